"""Losses that use a parameter directly, beside the model's outputs: its gradient comes before the engine knows."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep

WAYS = pytest.mark.parametrize("way", ["plain", "sharded", "stage 2"])
ZEROED = pytest.mark.parametrize("zeroed", ["never", "to None", "to zeros"])


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


def zero(optimizers: list[Any], zeroed: str) -> None:
    if zeroed != "never":
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=zeroed == "to None")


def loss_of(layers: list[Any], outputs: Tensor, x: Tensor) -> Tensor:
    return outputs.square().mean() + (layers[0].apart * x.mean()).sum()


def difference(models: list[Any], singles: list[Any]) -> float:
    ours = [p for model in models for p in model.parameters()]
    theirs = [p for single in singles for p in single.parameters()]
    return max(float((a - b).abs().max().detach()) for a, b in zip(ours, theirs, strict=True))


def plain_passes(seed: int, way: str, zeroed: str) -> float:
    """`loss.backward()` of one model; the largest difference from one process."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    single = Layer()
    torch.manual_seed(seed)
    inner = Layer()
    model = evenstep.DistributedDataParallel(inner)
    reference, ours = build_optimizers([single], "plain"), build_optimizers([model], way)
    for step in range(4):
        x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + step))
        mine = x[world.rank :: world.world_size]
        loss_of([single], single(x), x).backward()
        loss_of([inner], model(mine), mine).backward()
        for optimizer in [*reference, *ours]:
            optimizer.step()
        zero([*reference, *ours], zeroed)
    return difference([model], [single])


@WAYS
@ZEROED
@pytest.mark.parametrize("nproc", [2, 3])
def test_loss_backward_averages_what_comes_before_the_outputs(ranks, fresh_seed, nproc, way, zeroed):
    assert max(ranks.run(plain_passes, nproc, fresh_seed, way, zeroed)) < 1e-12


def build_alike(seed: int) -> tuple[list[Layer], list[Layer], list[evenstep.DistributedDataParallel]]:
    """Two layers for one process, the same two for the ranks, and those wrapped."""
    torch.manual_seed(seed)
    singles = [Layer(), Layer()]
    torch.manual_seed(seed)
    inner = [Layer(), Layer()]
    return singles, inner, [evenstep.DistributedDataParallel(each) for each in inner]


def passes_through_two(seed: int, way: str, zeroed: str, reaches: bool, accumulates: bool) -> float:
    """A decoder's loss with a penalty on a parameter of the encoder; the largest difference from one process."""
    world = evenstep.init(quiet=True)
    singles, inner, models = build_alike(seed)
    reference, ours = build_optimizers(singles, "plain"), build_optimizers(models, way)

    def passed(layers: list[Any], x: Tensor) -> Tensor:
        between = layers[0](x)
        return layers[1](between if reaches else between.detach())

    for step in range(4):
        x = torch.randn(13, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + step))
        parts = [x[:5], x[5:]] if accumulates else [x]
        for part in parts:
            (loss_of(singles, passed(singles, part), part) * (len(part) / len(x))).backward()
        for number, part in enumerate(parts):
            mine = part[world.rank :: world.world_size]
            with contextlib.ExitStack() as stack:
                if number < len(parts) - 1:
                    for model in models:
                        stack.enter_context(model.accumulate())
                evenstep.backward(models, loss_of(inner, passed(models, mine), mine), weight=len(mine))
        for optimizer in [*reference, *ours]:
            optimizer.step()
        zero([*reference, *ours], zeroed)
    return difference(models, singles)


@WAYS
@ZEROED
@pytest.mark.parametrize("reaches", [True, False], ids=["through the encoder", "beside it alone"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_backward_of_one_model_weighs_a_penalty_on_another(ranks, fresh_seed, nproc, way, zeroed, reaches):
    for accumulates in (False, True):
        results = ranks.run(passes_through_two, nproc, fresh_seed, way, zeroed, reaches, accumulates)
        assert max(results) < 1e-12, f"accumulates={accumulates}"


def passes_of_weight_zero(seed: int) -> tuple[float, bool]:
    """A rank whose weight is 0, with a penalty that is no number there: (difference from one process, all alike)."""
    world = evenstep.init(quiet=True)
    singles, inner, models = build_alike(seed)
    reference, ours = build_optimizers(singles, "plain"), build_optimizers(models, "plain")
    for step in range(3):
        x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + step))
        loss_of(singles, singles[1](singles[0](x)), x).backward()
        counts = world.rank == 0
        loss = loss_of(inner, models[1](models[0](x)), x if counts else x * torch.inf)
        evenstep.backward(models, loss, weight=7 if counts else 0)
        for optimizer in [*reference, *ours]:
            optimizer.step()
        zero([*reference, *ours], "to None")
    sums = world.gather(torch.stack([p.sum() for model in models for p in model.parameters()])[None].detach())
    return difference(models, singles), bool((sums == sums[0]).all())


def test_what_has_no_weight_brings_nothing_into_another_model(ranks, fresh_seed):
    for found, is_alike in ranks.run(passes_of_weight_zero, 2, fresh_seed):
        assert found < 1e-12
        assert is_alike
