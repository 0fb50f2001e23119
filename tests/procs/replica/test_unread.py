"""What isn't read on a GPU, for that would wait for it: weights, and whether gradients are zero. Here on CPUs.

Here they are tensors on a CPU, and nobody reads them either.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import evenstep
from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.window import validate_weight
from evenstep.replica.wrapper import distributed
from evenstep.testing import RankPool
from tests import reproducible_runs as runs
from tests.procs.replica.test_engine import random_windows
from tests.ranks import on_ranks


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            distributed,
            "validate_weight",
            lambda weight, *, rank: torch.tensor(validate_weight(weight, rank=rank), dtype=torch.float64),
        )
        patch.setattr(Bucket, "is_clear", property(lambda self: False))
        yield


def windows(seed: int) -> int:
    with as_on_a_gpu():
        return random_windows(seed, 10, 6)


@pytest.mark.extended(ranks=3)
@pytest.mark.parametrize("nproc", [2, 3])
def test_random_windows_equal_the_reference(ranks: RankPool, fresh_seed: int, nproc: int) -> None:
    assert ranks.run(windows, nproc, fresh_seed) == [60] * nproc


def reproduced(seed: int, sharded: bool, as_gpu: bool) -> dict[str, str]:
    with as_on_a_gpu() if as_gpu else contextlib.nullcontext():
        return runs.digits(9, seed, sharded)


@pytest.mark.parametrize("sharded", [False, True])
def test_reproducible_bits(ranks: RankPool, fresh_seed: int, sharded: bool) -> None:
    expected = ranks.run(reproduced, 2, fresh_seed, sharded, False)
    found = ranks.run(reproduced, 2, fresh_seed, sharded, True)
    assert found == expected


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(1, 2)
def test_a_part_of_weight_zero_leaves_the_other_parts_alone(
    world: evenstep.World, fresh_seed: int, sharded: bool
) -> None:
    """Of each rank's four parts the second has no token, so that its mean is 0 / 0; the last rank's fourth, either."""
    torch.manual_seed(fresh_seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    alone = copy.deepcopy(net)
    with as_on_a_gpu():
        model = evenstep.DistributedDataParallel(net, bucket_cap_mb=1e-5, world=world, on_nonfinite=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
        reference = torch.optim.SGD(alone.parameters(), lr=0.1)
        drawn = torch.Generator().manual_seed(fresh_seed)  # the ranks' own streams differ
        for _ in range(3):
            x = torch.randn(world.world_size, 8, 4, dtype=torch.float64, generator=drawn)
            mask = torch.ones(world.world_size, 8)
            mask[:, 2:4] = 0
            mask[-1, 6:] = 0
            for part, counts in model.microbatches((x[world.rank], mask[world.rank]), 4):
                loss = (model(part).square().mean(1) * counts).sum() / counts.sum()
                model.backward(loss, weight=counts.sum())
            alone(x.reshape(-1, 4)[mask.reshape(-1) > 0]).square().mean().backward()
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
