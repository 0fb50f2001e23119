"""LocalSGD of a divided model: as with as many replicated ranks, saved, resumed on other layouts, and refused."""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.errors import ConfigurationError, MismatchError, NonFiniteError, UsageError
from evenstep.ground.compat.torch_tensors import local_part
from evenstep.testing import RankPool
from tests.mesh_runs import whole_of
from tests.procs.checkpoint.test_meshes import written_once
from tests.procs.parallel.test_same_answer import world_of

EVERY, WARMUP, NUM_STEPS = 3, 2, 12  # exchanges behind steps 1, 2 (warm-up), 5, 8, 11; one local step is left
NUM_SHARES = 4  # of a global batch: two replicas of two, or one of four
MESHES: dict[str, dict[str, int] | None] = {
    "2 x 2": {"replicate": 2, "shard": 2},
    "2 x 1": {"replicate": 2, "shard": 1},
    "1 x 2": {"replicate": 1, "shard": 2},
    "2 replicas": None,
    "1 replica": None,
}
NUM_RANKS = {"2 x 2": 4, "2 x 1": 2, "1 x 2": 2, "2 replicas": 2, "1 replica": 1}
AS_REPLICAS = {"2 x 2": "2 replicas", "2 x 1": "2 replicas", "1 x 2": "1 replica"}


class Model(nn.Module):
    """Sizes that two ranks don't divide, a parameter of one row, a frozen one, and one that `outer` lacks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.plain = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh() * self.scale
        return self.second(hidden) + self.plain(hidden) * self.frozen


Made = tuple[torch.optim.Optimizer, torch.optim.Optimizer | None, Any, evenstep.LocalSGD]


def made(world: evenstep.World, layout: str, seed: int, *, with_outer: bool = True, **options: Any) -> Made:
    """The inner optimizer, the outer one, the model and its LocalSGD."""
    if MESHES[layout] is None:
        model = evenstep.DistributedDataParallel(Model(seed), world=world, **options)
    else:
        model = evenstep.parallelize(Model(seed), world, blocks="Linear", local_steps=True, **options)
    module = model.module
    inner = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    stepped = [*module.first.parameters(), *module.second.parameters(), module.scale]
    outer = torch.optim.SGD(stepped, lr=0.7, momentum=0.9, nesterov=True) if with_outer else None
    return inner, outer, model, evenstep.LocalSGD(model, inner, every=EVERY, warmup_steps=WARMUP, outer=outer)


def share_of(seed: int, step: int, number: int) -> Tensor:
    """Of other lengths in each step; some are empty."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + number)
    return torch.randn((step + 2 * number) % 4 + (number == 0), 6, dtype=torch.float64, generator=generator)


def step_of(model: Any, world: evenstep.World, seed: int, step: int, inner: torch.optim.Optimizer) -> None:
    """This rank's backward passes of a step, with clipping: all but the last are accumulated."""
    size = NUM_SHARES // world.world_size
    shares = [share_of(seed, step, size * world.rank + each) for each in range(size)]
    if not model.is_divided:  # else all ranks of a replica need as many passes
        shares = [each for each in shares if len(each)]
    inner.zero_grad()
    for x in shares:
        with contextlib.nullcontext() if x is shares[-1] else model.accumulate():
            model.backward(model(x).square().mean(), weight=len(x))
    evenstep.clip_grad_norm_(inner, 0.5)


def world_for(layout: str) -> evenstep.World:
    return world_of(MESHES[layout])


def values_of(model: Any) -> list[Tensor]:
    return [whole_of(each) for each in (*model.module.parameters(), *model.module.buffers())]


def trained(layout: str, seed: int, with_outer: bool) -> list[list[Tensor]]:
    """Values behind each exchange, and behind the mean at the end."""
    with world_for(layout) as world:
        inner, _, model, local = made(world, layout, seed, with_outer=with_outer)
        behind = []
        for step in range(NUM_STEPS):
            step_of(model, world, seed, step, inner)
            if local.step():
                behind.append(values_of(model))
        local.close()
        return [*behind, values_of(model)]


def are_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-12) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in pairs)


