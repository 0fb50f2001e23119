"""Steps that torch's hooks count, and stragglers."""

from __future__ import annotations

import pytest

from evenstep.ground.health.heartbeat import Heartbeat, Phase
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
