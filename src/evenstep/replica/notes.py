"""What a model's step is given on each rank beside options: how gradients were clipped, which averages are kept.

`options.OptionsWatch` takes it into the checksum that travels in the header of the next window.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, tuple[tuple[str, Any], ...]]  # who was called, and what it was given: plain values
ToldCall = tuple[str, tuple[tuple[str, str], ...]]  # the same with texts

_MAX_CALLS = 1000  # between two windows: within a `join` there are none that tell


class Notes:
    """Of one rank and model."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._kept: list[tuple[weakref.ref[Any], Call]] = []

    def add(self, call: Call) -> None:
        """A call of which every rank makes one like it before the next window ends."""
        if len(self._calls) < _MAX_CALLS:
            self._calls.append(call)

    def keep(self, owner: object, call: Call) -> None:
        """One that counts for as long as its owner lives; a rank may have none."""
        self._kept.append((weakref.ref(owner), call))

    def take(self) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
        """At the end of a window: (calls since the last one, those that are kept)."""
        if not self._calls and not self._kept:
            return (), ()
        calls, self._calls = tuple(self._calls), []
        self._kept = [each for each in self._kept if each[0]() is not None]
        return calls, tuple(call for _, call in self._kept)

    def forget_calls(self) -> None:
        """Ranks don't come to the same windows for a while."""
        self._calls.clear()

    def forget_kept(self) -> None:
        """Not all ranks have them: don't ask again."""
        self._kept.clear()


def as_texts(calls: Sequence[Call]) -> list[ToldCall]:
    """Calls as ranks tell each other of them. Pure."""
    return [(who, tuple((name, repr(value)) for name, value in given)) for who, given in calls]


def find_other_call(
    told: Sequence[Sequence[ToldCall]], are_alike: Callable[[str | None, str | None], bool]
) -> str | None:
    """The first call that ranks haven't made alike; None if there is none. Pure.

    Args:
        told: By rank, the calls in order.
        are_alike: Whether two texts mean the same.
    """
    for rank, each in enumerate(told):
        for first, other in itertools.zip_longest(told[0], each):
            if first is None or other is None:
                has, has_not = (0, rank) if other is None else (rank, 0)
                return f"{(first or other)[0]} was called on rank {has} and not on rank {has_not}"
            if first[0] != other[0]:
                return f"rank 0 called {first[0]} where rank {rank} called {other[0]}"
            ours, theirs = dict(first[1]), dict(other[1])
            for name in (*ours, *theirs):
                if not are_alike(ours.get(name), theirs.get(name)):
                    return f"{first[0]}: {name} is {ours.get(name)} on rank 0 and {theirs.get(name)} on rank {rank}"
    return None
