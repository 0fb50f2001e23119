"""What stands in the gradients of a sharded model between two windows: against torch's optimizer, on 2 and 3 ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import UsageError
from evenstep.replica.gradients.buckets.bucket import Bucket
from tests.ranks import on_ranks

KINDS = pytest.mark.parametrize("shard_gradients", [False, True])


class Two(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.extended(ranks=3)
@KINDS
@pytest.mark.parametrize("is_weighted", [False, True])
@on_ranks(2, 3)
def test_a_second_window_adds_to_each_gradient_that_there_is(
    world: evenstep.World, fresh_seed: int, shard_gradients: bool, is_weighted: bool
) -> None:
    """Behind the first window one gradient is dropped, and one is the program's own."""
    torch.manual_seed(fresh_seed + world.rank)
    xs = torch.randn(2, 4, 3, dtype=torch.float64)
    pair = []
    for kind in (evenstep.ShardedOptimizer, None):
        model = evenstep.DistributedDataParallel(Two(fresh_seed), bucket_cap_mb=25)
        if kind is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = kind(model, torch.optim.SGD, lr=0.1, shard_gradients=shard_gradients)
        net = model.module
        loss = model(xs[0]).square().mean()
        model.backward(loss, weight=3 + world.rank) if is_weighted else loss.backward()
        net.first.weight.grad = None
        net.second.weight.grad = torch.full_like(net.second.weight, 0.5)
        loss = model(xs[1]).square().mean()
        model.backward(loss, weight=2 + world.rank) if is_weighted else loss.backward()
        optimizer.step()
        pair.append(net)
    for (name, ours), theirs in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


class Squares(nn.Module):
    def __init__(self, values: list[torch.Tensor]) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(value.clone()) for value in values])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.stack([value.square().sum() for value in self.values]).sum()


pack = Bucket.pack


def pack_what_is_free(bucket: Bucket, *args: object) -> None:
    loan = getattr(bucket, "_loan", None)
    assert loan is None or loan.before is None or loan.before.work is None, "what is lent is still under way"
    pack(bucket, *args)


@on_ranks(2)
def test_nothing_lies_between_gradients_in_lent_memory(world: evenstep.World, fresh_seed: int) -> None:
    """Buckets of other sizes use the same memory one after the other: what is left between their gradients is none."""
    torch.manual_seed(fresh_seed)
    values = [torch.randn(n, dtype=torch.float64) for n in (3, 5, 7, 90, 100)]  # buckets from the last one on
    norms = []
    for is_sharded in (True, False):
        model = evenstep.DistributedDataParallel(Squares(values), bucket_cap_mb=7e-4, first_bucket_cap_mb=7e-4)
        if is_sharded:
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, shard_gradients=True)
            assert len(model.engine.exchange.buckets) > 2
        for _ in range(3):
            model.zero_grad()
            with mock.patch.object(Bucket, "pack", pack_what_is_free):
                model(torch.tensor(1.0 + world.rank)).backward()
            norms.append(float(evenstep.clip_grad_norm_(model, 1e9)))
    torch.testing.assert_close(norms[:3], norms[3:], rtol=1e-12, atol=0)
    assert optimizer.state_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@on_ranks(2)
def test_a_parameter_whose_memory_is_replaced_is_taken_back_or_refused(
    world: evenstep.World, dtype: torch.dtype
) -> None:
    model = evenstep.DistributedDataParallel(Two(1))
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    model.module.first.weight.data = torch.zeros(5, 3, dtype=torch.float64).to(dtype)
    if dtype is torch.float64:  # other memory is taken back
        optimizer.step()
        assert model.module.first.weight.abs().sum() > 0
        return
    with pytest.raises(UsageError, match=r"'first.weight' is float32 \[5, 3\].*was float64.*before wrapping it"):
        optimizer.step()
