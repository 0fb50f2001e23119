"""What is to be done with an attempt, decided from one look at its ranks. Pure.

[Note: how an attempt ends]

`judge` answers every look with the first row that holds, of one of two tables. While no failure is known the ranks are
left alone: until one has failed or is given up, all have ended, one doesn't end though others have saved, or a node has
failed or wants to join. Once a failure is known, the others may end by themselves and report why, since the first to
end needn't be the first that failed: for a moment where the root cause is evident, for longer where all reports only
say that a peer was lost. Then they are stopped.

`elastic/attempt.py` does what is answered, and looks again.
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
    """What is to be done next."""

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
    """All that a decision rests on. Times are monotonic, in nanoseconds.

    Attributes:
        states: The ranks of this node, but for those that the run has lost.
        policy: How long to wait.
        now_ns: When that was seen.
        saved_ns: When a rank was first seen to have saved and ended; None: none has.
        failed_ns: When it was noticed that the attempt has failed; None: it has not.
        is_given_up: A rank of this node was given up.
        failed_elsewhere: A failure on another node is known, or it is lost.
        new_node_waits: A new node waits to join.
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
        """How the ranks have ended; None: one runs."""
        return {each.exit_code for each in self.states}

    def since_s(self, then_ns: int | None) -> float:
        """Seconds since then; -inf: that has not been."""
        return -math.inf if then_ns is None else (self.now_ns - then_ns) / 1e9


def judge(seen: Situation) -> Step | End:
    """What is to be done: the first row that holds."""
    rows = _WHILE_ALL_IS_WELL if seen.failed_ns is None else _ONCE_IT_HAS_FAILED
    return next(step for holds, step in rows if holds(seen))


def _has_failed(seen: Situation) -> bool:
    return not seen.codes <= {None, 0, EXIT_PREEMPTED}


def _has_told(seen: Situation) -> bool:
    """A rank has reported an error, and is done; or its end takes too long: a thread or an exit handler holds it."""
    longest_s = seen.policy.terminate_s
    told = (each for each in seen.states if each.report is not None)
    return any(each.is_done or (each.report and seen.since_s(each.report.time_ns) > longest_s) for each in told)


def _is_late(seen: Situation) -> bool:
    """Ranks agree on a step before they leave, so the others follow within moments."""
    return None in seen.codes and seen.since_s(seen.saved_ns) > seen.policy.terminate_s


def _only_end(seen: Situation) -> bool:
    return all(each.is_done for each in seen.states if each.runs)


def _is_leaving(seen: Situation) -> bool:
    """A rank has left its world as it should, and early: how it ends decides which one is the root cause."""
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
    (lambda seen: EXIT_PREEMPTED in seen.codes, Step.NOTICE),  # and others have ended without a save
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
    """Whether the root cause is known, as far as it is on this node."""
    states = [*states]
    return is_evident(ends_of(states), reports_of(states))


def ends_of(states: Iterable[RankState]) -> list[Exit]:
    """How ranks have ended."""
    return [end for each in states if (end := each.end) is not None]


def reports_of(states: Iterable[RankState]) -> list[CrashReport]:
    """What ranks have reported."""
    return [each.report for each in states if each.report is not None]


def find_lost(states: Iterable[RankState], num_workers: int) -> list[RankState]:
    """The ranks without which the others go on: workers that a signal has killed, while a worker is left.

    Args:
        states: Of ranks that were not lost before.
        num_workers: Of parameter servers: the first ranks. 0: no rank can be lost.
    """
    workers = [each for each in states if each.rank < num_workers]
    killed = [each for each in workers if (each.exit_code or 0) < 0 and each.report is None]
    return killed if any(each.exit_code in (None, 0) for each in workers) else []
