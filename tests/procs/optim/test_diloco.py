"""Local steps with an outer optimizer (DiLoCo): against one process, in 16 bits, saved and resumed, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.errors import CheckpointError, ConfigurationError, MismatchError
from evenstep.testing import RankPool
from tests.ranks import on_ranks

EVERY, WARMUP, NUM_STEPS = 3, 2, 12  # exchanges behind steps 1, 2 (warm-up), 5, 8, 11; one local step is left


class Model(nn.Module):
    """Weights of several layouts, a complex one, a frozen one, a module buffer, and one that `outer` lacks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv2d(3, 4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.second, self.plain = nn.Linear(4, 3), nn.Linear(4, 3)
        self.double()
        self.first.to(memory_format=torch.channels_last)
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).tanh().mean((2, 3)))
        return (self.second(hidden) * self.turn).abs() + self.plain(hidden) * self.frozen


def optimizers_of(model: Model) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    stepped = [*model.first.parameters(), *model.norm.parameters(), *model.second.parameters(), model.turn]
    return inner, torch.optim.SGD(stepped, lr=0.7, momentum=0.9, nesterov=True)


def loss_of(model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    return model(torch.randn(5, 3, 4, 4, dtype=torch.float64, generator=generator)).square().mean()


def values_of(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in (*model.parameters(), *model.buffers())]


def trained(seed: int, last: int = NUM_STEPS) -> tuple[list[list[Tensor]], list[Tensor]]:
    """(values behind each exchange, values of a mean by hand at the end)."""
    world = evenstep.init(quiet=True)
    module = Model(seed)
    inner, outer = optimizers_of(module)
    model = evenstep.DistributedDataParallel(module, broadcast_buffers=False)
    local = evenstep.LocalSGD(model, inner, every=EVERY, warmup_steps=WARMUP, outer=outer)
    behind = []
    for step in range(last):
        inner.zero_grad()
        model.backward(loss_of(model, seed, step, world.rank))
        grads = [p.grad for p in module.parameters()]
        if local.step():
            behind.append(values_of(module))
        assert all(a is b.grad for a, b in zip(grads, module.parameters(), strict=True)), "the script's own stay"
    local.average()
    found = values_of(module)
    local.close()
    close = [torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in zip(found, values_of(module), strict=True)]
    assert all(close), "no outer step at the end"  # the mean of three equal values may round
    return behind, found


@torch.no_grad()
def average(models: list[Model], shared: Model, outer: torch.optim.Optimizer | None) -> None:
    """The outer step on a model of its own, whose values all models then take."""
    trained = {id(p) for group in (outer.param_groups if outer else ()) for p in group["params"]}
    own = [list(each.parameters()) for each in models]
    for number, parameter in enumerate(shared.parameters()):
        mean = torch.stack([each[number] for each in own]).mean(0)
        if id(parameter) in trained:
            parameter.grad = parameter - mean
        else:
            parameter.copy_(mean)
    for number, buffer in enumerate(shared.buffers()):
        if buffer.is_floating_point():
            buffer.copy_(torch.stack([list(each.buffers())[number] for each in models]).mean(0))
    if outer is not None:
        outer.step()
    for model in models:
        for into, value in zip(
            (*model.parameters(), *model.buffers()), (*shared.parameters(), *shared.buffers()), strict=True
        ):
            if into.is_floating_point() or into.is_complex():
                into.copy_(value)


def in_one_process(seed: int, num_ranks: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    models, shared = [Model(seed) for _ in range(num_ranks)], Model(seed)
    inners = [optimizers_of(model)[0] for model in models]
    outer = optimizers_of(shared)[1]
    behind = []
    for step in range(NUM_STEPS):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.zero_grad()
            loss_of(model, seed, step, rank).backward()
            inner.step()
        if step < WARMUP or (step + 1 - WARMUP) % EVERY == 0:
            average(models, shared, None if step < WARMUP else outer)
            behind.append(values_of(models[0]))
    average(models, shared, None)
    return behind, values_of(models[0])


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_an_outer_optimizer_steps_by_the_mean_of_what_ranks_have_changed(
    ranks: RankPool, fresh_seed: int, nproc: int
) -> None:
    wanted, last = in_one_process(fresh_seed, nproc)
    found = ranks.run(trained, nproc, fresh_seed)
    assert len(wanted) == 5
    for behind, at_end in found:
        assert len(behind) == len(wanted)
        for ours, theirs in zip([*behind, at_end], [*wanted, last], strict=True):
            for ours_each, theirs_each in zip(ours, theirs, strict=True):
                assert torch.allclose(ours_each, theirs_each, rtol=0, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(behind[-1], found[0][0][-1], strict=True)), "bits of rank 0"


# ---------------------------------------------------------------------- in 16 bits


def in_16_bits(seed: int, dtype: torch.dtype, with_outer: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(values before, mean over ranks of what a round has changed, what it has changed behind the exchange)."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    module = nn.Linear(40, 30)
    model = evenstep.DistributedDataParallel(module)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=1.0) if with_outer else None
    twin = nn.Linear(40, 30)
    twin.load_state_dict(module.state_dict())
    by_hand = torch.optim.SGD(twin.parameters(), lr=0.1)
    local = evenstep.LocalSGD(model, inner, every=2, outer=outer, transfer_dtype=dtype)
    before = module.weight.detach().clone()
    generator = torch.Generator().manual_seed(seed + world.rank)
    for _ in range(2):
        x = torch.randn(8, 40, generator=generator)
        for each, optimizer in ((model, inner), (twin, by_hand)):
            optimizer.zero_grad()
            loss = each(x).square().mean()
            model.backward(loss) if each is model else loss.backward()
        by_hand.step()
        local.step()
    told = world.gather(module.weight.detach()[None])
    assert all(torch.equal(each, told[0]) for each in told)
    assert module.weight.dtype is torch.float32
    local.close()
    return before, world.mean(twin.weight.detach() - before), module.weight.detach() - before


@pytest.mark.parametrize("with_outer", [False, True])
@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_what_ranks_have_changed_travels_in_16_bits(
    ranks: RankPool, fresh_seed: int, dtype: torch.dtype, eps: float, with_outer: bool
) -> None:
    for before, exact, found in ranks.run(in_16_bits, 2, fresh_seed, dtype, with_outer):
        scale = exact.abs().max()
        assert scale > 1e-4, "something was learnt"
        off = (found - exact).abs().max()
        assert off <= 4 * eps * scale, "of the change, not of the values"
        assert off > 2 * torch.finfo(torch.float32).eps * before.abs().max(), "it travelled whole"


# ---------------------------------------------------------------------- saved and resumed


def with_checkpoints(module: Model, where: Path) -> tuple[Any, ...]:
    """The inner optimizer, the outer one, the wrapped model, its LocalSGD, and what saves every fourth step."""
    inner, outer = optimizers_of(module)
    model = evenstep.DistributedDataParallel(module)
    local = evenstep.LocalSGD(model, inner, every=EVERY, warmup_steps=WARMUP, outer=outer)
    saves = evenstep.Checkpointer(where, model=model, local_sgd=local, every_steps=4, every_minutes=None, keep=9)
    return inner, outer, model, local, saves


def run(seed: int, where: Path, begin: int, end: int) -> tuple[list[int], int, list[Tensor]]:
    """(steps of which there are checkpoints, where it began, what is there at the end) of steps up to `end`."""
    world = evenstep.init(quiet=True)
    module = Model(seed + begin)  # another one: all comes from the checkpoint
    inner, outer, model, local, made = with_checkpoints(module, where)
    with made as checkpoint:
        began = checkpoint.resume()
        for step in range(began, end):
            inner.zero_grad()
            model.backward(loss_of(model, seed, step, world.rank))
            local.step()
            checkpoint.step()
        checkpoint.wait()
        saved = sorted(int(each.name.split("-")[1]) for each in where.glob("step-*") if each.is_dir())
        kept = values_of(module) + [outer.state[p]["momentum_buffer"].clone() for p in outer.param_groups[0]["params"]]
    local.close()
    return saved, began, kept


def test_a_save_waits_for_the_next_exchange_and_goes_on_with_the_same_bits(
    ranks: RankPool, fresh_seed: int, tmp_path: Path
) -> None:
    straight = ranks.run(run, 2, fresh_seed, tmp_path / "straight", 0, NUM_STEPS + 2)
    assert straight[0][0] == [5, 8, 14], "due behind steps 4, 8 and 12"
    first = ranks.run(run, 2, fresh_seed, tmp_path / "stopped", 0, 10)  # two steps behind the exchange are lost
    assert first[0][:2] == ([5, 8], 0)
    resumed = ranks.run(run, 2, fresh_seed, tmp_path / "stopped", 8, NUM_STEPS + 2)
    assert [each[1] for each in resumed] == [8, 8]
    for ours, wanted in zip(resumed, straight, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[2], wanted[2], strict=True))


def load_without(seed: int, where: Path) -> str:
    evenstep.init(quiet=True)
    module = Model(seed)
    model = evenstep.DistributedDataParallel(module)
    local = evenstep.LocalSGD(model, optimizers_of(module)[0], every=EVERY)
    with (
        evenstep.Checkpointer(where, model=model, local_sgd=local, every_minutes=None) as checkpoint,
        pytest.raises(CheckpointError) as caught,
    ):
        checkpoint.resume()
    local.close()
    return str(caught.value)


def test_an_outer_optimizer_that_is_missing_is_named(ranks: RankPool, fresh_seed: int, tmp_path: Path) -> None:
    ranks.run(run, 2, fresh_seed, tmp_path, 0, 6)
    for told in ranks.run(load_without, 2, fresh_seed, tmp_path):
        assert "local_sgd: was with an outer one of [7] parameters, and is with no outer optimizer here" in told


def loaded_midway(seed: int, where: Path) -> tuple[int, list[Tensor]]:
    """(steps that are counted at the end, what is there) of a run that goes back from within a round of local steps."""
    world = evenstep.init(quiet=True)
    module = Model(seed)
    inner, outer, model, local, made = with_checkpoints(module, where)
    with made as checkpoint:
        for steps in (range(9), range(5, NUM_STEPS + 2)):
            for step in steps:
                inner.zero_grad()
                model.backward(loss_of(model, seed, step, world.rank))
                local.step()
                checkpoint.step()
            if steps.start == 0:
                checkpoint.load(5)
                checkpoint.discard(after=5)
        kept = values_of(module) + [outer.state[p]["momentum_buffer"].clone() for p in outer.param_groups[0]["params"]]
    local.close()
    return checkpoint.num_steps, kept


def test_a_checkpoint_that_is_loaded_between_two_exchanges_begins_a_new_round(
    ranks: RankPool, fresh_seed: int, tmp_path: Path
) -> None:
    straight = ranks.run(run, 2, fresh_seed, tmp_path / "straight", 0, NUM_STEPS + 2)
    for (num_steps, ours), wanted in zip(
        ranks.run(loaded_midway, 2, fresh_seed, tmp_path / "back"), straight, strict=True
    ):
        assert num_steps == NUM_STEPS + 2
        assert all(torch.equal(a, b) for a, b in zip(ours, wanted[2], strict=True))


# ---------------------------------------------------------------------- refused


@on_ranks(2)
def test_wrong_outer_optimizers_are_refused_on_all_ranks(world: evenstep.World, fresh_seed: int) -> None:
    module = Model(fresh_seed)
    model = evenstep.DistributedDataParallel(module)
    inner, outer = optimizers_of(module)
    alien = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"outer": alien}, ConfigurationError, r"outer: its parameter of shape \[2, 2\]"),
        ({"outer": inner}, ConfigurationError, "outer: this is the optimizer of the local steps"),
        ({"outer": 0.7}, ConfigurationError, "outer=0.7"),
        ({"transfer_dtype": torch.int8}, ConfigurationError, "transfer_dtype"),
        ({"transfer_dtype": torch.bfloat16 if world.rank else None}, MismatchError, "transfer_dtype is None on rank 0"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            evenstep.LocalSGD(model, inner, every=2, **arguments)
    outer.param_groups[0]["lr"] = 0.5 + world.rank
    with pytest.raises(MismatchError, match="outer is"):
        evenstep.LocalSGD(model, inner, every=2, outer=outer)
