"""What a step may be made of, in random combinations, against torch's own optimizer in one process.

    python -m tests.procs.replica.test_step_combinations 300               # that many turns of a new seed
    python -m tests.procs.replica.test_step_combinations 1 SEED TURN       # one turn again

What is drawn is in tests/step_cases.py, the one process in tests/step_reference.py.

How far apart they may be. Both compute each rank's gradients from the same parameters, with the same operations; what
differs is the order in which few numbers are added, and where they are rounded to 16 bits. Such an error is relative to
the absolute values that were added, of which the reference keeps count: 10 units in the last place of the coarsest
dtype that gradients pass through, of the parameter's size plus what one step makes of the gradients. Where there are
16 or 32 bits the reference goes on from the ranks' parameters after each step, so that errors are those of one step.
In float64 nothing is set back, and a dozen steps of any optimizer may be 1e4 units (2e-12) apart.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import random
import sys
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import evenstep
from evenstep.replica.sharded.gradient_placeholder import GradientPlaceholder
from evenstep.testing import RankPool
from tests.step_cases import (
    EXPONENTS,
    Branches,
    Case,
    Part,
    Step,
    Window,
    draw_case,
    draw_steps,
    groups_of,
    loss_of,
    poison_of,
)
from tests.step_reference import Reference, build_optimizers, build_scaler

STEPS = (5, 3)  # on the first number of ranks, and from there on the second


class Replica:
    """What is tried, on one rank."""

    def __init__(self, case: Case, world: evenstep.World, *, has_late: bool) -> None:
        self.case, self.world = case, world
        self.model = evenstep.DistributedDataParallel(
            Branches(case),
            world=world,
            bucket_cap_mb=case.bucket_cap_mb,
            first_bucket_cap_mb=case.bucket_cap_mb,
            reduce_dtype=case.model_reduce_dtype,
            on_nonfinite=case.on_nonfinite,
        )
        groups, second, self.late = groups_of(case, self.model.module)
        if case.way in ("sharded", "several"):
            kind, options = getattr(torch.optim, case.kind), copy.deepcopy(case.options)
            self.optimizers = [evenstep.ShardedOptimizer(self.model, kind, groups, **case.sharded, **options)]
            self.optimizers += [torch.optim.SGD(second, lr=0.1)] if second else []
        else:
            self.optimizers = build_optimizers(case, groups, second)
        if has_late:
            self.add_late_group()
        self.scaler = build_scaler(case)

    def add_late_group(self) -> None:
        self.optimizers[0].add_param_group({"params": self.late, "lr": 0.02})

    def run(self, window: Window) -> None:
        """This rank's passes."""
        case, model, rank = self.case, self.model, self.world.rank
        parts = window.parts[rank]
        poison = window.poison[1] if window.poison is not None and window.poison[0] == rank else None
        if case.window == "microbatches":
            for part, x in zip(parts, model.microbatches(*window.wholes[rank]), strict=True):
                self._backward(dataclasses.replace(part, x=x), poison if part is parts[-1] else None)
            return
        held = model.no_sync if case.window == "no_sync" else model.accumulate
        for part in parts:
            is_last = part is parts[-1]
            with contextlib.nullcontext() if is_last else held():
                self._backward(part, poison if is_last else None)

    def lose(self, how: str, lost: Tensor) -> None:
        """Begin a window, and leave it."""
        if how == "accumulated":
            with self.model.accumulate():
                self._backward(Part(lost, 6.0, [0]), None)
        elif how:
            for x in self.model.microbatches(lost, 2):
                self._backward(Part(x, 3.0, [0]), None)
                break

    @torch.no_grad()
    def write(self, how: str, values: list[Tensor]) -> None:
        """Put values into all parameters. Collective: ranks may share their memory."""
        self.world.barrier()
        named = dict(self.model.module.named_parameters())
        if how == "load":
            self.model.module.load_state_dict(dict(zip(named, values, strict=True)))
        for parameter, value in zip(named.values(), values, strict=True):
            if how == "replace":
                parameter.data = torch.empty_like(parameter).copy_(value)
            elif how == "in place":
                parameter.copy_(value)
        self.world.barrier()

    def _backward(self, part: Part, poison: int | None) -> None:
        if part.asks:
            torch.autograd.grad(loss_of(self.case, self.model, part), self.model.module.scale)
        loss = loss_of(self.case, self.model, part)
        if poison is not None:
            loss = loss + poison_of(self.model.module, poison)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if not self.case.weighted:
            loss.backward()
        elif self.scaler is None:
            self.model.backward(loss, weight=part.weight)
        else:
            self.model.backward(loss, weight=part.weight, scaler=self.scaler)

    def step(self, *, unscales: bool) -> list[Tensor]:
        """Clip and step; the norms, by optimizer."""
        norms, has_stepped = [], False
        for optimizer in self.optimizers:
            has_any = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
            if self.scaler is not None and unscales and has_any:
                self.scaler.unscale_(optimizer)
            norms.append(self._clip(optimizer) if has_any else torch.zeros(0))
            if self.scaler is None:
                optimizer.step()
            elif has_any:
                self.scaler.step(optimizer)
                has_stepped = True
        if self.scaler is not None and has_stepped:
            self.scaler.update()
        return norms

    def _clip(self, optimizer: torch.optim.Optimizer) -> Tensor:
        clip, limit = self.case.clip, 0.3
        if clip == "group":
            return torch.stack([evenstep.clip_grad_norm_(group["params"], limit) for group in optimizer.param_groups])
        if clip in EXPONENTS:
            return evenstep.clip_grad_norm_(optimizer, limit, EXPONENTS[clip]).reshape(1)
        if clip == "value":
            evenstep.clip_grad_value_(optimizer, 0.05)
        return torch.zeros(0)

    def zero_grad(self, by: str, set_to_none: bool) -> None:
        for each in {"model": [self.model], "optimizers": self.optimizers, "nobody": []}[by]:
            each.zero_grad(set_to_none)

    def reload(self, states: list[dict[str, Any]]) -> None:
        """All states, where they come from."""
        self.model.load_state_dict(self.model.state_dict())
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(self.scaler.state_dict())


