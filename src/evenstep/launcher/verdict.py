"""When is it clear who failed, and how is it put? Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evenstep.health.blame import CrashReport, Exit


@dataclass(frozen=True)
class StopPolicy:
    """How the other ranks are stopped once one has failed.

    Attributes:
        grace_s: How long they may end by themselves and tell why, while nobody but witnesses has spoken.
        evident_grace_s: The same once the culprit is known.
        terminate_s: From the first signal to SIGKILL.
        stopped_grace_s: How long a rank may be stopped (state T) before it is given up.
        save_s: The same for ranks that save when somebody asks the run to stop. A second signal ends that at once.
    """

    grace_s: float = 1.0
    evident_grace_s: float = 0.2
    terminate_s: float = 5.0
    save_s: float = 600.0
    stopped_grace_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.grace_s, self.evident_grace_s, self.terminate_s, self.save_s, self.stopped_grace_s) < 0:
            raise ValueError(f"{self}: times are at least 0")


def is_evident(exits: Iterable[Exit], reports: Sequence[CrashReport]) -> bool:
    """Whether the culprit has spoken, or died without a word; if not, only witnesses have, and it is still to come."""
    told = {report.rank for report in reports}
    died_untold = any(end.exit_code != 0 and not end.stopped_by_launcher and end.rank not in told for end in exits)
    return died_untold or any(not report.is_consequence for report in reports)


def describe_exit(exit_code: int, *, guess: bool = True) -> str:
    """How a process without a report ended, in words; with a guess why, where nothing better is known."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ": out of memory, or killed by somebody" if guess and -exit_code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def exit_status(exit_code: int) -> int:
    """The status with which a shell would report this end: 128 and the signal's number for signals."""
    return 128 - exit_code if exit_code < 0 else exit_code
