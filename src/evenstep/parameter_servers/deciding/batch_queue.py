"""Decides which worker gets which batch of an epoch. Each batch is given out once; fast workers get more. Pure.

[Note: a batch's way]

A batch is *open* until a worker takes it, *held* until the gradients of its samples are applied, and then *finished*.
A batch that a worker holds when it ends is open again. If the other workers are already in a later epoch, they take it
during that epoch.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Pass = tuple[int, int, int]  # number of the loader, epoch, and number of the iteration of that epoch
Batch = tuple[Pass, int]  # the pass, and the batch's number in the epoch


class Taken(NamedTuple):
    """The answer to a worker that asks for a batch.

    Attributes:
        batch: The batch; None: there is none now. A batch that another worker gave back may be of an earlier epoch than
            the worker's.
        is_over: All batches of the worker's own pass are finished.
        failure: Why there is no batch, if the workers' loaders differ; else "".
    """

    batch: Batch | None
    is_over: bool = False
    failure: str = ""


@dataclass
class _State:
    facts: str  # "": not known yet
    num_batches: int  # 0: not known yet
    first: int = 0  # all batches before this number are finished
    ahead: set[int] = field(default_factory=set)  # later batches that are finished
    next: int = 0  # from this number on no batch was given out, except in an earlier run
    returned: deque[int] = field(default_factory=deque)


class BatchQueue:
    """The batches of all passes over all loaders. Not for several threads at once."""

    def __init__(self) -> None:
        self._passes: dict[Pass, _State] = {}
        self._held: dict[int, set[Batch]] = {}  # batches that each worker holds
        self._first_epochs: dict[int, int] = {}  # by loader: earlier epochs were finished before this run

    def __repr__(self) -> str:
        return f"<BatchQueue {len(self._passes)} passes, {sum(map(len, self._held.values()))} batches held>"

    def take(self, worker: int, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """The next batch for a worker: an open one of an earlier pass over the loader, else the next of its own pass.

        Args:
            worker: The worker's number.
            wanted: The worker's pass.
            num_batches: The batches of the epoch.
            facts: Values that decide which samples a batch has; equal on all workers.
        """
        loader, epoch, _ = wanted
        if epoch < self._first_epochs.get(loader, 0):
            return Taken(None, is_over=True)
        state = self._passes.setdefault(wanted, _State(facts, num_batches))
        if not state.num_batches and _agree(state.facts, facts):  # begun by a loader without a queue
            state.facts, state.num_batches = facts, num_batches
        if (state.facts, state.num_batches) != (facts, num_batches):
            return Taken(
                None,
                failure=(
                    f"worker {worker} has another loader than the worker that began epoch {epoch}: {num_batches} "
                    f"batches of {facts}, and there {state.num_batches or 'some'} of {state.facts}"
                ),
            )
        for each in sorted(self._passes):
            if each[0] == loader:
                number = _next_of(self._passes[each], may_begin=each[1] < epoch or each == wanted)
                if number is not None:
                    self._held.setdefault(worker, set()).add((each, number))
                    return Taken((each, number))
        return Taken(None, is_over=state.first == state.num_batches)

    def finish(self, worker: int, batches: Iterable[Batch]) -> None:
        """Mark a worker's batches as finished, after their gradients were applied."""
        held = self._held.get(worker, set())
        for each in batches:
            if each in held:
                held.remove(each)
                state = self._passes[each[0]]
                state.ahead.add(each[1])
                while state.first in state.ahead:
                    state.ahead.remove(state.first)
                    state.first += 1

    def give_back(self, worker: int, batches: Iterable[Batch] | None = None) -> list[Batch]:
        """Reopen batches that a worker holds, or all with None; returns the reopened batches."""
        held = self._held.get(worker, set())
        found = sorted(held if batches is None else held & set(batches))
        held -= set(found)
        for at, number in found:
            self._passes[at].returned.append(number)
        return found

    def is_returned(self, batch: Batch) -> bool:
        """Whether a batch was given back and is still open."""
        return batch[1] in self._passes[batch[0]].returned

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The finished batches, in JSON types; a held batch counts as open."""
        passes = [
            {
                "pass": list(at),
                "facts": json.loads(state.facts) if state.facts else None,
                "num_batches": state.num_batches,
                "first": state.first,
                "ahead": sorted(state.ahead),
            }
            for at, state in sorted(self._passes.items())
        ]
        return {"passes": passes, "first_epochs": {str(key): value for key, value in self._first_epochs.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state`."""
        self._passes, self._held = {}, {}
        self._first_epochs = {int(key): int(value) for key, value in state["first_epochs"].items()}
        for each in state["passes"]:
            loader, epoch, iteration = each["pass"]
            facts = "" if each["facts"] is None else json.dumps(each["facts"], sort_keys=True)
            first = int(each["first"])
            self._passes[loader, epoch, iteration] = _State(
                facts, int(each["num_batches"]), first=first, ahead=set(each["ahead"]), next=first
            )


def _agree(before: str, facts: str) -> bool:
    """Whether the facts of a loader agree with those of the loader without a queue that began an epoch."""
    return not before or json.loads(before).items() <= json.loads(facts).items()


def _next_of(state: _State, *, may_begin: bool) -> int | None:
    if state.returned:
        return state.returned.popleft()
    state.next = max(state.next, state.first)
    while state.next in state.ahead:
        state.next += 1
    if not may_begin or state.next >= state.num_batches:
        return None
    state.next += 1
    return state.next - 1