# ---------------------------------------------------------------------- comparison


def assert_close(got: Tensor, expected: Tensor, tolerance: Tensor | float, what: str) -> None:
    assert got.shape == expected.shape, f"{what}: of shape {list(got.shape)} and not {list(expected.shape)}"
    wide = torch.complex128 if got.is_complex() else torch.float64
    apart = (got.detach().to(wide) - expected.detach().to(wide)).abs()
    assert bool((apart <= tolerance).all()), f"{what}: {float(apart.max()):.3g} apart, {float(tolerance):.3g} allowed"


def compare_parameters(replica: Replica, reference: Reference, what: str) -> None:
    named = replica.model.module.named_parameters()
    for number, ((name, got), expected) in enumerate(zip(named, reference.stepped.parameters(), strict=True)):
        told = f"{what}: {name}, of gradients of up to {float(reference.since[number]):.3g} in sum"
        assert_close(got, expected, reference.tolerance(number), told)


def compare_gradients(replica: Replica, reference: Reference, what: str) -> None:
    """Those that can be read. One that nobody has is none, or zeros."""
    named = replica.model.module.named_parameters()
    for number, ((name, mine), other) in enumerate(zip(named, reference.stepped.parameters(), strict=True)):
        got, expected = mine.grad, other.grad
        if isinstance(got, GradientPlaceholder) or (got is None and expected is None):
            continue
        got = torch.zeros_like(mine) if got is None else got
        expected = torch.zeros_like(other) if expected is None else expected
        if bool(expected.isfinite().all()):
            assert_close(got, expected, reference.gradient_tolerance(number), f"{what}: gradient of {name}")


def compare_norms(replica: Replica, reference: Reference, norms: list[Tensor], what: str) -> None:
    """Their errors are at most those of all gradients."""
    numbers = range(len(reference.added))
    tolerance = sum(5 * reference.gradient_tolerance(number) for number in numbers)  # of 25 elements at most, each
    for got, expected in zip(norms, reference.norms, strict=True):
        if bool(expected.isfinite().all()):
            assert_close(got, expected, tolerance, f"{what}: norm")


def compare_states(replica: Replica, reference: Reference, what: str) -> list[dict[str, Any]]:
    """Of all optimizers; the states of the replica's."""
    saved = [optimizer.state_dict() for optimizer in replica.optimizers]
    for got, optimizer in zip(saved, reference.optimizers, strict=True):
        expected = optimizer.state_dict()
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        assert got["param_groups"] == expected["param_groups"], f"{what}: {got['param_groups']}"
        for number in got["state"].keys() | expected["state"].keys():
            found, state = dict(got["state"].get(number, {})), expected["state"].get(number, {})
            master = found.pop("master_weights", None)
            assert found.keys() == state.keys(), f"{what}: {set(found)} of {number}, and not {set(state)}"
            if master is not None:
                assert_close(master, stepped[number], reference.state_tolerance, f"{what}: master_weights of {number}")
            for key, value in state.items():
                if isinstance(value, Tensor):
                    assert_close(found[key], value, reference.state_tolerance, f"{what}: {key} of {number}")
                else:
                    assert found[key] == value, f"{what}: {key} of {number}"
    return saved


# ---------------------------------------------------------------------- ranks


def half(seed: int, turn: int, start: bytes | None) -> bytes | None:
    """On every rank: half of a turn. What the other half goes on from, of a rank that has made all steps."""
    case = draw_case(random.Random(f"{seed} {turn}"))
    world = evenstep.init(quiet=True)
    if case.transport == "gloo":
        world = evenstep.World.from_process_group(transport="gloo", device="cpu")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "a gradient was infinite")
            warnings.filterwarnings("ignore", "Detected call of")  # the first step may have been skipped
            given = None if start is None else torch.load(io.BytesIO(start), weights_only=False)
            kept = train(
                case, world, f"seed {seed}, turn {turn}, {world.world_size} ranks, {case}", f"{seed} {turn}", given
            )
        saved = io.BytesIO()
        torch.save(kept, saved)
        return None if kept is None else saved.getvalue()
    finally:
        if case.transport == "gloo":
            world.close()


