"""Local SGD: faults on one rank, closing and going on, and whether it converges as well."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.errors import ConfigurationError, UsageError
from evenstep.testing import RankPool

# ---------------------------------------------------------------------- faults on one rank


def build(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def scaled(seed: int) -> tuple[list[float], list[float], float, list[float]]:
    """(parameters, those of an oracle, the largest difference of scales, the scale after each step)."""
    world = evenstep.init(quiet=True)
    model, oracle = evenstep.DistributedDataParallel(build(seed, torch.float32)), build(seed, torch.float32)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, oracle))
    local = evenstep.LocalSGD(model, optimizer, every=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    generator, scales = torch.Generator().manual_seed(seed + world.rank), []
    for step in range(6):
        x = torch.randn(4, 6, generator=generator)
        overflows = step == 1 and world.rank == world.world_size - 1
        model.backward(scaler.scale(model(x).square().mean()), scaler=scaler)
        if overflows:
            model.module[0].weight.grad[0, 0] = math.inf
        else:
            oracle(x).square().mean().backward()
            plain.step()
            plain.zero_grad()
        if local.step(scaler=scaler):
            for parameter in oracle.parameters():
                parameter.data = world.mean(parameter.detach())
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    told = world.exchange(scaler.get_scale())
    model.backward(scaler.scale(model(x).square().mean()), scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match=r"local\.step\(scaler=scaler\)"):
        local.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ConfigurationError, match="scaler=5"):
        local.step(scaler=5)
    optimizer.zero_grad()
    local.step()  # what was scaled is gone
    flat = [torch.cat([p.detach().reshape(-1) for p in each.parameters()]).tolist() for each in (model, oracle)]
    return flat[0], flat[1], max(told) - min(told), scales


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_scaler_leaves_out_steps_of_a_rank_and_is_agreed_on_with_parameters(ranks, fresh_seed, nproc):
    for got, expected, spread, scales in ranks.run(scaled, nproc, fresh_seed):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert spread == 0.0
        assert scales[-1] == 512.0


# ---------------------------------------------------------------------- closing, and going on


KINDS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}
EVERY, NUM_LOCAL, NUM_STEPS = 3, 7, 11


class TwoWays(nn.Module):
    """A part that only some ranks use at first: the others' optimizers keep nothing for it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.other = nn.Linear(6, 5), nn.Linear(5, 2), nn.Linear(5, 2)
        self.double()

    def forward(self, x: Tensor, *, there: bool) -> Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden) + (self.other(hidden) if there else 0.0)


def loss_of(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + 10 * step + rank))
    return model(x, there=rank > 0 or step >= NUM_LOCAL).square().mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def mean_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).mean(0)


@torch.no_grad()
def average(models: list[TwoWays]) -> None:
    for own in zip(*(model.parameters() for model in models), strict=True):
        mean = mean_of([p.detach() for p in own])
        for parameter in own:
            parameter.copy_(mean)


def in_one_process(kind: str, seed: int, num_ranks: int) -> Tensor:
    """All ranks' models, and from the end of the local steps on one with the mean of what they kept."""
    models = [TwoWays(seed) for _ in range(num_ranks)]
    optimizers = [KINDS[kind](model.parameters()) for model in models]
    for step in range(NUM_LOCAL):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, seed, step, rank).backward()
            optimizer.step()
        if (step + 1) % EVERY == 0:
            average(models)
    average(models)
    model, optimizer = models[0], optimizers[0]
    for number, parameter in enumerate(model.parameters()):
        same = [list(each.parameters())[number] for each in models]
        having = [each.state[p] for each, p in zip(optimizers, same, strict=True) if p in each.state]
        if not having:  # nobody has used it
            continue
        optimizer.state[parameter] = {
            key: mean_of([state[key] for state in having]) if isinstance(value, Tensor) and value.dim() else value
            for key, value in having[0].items()
        }
    for step in range(NUM_LOCAL, NUM_STEPS):
        optimizer.zero_grad()
        torch.stack([loss_of(model, seed, step, rank) for rank in range(num_ranks)]).mean().backward()
        optimizer.step()
    return flat(model)


def close_and_train_on(kind: str, seed: int) -> Tensor:
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(TwoWays(seed))
    optimizer = KINDS[kind](model.parameters())
    local = evenstep.LocalSGD(model, optimizer, every=EVERY)
    for step in range(NUM_STEPS):
        if step == NUM_LOCAL:
            local.close()
        optimizer.zero_grad()
        model.backward(loss_of(model, seed, step, world.rank))
        assert local.step() == (step >= NUM_LOCAL or (step + 1) % EVERY == 0)
    return flat(model)


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
def test_closed_midway_replicas_train_on_as_one_with_the_mean_of_what_they_kept(
    ranks: RankPool, fresh_seed: int, kind: str
) -> None:
    for nproc in (1, 2, 3):
        found = ranks.run(close_and_train_on, nproc, kind, fresh_seed)
        assert all(torch.equal(each, found[0]) for each in found)
        assert torch.allclose(found[0], in_one_process(kind, fresh_seed, nproc), rtol=0, atol=1e-12)


def closed_and_resumed(seed: int, where: Path, resumes: bool) -> Tensor:
    world = evenstep.init(quiet=True)
    model = optimizer = local = None
    for steps in (range(NUM_LOCAL + 2), range(NUM_LOCAL + 2, NUM_STEPS)):
        is_begin = steps.start == 0
        if is_begin or resumes:
            model = evenstep.DistributedDataParallel(TwoWays(seed + steps.start))
            optimizer = KINDS["AdamW"](model.parameters())
            local = evenstep.LocalSGD(model, optimizer, every=EVERY)
        folder = where if resumes else where / str(steps.start)
        with evenstep.Checkpointer(folder, model=model, local_sgd=local, every_minutes=None) as checkpoint:
            if not is_begin and resumes:
                checkpoint.resume()
            for step in steps:
                if step == NUM_LOCAL:
                    local.close()
                optimizer.zero_grad()
                model.backward(loss_of(model, seed, step, world.rank))
                local.step()
                checkpoint.step()
            if is_begin:
                checkpoint.save()
    return flat(model)


def test_a_run_that_is_saved_behind_it_is_resumed_closed(ranks: RankPool, fresh_seed: int, tmp_path: Path) -> None:
    alone = ranks.run(closed_and_resumed, 2, fresh_seed, tmp_path / "alone", False)
    resumed = ranks.run(closed_and_resumed, 2, fresh_seed, tmp_path / "resumed", True)
    assert all(torch.equal(each, alone[0]) for each in (*alone, *resumed))


def close_with_what_grows() -> list[str]:
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(TwoWays(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = evenstep.LocalSGD(model, optimizer, every=2)
    optimizer.state[model.module.first.weight]["seen"] = torch.zeros(2 + world.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local.close()
    return [str(each.message) for each in caught]


def test_what_cant_be_averaged_is_said_once(ranks: RankPool) -> None:
    told = ranks.run(close_with_what_grows, 2)
    assert [len(each) for each in told] == [1, 0]
    assert "'seen' of parameter 0 is float32 [3] on rank 1" in told[0][0]
    assert "make a new optimizer" in told[0][0]


# ---------------------------------------------------------------------- does it converge as well?
