"""Clipping of divided and of whole gradients, against torch on one process."""

from __future__ import annotations

import itertools
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
    torch.testing.assert_close(evenstep.clip_grad_norm_(model, 1e-3, exponent), expected, rtol=1e-12, atol=0)
    before = model.module[2].weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - model.module[2].weight, 0.1 * alone[2].weight.grad, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(model.module[0].weight.grad, alone[0].weight.grad, rtol=1e-12, atol=1e-15)


def measured_without_limit(seed: int) -> list[bool]:
    """Measures an infinite gradient in every way; whether all gradients are as they were."""
    world = evenstep.init(quiet=True)
    unchanged = []
    for sharded, limit in itertools.product((True, False), (math.inf, torch.tensor(math.inf))):
        model = evenstep.DistributedDataParallel(build(seed))
        groups = groups_of(model)
        optimizer = (
            evenstep.ShardedOptimizer(model, torch.optim.SGD, groups, lr=0.1)
            if sharded
            else torch.optim.SGD(groups, lr=0.1)
        )
        model(torch.randn(4, 6, dtype=torch.float64)).square().mean().backward()
        grads = (
            [bucket.shard for bucket in model.engine.exchange.sharded_buckets]
            if sharded and world.world_size > 1
            else [parameter.grad for parameter in model.parameters()]
        )
        grads[0].view(-1)[0] = math.inf
        before = [grad.clone() for grad in grads]
        norm = evenstep.clip_grad_norm_(optimizer, limit)
        assert torch.isinf(norm).any()
        unchanged.append(all(torch.equal(a, b) for a, b in zip(before, grads, strict=True)))
        optimizer.zero_grad()
    return unchanged


@pytest.mark.parametrize("nproc", [1, 2])
def test_an_infinite_limit_only_measures(ranks, fresh_seed, nproc):
    for unchanged in ranks.run(measured_without_limit, nproc, fresh_seed):
        assert all(unchanged), unchanged


@on_ranks(2)
def test_wrong_clipping_is_named_on_every_rank(world: evenstep.World) -> None:
    model = evenstep.DistributedDataParallel(build(0))
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.randn(2, 6, dtype=torch.float64)
    with model.accumulate():
        model(x).sum().backward()
    for target in (model, optimizer):
        with pytest.raises(UsageError, match="this rank's alone"):
            evenstep.clip_grad_norm_(target, 1.0)
        with pytest.raises(UsageError, match="this rank's alone"):
            evenstep.clip_grad_value_(target, 1.0)
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


def reads_of_clipping(seed: int) -> dict[str, list[str]]:
    """By the way gradients are there: what was read on the host."""
    world = evenstep.init(quiet=True)
    found = {}
    for way in ("plain", "stage 1", "stage 2", "parameters"):
        model = evenstep.DistributedDataParallel(build(seed), bucket_cap_mb=5e-4)
        if way in ("plain", "parameters"):
            optimizer: torch.optim.Optimizer = torch.optim.SGD(groups_of(model), lr=0.1)
        else:
            optimizer = evenstep.ShardedOptimizer(
                model, torch.optim.SGD, groups_of(model), lr=0.1, shard_gradients=way == "stage 2"
            )
        x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + world.rank))
        model.backward(model(x).square().mean(), weight=3)
        with Reads() as reads:
            if way == "parameters":
                evenstep.clip_grad_norm_(model.parameters(), torch.tensor(0.5).expand(()).clone().to(torch.float64))
            else:
                for norm_type in (2.0, 1.0, math.inf):
                    evenstep.clip_grad_norm_(optimizer, 0.5, norm_type)
            evenstep.clip_grad_value_(model, 0.1)
        found[way] = reads.found
    with Reads() as reads:
        evenstep.clip_grad_norm_(model, 0.5, error_if_nonfinite=True)
    found["asked to look"] = reads.found
    return found


@pytest.mark.parametrize("nproc", [1, 2])
def test_nothing_is_read_on_the_host(ranks, fresh_seed, nproc):
    """On a GPU that would wait for it; `max_norm` as a tensor of the CPU is read, and costs nothing."""
    for found in ranks.run(reads_of_clipping, nproc, fresh_seed):
        assert found.pop("asked to look"), "the mode counts"
        assert len(found.pop("parameters")) <= 1
        assert found == {way: [] for way in ("plain", "stage 1", "stage 2")}


def norm_with_a_tensor_of_one(seed: int) -> float:
    """The norm behind clipping, by a number in a tensor with a dimension."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(build(seed))
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, groups_of(model), lr=0.1)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed + world.rank)).double()
    model.backward(10 * model(x).square().mean(), weight=3)
    evenstep.clip_grad_norm_(optimizer, torch.tensor([1e-3]))
    return float(evenstep.clip_grad_norm_(optimizer, math.inf))


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_largest_norm_in_a_tensor_of_one_number(ranks, fresh_seed, nproc):
    for norm in ranks.run(norm_with_a_tensor_of_one, nproc, fresh_seed):
        assert norm == pytest.approx(1e-3, rel=2e-3)
