"""Decides what to do with an attempt, from the present states of its ranks. Pure.

[Note: how an attempt ends]

`judge` returns the first matching row of one of two tables. While no failure is known, the ranks go on until one has
failed or is given up, all have ended, one doesn't end although others have saved, or a node has failed or wants to
join. Once a failure is known, the others get time to end by themselves and report why, because the first rank to end
needn't be the first that failed: a moment if the root cause is evident, longer if all reports only name a lost peer.
Then they are stopped.

`elastic/attempt.py` carries out the result, and checks the ranks again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from evenstep.errors import EXIT_PREEMPTED
from evenstep.ground.health.first_failure import CrashReport, Exit
from evenstep.launcher.failure.detection import RankState
from evenstep.launcher.failure.report import StopPolicy, is_evident


class Step(enum.Enum):
    """The next action of the launcher."""

    WAIT = "until the next look"
    LEAVE_BEHIND = "kill the ranks that don't end, and go on without them: no failure"
    NOTICE = "the attempt has failed: remember when, and where ranks are"
    STOP = "stop the ranks that run, and name the root cause"
    KILL = "the same at once: of those that run only python's own end is left, a tenth of a second"


class End(enum.Enum):
    """How an attempt has ended, as one node sees it."""

    WELL = "all ranks have ended as they should"
    SAVED = "ranks were asked to stop, have saved, and ended"
    NODE_COMES = "ranks are stopped, and save, because a new node waits to join"
    FAILED = "a rank has failed, here or on another node"


@dataclass(frozen=True)
class Situation:
    """Everything that a decision depends on. Times are monotonic, in nanoseconds.

    Attributes:
        states: The states of this node's ranks, except those that the run has lost.
        policy: The policy, which says how long to wait.
        now_ns: The time at which the states were read.
        saved_ns: When a rank was first found to have saved and ended; None: no rank has.
        failed_ns: When the attempt's failure was noticed; None: it hasn't failed.
        is_given_up: Whether a rank of this node was given up.
        failed_elsewhere: Whether a failure on another node is known, or another node is lost.
        new_node_waits: Whether a new node waits to join.
    """

    states: Sequence[RankState]
    policy: StopPolicy
    now_ns: int
    saved_ns: int | None = None
    failed_ns: int | None = None
    is_given_up: bool = False
    failed_elsewhere: bool = False
    new_node_waits: bool = False

    @property
    def codes(self) -> set[int | None]:
        """The ranks' exit codes; None for a rank that runs."""
        return {each.exit_code for each in self.states}

    def since_s(self, then_ns: int | None) -> float:
        """Seconds since a time; -inf if the time is None."""
        return -math.inf if then_ns is None else (self.now_ns - then_ns) / 1e9


def judge(seen: Situation) -> Step | End:
    """The action in the first matching row of the table."""
    rows = _WHILE_ALL_IS_WELL if seen.failed_ns is None else _ONCE_IT_HAS_FAILED
    return next(step for holds, step in rows if holds(seen))


def _has_failed(seen: Situation) -> bool:
    return not seen.codes <= {None, 0, EXIT_PREEMPTED}


def _has_told(seen: Situation) -> bool:
    """Whether a rank has reported an error and ended, or a thread or exit handler delays its end for too long."""
    longest_s = seen.policy.terminate_s
    told = (each for each in seen.states if each.report is not None)
    return any(each.is_done or (each.report and seen.since_s(each.report.time_ns) > longest_s) for each in told)


def _is_late(seen: Situation) -> bool:
    """Whether a rank is late to end after others have saved.

    Ranks agree on the step of the save, so all should end within moments.
    """
    return None in seen.codes and seen.since_s(seen.saved_ns) > seen.policy.terminate_s


def _only_end(seen: Situation) -> bool:
    return all(each.is_done for each in seen.states if each.runs)


def _is_leaving(seen: Situation) -> bool:
    """Whether a rank has left its world early, without an error. How it ends decides which rank is the root cause."""
    return any(each.is_leaving for each in seen.states) and seen.since_s(seen.failed_ns) < seen.policy.terminate_s


_Row = tuple[Callable[[Situation], bool], "Step | End"]
_WHILE_ALL_IS_WELL: Sequence[_Row] = (
    (_has_failed, Step.NOTICE),
    (_has_told, Step.NOTICE),
    (lambda seen: seen.new_node_waits, End.NODE_COMES),
    (lambda seen: seen.is_given_up or seen.failed_elsewhere, Step.NOTICE),
    (_is_late, Step.LEAVE_BEHIND),
    (lambda seen: None in seen.codes, Step.WAIT),
    (lambda seen: seen.codes == {EXIT_PREEMPTED}, End.SAVED),
    (lambda seen: EXIT_PREEMPTED in seen.codes, Step.NOTICE),  # some ranks have saved, others have ended without a save
    (lambda seen: True, End.WELL),
)
_ONCE_IT_HAS_FAILED: Sequence[_Row] = (
    (lambda seen: seen.failed_elsewhere, Step.STOP),
    (_only_end, Step.KILL),
    (lambda seen: is_known(seen.states) and seen.since_s(seen.failed_ns) >= seen.policy.evident_grace_s, Step.STOP),
    (lambda seen: is_known(seen.states), Step.WAIT),
    (_is_leaving, Step.WAIT),
    (lambda seen: seen.since_s(seen.failed_ns) >= seen.policy.grace_s, Step.STOP),
    (lambda seen: True, Step.WAIT),
)


def is_known(states: Iterable[RankState]) -> bool:
    """Whether the root cause is known, if it is on this node."""
    states = [*states]
    return is_evident(ends_of(states), reports_of(states))


def ends_of(states: Iterable[RankState]) -> list[Exit]:
    """How the ranks have ended."""
    return [end for each in states if (end := each.end) is not None]


def reports_of(states: Iterable[RankState]) -> list[CrashReport]:
    """The ranks' reports."""
    return [each.report for each in states if each.report is not None]


def find_lost(states: Iterable[RankState], num_workers: int) -> list[RankState]:
    """The ranks without which the others continue: workers that a signal has killed, while another worker is left.

    Args:
        states: The states of ranks that were not lost before.
        num_workers: With parameter servers, the number of workers, which are the first ranks. 0: no rank can be lost.
    """
    workers = [each for each in states if each.rank < num_workers]
    killed = [each for each in workers if (each.exit_code or 0) < 0 and each.report is None]
    return killed if any(each.exit_code in (None, 0) for each in workers) else []
