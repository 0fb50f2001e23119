"""What is to be done with an attempt, by one look at its ranks: the table, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evenstep.errors import EXIT_PREEMPTED
from evenstep.ground.health.first_failure import CrashReport
from evenstep.ground.health.heartbeat import Heartbeat, Phase
from evenstep.launcher.failure.detection import RankState
from evenstep.launcher.failure.report import StopPolicy
from evenstep.launcher.failure.verdict import End, Situation, Step, find_lost, is_known, judge

SECOND = 1_000_000_000
NOW = 100 * SECOND
POLICY = StopPolicy(grace_s=1.0, evident_grace_s=0.2, terminate_s=5.0)


def report(*, of_a_peer: bool = False, ago_s: float = 0.0) -> CrashReport:
    return CrashReport(0, 10, int(NOW - ago_s * SECOND), of_a_peer, 76 if of_a_peer else 1, "", "")


def rank(number: int = 0, code: int | None = None, **what: Any) -> RankState:
    return RankState(number, 10 + number, code, **what)


def page(phase: Phase = Phase.FORWARD, *, is_done: bool = False) -> Heartbeat:
    return Heartbeat(10, phase, 3, 0, is_waiting=False, time_ns=1, is_done=is_done)


def step(*states: RankState, ago_s: float | None = None, **more: Any) -> Step | End:
    failed_ns = None if ago_s is None else int(NOW - ago_s * SECOND)
    return judge(Situation(states, POLICY, NOW, failed_ns=failed_ns, **more))


RUNS, WELL, SAVED = rank(1), rank(2, 0), rank(3, EXIT_PREEMPTED)
TOLD = rank(0, report=report(), page=page())
PEER = rank(0, 76, report=report(of_a_peer=True))
DONE = rank(0, report=report(), page=page(is_done=True))
LEAVING = rank(4, page=page(Phase.ENDED))
LONG_AGO = NOW - 6 * SECOND


@pytest.mark.parametrize(
    ("states", "more", "expected"),
    [
        ([RUNS, RUNS], {}, Step.WAIT),
        ([RUNS, WELL], {}, Step.WAIT),
        ([WELL, WELL], {}, End.WELL),
        ([SAVED, SAVED], {}, End.SAVED),
        ([SAVED, RUNS], {"saved_ns": NOW - SECOND}, Step.WAIT),
        ([SAVED, RUNS], {"saved_ns": LONG_AGO}, Step.LEAVE_BEHIND),
        ([SAVED, WELL], {"saved_ns": LONG_AGO}, Step.NOTICE),
        ([RUNS, rank(0, 3)], {}, Step.NOTICE),
        ([RUNS, rank(0, -9)], {}, Step.NOTICE),
        ([SAVED, rank(0, 1)], {"saved_ns": LONG_AGO}, Step.NOTICE),
        # It has told of its end, and its exit handlers run; they have run; they, or a thread, take too long.
        ([RUNS, TOLD], {}, Step.WAIT),
        ([RUNS, DONE], {}, Step.NOTICE),
        ([RUNS, replace(TOLD, report=report(ago_s=4.9))], {}, Step.WAIT),
        ([RUNS, replace(TOLD, report=report(ago_s=5.1))], {}, Step.NOTICE),
        # An exit handler has chosen another status: `atexit.register(os._exit, 0)`.
        ([WELL, replace(TOLD, exit_code=0)], {}, Step.NOTICE),
        ([RUNS], {"is_given_up": True}, Step.NOTICE),
        ([RUNS], {"failed_elsewhere": True}, Step.NOTICE),
        ([WELL], {"failed_elsewhere": True}, Step.NOTICE),
        ([SAVED, RUNS], {"saved_ns": LONG_AGO, "failed_elsewhere": True}, Step.NOTICE),
        ([RUNS], {"new_node_waits": True}, End.NODE_COMES),
        ([SAVED], {"new_node_waits": True}, End.NODE_COMES),
        ([RUNS], {"new_node_waits": True, "failed_elsewhere": True}, End.NODE_COMES),
        ([RUNS, rank(0, 1)], {"new_node_waits": True}, Step.NOTICE),  # it has failed by itself, or will be asked
    ],
)
def test_while_no_failure_is_known(states: list[RankState], more: dict[str, Any], expected: Step | End) -> None:
    assert step(*states, **more) is expected


@pytest.mark.parametrize(
    ("states", "ago_s", "more", "expected"),
    [
        # It has died without a report, or has reported an error of its own: evident.
        ([RUNS, rank(0, -9)], 0.1, {}, Step.WAIT),
        ([RUNS, rank(0, -9)], 0.2, {}, Step.STOP),
        ([RUNS, TOLD], 0.1, {}, Step.WAIT),
        ([RUNS, TOLD], 0.2, {}, Step.STOP),
        # All that is known are ranks that lost a peer: the one that failed may yet report.
        ([RUNS, PEER], 0.9, {}, Step.WAIT),
        ([RUNS, PEER], 1.0, {}, Step.STOP),
        ([RUNS, PEER, rank(5, 1, report=report())], 0.3, {}, Step.STOP),
        # One that leaves its world early may be the root cause, by how it ends.
        ([LEAVING, PEER], 4.9, {}, Step.WAIT),
        ([LEAVING, PEER], 5.0, {}, Step.STOP),
        ([LEAVING, rank(0, -9)], 0.2, {}, Step.STOP),
        ([replace(LEAVING, exit_code=0), RUNS, PEER], 1.0, {}, Step.STOP),
        # Nobody runs, or only python's own end is left.
        ([WELL, PEER], 0.0, {}, Step.KILL),
        ([DONE, PEER], 0.0, {}, Step.KILL),
        ([DONE, TOLD], 0.0, {}, Step.WAIT),
        ([RUNS, RUNS], 0.5, {"is_given_up": True}, Step.WAIT),  # its peers report that they have lost it
        ([RUNS, RUNS], 0.0, {"failed_elsewhere": True}, Step.STOP),
        ([RUNS, rank(0, -9)], 0.1, {"new_node_waits": True}, Step.WAIT),
    ],
)
def test_once_a_failure_is_known(
    states: list[RankState], ago_s: float, more: dict[str, Any], expected: Step | End
) -> None:
    assert step(*states, ago_s=ago_s, **more) is expected


def test_whatever_is_seen_something_is_to_be_done() -> None:
    """And who has failed is stopped at last."""
    kinds = [RUNS, WELL, SAVED, TOLD, PEER, DONE, LEAVING, rank(0, -9), rank(0, 2)]
    for first in kinds:
        for second in kinds:
            for saved_ns in (None, LONG_AGO):
                assert isinstance(step(first, second, saved_ns=saved_ns), Step | End)
            assert step(first, second, ago_s=5.0) in (Step.STOP, Step.KILL)


def test_a_stopped_rank_is_no_cause() -> None:
    assert not is_known([rank(0, -15, was_stopped=True), RUNS])
    assert is_known([rank(0, -15), RUNS])
    assert not is_known([PEER, RUNS])


KILLED = {number: rank(number, -9) for number in range(4)}


@pytest.mark.parametrize(
    ("states", "num_workers", "lost"),
    [
        ([KILLED[0], rank(1), rank(2)], 0, []),  # without servers
        ([KILLED[0], rank(1), rank(2)], 2, [0]),
        ([KILLED[0], rank(1, 0), rank(2)], 2, [0]),
        ([KILLED[0], KILLED[1], rank(2), rank(3)], 3, [0, 1]),
        ([KILLED[0], KILLED[1], rank(2)], 2, []),  # no worker is left
        ([rank(0), rank(1), KILLED[2]], 2, []),  # a server
        ([rank(0, 73), rank(1), rank(2)], 2, []),  # it failed by itself
        ([rank(0, -6, report=report()), rank(1), rank(2)], 2, []),  # as did this one, and then aborted
    ],
)
def test_a_worker_that_is_killed_is_lost_while_another_is_left(
    states: list[RankState], num_workers: int, lost: list[int]
) -> None:
    assert [each.rank for each in find_lost(states, num_workers)] == lost
