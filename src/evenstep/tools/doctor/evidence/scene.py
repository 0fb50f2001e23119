"""What judges share: the evidence, names of files, and loops over loaders put together of their events. Pure."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from evenstep.tools.doctor.findings import Finding
from evenstep.tools.doctor.run.events import Event, Evidence, Place
from evenstep.tools.reading.looked import Facts

MIB = 1 << 20
_IS_OF_A_PEER = re.compile("connection (closed|reset|refused)|closed by peer|broken pipe|gloo/transport", re.IGNORECASE)


@dataclass(frozen=True)
class Loop:
    """One loop over a loader, on one rank.

    Attributes:
        begin: The event "iterate".
        rows: Of each batch, digests of its samples.
        num_steps: Optimizer steps that were made in it.
        num_evaluated: Forward passes without gradients.
        end: The event "iterated"; None if the run ended before.
    """

    begin: Event
    rows: Sequence[Sequence[str]] = ()
    num_steps: int = 0
    num_evaluated: int = 0
    end: Event | None = None

    @property
    def samples(self) -> list[str]:
        """Digests of all samples, in order."""
        return [row for rows in self.rows for row in rows]

    @property
    def key(self) -> tuple[int, int]:
        """(loader, iteration): the same on all ranks for the same loop."""
        return self.begin["loader"], self.begin["iteration"]


@dataclass
class Scene:
    """The evidence of a run, and what judges ask of it.

    Attributes:
        evidence: What the ranks have written.
        script: As the user named it.
        directory: The current one, absolute.
        facts: What reading knows of the script.
        loops: By rank, its loops over loaders in the steps that are looked at.
    """

    evidence: Evidence
    script: str = "train.py"
    directory: str = "/"
    facts: Facts = field(default_factory=Facts)
    loops: list[list[Loop]] = field(init=False)

    def __post_init__(self) -> None:
        self.loops = [_loops_of(events) for events in self.evidence.ranks]

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return len(self.evidence.ranks)

    @property
    def wrapper(self) -> str:
        """Whose wrapper averages gradients: "torch", "evenstep" or ""."""
        return next((str(each["wrapper"]) for each in self.evidence.all("wrapped")), "")

    @property
    def error(self) -> Event | None:
        """The first error of a rank that isn't the end of a connection to a rank that has left."""
        raised = [
            each
            for each in self.evidence.all("raised")
            if each["type"] != "KeyboardInterrupt" and not _IS_OF_A_PEER.search(str(each["message"]))
        ]
        return min(raised, key=lambda each: each.time_s) if raised else None

    def finding(self, rule: str, place: Place, evidence: str, cost: str = "", mend: str = "") -> Finding:
        """One that the run has shown."""
        path, line = place
        return Finding(rule, self.name_of(path), max(1, line), 1, evidence, cost=cost, mend=mend, confirmed=True)

    def name_of(self, path: str) -> str:
        """A file as the user would name it."""
        absolute = os.path.join(self.directory, self.script)
        if not path or os.path.normpath(absolute) == os.path.normpath(path):
            return self.script
        return os.path.relpath(path, self.directory)

    def told(self, place: Place) -> str:
        """A place in words."""
        return f"{self.name_of(place[0])}:{place[1]}" if place[0] else "a library"

    def training_loops(self) -> list[list[Loop]]:
        """By rank, the loops in which steps were made."""
        return [[loop for loop in loops if loop.num_steps] for loops in self.loops]


def made_at(loop: Loop) -> Place:
    """Where the loader was made; where it is iterated if that is unknown."""
    made = loop.begin["made"]
    return (str(made[0][0]), int(made[0][1])) if made else loop.begin.place


def pairs(loops: Sequence[Sequence[Loop]]) -> Iterable[tuple[int, Loop, Loop]]:
    """(rank, rank 0's loop, that rank's) for each loop that both have."""
    first = {loop.key: loop for loop in loops[0]} if loops else {}
    for rank, others in enumerate(loops[1:], 1):
        for other in others:
            if other.key in first:
                yield rank, first[other.key], other


def by_place(events: Iterable[Event]) -> dict[Place, list[Event]]:
    """Events by where they happened, those of libraries left out."""
    found: dict[Place, list[Event]] = {}
    for event in events:
        if event.places:
            found.setdefault(event.place, []).append(event)
    return found


def by_step(events: Iterable[Event]) -> dict[int, list[Event]]:
    """Events by the number of steps before them."""
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.step, []).append(event)
    return found


def usual(numbers: Iterable[int]) -> int:
    """The most frequent number; 0 without any."""
    counts = Counter(numbers)
    return counts.most_common(1)[0][0] if counts else 0


def share_of_equal(ours: Sequence[str], theirs: Sequence[str], *, in_any_order: bool) -> float:
    """Of samples that two ranks have read, how many are the same, 0 to 1; 0 where repeats say nothing.

    Args:
        ours: Digests, in order.
        theirs: And of the other rank.
        in_any_order: Both may have shuffled all of the data; else it is only the same where the order is, too, since
            data may have repeats.
    """
    count = min(len(ours), len(theirs))
    if not count:
        return 0.0
    in_place = sum(a == b for a, b in zip(ours, theirs, strict=False)) / count
    if not in_any_order or any(len(set(each)) <= 0.9 * len(each) for each in (ours, theirs)):
        return in_place
    return max(in_place, len(set(ours) & set(theirs)) / min(len(set(ours)), len(set(theirs))))


def _loops_of(events: Sequence[Event]) -> list[Loop]:
    loops: dict[tuple[int, int], Loop] = {}
    opened: dict[tuple[int, int], tuple[list[list[str]], list[int]]] = {}
    for event in events:
        if event.kind == "over":
            break
        key = event["loader"], event["iteration"]
        if event.kind == "iterate":
            # One look at a batch, `next(iter(loader))`, never ends by itself: the next loop over the loader ends it.
            for earlier in [each for each in opened if each[0] == key[0]]:
                rows, (steps, evaluated) = opened.pop(earlier)
                loops[earlier] = Loop(loops[earlier].begin, rows, steps, evaluated)
            opened[key] = [], [0, 0]
            loops[key] = Loop(event)
        elif event.kind == "batch" and key in opened:
            opened[key][0].append(list(event["rows"]))
        elif event.kind == "iterated" and key in opened:
            rows, (steps, evaluated) = opened.pop(key)
            loops[key] = Loop(loops[key].begin, rows, steps, evaluated, event)
        elif event.kind == "stepped":
            for _, counts in opened.values():
                counts[0] += 1
        elif event.kind == "forward" and not event["grad"]:
            for _, counts in opened.values():
                counts[1] += 1
    for key, (rows, (steps, evaluated)) in opened.items():
        loops[key] = Loop(loops[key].begin, rows, steps, evaluated)
    return list(loops.values())
