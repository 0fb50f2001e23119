"""How long a rank may take in each phase while others wait for it. Pure.

Legitimate times differ: a step takes seconds; compiling, an evaluation or a save may take an hour; and the block of
`world.main_first()` has no limit for the ranks that wait for it there. A rank hangs if it has exceeded the timeout of
its phase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from evenstep.errors import ConfigurationError
from evenstep.ground.environment import settings
from evenstep.ground.health.heartbeat import WORDS, Heartbeat, Phase

DEFAULT_STEP_S = 600.0
# By phase: the name for users, and the limit as a multiple of `init(timeout_s=...)`, larger for phases that are known
# to take long. "main_first" limits ranks that wait in a collective; ranks that wait for the block itself have no
# deadline.
_KINDS = {
    Phase.STARTING: ("starting", 3.0),
    Phase.BETWEEN_STEPS: ("between", 1.0),
    Phase.ENDED: ("between", 1.0),
    Phase.FORWARD: ("step", 1.0),
    Phase.BACKWARD: ("step", 1.0),
    Phase.OPTIMIZER: ("step", 1.0),
    Phase.EVALUATING: ("evaluating", 6.0),
    Phase.COMPILING: ("compiling", 6.0),
    Phase.SAVING: ("saving", 6.0),
    Phase.MAIN_FIRST: ("main_first", 6.0),
}
_NAMES = list(dict(_KINDS.values()))


@dataclass(frozen=True)
class PhaseTimeouts:
    """The limit of each phase, in seconds.

    Args:
        step_s: A collective's deadline. It limits the phases of a step (forward, backward, optimizer); the defaults of
            other phases are multiples of it.
        given: The limits that the user has set, by name.
    """

    step_s: float = DEFAULT_STEP_S
    given: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, *, step_s: float = DEFAULT_STEP_S) -> PhaseTimeouts:
        """Parse a text such as "step=60,evaluating=7200". Pure.

        Raises:
            ConfigurationError: The text is malformed.
        """
        given: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            try:
                seconds = float(value)
            except ValueError:
                seconds = math.nan
            if name not in _NAMES or not seconds > 0:
                raise ConfigurationError(
                    f"--phase-timeout {part!r}: write PHASE=SECONDS, as in evaluating=7200, with a phase of "
                    f"{', '.join(_NAMES)}, and seconds greater than 0 (inf: no limit)."
                )
            given[name] = seconds
        return cls(given.get("step", step_s), given)

    @classmethod
    def of_this_run(cls, step_s: float) -> PhaseTimeouts:
        """The limits from `evenstep run --phase-timeout`; for other phases, multiples of a collective's deadline."""
        return cls.parse(settings().phase_timeouts, step_s=step_s)

    def __str__(self) -> str:
        return ",".join(f"{name}={seconds:g}" for name, seconds in self.given.items())

    def of(self, seen: Heartbeat) -> float:
        """Seconds for which a rank may stay in its phase while others wait for it."""
        name, factor = _KINDS[seen.phase]
        return self.given.get(name, factor * self.step_s)


@dataclass(frozen=True)
class AwaitedRank:
    """A rank that others wait for.

    Attributes:
        rank: The rank.
        seen: The content of the rank's page.
        waited_s: The longest time for which another rank has waited for it.
        waiting: The ranks that wait.
        limit_s: The limit of the rank's phase.
        overdue_s: Seconds beyond the limit for which the page has been unchanged while others waited. A rank that
            leaves a long evaluation has a step's limit from then on. For a rank that keeps changing its page and never
            arrives, the deadlines of the waiting ranks apply.
    """

    rank: int
    seen: Heartbeat
    waited_s: float
    waiting: tuple[int, ...]
    limit_s: float
    overdue_s: float

    def __str__(self) -> str:
        names = ", ".join(f"rank {rank}" for rank in self.waiting)
        verb = "waits" if len(self.waiting) == 1 else "wait"
        since = f"since {self.waited_s:.0f} s"
        return f"rank {self.rank} (pid {self.seen.pid}) is {describe(self.seen)}; {names} {verb} {since}"


def patience(seen: Heartbeat) -> float:
    """The factor by which a rank's phase may last longer than a step before a message is printed. Pure."""
    return _KINDS[seen.phase][1]


def find_awaited(pages: Mapping[int, Heartbeat | None], timeouts: PhaseTimeouts, *, now_ns: int) -> list[AwaitedRank]:
    """The ranks for which others wait, with the time of the wait. Pure.

    If all ranks wait, none is overdue: they wait for each other, and their own deadlines end the wait.

    Args:
        pages: Pages of one host, by rank.
        timeouts: The limit of each phase.
        now_ns: Monotonic time of that host.
    """
    known = {rank: seen for rank, seen in pages.items() if seen is not None}
    waiting = {rank: seen.waiting_since_ns for rank, seen in known.items() if seen.waiting_since_ns is not None}
    if not waiting:
        return []
    since_ns = min(waiting.values())
    waited_s, ranks = (now_ns - since_ns) / 1e9, tuple(sorted(waiting))
    found = []
    for rank, seen in known.items():
        if rank not in waiting and seen.phase != Phase.ENDED:
            limit_s = timeouts.of(seen)
            overdue_s = (now_ns - max(since_ns, seen.time_ns)) / 1e9 - limit_s
            found.append(AwaitedRank(rank, seen, waited_s, ranks, limit_s, overdue_s))
    return found


def describe(seen: Heartbeat) -> str:
    """A rank's phase and step, in words for a message. Pure."""
    return f"{WORDS[seen.phase]} of step {seen.step}" if seen.step else WORDS[seen.phase]
