"""Marks and what they are turned into; recorders of real steps; what it costs."""

import random

import pytest
import torch

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
