"""LocalSGD of whole and of divided replicas, with an outer optimizer (DiLoCo) and without.

A rank of a whole model, or a group of ranks that have divided one, is a replica and steps on its own. The one process
has a model for each replica, and averages them by hand.
"""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.errors import CheckpointError, ConfigurationError, MismatchError, NonFiniteError, UsageError
from evenstep.ground.compat.torch_tensors import local_part
from evenstep.testing import RankPool
from tests.mesh_runs import whole_of
from tests.procs.parallel.test_same_answer import world_of
from tests.ranks import on_ranks

NUM_LOCAL, NUM_STEPS = 7, 12  # steps until a run may be closed, and in all
MESHES: dict[str, dict[str, int]] = {
    "2 x 2": {"replicate": 2, "shard": 2},
    "2 x 1": {"replicate": 2, "shard": 1},
    "1 x 2": {"replicate": 1, "shard": 2},
}
# By layout: how many ranks, and how many replicas.
NUM_RANKS = {"2 x 2": 4, "2 x 1": 2, "1 x 2": 2, "1 replica": 1, "2 replicas": 2, "3 replicas": 3}
NUM_REPLICAS = {"2 x 2": 2, "2 x 1": 2, "1 x 2": 1, "1 replica": 1, "2 replicas": 2, "3 replicas": 3}
KINDS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@dataclass(frozen=True)
class Case:
    """How replicas are trained. From step `closes` on they average gradients again.

    Attributes:
        has_more: The model has what a divided one can't have.
    """

    layout: str
    kind: str = "AdamW"
    every: int = 3
    warmup: int = 2
    with_outer: bool = True
    closes: int = NUM_STEPS
    has_more: bool = True

    @property
    def is_divided(self) -> bool:
        return self.layout in MESHES


def draw_case(chance: random.Random, layout: str) -> Case:
    is_divided = layout in MESHES
    kind = chance.choice(["momentum", "AdamW"] if is_divided else list(KINDS))
    closes = NUM_STEPS if is_divided else chance.choice([NUM_LOCAL, NUM_STEPS])
    return Case(layout, kind, chance.randint(2, 4), chance.randint(0, 2), chance.random() < 0.5, closes)


class Model(nn.Module):
    """Sizes that two ranks don't divide, a frozen parameter, some that `outer` lacks, and a part that some need late.

    A whole one has a module buffer, a matrix that lies otherwise in memory and, where the optimizer knows complex
    numbers, a complex parameter.
    """

    def __init__(self, seed: int, case: Case) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.plain = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.other = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        if case.has_more and not case.is_divided:
            self.turned = nn.Parameter(torch.randn(3, 3).t())
            self.register_buffer("seen", torch.zeros(()))
        self.double()
        if case.has_more and not case.is_divided and case.kind == "momentum":
            self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: Tensor, uses_other: bool = True) -> Tensor:
        hidden = self.first(x).tanh() * self.scale
        out: Tensor = self.second(hidden) + self.plain(hidden) * self.frozen
        if uses_other:
            out = out + self.other(hidden)
        if hasattr(self, "turned"):
            out = out @ self.turned
            with torch.no_grad():
                self.seen += x.sum()
        return (out * self.waves).abs() if hasattr(self, "waves") else out


def optimizers_of(module: Model, case: Case) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer | None]:
    inner = KINDS[case.kind]([p for p in module.parameters() if p.requires_grad])
    stepped = [p for name, p in module.named_parameters() if name.startswith(("first", "second", "scale", "waves"))]
    return inner, torch.optim.SGD(stepped, lr=0.7, momentum=0.9, nesterov=True) if case.with_outer else None


