"""Losses that use a parameter directly, beside the model's outputs: its gradient comes before the engine knows."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from tests.ranks import on_ranks


class Layer(nn.Module):
    """A layer, and a parameter that only a penalty uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.factor = nn.Parameter(torch.randn(6))
        self.apart = nn.Parameter(torch.randn(6))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.factor


def build_optimizers(models: list[Any], way: str) -> list[Any]:
    options = {"lr": 0.1, "momentum": 0.5}
    if way in ("sharded", "stage 2"):
        kind = torch.optim.SGD
        return [evenstep.ShardedOptimizer(m, kind, shard_gradients=way == "stage 2", **options) for m in models]
    return [torch.optim.SGD(model.parameters(), **options) for model in models]


def trained(
    seed: int, way: str, zeroed: str, num_models: int, is_weighted: bool, reaches: bool, accumulates: bool
) -> float:
    """A loss through one model, or through an encoder and a decoder, with a penalty on a parameter of the first.

    Returns the largest difference from one process. With `reaches` the loss goes through the encoder, too; the last
    rank's weight is 0 in some steps, with a penalty that is no number there.
    """
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    singles = [Layer() for _ in range(num_models)]
    inner = copy.deepcopy(singles)
    models = [evenstep.DistributedDataParallel(each) for each in inner]
    reference, ours = build_optimizers(singles, "plain"), build_optimizers(models, way)

    def loss_of(layers: list[Any], given: list[Any], x: Tensor) -> Tensor:
        between = given[0](x)
        if num_models > 1:
            between = given[1](between if reaches else between.detach())
        return between.square().mean() + (layers[0].apart * x.mean()).sum()

    for step in range(4):
        x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + step))
        mutes = is_weighted and step == 2 and world.world_size > 1 and not accumulates
        counted = x[: len(x) // 2] if mutes else x
        for part in counted.chunk(2) if accumulates else [counted]:
            (loss_of(singles, singles, part) * (len(part) / len(counted))).backward()
        parts = counted.chunk(2) if accumulates else [counted]
        for number, part in enumerate(parts):
            mine = part[world.rank :: world.world_size]
            weight = len(mine)
            if mutes:  # rank 0 has all that counts
                mine, weight = (part, len(part)) if world.rank == 0 else (x * torch.inf, 0)
            with contextlib.ExitStack() as stack:
                if number < len(parts) - 1:
                    for model in models:
                        stack.enter_context(model.accumulate())
                loss = loss_of(inner, models, mine)
                evenstep.backward(models, loss, weight=weight) if is_weighted else loss.backward()
        for optimizer in [*reference, *ours]:
            optimizer.step()
        if zeroed != "never":
            for optimizer in [*reference, *ours]:
                optimizer.zero_grad(set_to_none=zeroed == "to None")
    sums = [float(p.detach().sum()) for model in models for p in model.parameters()]
    assert all(each == sums for each in world.exchange(sums)), "replicas differ"
    pairs = zip(
        (p for each in inner for p in each.parameters()),
        (p for each in singles for p in each.parameters()),
        strict=True,
    )
    return max(float((a - b).abs().max().detach()) for a, b in pairs)


@pytest.mark.extended(beyond=9)
@pytest.mark.parametrize("way", ["plain", "sharded", "stage 2"])
@pytest.mark.parametrize("zeroed", ["never", "to None", "to zeros"])
@pytest.mark.parametrize("nproc", [2, 1, 3])
def test_a_penalty_on_a_parameter_is_averaged_as_what_goes_through_outputs(ranks, fresh_seed, nproc, way, zeroed):
    for is_two, is_weighted, reaches, accumulates in itertools.product((False, True), repeat=4):
        if (
            (reaches and not is_two)
            or (accumulates and not is_weighted)
            or (is_two and not is_weighted and not reaches)
        ):
            continue
        case = 1 + is_two, is_weighted, reaches, accumulates
        assert max(ranks.run(trained, nproc, fresh_seed, way, zeroed, *case)) < 1e-12, case


@on_ranks(2, 3)
def test_a_penalty_that_ranks_find_at_different_times_doesnt_change_the_order_of_models(world, fresh_seed):
    """The last rank's first share is empty, so that it still has a hook on every parameter in the second step."""
    torch.manual_seed(fresh_seed)
    singles = [Layer(), Layer()]
    inner = copy.deepcopy(singles)
    models = [evenstep.DistributedDataParallel(each) for each in inner]
    for step in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(fresh_seed + step))
        own = x[:0] if step == 0 and world.rank == world.world_size - 1 else x
        whole, loss = singles[1](singles[0](x)).square().sum(), models[1](models[0](own)).square().sum()
        whole = whole * ((world.world_size - 1) / world.world_size if step == 0 else 1)
        if step:
            whole, loss = whole + singles[0].apart.square().sum(), loss + inner[0].apart.square().sum()
        whole.backward()
        loss.backward()
        for model, single in zip(inner, singles, strict=True):
            for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
                ours.grad = theirs.grad = None