def train(case: Case, world: evenstep.World, what: str, seed: str, start: Any) -> Any:
    """Some steps, from a state that is compared with the reference at each, to what another world goes on from."""
    chance = random.Random(f"{seed} {start is not None}")
    reference: Reference = Reference(case) if start is None else start[0]
    replica = Replica(case, world, has_late=start is not None and case.has_late_group)
    if start is not None:
        take_over(replica, reference, start[1], from_torchs=chance.random() < 0.5)
    num_steps = STEPS[start is not None]
    steps = draw_steps(chance, case, world.world_size, num_steps, adds_group=case.has_late_group and start is None)
    schedules = schedules_of(replica, reference)
    with replica.model.join() if case.joins else contextlib.nullcontext():
        for number, step in enumerate(steps):
            one_step(replica, reference, step, schedules, f"{what}, step {number}")
            if step.adds_group:
                replica.add_late_group()
                reference.optimizers[0].add_param_group({"params": reference.late, "lr": 0.02})
                schedules = schedules_of(replica, reference)
    compare_parameters(replica, reference, what)
    sums = [float(p.detach().abs().double().sum()) for p in replica.model.parameters()]
    assert all(each == sums for each in world.exchange(sums)), f"{what}: ranks have different parameters"
    if world.rank not in steps[-1].active:  # its optimizer has made fewer steps
        return None
    return reference, compare_states(replica, reference, what)


def one_step(replica: Replica, reference: Reference, step: Step, schedules: list[Any], what: str) -> None:
    is_active = replica.world.rank in step.active
    if any(step.loses):
        replica.lose(step.loses[replica.world.rank], step.lost)
        replica.zero_grad("model", set_to_none=True)
        reference.zero_grad("model", set_to_none=True)
    for window in step.windows:
        reference.run(window)
        if is_active:
            replica.run(window)
    if is_active:
        compare_gradients(replica, reference, what)
    reference.step()
    if is_active:
        compare_norms(replica, reference, replica.step(unscales=step.unscales), what)
        compare_parameters(replica, reference, what)
        replica.zero_grad(step.zeroed_by, step.set_to_none)
    if step.writes:
        generator = torch.Generator().manual_seed(random.Random(what).randrange(1 << 30))
        shapes = [(p.shape, p.dtype) for p in replica.model.parameters()]
        values = [torch.randn(shape, dtype=dtype, generator=generator) for shape, dtype in shapes]
        replica.write(step.writes, values)
        reference.write(values)
    if step.reloads:
        replica.reload(compare_states(replica, reference, what))
    reference.zero_grad(step.zeroed_by, step.set_to_none)
    reference.follow(replica.model if is_active else reference.stepped)
    for schedule in schedules:
        schedule.step()


def schedules_of(replica: Replica, reference: Reference) -> list[Any]:
    both = (*replica.optimizers, *reference.optimizers)
    return [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in both if replica.case.has_schedule]


def take_over(replica: Replica, reference: Reference, saved: list[dict[str, Any]], *, from_torchs: bool) -> None:
    """Go on from a state of other ranks, or of torch's optimizers."""
    replica.model.module.load_state_dict(reference.module.state_dict())
    for optimizer, own, other in zip(replica.optimizers, saved, reference.optimizers, strict=True):
        # A copy: torch's optimizers take over the tensors themselves.
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()) if from_torchs else own)
    if from_torchs and replica.case.is_master:  # torch's state has no such values
        reference.stepped.load_state_dict(reference.module.state_dict())
    if replica.scaler is not None and reference.scaler is not None:
        replica.scaler.load_state_dict(reference.scaler.state_dict())


def play(pool: RankPool, seed: int, turn: int) -> None:
    """One turn: some steps on some ranks, and from there some on others."""
    case = draw_case(random.Random(f"{seed} {turn}"))
    ends = pool.run(half, case.sizes[0], seed, turn, None, timeout_s=150)
    start = next(end for end in ends if end is not None)
    pool.run(half, case.sizes[1], seed, turn, start, timeout_s=150)


@pytest.mark.parametrize("turn", [*range(4), *(pytest.param(turn, marks=pytest.mark.extended) for turn in range(4, 8))])
def test_random_combinations_equal_one_process(ranks, fresh_seed, turn):
    play(ranks, fresh_seed, turn)


@pytest.mark.extended
def test_many_random_combinations_equal_one_process(ranks, fresh_seed):
    for turn in range(8, 33):
        play(ranks, fresh_seed, turn)


if __name__ == "__main__":
    num_turns, *given = map(int, sys.argv[1:])
    seed, first = given or (int(time.time()), 0)
    failed = []
    with RankPool() as pool:
        for turn in range(first, first + num_turns):
            try:
                play(pool, seed, turn)
            except Exception as error:
                failed.append(turn)
                print(f"turn {turn}: {type(error).__name__}: {error}\n", flush=True)  # noqa: T201
    print(f"seed {seed}: {num_turns - len(failed)} of {num_turns} turns equal one process; not {failed}")  # noqa: T201
    sys.exit(bool(failed))
