"""The events that a watched rank writes, one line of JSON for each, and their reader. Pure but for the files.

Kinds of events, and their facts beside time, step and place:

    start      a rank begins: `pid`
    init       the process group is made: `port` (a fixed one, or None), `by_script`
    destroy    the process group is destroyed
    wrapped    a wrapper is made: `wrapper`, `num_bytes` of gradients
    enter      a collective begins: `op`, `call` (its number on this rank), `group`
    leave      a collective has ended: `call`
    iterate    a loop over a loader begins: `loader`, `iteration`, and facts of the loader
    batch      a batch was read: `loader`, `iteration`, `rows` (digests of samples)
    iterated   the loop has ended: `loader`, `iteration`, `num_batches`, `cut` (whether doctor ended it early)
    fetch      samples were loaded: `worker` (-1: in the rank), `dataset`, `number`, `streams` (the states, before, of
               the random streams that were drawn from)
    forward    an outermost forward pass: `wrapped`, `grad`, `rows`
    backward   a backward pass: `synced`, `factor`, `is_mean`, `is_sum`, `weighted`
    loss       a loss over labels: `valid`, `labels`, `reduction`
    norm       a batch normalisation in training: `rows`
    stepped    the optimizer that counts steps has stepped: `stale`, `untrained`
    stepped again   another optimizer has stepped
    parameters trained parameters of a model: `model` (number), `when` (0: before step 1, 1: after step 2), `digests` by
               name
    apart      from here on, ranks may hold different parts of a model: `what`
    write      a file is written: `path`
    save       a checkpoint is saved: `path`, `has_prefix`
    idle       no event for a while: the place is where the script is
    over       enough steps were made; from here on, the script is hurried to its end
    join       torch's Join is entered, for ranks with different numbers of batches
    left       the script made many more steps than are watched, and was ended
    raised     the script raised an exception: `type`, `message`
    spawns     the script would start its own ranks: `num_ranks`
    end        the script has ended: `status` ("gone": its process vanished), `has_group`
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
    """One event of a rank.

    Attributes:
        kind: One of the kinds in the module's docstring.
        time_s: The time on the clock of `time.monotonic`, which all processes of a host share.
        step: The number of optimizer steps before the event.
        places: (file, line) of the calls in the script's own files, innermost first; empty if there are none.
        facts: The other facts, by name.
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
        """The innermost place; ("", 0) if there is none."""
        return self.places[0] if self.places else ("", 0)

    def as_line(self) -> str:
        """The event as a line of the file."""
        return json.dumps(
            [self.kind, round(self.time_s, 6), self.step, [list(each) for each in self.places], self.facts]
        )

    @classmethod
    def from_line(cls, line: str) -> Event:
        """Read a line that `as_line` made."""
        kind, time_s, step, places, facts = json.loads(line)
        return cls(kind, time_s, step, tuple((file, number) for file, number in places), facts)


@dataclass(frozen=True)
class Plan(launch.Plan):
    """The instructions for a watched rank. Events, and the files that the script saves, go to `directory`.

    Attributes:
        num_steps: The number of optimizer steps to watch.
        world_size: The number of ranks.
    """

    num_steps: int
    world_size: int

    def file_of(self, rank: int) -> Path:
        """The file for the events of a rank."""
        return Path(self.directory) / f"events-{rank}.jsonl"


@dataclass(frozen=True)
class Hang:
    """A run whose ranks would wait for ever.

    Attributes:
        waiting: By waiting rank, the call that it is in.
        missing: By rank that doesn't join the call, its last event ("end", "idle", or another call).
    """

    waiting: Mapping[int, Event]
    missing: Mapping[int, Event]


@dataclass(frozen=True)
class Evidence:
    """The events of all ranks of a run.

    Attributes:
        ranks: By rank, its events in order.
        hang: The hang for which the run was ended; None without one.
        is_late: Whether the run was ended because its time was over.
        status: The exit status of the launcher.
        said: The last part of the run's output.
    """

    ranks: Sequence[Sequence[Event]]
    hang: Hang | None = None
    is_late: bool = False
    status: int = 0
    said: str = ""

    @property
    def num_steps(self) -> int:
        """The number of optimizer steps that all ranks made."""
        return min((sum(each.kind == "stepped" for each in events) for events in self.ranks), default=0)

    def of(self, kind: str, *, hurried: bool = False) -> list[list[Event]]:
        """By rank, its events of one kind.

        Args:
            kind: The kind.
            hurried: Include the events after enough steps, when doctor cuts loops over data short.
        """
        return [
            [each for each in (events if hurried else _before_the_end(events)) if each.kind == kind]
            for events in self.ranks
        ]

    def all(self, kind: str, *, hurried: bool = False) -> list[Event]:
        """The events of one kind of all ranks, as one list."""
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
        """Read new events, and return all events so far."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                received = file.read()
            whole = received[: received.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.events += [Event.from_line(line) for line in whole.decode().splitlines()]
        return self.events