@pytest.mark.parametrize("with_outer", [False, True])
@pytest.mark.parametrize("layout", ["2 x 2", "1 x 2", pytest.param("2 x 1", marks=pytest.mark.extended)])
def test_a_divided_replica_steps_as_one_rank_would(
    ranks: RankPool, fresh_seed: int, layout: str, with_outer: bool
) -> None:
    """Weights are counted within a replica, which has empty shares, too."""
    found = ranks.run(trained, NUM_RANKS[layout], layout, fresh_seed, with_outer)
    alone = AS_REPLICAS[layout]
    wanted = ranks.run(trained, NUM_RANKS[alone], alone, fresh_seed, with_outer)[0]
    assert len(wanted) == 6
    for each in found:
        assert all(are_close(ours, theirs) for ours, theirs in zip(each, wanted, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(each[-2], found[0][-2], strict=True)), "bits of rank 0"


# ---------------------------------------------------------------------- saved and resumed


def run(layout: str, seed: int, where: Path, end: int, begins_anew: bool) -> tuple[list[int], int, list[Tensor], Any]:
    """(steps of which there are checkpoints, where it began, values at the end, what the optimizers keep)."""
    with world_for(layout) as world:
        inner, outer, model, local = made(world, layout, seed + 7 * begins_anew)  # all comes from the checkpoint
        saves = evenstep.Checkpointer(where, model=model, local_sgd=local, every_steps=4, every_minutes=None, keep=9)
        with saves as checkpoint:
            began = checkpoint.resume()
            for step in range(began, end):
                step_of(model, world, seed, step, inner)
                local.step()
                checkpoint.step()
            checkpoint.wait()
            saved = sorted(int(each.name.split("-")[1]) for each in where.glob("step-*") if each.is_dir())
            kept = whole_of([inner.state_dict(), outer.state_dict() if outer is not None else None])
            values = values_of(model)
        local.close()
        return saved, began, values, kept


def tensors_in(kept: Any) -> list[Tensor]:
    if isinstance(kept, Tensor):
        return [kept]
    inside = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list) else []
    return [each for item in inside for each in tensors_in(item)]


def run_on(ranks: RankPool, layout: str, *arguments: Any) -> list[tuple[list[int], int, list[Tensor], Any]]:
    return ranks.run(run, NUM_RANKS[layout], layout, *arguments)


def test_a_save_waits_for_the_next_exchange_and_goes_on_with_the_same_bits(
    ranks: RankPool, fresh_seed: int, tmp_path: Path
) -> None:
    straight = run_on(ranks, "2 x 2", fresh_seed, tmp_path / "straight", NUM_STEPS + 1, False)
    assert straight[0][0] == [5, 8], "due behind steps 4, 8 and 12"
    for step in (5, 8):
        written_once(tmp_path / "straight", step)
    first = run_on(ranks, "2 x 2", fresh_seed, tmp_path / "stopped", 10, False)  # two steps behind it are lost
    assert first[0][:2] == ([5, 8], 0)
    resumed = run_on(ranks, "2 x 2", fresh_seed, tmp_path / "stopped", NUM_STEPS + 1, True)
    assert [each[1] for each in resumed] == [8] * 4
    for ours, wanted in zip(resumed, straight, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[2], wanted[2], strict=True))
        kept = tensors_in(ours[3]), tensors_in(wanted[3])
        assert len(kept[0]) > 20
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@pytest.mark.parametrize(
    ("saving", "resuming"),
    [
        ("2 x 2", "2 replicas"),
        ("2 replicas", "2 x 2"),
        pytest.param("2 x 2", "2 x 1", marks=pytest.mark.extended),
        pytest.param("2 x 1", "2 x 2", marks=pytest.mark.extended),
    ],
)
def test_another_layout_of_as_many_replicas_goes_on(
    ranks: RankPool, fresh_seed: int, tmp_path: Path, saving: str, resuming: str
) -> None:
    straight = run_on(ranks, "2 replicas", fresh_seed, tmp_path / "straight", NUM_STEPS + 1, False)
    run_on(ranks, saving, fresh_seed, tmp_path / "other", 9, False)
    for each in run_on(ranks, resuming, fresh_seed, tmp_path / "other", NUM_STEPS + 1, True):
        assert each[1] == 8
        assert are_close(each[2], straight[-1][2]) or are_close(each[2], straight[0][2])
        states = [tensors_in(of[3]) for of in straight]
        assert any(are_close(tensors_in(each[3]), state) for state in states), "of its replica"


