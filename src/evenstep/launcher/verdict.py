"""When is it clear who failed, and how is it put? Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from evenstep.health.blame import CrashReport, Exit


@dataclass(frozen=True)
class StopPolicy:
    """How the other ranks are stopped once one has failed.

    Attributes:
        grace_s: How long they may end by themselves and tell why, while nobody but witnesses has spoken.
        evident_grace_s: The same once the culprit is known.
        terminate_s: From the first signal to SIGKILL.
        stopped_grace_s: How long a rank may be stopped (state T) before it is given up.
        look_every_s: Time between two looks at ranks that run. That one has ended is known at once.
        save_s: The same for ranks that save when somebody asks the run to stop. A second signal ends that at once.
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
class Standing:
    """What a host knows of a run's restarts.

    Attributes:
        num_restarts: How many there were.
        num_in_vain: As of `RestartLimit`.
        saved_step: Of the newest checkpoint of this run; None: none yet.
        has_saved: A checkpoint was committed since the last restart, before hosts came or went without one.
    """

    num_restarts: int
    num_in_vain: int
    saved_step: int | None
    has_saved: bool

    @staticmethod
    def by_all(each: Iterable[Standing]) -> Standing:
        """All together: those that came later know less. Pure."""
        hosts = list(each)
        most = max(host.num_restarts for host in hosts)
        steps = [host.saved_step for host in hosts if host.saved_step is not None]
        return Standing(
            most,
            min(host.num_in_vain for host in hosts if host.num_restarts == most),
            max(steps, default=None),
            any(host.has_saved for host in hosts),
        )


class RestartLimit:
    """Ends a run that fails again and again and gets nowhere. Pure.

    Only for runs with a `Checkpointer`: of others nobody knows whether they get anywhere.

    Attributes:
        num_in_vain: Restarts since the last checkpoint was committed.
        saved_step: Of the newest checkpoint of this run; None: none yet.
    """

    MOST_IN_VAIN = 3

    def __init__(self) -> None:
        self.num_in_vain = 0
        self.saved_step: int | None = None
        self._has_saved = False  # since the last restart

    def note(self, *, attempt: int, saves: bool, saved_step: int | None) -> None:
        """An attempt has failed.

        Args:
            attempt: 0 for the first.
            saves: It had a `Checkpointer`.
            saved_step: Of the last checkpoint that it has committed; None: none.
        """
        self.note_saved(saved_step)
        if saves and attempt > 0 and not self._has_saved:
            self.num_in_vain += 1
        self._has_saved = False

    def note_saved(self, saved_step: int | None) -> None:
        """An attempt goes on with other hosts; what it has committed before, if anything."""
        if saved_step is not None:
            self.num_in_vain, self.saved_step, self._has_saved = 0, saved_step, True

    def standing(self, *, num_restarts: int) -> Standing:
        """What this host can tell others."""
        return Standing(num_restarts, self.num_in_vain, self.saved_step, self._has_saved)

    def adopt(self, standing: Standing) -> None:
        """Go on from what all hosts together know."""
        self.saved_step, self._has_saved = standing.saved_step, standing.has_saved
        self.num_in_vain = 0 if standing.has_saved else standing.num_in_vain

    @property
    def is_reached(self) -> bool:
        """Whether one more restart would be one too many."""
        return self.num_in_vain >= self.MOST_IN_VAIN


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
