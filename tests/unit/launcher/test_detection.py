"""Ranks seen from outside: suspended ones are reported, and given up after a while."""

from __future__ import annotations

import pytest

from evenstep.ground.health.first_failure import CrashReport, Exit
from evenstep.ground.health.heartbeat import Heartbeat, Phase
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.launcher.failure.detection import RankState, StopWatch, look_at
from evenstep.launcher.spawn.child import Child


def seen(step: int = 7) -> Heartbeat:
    return Heartbeat(pid=11, phase=Phase.BACKWARD, step=step, collective=5, is_waiting=False, time_ns=1)


def is_in(state: str) -> RankState:
    return RankState(1, 11, page=seen(), state=state, resident_bytes=2)


def test_a_stopped_rank_is_told_of_once_and_given_up_after_the_grace() -> None:
    watch = StopWatch(report_after_s=2, grace_s=10)
    states = [RankState(0, 10, state="R", resident_bytes=1), is_in("T"), RankState(2, 12, 0)]
    assert watch.poll(0.0, states) == ([], None)
    assert watch.poll(1.9, states) == ([], None)
    (line,), nobody = watch.poll(2.0, states)
    assert line.startswith(
        "rank 1 (pid 11) is stopped (state T) in backward, step 7 of this attempt, collective 5, since 2 s. kill -CONT"
    )
    assert nobody is None
    assert watch.poll(9.9, states) == ([], None)
    lines, hang = watch.poll(10.0, states)
    assert (lines, hang is not None and hang.rank) == ([], 1)
    assert watch.resident_bytes == {0: 1, 1: 2}


def test_a_rank_that_goes_on_starts_anew_and_a_debugger_may_take_its_time() -> None:
    watch = StopWatch(report_after_s=2, grace_s=10)
    watch.poll(0.0, [is_in("T")])
    watch.poll(3.0, [is_in("T")])
    assert watch.poll(9.0, [is_in("S")]) == (["rank 1 (pid 11) goes on"], None)
    assert watch.poll(11.0, [is_in("T")]) == ([], None)
    debugged = StopWatch(report_after_s=2, grace_s=10)
    for now in (0.0, 5.0, 500.0):
        assert debugged.poll(now, [is_in("t")])[1] is None


def test_a_rank_that_is_killed_while_it_is_suspended_does_not_go_on() -> None:
    watch = StopWatch(report_after_s=2, grace_s=10)
    watch.poll(0.0, [is_in("T")])
    assert len(watch.poll(3.0, [is_in("T")])[0]) == 1
    assert watch.poll(4.0, [RankState(1, 11, -9)]) == ([], None)


def test_a_rank_that_is_stopped_for_a_moment_is_not_named_and_one_that_stays_is_before_two_seconds() -> None:
    """As the launcher looks: ten times a second."""
    for stopped_s, is_named in ((1.0, False), (1.4, False), (1.9, True)):
        watch = StopWatch()
        looks = [number / 10 for number in range(40)]
        told = {now: watch.poll(now, [is_in("T" if now <= stopped_s else "S")])[0] for now in looks}
        assert [now for now, lines in told.items() if any("is stopped" in line for line in lines)] == [1.5] * is_named


def report_of(pid: int) -> CrashReport:
    return CrashReport(0, pid, 1, False, 1, "ValueError: boom", "")


@pytest.mark.parametrize(
    ("whose", "code", "counts"), [("own", None, True), ("own", 0, True), ("other", None, False), ("other", 0, False)]
)
def test_a_report_of_a_child_is_none_of_the_rank_unless_the_rank_fails(
    whose: str, code: int | None, counts: bool
) -> None:
    """A child that fails, and whose parent has caught that; or the script behind a program with its status."""
    node, process = NodePages(1), Child(1 << 22)
    process.returncode = code
    node.pages[0].write_report(report_of((1 << 22) + (whose == "other")).pack())
    assert (look_at(0, process, node.pages[0]).report is not None) == counts
    process.returncode = 1
    assert look_at(0, process, node.pages[0]).report is not None
    node.close()


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (RankState(0, 5), None),
        (RankState(0, 5, 3), Exit(0, 5, 3)),
        (RankState(0, 5, -15, was_stopped=True), Exit(0, 5, -15, stopped_by_launcher=True)),
        (RankState(0, 5, 0, report=report_of(5)), Exit(0, 5, 1)),  # `atexit.register(os._exit, 0)`
        (RankState(0, 5, -15, report=report_of(5), was_stopped=True), Exit(0, 5, 1)),
        (RankState(0, 5, -11, report=report_of(5)), Exit(0, 5, -11)),
        (RankState(0, 5, report=report_of(5)), Exit(0, 5, 1)),  # it can't be killed
        (RankState(0, 5, -9, is_lost=True), None),
    ],
)
def test_a_rank_that_has_reported_has_failed_however_it_ended(state: RankState, end: Exit | None) -> None:
    assert state.end == end


def test_a_rank_that_ends_while_it_is_looked_at_has_not_ended_without_its_report() -> None:
    """It reports first, so its report is read last."""
    node = NodePages(1)

    class Ending(Child):
        def poll(self) -> int | None:
            node.pages[0].write_report(report_of(self.pid).pack())
            return 1

    seen = look_at(0, Ending(1 << 22), node.pages[0])
    assert (seen.exit_code, seen.report is not None) == (1, True)
    node.close()
