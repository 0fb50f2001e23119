"""Marks and what they are turned into; recorders of real steps; what it costs."""

import gc
import random

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

import evenstep
from evenstep.ground.health.telemetry import (
    _MOST_PER_STEP,
    BACKWARD,
    END,
    FORWARD,
    FORWARD_END,
    OPTIMIZER,
    OPTIMIZER_END,
    REDUCED,
    WAITING,
    Recorder,
    Telemetry,
    explain,
)

MS = 1_000_000


def test_every_part_of_a_step_has_its_time() -> None:
    backward = [FORWARD, 1 * MS, FORWARD_END, 11 * MS, BACKWARD, 13 * MS, 1, 20 * MS, 0, 30 * MS, WAITING, 33 * MS]
    after = [REDUCED, 40 * MS, END, 41 * MS, OPTIMIZER, 45 * MS, OPTIMIZER_END, 50 * MS]
    times = explain([*backward, *after])
    assert times.began_s == pytest.approx(0.001)
    assert times.forward_s == pytest.approx(0.010)
    assert times.backward_s == pytest.approx(0.020)
    assert times.ready_s == pytest.approx((0.017, 0.007))  # by bucket, not in order of time
    assert times.wait_s == pytest.approx(0.007)
    assert times.finish_s == pytest.approx(0.001)
    assert times.optimizer_s == pytest.approx(0.005)


def test_passes_of_one_window_are_added() -> None:
    one = [FORWARD, 0, FORWARD_END, 2 * MS, BACKWARD, 3 * MS]
    two = [FORWARD, 10 * MS, FORWARD_END, 13 * MS, BACKWARD, 14 * MS, 0, 15 * MS, WAITING, 18 * MS]
    times = explain([*one, *two, REDUCED, 20 * MS, END, 20 * MS])
    assert times.forward_s == pytest.approx(0.005)
    assert times.backward_s == pytest.approx(0.007 + 0.004)  # the first: until the next forward pass
    assert times.ready_s == pytest.approx((0.012,))
    assert times.wait_s == pytest.approx(0.002)


def test_alone_the_backward_pass_ends_where_the_optimizer_begins() -> None:
    marks = [FORWARD, 0, FORWARD_END, MS, BACKWARD, 2 * MS, OPTIMIZER, 7 * MS, OPTIMIZER_END, 8 * MS]
    times = explain(marks)
    assert (times.backward_s, times.optimizer_s) == pytest.approx((0.005, 0.001))
    assert times.ready_s == ()


def test_any_marks_have_times_that_are_not_negative_and_fit_in(fresh_seed: int) -> None:
    """Whatever goes wrong in a step, who asks gets an answer."""
    draw = random.Random(fresh_seed)
    for _ in range(300):
        when, marks = 0, []
        for _ in range(draw.randrange(20)):
            when += draw.randrange(1, 5 * MS)
            marks += [draw.randrange(-8, 4), when]
        times = explain(marks)
        parts = (times.forward_s, times.backward_s, times.wait_s, times.finish_s, times.optimizer_s, *times.ready_s)
        assert all(0 <= part <= when / 1e9 for part in parts)


def train(model: torch.nn.Module, num_steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_world_of_one_records_its_steps() -> None:
    world = evenstep.World.alone()
    model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 2), world=world)
    train(model, 3)
    steps = world.telemetry.steps()
    assert len(steps) == 3
    for times in steps:
        assert times.forward_s > 0
        assert times.backward_s > 0
        assert times.optimizer_s > 0
        assert times.wait_s == 0
    assert [times.began_s for times in steps] == sorted(times.began_s for times in steps)
    assert world.telemetry.steps(model=1) == []


def test_an_evaluation_leaves_no_marks() -> None:
    """However long it is: marks of a step that never ends would fill the memory."""
    model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 2), world=evenstep.World.alone())
    train(model, 2)
    before = model.engine.recorder.marks()
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(3, 4))
    assert model.engine.recorder.marks() == before
    train(model, 1)
    assert len(model.engine.recorder.steps()) == 3


def test_a_model_that_nobody_trains_remembers_no_more_and_more() -> None:
    world = evenstep.World.alone()
    idle, busy = (evenstep.DistributedDataParallel(torch.nn.Linear(4, 2), world=world) for _ in range(2))
    train(idle, 1)
    for _ in range(_MOST_PER_STEP):
        idle.engine.recorder.forward(0)
    train(busy, 3)
    assert max(map(len, idle.engine.recorder._steps)) < _MOST_PER_STEP + 100
    assert len(world.telemetry.steps(1)) == 3
    train(idle, 3)
    assert [step.optimizer_s > 0 for step in world.telemetry.steps(0)][-2:] == [True, True]


def test_telemetry_may_be_collected_in_the_middle_of_a_step() -> None:
    """torch iterates over its global hooks then, so none of them may be taken out."""
    hooks = len(_global_optimizer_pre_hooks)
    telemetries = [Telemetry()]
    telemetries[0].open()
    hooks = max(hooks, len(_global_optimizer_pre_hooks))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def collect(*_: object) -> None:
        telemetries.clear()
        gc.collect()

    first = register_optimizer_step_pre_hook(collect)
    _global_optimizer_pre_hooks.move_to_end(first.id, last=False)
    try:
        optimizer.step()
    finally:
        first.remove()
    assert not telemetries
    assert len(_global_optimizer_pre_hooks) == hooks


def test_an_optimizers_step_ends_a_step_whose_window_nobody_ended() -> None:
    recorder = Recorder()
    for _ in range(2):
        recorder.forward(recorder.begin_forward())
        recorder.begin_backward()
        recorder.mark_optimizer(None, False)
        recorder.mark_optimizer(None, True)
    assert [times.optimizer_s > 0 for times in recorder.steps()] == [True, True]