@pytest.mark.parametrize(("saving", "resuming"), [("2 x 2", "1 x 2"), ("1 x 2", "2 x 2")])
def test_another_number_of_replicas_has_the_mean(
    ranks: RankPool, fresh_seed: int, tmp_path: Path, saving: str, resuming: str
) -> None:
    run_on(ranks, saving, fresh_seed, tmp_path, 9, False)
    alone = AS_REPLICAS[resuming]
    wanted = run_on(ranks, alone, fresh_seed, tmp_path, 8, True)[0]
    for each in run_on(ranks, resuming, fresh_seed, tmp_path, 8, True):
        assert each[1] == wanted[1] == 8
        assert are_close(each[2], wanted[2], 0.0)
        assert are_close(tensors_in(each[3]), tensors_in(wanted[3]), 0.0)


def ended_between(layout: str, seed: int, where: Path) -> list[Tensor]:
    """What a run leaves in its checkpoint that ends between two exchanges; loaded as one replica."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with world_for(layout) as world:
            inner, _, model, local = made(world, layout, seed)
            checkpoint = evenstep.Checkpointer(where, model=model, local_sgd=local, every_minutes=None)
            for step in range(7):
                step_of(model, world, seed, step, inner)
                local.step()
                checkpoint.step()
    assert not [each for each in caught if "LocalSGD" in str(each.message)]
    with world_for(layout) as world:
        *_, model, local = made(world, layout, seed + 1)
        with evenstep.Checkpointer(where, model=model, local_sgd=local, every_minutes=None) as checkpoint:
            assert checkpoint.resume() == 7
        found = values_of(model)
        local.close()
        return found


def test_a_run_that_ends_between_two_exchanges_is_saved_with_the_mean(
    ranks: RankPool, fresh_seed: int, tmp_path: Path
) -> None:
    found = ranks.run(ended_between, 4, "2 x 2", fresh_seed, tmp_path / "divided")
    wanted = ranks.run(ended_between, 2, "2 replicas", fresh_seed, tmp_path / "whole")[0]
    assert all(are_close(each, wanted) for each in found)


# ---------------------------------------------------------------------- faults on one rank, scalers, random streams


def poisoned(layout: str, seed: int, policy: str | None, odd: int) -> tuple[str, list[str], int, list[Tensor]]:
    """(what was raised, warnings, skipped steps, values at the end) with one NaN in one rank's part."""
    with world_for(layout) as world:
        inner, _, model, local = made(world, layout, seed, with_outer=False, on_nonfinite=policy)
        raised = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for step in range(8):
                    step_of(model, world, seed, step, inner)
                    if step == 4 and world.rank == odd:  # behind which parameters are averaged
                        local_part(model.module.first.weight.grad)[0, 3] = math.nan
                    local.step()
            except NonFiniteError as error:
                raised = str(error)
        told = [str(each.message) for each in caught if "not a number" in str(each.message)]
        return raised, told, model.skipped_steps, values_of(model)


@pytest.mark.parametrize(("layout", "odd"), [("2 x 2", 1), ("2 x 2", 2), ("2 replicas", 1), ("1 replica", 0)])
def test_a_gradient_that_isnt_finite_is_named_by_all_ranks(
    ranks: RankPool, fresh_seed: int, layout: str, odd: int
) -> None:
    for policy in ("warn", "skip", "raise", None):
        found = ranks.run(poisoned, NUM_RANKS[layout], layout, fresh_seed, policy, odd)
        raised, told, _, values = found[0]
        is_finite = all(bool(each.isfinite().all()) for each in values)
        if policy == "raise":
            assert f"on rank {odd}: 'first.weight'." in raised
            assert all(each[0] == raised for each in found)
            continue
        assert raised == ""
        assert [len(each[1]) for each in found] == [int(policy is not None)] + [0] * (len(found) - 1)
        assert all(f"on rank {odd}: 'first.weight'." in each for each in told)
        assert {each[2] for each in found} == {1 if policy == "skip" else 0}
        assert is_finite == (policy == "skip")
        if is_finite:
            assert all(are_close(each[3], values, 0.0) for each in found)


