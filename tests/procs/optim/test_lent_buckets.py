"""Buckets that share memory (stage 2) wait for each other inside the backward pass; peers may wait elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import evenstep
from tests.ranks import on_ranks


def layers(width: int) -> nn.Sequential:
    """More layers than buckets that are in flight at once."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))


def share_of(world: evenstep.World, x: torch.Tensor, step: int) -> torch.Tensor:
    """This rank's rows; in every other step the last rank has none."""
    without = world.world_size - step % 2
    return x[world.rank :: without] if world.rank < without else x[:0]


@pytest.mark.parametrize("weighted", [False, True])
@on_ranks(2, 3)
def test_two_models_and_an_empty_share(world, fresh_seed, weighted):
    """The rank without samples ends one model after the other."""
    torch.manual_seed(fresh_seed)
    singles = [layers(6).double(), layers(6).double()]
    models = [evenstep.DistributedDataParallel(copy.deepcopy(each), bucket_cap_mb=1e-4) for each in singles]
    optimizers = [evenstep.ShardedOptimizer(m, torch.optim.SGD, lr=0.1, shard_gradients=True) for m in models]
    reference = torch.optim.SGD([p for each in singles for p in each.parameters()], lr=0.1)
    for step in range(4):
        x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(fresh_seed + step))
        whole, own = singles[1](singles[0](x)), share_of(world, x, step)
        loss = models[1](models[0](own)).square()
        if weighted:
            whole.square().mean().backward()
            evenstep.backward(models, loss.mean(), weight=len(own))
        else:
            (whole.square().sum() / world.world_size).backward()
            loss.sum().backward()
        for optimizer in [*optimizers, reference]:
            optimizer.step()
            optimizer.zero_grad()
    for model, single in zip(models, singles, strict=True):
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@on_ranks(2, 3)
def test_statistics_and_an_empty_share(world, fresh_seed):
    """The rank without samples takes part in the others' statistics before it launches a bucket."""
    torch.manual_seed(fresh_seed)
    single = nn.Sequential(layers(6), nn.BatchNorm1d(6), layers(6)).double()
    model = evenstep.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single))
    model = evenstep.DistributedDataParallel(model, bucket_cap_mb=1e-4)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, shard_gradients=True)
    reference = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(fresh_seed + step))
        single(x).square().mean().backward()
        own = share_of(world, x, step)
        model.backward(model(own).square().mean(), weight=len(own))
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