def share_of(seed: int, step: int, number: int) -> Tensor:
    """Of other lengths in each step; some are empty, but of each replica one isn't."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * step + number)
    return torch.randn((step + 2 * number) % 4 + (number == 0), 6, dtype=torch.float64, generator=generator)


def numbers_of(part: int, num_parts: int) -> range:
    """Which shares of a global batch belong to a rank, or to a replica."""
    size = (6 if num_parts == 3 else 4) // num_parts
    return range(size * part, size * (part + 1))


def uses_other(step: int, replica: int) -> bool:
    return replica > 0 or step >= NUM_LOCAL


# ---------------------------------------------------------------------- the ranks


@contextlib.contextmanager
def world_for(case: Case) -> Any:
    with world_of(MESHES.get(case.layout)) as world:
        yield world


Made = tuple[torch.optim.Optimizer, torch.optim.Optimizer | None, Any, evenstep.LocalSGD]


def made(world: evenstep.World, case: Case, seed: int, **options: Any) -> Made:
    """The inner optimizer, the outer one, the model and its LocalSGD."""
    if case.is_divided:
        model = evenstep.parallelize(Model(seed, case), world, blocks="Linear", local_steps=True, **options)
    else:
        model = evenstep.DistributedDataParallel(Model(seed, case), world=world, **options)
    inner, outer = optimizers_of(model.module, case)
    return inner, outer, model, evenstep.LocalSGD(model, inner, every=case.every, warmup_steps=case.warmup, outer=outer)


def step_of(model: Any, world: evenstep.World, case: Case, seed: int, step: int, inner: torch.optim.Optimizer) -> None:
    """This rank's backward passes of a step, with clipping: all but the last are accumulated."""
    numbers = numbers_of(world.rank, world.world_size)
    replica = world.rank * NUM_REPLICAS[case.layout] // world.world_size
    inner.zero_grad()
    for number in numbers:
        with contextlib.nullcontext() if number == numbers[-1] else model.accumulate():
            x = share_of(seed, step, number)
            model.backward(model(x, uses_other(step, replica)).square().mean(), weight=len(x))
    evenstep.clip_grad_norm_(inner, 0.5)


def values_of(model: Any) -> list[Tensor]:
    return [whole_of(each) for each in (*model.module.parameters(), *model.module.buffers())]


def trained(case: Case, seed: int) -> list[list[Tensor]]:
    """Values behind each exchange, and behind the mean at the end."""
    with world_for(case) as world:
        inner, _, model, local = made(world, case, seed)
        behind = []
        for step in range(NUM_STEPS):
            if step == case.closes:
                local.close()
            step_of(model, world, case, seed, step, inner)
            grads = [p.grad for p in model.parameters()]
            if local.step():
                behind.append(values_of(model))
            assert all(a is b.grad for a, b in zip(grads, model.parameters(), strict=True)), "the script's own stay"
        local.close()
        return [*behind, values_of(model)]


# ---------------------------------------------------------------------- the one process


@torch.no_grad()
def average(models: list[Model], shared: Model, outer: torch.optim.Optimizer | None) -> None:
    """The outer step on a model of its own, whose values all models then take."""
    stepped = {id(p) for group in (outer.param_groups if outer else ()) for p in group["params"]}
    own = [list(each.parameters()) for each in models]
    for number, parameter in enumerate(shared.parameters()):
        mean = torch.stack([each[number] for each in own]).mean(0)
        if id(parameter) in stepped:
            parameter.grad = parameter - mean
        else:
            parameter.copy_(mean)
    for number, buffer in enumerate(shared.buffers()):
        buffer.copy_(torch.stack([list(each.buffers())[number] for each in models]).mean(0))
    if outer is not None:
        outer.step()
    for model in models:
        model.load_state_dict(shared.state_dict())


def take_mean_state(models: list[Model], inners: list[torch.optim.Optimizer]) -> None:
    """The first optimizer goes on with the mean of what all of them keep."""
    for number, parameter in enumerate(models[0].parameters()):
        same = [list(each.parameters())[number] for each in models]
        having = [each.state[p] for each, p in zip(inners, same, strict=True) if p in each.state]
        if having:
            inners[0].state[parameter] = {
                key: torch.empty_like(value).copy_(torch.stack([state[key] for state in having]).mean(0))
                if isinstance(value, Tensor) and value.dim()
                else value
                for key, value in having[0].items()
            }


def in_one_process(case: Case, seed: int) -> list[list[Tensor]]:
    num_replicas = NUM_REPLICAS[case.layout]
    models, shared = [Model(seed, case) for _ in range(num_replicas)], Model(seed, case)
    inners, outer = [optimizers_of(model, case)[0] for model in models], optimizers_of(shared, case)[1]
    behind = []
    for step in range(NUM_STEPS):
        if step == case.closes:
            average(models, shared, None)
            take_mean_state(models, inners)
            del models[1:], inners[1:]
        for replica, (model, inner) in enumerate(zip(models, inners, strict=True)):
            num_parts = num_replicas if step < case.closes else 1
            numbers = numbers_of(replica, num_parts) if num_parts > 1 else range(6 if num_replicas == 3 else 4)
            inner.zero_grad()
            x = torch.cat([share_of(seed, step, number) for number in numbers])
            model(x, uses_other(step, replica)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            inner.step()
        is_warming_up = step < case.warmup
        if step < case.closes and (is_warming_up or (step + 1 - case.warmup) % case.every == 0):
            average(models, shared, None if is_warming_up else outer)
            behind.append(whole_of([*models[0].parameters(), *models[0].buffers()]))
        elif step >= case.closes:
            behind.append(whole_of([*models[0].parameters()]))
    if case.closes == NUM_STEPS:
        average(models, shared, None)
    return [*behind, whole_of([*models[0].parameters()])]


def are_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-12) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(ours, theirs, strict=False))