def scaled(seed: int) -> tuple[list[float], list[bool]]:
    """(scales behind each step, whether a step has changed this rank's replica)."""
    with world_for("2 x 2") as world:
        module = Model(seed).float()
        model = evenstep.parallelize(module, world, blocks="Linear", local_steps=True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        local = evenstep.LocalSGD(model, optimizer, every=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        generator, scales, changed = torch.Generator().manual_seed(seed + world.rank), [], []
        for step in range(3):
            model.backward(model(torch.randn(4, 6, generator=generator)).square().mean(), scaler=scaler)
            if step == 1 and world.rank == 3:
                local_part(module.first.weight.grad)[0, 0] = math.inf
            before = whole_of(module.first.weight)
            local.step(scaler=scaler)
            optimizer.zero_grad()
            changed.append(not torch.equal(before, whole_of(module.first.weight)))
            scales.append(scaler.get_scale())
        model.backward(model(torch.randn(4, 6, generator=generator)).square().mean(), scaler=scaler)
        with pytest.raises(UsageError, match=r"local\.step\(scaler=scaler\)"):
            local.step()
        optimizer.zero_grad()
        local.close()
        return scales, changed


def test_a_scaler_leaves_out_a_replicas_step_and_is_agreed_on(ranks: RankPool, fresh_seed: int) -> None:
    found = ranks.run(scaled, 4, fresh_seed)
    assert [each[0] for each in found] == [[1024.0, 1024.0, 512.0]] * 2 + [[1024.0, 512.0, 512.0]] * 2
    assert [each[1] for each in found] == [[True, True, True]] * 2 + [[True, False, True]] * 2


def drawn(seed: int) -> float:
    with world_for("2 x 2") as world:
        inner, _, model, local = made(world, "2 x 2", seed)
        step_of(model, world, seed, 0, inner)
        found = float(torch.rand(()))
        local.close()
        return found


def test_all_ranks_draw_their_own_random_numbers(ranks: RankPool, fresh_seed: int) -> None:
    """Each has samples of its own, and so has one of another replica."""
    assert len(set(ranks.run(drawn, 4, fresh_seed))) == 4


# ---------------------------------------------------------------------- refused


def refused(seed: int) -> None:
    from torch.distributed.fsdp import fully_shard

    with world_for("2 x 2") as world:
        x = torch.ones(2, 6, dtype=torch.float64)
        hybrid = evenstep.parallelize(Model(seed), world, blocks="Linear")
        with pytest.raises(UsageError, match="local_steps=True"):
            evenstep.LocalSGD(hybrid, torch.optim.SGD(hybrid.parameters(), lr=0.1), every=2)
        model = evenstep.parallelize(Model(seed), world, blocks="Linear", local_steps=True)
        with pytest.raises(UsageError, match="no LocalSGD averages its replicas"):
            model(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(MismatchError, match="every is 2 on rank 0 and 3 on rank 2"):
            evenstep.LocalSGD(model, optimizer, every=2 + world.rank // 2)
        local = evenstep.LocalSGD(model, optimizer, every=2)
        with pytest.raises(UsageError, match="another LocalSGD"):
            evenstep.LocalSGD(model, optimizer, every=2)
        with model.accumulate():
            model.backward(model(x).square().mean())
        with pytest.raises(UsageError, match=r"Leave model\.accumulate\(\)"):
            local.step()
        model.backward(model(x).square().mean())
        local.step()
        local.close()
        with pytest.raises(UsageError, match="can't be trained any more"):
            model(x)
        with torch.no_grad():
            assert bool(model(x).isfinite().all())
        whole = Model(seed)
        fully_shard(whole, mesh=world.mesh["replicate", "shard"])
        with pytest.raises(ConfigurationError, match=r"over ranks \[0, 1, 2, 3\]"):
            evenstep.attach(whole, world, local_steps=True)
    alone = pytest.raises(ConfigurationError, match="But there is tensor")
    with world_of({"replicate": 2, "tensor": 2}) as world, alone:
        evenstep.parallelize(Model(seed), world, tensor_plan={}, local_steps=True)


def test_what_replicas_that_step_on_their_own_cant_have(ranks: RankPool, fresh_seed: int) -> None:
    ranks.run(refused, 4, fresh_seed)
