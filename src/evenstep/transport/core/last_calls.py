"""The last calls of this process, over all of its transports, for the error of a call that times out.

Recording a call costs an append to a ring, and updates of two numbers that show its transport's progress.
"""

from __future__ import annotations

import collections
import itertools
import os

from evenstep.transport.core.header import Fingerprint

NUM_CALLS = 50


class RecordedGroup:
    """One transport's entry in the record.

    Args:
        name: The group's name, equal on all ranks.
        description: A description of the transport that carries the calls.

    Attributes:
        name: The group's name.
        num_started: The number of this rank's calls that the other ranks can see.
        num_completed: The number of calls that have ended, counted from the first.
        unfinished: For a transport whose calls may end in any order: the numbers of the calls that haven't ended.
    """

    def __init__(self, name: str, description: str) -> None:
        self.name = name
        self.description = description
        self.num_started = 0
        self.num_completed = 0
        self.unfinished: set[int] = set()

    def state_of(self, number: int) -> str:
        """The state of call `number`, from 1; "scheduled": the call waits for calls before it."""
        if number <= self.num_completed and number not in self.unfinished:
            return "completed"
        return "started" if number <= self.num_started else "scheduled"

    def __repr__(self) -> str:
        return f"<RecordedGroup {self.name}, {self.description}>"


# (group, number of the call from 1, packed or unpacked fingerprint). The oldest entry is dropped.
_calls: collections.deque[tuple[RecordedGroup, int, bytes | Fingerprint]] = collections.deque(maxlen=NUM_CALLS)
record = _calls.append  # records a call as it is launched


def describe_last_calls() -> str:
    """The recorded calls as text, for the end of an error's message: a line for each run of equal calls."""
    calls = _copy()
    lines = []
    for (collective, rest), run in itertools.groupby(calls, lambda call: _in_words(*call)):
        numbers = [number for _, number, _ in run]
        counted = f"number {numbers[0]}" if len(numbers) == 1 else f"numbers {numbers[0]} to {numbers[-1]}"
        lines.append(f"\n  {collective} {counted}, {rest}")
    return f"\nThe last calls of this rank, oldest first:{''.join(lines)}" if lines else ""


def _copy() -> list[tuple[RecordedGroup, int, bytes | Fingerprint]]:
    while True:
        try:
            return list(_calls)
        except RuntimeError:  # another thread has launched a call meanwhile
            continue


def _in_words(group: RecordedGroup, number: int, call: bytes | Fingerprint) -> tuple[str, str]:
    """The collective, and the rest of its line without the call's number."""
    made = Fingerprint.unpack(call) if isinstance(call, bytes) else call
    what = f"{str(made.dtype)[6:]} {list(made.shape)}"
    return made.collective, f"{what} over {group.description}, group {group.name}: {group.state_of(number)}"


def _forget() -> None:
    _calls.clear()  # in a forked child: the calls were the parent's


os.register_at_fork(after_in_child=_forget)
