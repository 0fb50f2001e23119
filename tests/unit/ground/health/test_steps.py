"""Steps that torch's hooks count, and stragglers."""

from __future__ import annotations

import gc
import random
import sys
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from evenstep.ground.health import steps
from evenstep.ground.health.heartbeat import Heartbeat, Page, Phase
from evenstep.ground.health.steps import StragglerWatch, find_stragglers

SECOND = 1_000_000_000


def after_steps(rank: int, num_steps: int, own_s: float, step_s: float) -> Heartbeat:
    """A page after so many steps, of which this rank spent a part on its own work and the rest waiting."""
    return Heartbeat(
        pid=rank,
        phase=Phase.BETWEEN_STEPS,
        step=num_steps,
        collective=0,
        is_waiting=False,
        time_ns=0,
        waited_ns=int(num_steps * (step_s - own_s) * SECOND),
        stepped_ns=int(num_steps * step_s * SECOND),
    )


def pages_after(num_steps: int, own_s: list[float]) -> dict[int, Heartbeat]:
    return {rank: after_steps(rank, num_steps, own, max(own_s)) for rank, own in enumerate(own_s)}


def test_a_slow_rank_is_the_one_that_does_not_wait() -> None:
    before = pages_after(0, [0.1, 0.1])
    assert find_stragglers(before, pages_after(100, [0.1, 0.14])) == {}
    assert find_stragglers(before, pages_after(100, [0.1, 0.2])) == pytest.approx({1: 2.0})
    assert find_stragglers(before, pages_after(10, [0.1, 0.2])) == {}, "ten steps say nothing"
    four = [0.1, 0.12, 0.3, 0.11]
    assert find_stragglers(pages_after(0, four), pages_after(50, four)) == pytest.approx({2: 0.3 / 0.11})


def test_equal_ranks_are_never_slow(fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    for _ in range(200):
        own = [0.1 * draw.uniform(0.9, 1.1) for _ in range(draw.randint(1, 8))]
        assert find_stragglers(pages_after(0, own), pages_after(draw.randint(0, 99), own)) == {}


def test_slow_is_said_once_and_only_of_two_windows_in_a_row() -> None:
    watch = StragglerWatch()
    steps = 0
    said = []
    for own in ([0.1, 0.1], [0.1, 0.3], [0.1, 0.1], [0.1, 0.3], [0.1, 0.3], [0.1, 0.3]):
        before = watch._before[1] if watch._before is not None else pages_after(0, own)
        steps += 100
        grown = {
            rank: after_steps(rank, steps, 0, 0).__class__(
                **{
                    **vars(seen_before),
                    "step": seen_before.step + 100,
                    "stepped_ns": seen_before.stepped_ns + int(100 * max(own) * SECOND),
                    "waited_ns": seen_before.waited_ns + int(100 * (max(own) - own[rank]) * SECOND),
                }
            )
            for rank, seen_before in before.items()
        }
        said.append(watch.judge(float(steps), grown))
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 1, 0]
    assert said[4][0].startswith("rank 1 (pid 1) is slow: its part of a step takes 3.0 times as long")


def test_the_busiest_optimizer_that_is_left_counts(monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(sys.modules["torch.optim.optimizer"], name, OrderedDict())
    monkeypatch.setattr(steps, "_is_watching", False)
    steps.count_optimizer_steps()
    steps.count_optimizer_steps()
    busy, idle = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    for _ in range(5):
        busy.step()
    idle.step()
    seen = page.read()
    assert seen is not None
    assert (seen.phase, seen.step) == (Phase.BETWEEN_STEPS, 5)
    del busy
    gc.collect()
    idle.step()
    seen = page.read()
    assert seen is not None
    assert seen.step == 2


def test_destroying_the_default_group_is_leaving_and_destroying_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[object] = []
    marked: list[Phase] = []
    for module in (dist, distributed_c10d):  # restored at the end
        monkeypatch.setattr(module, "destroy_process_group", lambda group=None: destroyed.append(group))
    monkeypatch.setattr(steps, "mark", marked.append)
    steps.mark_end_of_group()
    other = object()
    dist.destroy_process_group(other)  # type: ignore[arg-type]
    assert marked == []
    distributed_c10d.destroy_process_group()
    assert marked == [Phase.ENDED]
    assert destroyed == [other, None]