@pytest.mark.extended(beyond=2)
@pytest.mark.parametrize(
    "layout",
    ["2 replicas", "2 x 2", "1 replica", "3 replicas", "1 x 2", "2 x 1"],
)
def test_random_local_steps_are_those_of_one_process(ranks: RankPool, fresh_seed: int, layout: str) -> None:
    """Weights are counted within a replica, which has empty shares, too; closed midway they train on as one."""
    chance = random.Random(f"{fresh_seed} {layout}")
    for _ in range(2 if layout in MESHES else 5):
        case = draw_case(chance, layout)
        wanted = in_one_process(case, fresh_seed)
        for found in ranks.run(trained, NUM_RANKS[layout], case, fresh_seed):
            assert len(found) == len(wanted) > 3
            close = [are_close(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)]
            assert all(close), f"{case}: {close}"


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
            each(x).square().mean().backward()
        by_hand.step()
        local.step()
    found = module.weight.detach() - before
    local.close()
    return before, world.mean(twin.weight.detach() - before), found


@pytest.mark.parametrize("with_outer", [False, True])
@pytest.mark.parametrize(("dtype", "eps"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_what_ranks_have_changed_travels_in_16_bits(
    ranks: RankPool, fresh_seed: int, dtype: torch.dtype, eps: float, with_outer: bool
) -> None:
    told = ranks.run(in_16_bits, 2, fresh_seed, dtype, with_outer)
    assert torch.equal(told[0][2], told[1][2])
    before, exact, found = told[0]
    scale = exact.abs().max()
    assert scale > 1e-4, "something was learnt"
    off = (found - exact).abs().max()
    assert off <= 4 * eps * scale, "of the change, not of the values"
    assert off > 2 * torch.finfo(torch.float32).eps * before.abs().max(), "it travelled whole"


# ---------------------------------------------------------------------- saved and resumed


def run(case: Case, seed: int, where: Path, end: int, goes_back: bool = False) -> tuple[list[int], int, list[Any]]:
    """(steps of which there are checkpoints, where it began, values and what the optimizers keep) of a run.

    Args:
        case: How replicas are trained.
        seed: Of the samples and the model.
        where: Of the checkpoints; where there are some, it is resumed.
        end: Behind this step the run ends.
        goes_back: There it loads its first checkpoint, and makes the steps behind that once more.
    """
    with world_for(case) as world:
        inner, outer, model, local = made(world, case, seed)
        saves = evenstep.Checkpointer(where, model=model, local_sgd=local, every_steps=4, every_minutes=None, keep=9)
        with saves as checkpoint:
            began = checkpoint.resume()
            steps = [*range(began, end)]
            while steps:
                step = steps.pop(0)
                if step == case.closes:
                    local.close()
                step_of(model, world, case, seed, step, inner)
                local.step()
                checkpoint.step()
                if goes_back and not steps:
                    checkpoint.load(5)
                    checkpoint.discard(after=5)
                    steps, goes_back = [*range(5, end)], False
            checkpoint.wait()
            saved = sorted(int(each.name.split("-")[1]) for each in where.glob("step-*") if each.is_dir())
            kept = whole_of([inner.state_dict(), outer.state_dict() if outer is not None else None])
            values = values_of(model)
        local.close()
        return saved, began, [values, tensors_in(kept)]


def tensors_in(kept: Any) -> list[Tensor]:
    if isinstance(kept, Tensor):
        return [kept]
    inside = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list) else []
    return [each for item in inside for each in tensors_in(item)]


def run_on(ranks: RankPool, case: Case, *arguments: Any) -> list[tuple[list[int], int, list[Any]]]:
    return ranks.run(run, NUM_RANKS[case.layout], case, *arguments)


def assert_same_ends(found: Any, wanted: Any, tolerance: float = 0.0) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert len(ours) == len(theirs) > 5
        assert are_close(ours, theirs, tolerance)


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize("case", [Case("2 replicas"), Case("2 replicas", closes=NUM_LOCAL), Case("2 x 2")], ids=str)
def test_a_save_waits_for_the_next_exchange_and_goes_on_with_the_same_bits(
    ranks: RankPool, fresh_seed: int, tmp_path: Path, case: Case
) -> None:
    straight = run_on(ranks, case, fresh_seed, tmp_path / "straight", NUM_STEPS)
    assert straight[0][0][:2] == [5, 8], "due behind steps 4 and 8"
    first = run_on(ranks, case, fresh_seed, tmp_path / "stopped", 10)  # what is behind the last exchange is lost
    assert first[0][:2] == ([5, 8], 0)
    for ours, wanted in zip(run_on(ranks, case, fresh_seed, tmp_path / "stopped", NUM_STEPS), straight, strict=True):
        assert ours[1] == (8 if case.closes == NUM_STEPS else 10), "closed, ranks are equal behind every step"
        assert_same_ends(ours[2], wanted[2])
    if case.closes < NUM_STEPS:
        return
    back = run_on(ranks, case, fresh_seed, tmp_path / "back", 9, True)  # from within a round of local steps
    for ours, wanted in zip(back, run_on(ranks, case, fresh_seed, tmp_path / "nine", 9), strict=True):
        assert_same_ends(ours[2], wanted[2])


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize(
    ("saving", "resuming"),
    [
        ("2 x 2", "2 replicas"),
        ("2 replicas", "2 x 2"),
        ("2 x 2", "2 x 1"),
        ("2 x 2", "1 x 2"),
        ("1 x 2", "2 x 2"),
    ],
)
def test_another_layout_goes_on_and_another_number_of_replicas_has_the_mean(
    ranks: RankPool, fresh_seed: int, tmp_path: Path, saving: str, resuming: str
) -> None:
    """Of replicas that save, what is resumed on whole ones of the same number is what is resumed on divided ones."""
    cases = [Case(layout, has_more=False) for layout in (saving, resuming)]
    run_on(ranks, cases[0], fresh_seed, tmp_path / "resumed", 9)
    shutil.copytree(tmp_path / "resumed", tmp_path / "whole")
    num_replicas = NUM_REPLICAS[resuming]
    whole = Case("1 replica" if num_replicas == 1 else f"{num_replicas} replicas", has_more=False)
    wanted = run_on(ranks, whole, fresh_seed, tmp_path / "whole", NUM_STEPS)
    for rank, each in enumerate(run_on(ranks, cases[1], fresh_seed, tmp_path / "resumed", NUM_STEPS)):
        assert each[1] == 8
        assert_same_ends(each[2], wanted[rank * num_replicas // NUM_RANKS[resuming]][2], 1e-12)


def ended_between(case: Case, seed: int, where: Path) -> list[Tensor]:
    """What a run leaves in its checkpoint that ends between two exchanges."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with world_for(case) as world:
            inner, _, model, local = made(world, case, seed)
            checkpoint = evenstep.Checkpointer(where, model=model, local_sgd=local, every_minutes=None)
            for step in range(7):
                step_of(model, world, case, seed, step, inner)
                local.step()
                checkpoint.step()
    assert not [each for each in caught if "LocalSGD" in str(each.message)]
    with world_for(case) as world:
        *_, model, local = made(world, case, seed + 1)
        with evenstep.Checkpointer(where, model=model, local_sgd=local, every_minutes=None) as checkpoint:
            assert checkpoint.resume() == 7
        found = values_of(model)
        local.close()
        return found


def test_a_run_that_ends_between_two_exchanges_is_saved_with_the_mean(
    ranks: RankPool, fresh_seed: int, tmp_path: Path
) -> None:
    found = [
        ranks.run(ended_between, NUM_RANKS[layout], Case(layout, has_more=False), fresh_seed, tmp_path / layout)
        for layout in ("2 x 2", "2 replicas")
    ]
    assert all(are_close(each, found[1][0]) for each in found[0])


@on_ranks(2)
def test_an_outer_optimizer_that_is_missing_is_named(world: evenstep.World, tmp_path: Path) -> None:
    for case in (Case("2 replicas"), Case("2 replicas", with_outer=False)):
        _, _, model, local = made(world, case, 0)
        with evenstep.Checkpointer(tmp_path, model=model, local_sgd=local, every_minutes=None) as checkpoint:
            if case.with_outer:
                checkpoint.save()
                continue
            told = "local_sgd: was with an outer one of .* parameters, and is with no outer optimizer here"
            with pytest.raises(CheckpointError, match=told):
                checkpoint.resume()
        local.close()


# ---------------------------------------------------------------------- faults on one rank, scalers, random streams


def poisoned(case: Case, seed: int, policy: str | None, odd: int) -> tuple[str, list[str], int, list[Tensor]]:
    """(what was raised, warnings, skipped steps, values at the end) with one NaN in one rank's part."""
    with world_for(case) as world:
        inner, _, model, local = made(world, case, seed, on_nonfinite=policy)
        raised = ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for step in range(8):
                    step_of(model, world, case, seed, step, inner)
                    if step == 4 and world.rank == odd:  # behind which parameters are averaged
                        local_part(model.module.first.weight.grad)[0, 3] = math.nan
                    local.step()
            except NonFiniteError as error:
                raised = str(error)
        told = [str(each.message) for each in caught if "not a number" in str(each.message)]
        return raised, told, model.skipped_steps, values_of(model)


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize(("layout", "odd"), [("2 x 2", 1), ("2 replicas", 1), ("1 replica", 0)])
def test_a_gradient_that_isnt_finite_is_named_by_all_ranks(
    ranks: RankPool, fresh_seed: int, layout: str, odd: int
) -> None:
    case = Case(layout, with_outer=False)
    for policy in ("warn", "skip", "raise", None):
        found = ranks.run(poisoned, NUM_RANKS[layout], case, fresh_seed, policy, odd)
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


def scaled(case: Case, seed: int) -> tuple[list[float], list[bool], float]:
    """(scales behind each step, whether a step has changed this rank's replica, a random number of its own)."""
    with world_for(case) as world:
        inner, _, model, local = made(world, case, seed)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        generator, scales, changed = torch.Generator().manual_seed(seed + world.rank), [], []

        def backward() -> None:
            x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
            model.backward(model(x).square().mean(), scaler=scaler)

        for step in range(3):
            backward()
            weight = model.module.first.weight
            if step == 1 and world.rank == world.world_size - 1:
                local_part(weight.grad)[0, 0] = math.inf
            before = whole_of(weight)
            local.step(scaler=scaler)
            inner.zero_grad()
            changed.append(not torch.equal(before, whole_of(weight)))
            scales.append(scaler.get_scale())
        backward()
        with pytest.raises(UsageError, match=r"local\.step\(scaler=scaler\)"):
            local.step()
        with pytest.raises(ConfigurationError, match="scaler=5"):
            local.step(scaler=5)
        inner.zero_grad()
        local.step()  # what was scaled is gone
        local.close()
        return scales, changed, float(torch.rand(()))


@pytest.mark.parametrize("layout", ["1 replica", "3 replicas", "2 x 2"])
def test_a_scaler_leaves_out_a_replicas_step_and_is_agreed_on(ranks: RankPool, fresh_seed: int, layout: str) -> None:
    case = Case(layout, kind="momentum", every=3, warmup=0, with_outer=False, has_more=False)
    found = ranks.run(scaled, NUM_RANKS[layout], case, fresh_seed)
    num_ranks, size = NUM_RANKS[layout], NUM_RANKS[layout] // NUM_REPLICAS[layout]
    others, last = [1024.0, 1024.0, 512.0], [1024.0, 512.0, 512.0]
    assert [each[0] for each in found] == [others] * (num_ranks - size) + [last] * size
    assert [each[1] for each in found] == [[True] * 3] * (num_ranks - size) + [[True, False, True]] * size
    assert len({each[2] for each in found}) == num_ranks, "each draws random numbers of its own"


# ---------------------------------------------------------------------- refused


@on_ranks(2)
def test_what_local_steps_of_whole_models_cant_have_is_named_on_all_ranks(
    world: evenstep.World, fresh_seed: int
) -> None:
    module = Model(fresh_seed, Case("2 replicas"))
    model = evenstep.DistributedDataParallel(module)
    inner, outer = optimizers_of(module, Case("2 replicas"))
    assert outer is not None
    alien = torch.optim.SGD(nn.Linear(2, 7).parameters(), lr=0.1)
    outer.param_groups[0]["lr"] = 0.5 + world.rank
    half = torch.bfloat16 if world.rank else None
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (inner, {"every": 0}, ConfigurationError, "every"),
        (inner, {"warmup_steps": -1}, ConfigurationError, "warmup_steps"),
        (alien, {}, ConfigurationError, r"\[7, 2\] isn't one of the model's"),
        (inner, {"outer": alien}, ConfigurationError, r"outer: its parameter of shape \[7, 2\]"),
        (inner, {"outer": inner}, ConfigurationError, "outer: this is the optimizer of the local steps"),
        (inner, {"outer": 0.7}, ConfigurationError, "outer=0.7"),
        (inner, {"outer": outer}, MismatchError, "outer is"),
        (inner, {"transfer_dtype": torch.int8}, ConfigurationError, "transfer_dtype"),
        (inner, {"transfer_dtype": half}, MismatchError, "transfer_dtype is None on rank 0"),
    ]
    for optimizer, arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            evenstep.LocalSGD(model, optimizer, **{"every": 2, **arguments})
    with pytest.raises(ConfigurationError, match="model=Linear"):
        evenstep.LocalSGD(nn.Linear(1, 1), inner, every=1)
    x = torch.ones(1, 6, dtype=torch.float64)
    with model.accumulate():
        model(x).sum().backward()
    with pytest.raises(UsageError, match="before the loop"):
        evenstep.LocalSGD(model, inner, every=1)
    model(x).sum().backward()
    with pytest.raises(ConfigurationError, match="plain torch optimizer"):
        evenstep.LocalSGD(model, evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1), every=1)
    plain = torch.optim.SGD(module.first.parameters(), lr=0.1)
    for kind in (torch.optim.SGD, torch.optim.Adafactor):  # the second would step each rank with its own gradients
        divided = evenstep.ShardedOptimizer(model, kind, module.second.parameters(), lr=0.1)
        with pytest.raises(UsageError, match="the model has a ShardedOptimizer"):
            evenstep.LocalSGD(model, plain, every=2)
        del divided  # one that has gone doesn't matter
        local = evenstep.LocalSGD(model, plain, every=2)
        with pytest.raises(UsageError, match="another LocalSGD"):
            evenstep.LocalSGD(model, plain, every=2)
        with pytest.raises(UsageError, match="the model has a LocalSGD"):
            evenstep.ShardedOptimizer(model, kind, module.second.parameters(), lr=0.1)
        local.close()


def close_with_what_grows() -> list[str]:
    world = evenstep.init(quiet=True)
    _, _, model, local = made(world, Case("2 replicas"), 0)
    local.optimizer.state[model.module.first.weight]["seen"] = torch.zeros(2 + world.rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local.close()
    return [str(each.message) for each in caught]


def test_what_cant_be_averaged_is_said_once(ranks: RankPool) -> None:
    (told,), others = ranks.run(close_with_what_grows, 2)
    assert others == []
    assert "'seen' of parameter 2 is float32 [3] on rank 1" in told
    assert "make a new optimizer" in told


@on_ranks(4)
def test_what_replicas_that_step_on_their_own_cant_have(world, fresh_seed):
    from torch.distributed.fsdp import fully_shard

    case = Case("2 x 2")
    with world_for(case) as world:
        x = torch.ones(2, 6, dtype=torch.float64)
        hybrid = evenstep.parallelize(Model(fresh_seed, case), world, blocks="Linear")
        with pytest.raises(UsageError, match="local_steps=True"):
            evenstep.LocalSGD(hybrid, torch.optim.SGD(hybrid.parameters(), lr=0.1), every=2)
        model = evenstep.parallelize(Model(fresh_seed, case), world, blocks="Linear", local_steps=True)
        with pytest.raises(UsageError, match="no LocalSGD averages its replicas"):
            model(x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(MismatchError, match="every is 2 on rank 0 and 3 on rank 2"):
            evenstep.LocalSGD(model, optimizer, every=2 + world.rank // 2)
        local = evenstep.LocalSGD(model, optimizer, every=2)
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
        whole = Model(fresh_seed, case)
        fully_shard(whole, mesh=world.mesh["replicate", "shard"])
        with pytest.raises(ConfigurationError, match=r"over ranks \[0, 1, 2, 3\]"):
            evenstep.attach(whole, world, local_steps=True)
    alone = pytest.raises(ConfigurationError, match="But there is tensor")
    with world_of({"replicate": 2, "tensor": 2}) as world, alone:
        evenstep.parallelize(Model(fresh_seed, case), world, tensor_plan={}, local_steps=True)
