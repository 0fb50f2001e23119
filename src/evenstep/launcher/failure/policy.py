"""When the root cause of a failure is known, how ranks are stopped then, and how an exit is described. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from evenstep.ground.health.first_failure import CrashReport, Exit


@dataclass(frozen=True)
class StopPolicy:
    """How the other ranks are stopped once one has failed.

    Attributes:
        grace_s: How long they may end by themselves and report why, while only secondary failures are known.
        evident_grace_s: The same once the root cause is known.
        terminate_s: From the first signal to SIGKILL.
        stopped_grace_s: How long a rank may be stopped (state T) before it is given up.
        look_every_s: Time between two looks at ranks that run. That one has ended is known at once.
        save_s: From a stop signal to SIGKILL for ranks that save then. A second signal ends that at once.
    """

    grace_s: float = 1.0
    evident_grace_s: float = 0.2
    terminate_s: float = 5.0
    save_s: float = 600.0
    stopped_grace_s: float = 30.0
    look_every_s: float = 0.1

    def __post_init__(self) -> None:
        if min(astuple(self)) < 0:
            raise ValueError(f"{self}: times are at least 0")


@dataclass(frozen=True)
class LossPolicy:
    """Which ranks a run can lose: with parameter servers, workers that a signal has killed. Pure.

    Attributes:
        num_workers: The first ranks: the others go on without them, as long as one is left. 0: no rank can be lost.
    """

    num_workers: int = 0

    def can_lose(self, rank: int, exit_code: int) -> bool:
        """Whether the others may go on without a rank that has ended so. One that failed by itself ends the run."""
        return exit_code < 0 and rank < self.num_workers


def is_evident(exits: Iterable[Exit], reports: Sequence[CrashReport]) -> bool:
    """Whether the root cause is known: it has reported, or died silently. Else all failures are secondary yet."""
    reporting = {report.rank for report in reports}
    died_silently = any(
        end.exit_code != 0 and not end.stopped_by_launcher and end.rank not in reporting for end in exits
    )
    return died_silently or any(not report.is_consequence for report in reports)


def describe_exit(exit_code: int, *, guess: bool = True) -> str:
    """How a process without a report ended, in words; with a guess why, where nothing better is known."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ": out of memory, or killed from outside" if guess and -exit_code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def exit_status(exit_code: int) -> int:
    """The status with which a shell would report this end: 128 and the signal's number for signals."""
    return 128 - exit_code if exit_code < 0 else exit_code
