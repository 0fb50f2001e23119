"""How long a rank may take in each phase while others wait for it. Pure.

Legitimate times differ: a step takes seconds; compiling, an evaluation or a save may take an hour; and the block of
`world.main_first()` as long as it takes, for those who wait for it there. A hang is a rank that has exceeded the
timeout of its phase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from evenstep.errors import ConfigurationError
from evenstep.ground.environment import settings
from evenstep.ground.health.heartbeat import WORDS, Heartbeat, Phase

DEFAULT_STEP_S = 600.0
# By phase, what users call it, and how long it may take as a multiple of `init(timeout_s=...)`: more where it is known
# that something long goes on. "main_first" is for those who wait in a collective: who waits for the block itself has no
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
    """Seconds for each phase.

    Args:
        step_s: A collective's deadline. It is what a step may take (forward, backward, optimizer); the others'
            defaults are multiples of it.
        given: Those that the user has chosen, by name.
    """

    step_s: float = DEFAULT_STEP_S
    given: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, *, step_s: float = DEFAULT_STEP_S) -> PhaseTimeouts:
        """ "step=60,evaluating=7200". Pure.

        Raises:
            ConfigurationError: It can't be understood.
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
        """What `evenstep run --phase-timeout` said, and else multiples of a collective's deadline."""
        return cls.parse(settings().phase_timeouts, step_s=step_s)

    def __str__(self) -> str:
        return ",".join(f"{name}={seconds:g}" for name, seconds in self.given.items())

    def of(self, seen: Heartbeat) -> float:
        """How long a rank may stay in its phase while others wait for it, in seconds."""
        name, factor = _KINDS[seen.phase]
        return self.given.get(name, factor * self.step_s)


@dataclass(frozen=True)
class AwaitedRank:
    """A rank that others wait for.

    Attributes:
        rank: Which.
        seen: Its page.
        waited_s: How long the one that waits longest has waited.
        waiting: The ranks that wait.
        limit_s: What its phase allows.
        overdue_s: For how much longer than that it has changed nothing while others waited. Who comes out of a long
            evaluation gets a step's time from then on; who changes something and never comes is a matter for the
            deadlines of those who wait.
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
    """How many times as long as in a step one waits in its phase before anything is said. Pure."""
    return _KINDS[seen.phase][1]


def find_awaited(pages: Mapping[int, Heartbeat | None], timeouts: PhaseTimeouts, *, now_ns: int) -> list[AwaitedRank]:
    """The ranks for which others wait, and for how long. Pure.

    Where all wait, no rank is overdue: they wait for each other, and their own deadlines end that.

    Args:
        pages: By rank, of one host.
        timeouts: What each phase allows.
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
    """Where a rank is, in words that go into a sentence in brackets. Pure."""
    return f"{WORDS[seen.phase]} of step {seen.step}" if seen.step else WORDS[seen.phase]
