"""Which worker takes which batch of an epoch: each once, whoever is fastest. Pure.

[Note: a batch's way]

A batch is *open* until a worker takes it, *held* until the gradients of its samples are applied, and then *finished*.
What a worker holds when it ends is open again. Other workers may have gone on to a later epoch by then: they take it
there.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Pass = tuple[int, int, int]  # number of the loader, epoch, and which iteration of that epoch
Batch = tuple[Pass, int]  # and its number in the epoch


class Taken(NamedTuple):
    """What a worker is given.

    Attributes:
        batch: Of an earlier epoch than the worker's own where it came back; None: there is none now.
        is_over: All batches of the worker's own pass are finished.
        failure: Why there is none; "" unless the workers' loaders differ.
    """

    batch: Batch | None
    is_over: bool = False
    failure: str = ""


@dataclass
class _State:
    facts: str
    num_batches: int
    next: int = 0  # the first that was never given out
    returned: deque[int] = field(default_factory=deque)
    ahead: set[int] = field(default_factory=set)  # finished, from `next` on: in a run before this one
    num_finished: int = 0


class BatchQueue:
    """The batches of all passes over all loaders. Not for several threads at once."""

    def __init__(self) -> None:
        self._passes: dict[Pass, _State] = {}
        self._held: dict[int, set[Batch]] = {}  # by worker
        self._first_epochs: dict[int, int] = {}  # by loader: earlier ones were finished before this run

    def __repr__(self) -> str:
        return f"<BatchQueue {len(self._passes)} passes, {sum(map(len, self._held.values()))} batches held>"

    def take(self, worker: int, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """The next batch for a worker: one that an earlier pass over this loader lacks, else the next of its own pass.

        Args:
            worker: Its number.
            wanted: The worker's pass.
            num_batches: Of the epoch.
            facts: What decides which samples a batch has; equal on all workers.
        """
        loader, epoch, _ = wanted
        if epoch < self._first_epochs.get(loader, 0):
            return Taken(None, is_over=True)
        state = self._passes.setdefault(wanted, _State(facts, num_batches))
        if not state.facts:  # begun in a run before this one
            state.facts, state.num_batches = facts, num_batches
        if (state.facts, state.num_batches) != (facts, num_batches):
            return Taken(
                None,
                failure=(
                    f"worker {worker} has another loader than the worker that began epoch {epoch}: {num_batches} "
                    f"batches of {facts}, and there {state.num_batches} of {state.facts}"
                ),
            )
        for each in sorted(self._passes):
            if each[0] == loader:
                number = _next_of(self._passes[each], may_begin=each[1] < epoch or each == wanted)
                if number is not None:
                    self._held.setdefault(worker, set()).add((each, number))
                    return Taken((each, number))
        return Taken(None, is_over=state.num_finished == state.num_batches)

    def finish(self, worker: int, batches: Iterable[Batch]) -> None:
        """The gradients of what a worker has taken are applied."""
        held = self._held.get(worker, set())
        for each in batches:
            if each in held:
                held.remove(each)
                self._passes[each[0]].num_finished += 1

    def give_back(self, worker: int, batches: Iterable[Batch] | None = None) -> list[Batch]:
        """Others take what a worker holds: some batches, or, with None, all; returns these."""
        held = self._held.get(worker, set())
        found = sorted(held if batches is None else held & set(batches))
        held -= set(found)
        for at, number in found:
            self._passes[at].returned.append(number)
        return found

    def is_returned(self, batch: Batch) -> bool:
        """Whether a batch came back, and nobody has taken it since."""
        return batch[1] in self._passes[batch[0]].returned

    # ------------------------------------------------------------------ what checkpoints hold

    def state(self) -> dict[str, Any]:
        """What is finished, in JSON types; what is held counts as open."""
        passes = []
        held = {each for batches in self._held.values() for each in batches}
        for at, state in sorted(self._passes.items()):
            missing = {number for where, number in held if where == at} | set(state.returned)
            first = min(missing, default=_next_open(state))
            ahead = sorted(set(range(first, state.next)) - missing | {each for each in state.ahead if each > first})
            passes.append(
                {
                    "pass": list(at),
                    "facts": json.loads(state.facts) if state.facts else None,
                    "num_batches": state.num_batches,
                    "first": first,
                    "ahead": ahead,
                }
            )
        return {"passes": passes, "first_epochs": {str(key): value for key, value in self._first_epochs.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Begin where `state` was taken."""
        self._passes, self._held = {}, {}
        self._first_epochs = {int(key): int(value) for key, value in state["first_epochs"].items()}
        for each in state["passes"]:
            loader, epoch, iteration = each["pass"]
            facts = "" if each["facts"] is None else json.dumps(each["facts"], sort_keys=True)
            first, ahead = int(each["first"]), set(each["ahead"])
            self._passes[loader, epoch, iteration] = _State(
                facts, int(each["num_batches"]), next=first, ahead=ahead, num_finished=first + len(ahead)
            )


def _next_of(state: _State, *, may_begin: bool) -> int | None:
    if state.returned:
        return state.returned.popleft()
    batch = _next_open(state)
    if not may_begin or batch >= state.num_batches:
        return None
    while state.next <= batch:
        state.ahead.discard(state.next)
        state.next += 1
    return batch


def _next_open(state: _State) -> int:
    batch = state.next
    while batch in state.ahead:
        batch += 1
    return batch
