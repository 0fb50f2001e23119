"""Clipping of divided and of whole gradients, against torch on one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import evenstep
from evenstep.errors import ConfigurationError, NonFiniteError, UsageError
from tests.ranks import on_ranks


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1]},
    ]


@pytest.mark.parametrize("exponent", [1.0, 2.0, 3.0, math.inf])
@on_ranks(1, 2, 3)
def test_a_norm_is_that_of_divided_and_whole_gradients_together(
    world: evenstep.World, fresh_seed: int, exponent: float
) -> None:
    alone = build(fresh_seed)
    model = evenstep.DistributedDataParallel(build(fresh_seed), bucket_cap_mb=5e-4)
    # The largest element may be in either.
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, model.module[2].parameters(), lr=0.1)
    x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(fresh_seed))
    model.backward(model(x[world.rank :: world.world_size]).square().mean(), weight=12 // world.world_size)
    alone(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3, exponent)
    limit = torch.tensor([1e-3], dtype=torch.float64) if exponent == 2.0 else 1e-3
    torch.testing.assert_close(evenstep.clip_grad_norm_(model, limit, exponent), expected, rtol=1e-12, atol=0)
    before = model.module[2].weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - model.module[2].weight, 0.1 * alone[2].weight.grad, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(model.module[0].weight.grad, alone[0].weight.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("sharded", [True, False])
@on_ranks(1, 2)
def test_an_infinite_limit_only_measures(world: evenstep.World, fresh_seed: int, sharded: bool) -> None:
    for limit in (math.inf, torch.tensor(math.inf)):
        model = evenstep.DistributedDataParallel(build(fresh_seed))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups_of(model), lr=0.1)
        if sharded:
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, groups_of(model), lr=0.1)
        model(torch.randn(4, 6, dtype=torch.float64)).square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        if sharded and world.world_size > 1:
            grads = [bucket.shard for bucket in model.engine.exchange.sharded_buckets]
        grads[0].view(-1)[0] = math.inf
        before = [grad.clone() for grad in grads]
        assert torch.isinf(evenstep.clip_grad_norm_(optimizer, limit))
        assert all(torch.equal(a, b) for a, b in zip(before, grads, strict=True))


@on_ranks(2)
def test_wrong_clipping_is_named_on_every_rank(world: evenstep.World) -> None:
    model = evenstep.DistributedDataParallel(build(0))
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.randn(2, 6, dtype=torch.float64)
    with model.accumulate():
        model(x).sum().backward()
    parameters = list(model.parameters())
    for target in (model, optimizer, parameters, iter(parameters), parameters[0], model.module[2]):
        clip = evenstep.clip_grad_norm_ if target is not optimizer else evenstep.clip_grad_value_
        with pytest.raises(UsageError, match="this rank's alone"):
            clip(target, 1.0)
    model(x / 0).sum().backward()
    before = model.engine.exchange.sharded_buckets[0].shard.clone()
    with pytest.raises(NonFiniteError, match="nan"):
        evenstep.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert torch.equal(before.nan_to_num(), model.engine.exchange.sharded_buckets[0].shard.nan_to_num())
    for wrong in ({"max_norm": -1.0}, {"max_norm": [1.0, 1.0]}, {"max_norm": 1.0, "norm_type": 0}):
        with pytest.raises(ConfigurationError, match="clip_grad_norm_"):
            evenstep.clip_grad_norm_(model, **wrong)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "unique", "masked_select"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@on_ranks(1, 2)
def test_nothing_is_read_on_the_host(world: evenstep.World, fresh_seed: int) -> None:
    """On a GPU that would wait for it; `max_norm` as a tensor of the CPU is read, and costs nothing."""
    for way in ("plain", "stage 1", "stage 2"):
        model = evenstep.DistributedDataParallel(build(fresh_seed), bucket_cap_mb=5e-4)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups_of(model), lr=0.1)
        if way != "plain":
            optimizer = evenstep.ShardedOptimizer(
                model, torch.optim.SGD, groups_of(model), lr=0.1, shard_gradients=way == "stage 2"
            )
        model.backward(model(torch.randn(3, 6, dtype=torch.float64)).square().mean(), weight=3)
        with Reads() as reads:
            for norm_type in (2.0, 1.0, math.inf):
                evenstep.clip_grad_norm_(optimizer, 0.5, norm_type)
            evenstep.clip_grad_value_(model, 0.1)
        assert reads.found == [], way
        with Reads() as reads:
            evenstep.clip_grad_norm_(model, torch.tensor(0.5, dtype=torch.float64))
        assert len(reads.found) <= 1, way
    with Reads() as reads:
        evenstep.clip_grad_norm_(model, 0.5, error_if_nonfinite=True)
    assert reads.found, "the mode counts"
