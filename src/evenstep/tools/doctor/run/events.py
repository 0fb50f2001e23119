"""What a rank under watch writes down, one line of JSON for each event, and the reader of it. Pure but for the files.

Kinds of events, and their facts beside time, step and place:

    start      a rank begins: `pid`
    init       the process group is made: `port` (a fixed one, or None), `by_script`
    destroy    it is destroyed
    wrapped    a wrapper is made: `wrapper`, `num_bytes` of gradients
    enter      a call that other ranks must make, too, begins: `op`, `call` (its number on this rank), `group`
    leave      it has ended: `call`
    iterate    a loop over a loader begins: `loader`, `iteration`, and facts of the loader
    batch      a batch was read: `loader`, `iteration`, `rows` (digests of samples)
    iterated   the loop has ended: `loader`, `iteration`, `num_batches`, `cut` (ended by the watch, and not by itself)
    fetch      samples were loaded: `worker` (-1: in the rank), `dataset`, `streams` (those that moved, before)
    forward    an outermost forward pass: `wrapped`, `grad`, `rows`
    backward   a backward pass: `synced`, `factor`, `is_mean`, `is_sum`, `weighted`
    loss       a loss over labels: `valid`, `labels`, `rows`, `reduction`
    norm       a batch normalisation in training: `rows`
    stepped    an optimizer has stepped: `stale`, `untrained`
    parameters what a model trains: `model` (its number), `when` (0: before step 1, 1: after step 2), `digests` by name
    apart      ranks may hold other parts of a model from here: `what`
    write      a file is written: `path`
    save       a checkpoint is saved: `path`, `has_prefix`
    idle       nothing has happened for a while: the place is where the script is
    over       enough steps were made; what follows is the end of the script, hurried
    join       torch's Join is entered, for ranks with different numbers of batches
    left       more steps were made than are looked at, and the script was ended
    raised     the script has raised: `type`, `message`
    spawns     the script would start ranks of its own: `num_ranks`
    end        the script has ended: `status` ("gone": its process has, without a word), `has_group`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenstep.tools.observing import launch

Place = tuple[str, int]  # file and line


@dataclass(frozen=True)
class Event:
    """One thing that a rank has done.

    Attributes:
        kind: See the list above.
        time_s: On the clock of `time.monotonic`, which all processes of a host share.
        step: Optimizer steps that were made before.
        places: File and line in the script's own files, innermost first; empty where none was involved.
        facts: The rest.
    """

    kind: str
    time_s: float = 0.0
    step: int = 0
    places: Sequence[Place] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.facts.get(name)

    @property
    def place(self) -> Place:
        """The innermost one; ("", 0) without."""
        return self.places[0] if self.places else ("", 0)

    def as_line(self) -> str:
        """For the file."""
        return json.dumps(
            [self.kind, round(self.time_s, 6), self.step, [list(each) for each in self.places], self.facts]
        )

    @classmethod
    def from_line(cls, line: str) -> Event:
        """What `as_line` has written."""
        kind, time_s, step, places, facts = json.loads(line)
        return cls(kind, time_s, step, tuple((file, number) for file, number in places), facts)


@dataclass(frozen=True)
class Plan(launch.Plan):
    """The instructions for a rank under watch; `directory` is where events go, and what the script saves.

    Attributes:
        num_steps: So many optimizer steps are looked at.
        world_size: Ranks of this run.
    """

    num_steps: int
    world_size: int

    def file_of(self, rank: int) -> Path:
        """Where a rank writes its events."""
        return Path(self.directory) / f"events-{rank}.jsonl"


@dataclass(frozen=True)
class Hang:
    """Ranks that would wait for ever.

    Attributes:
        waiting: By rank that waits: the call that it is in.
        missing: By rank that doesn't come: its last event ("end", "idle", or another call).
    """

    waiting: Mapping[int, Event]
    missing: Mapping[int, Event]


@dataclass(frozen=True)
class Evidence:
    """What the ranks of a run have written.

    Attributes:
        ranks: By rank, its events, in order.
        hang: Why the run was ended; None if it wasn't for that.
        is_late: The run was ended because its time was over.
        status: Exit status of the launcher.
        said: What it has written to the screen, the last part.
    """

    ranks: Sequence[Sequence[Event]]
    hang: Hang | None = None
    is_late: bool = False
    status: int = 0
    said: str = ""

    @property
    def num_steps(self) -> int:
        """Optimizer steps that all ranks have made."""
        return min((sum(each.kind == "stepped" for each in events) for events in self.ranks), default=0)

    def of(self, kind: str, *, hurried: bool = False) -> list[list[Event]]:
        """By rank, its events of a kind.

        Args:
            kind: Which.
            hurried: With those after enough steps were made: loops over data are cut short then.
        """
        return [
            [each for each in (events if hurried else _before_the_end(events)) if each.kind == kind]
            for events in self.ranks
        ]

    def all(self, kind: str, *, hurried: bool = False) -> list[Event]:
        """The events of a kind, of all ranks."""
        return [each for events in self.of(kind, hurried=hurried) for each in events]


def _before_the_end(events: Sequence[Event]) -> Iterator[Event]:
    for each in events:
        if each.kind == "over":
            return
        yield each


class EventFile:
    """Reads the events of a rank while it writes them."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        """Take in what is new, and return all."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                received = file.read()
            whole = received[: received.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.events += [Event.from_line(line) for line in whole.decode().splitlines()]
        return self.events
