"""Ranks seen from outside: suspended ones are reported, and given up after a while."""

from __future__ import annotations

import os

from evenstep.ground.health.heartbeat import Heartbeat, Phase
from evenstep.launcher.failure.detection import Observation, StopWatch, count_memory_kills, observe


def seen(step: int = 7) -> Heartbeat:
    return Heartbeat(pid=11, phase=Phase.BACKWARD, step=step, collective=5, is_waiting=False, time_ns=1)


def test_a_stopped_rank_is_told_of_once_and_given_up_after_the_grace() -> None:
    watch = StopWatch(report_after_s=2, grace_s=10)
    running, stopped = Observation(10, "R", 1), Observation(11, "T", 2)
    assert watch.look(0.0, {0: running, 1: stopped}, {1: seen()}) == ([], None)
    assert watch.look(1.9, {0: running, 1: stopped}, {1: seen()}) == ([], None)
    (line,), nobody = watch.look(2.0, {0: running, 1: stopped}, {1: seen()})
    assert line.startswith(
        "rank 1 (pid 11) is stopped (state T) in backward, step 7, collective 5, since 2 s. kill -CONT"
    )
    assert nobody is None
    assert watch.look(9.9, {0: running, 1: stopped}, {1: seen()}) == ([], None)
    lines, hang = watch.look(10.0, {0: running, 1: stopped}, {1: seen()})
    assert (lines, hang is not None and hang.rank) == ([], 1)
    assert watch.resident_bytes == {0: 1, 1: 2}


def test_a_rank_that_goes_on_starts_anew_and_a_debugger_may_take_its_time() -> None:
    watch = StopWatch(report_after_s=2, grace_s=10)
    watch.look(0.0, {1: Observation(11, "T", 0)}, {})
    watch.look(3.0, {1: Observation(11, "T", 0)}, {})
    assert watch.look(9.0, {1: Observation(11, "S", 0)}, {}) == (["rank 1 (pid 11) goes on"], None)
    assert watch.look(11.0, {1: Observation(11, "T", 0)}, {}) == ([], None)
    debugged = StopWatch(report_after_s=2, grace_s=10)
    for now in (0.0, 5.0, 500.0):
        assert debugged.look(now, {1: Observation(11, "t", 0)}, {})[1] is None


def test_no_grace_still_gives_two_seconds() -> None:
    watch = StopWatch(report_after_s=2, grace_s=0)
    assert watch.look(0.0, {1: Observation(11, "T", 0)}, {})[1] is None
    assert watch.look(2.0, {1: Observation(11, "T", 0)}, {})[1] is not None


def test_a_rank_that_is_stopped_for_a_moment_is_not_named_and_one_that_stays_is_before_two_seconds() -> None:
    """As the launcher looks: ten times a second."""
    for stopped_s, is_named in ((1.0, False), (1.4, False), (1.9, True)):
        watch = StopWatch()
        looks = [number / 10 for number in range(40)]
        told = {now: watch.look(now, {1: Observation(11, "T" if now <= stopped_s else "S", 1)}, {})[0] for now in looks}
        assert [now for now, lines in told.items() if any("is stopped" in line for line in lines)] == [1.5] * is_named


def test_observing_this_process() -> None:
    own = observe(os.getpid())
    assert own.state in ("R", "S")
    assert own.resident_bytes > 1 << 20
    assert observe(1 << 22) == Observation(1 << 22, "", 0)
    assert count_memory_kills() is None or count_memory_kills() >= 0  # type: ignore[operator]
