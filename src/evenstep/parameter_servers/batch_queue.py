"""Which worker takes which batch of an epoch: each once, whoever is fastest. Pure.

[Note: a batch's way]

A batch is *open* until a worker takes it, *held* until the gradients of its samples are applied, and then *finished*.
What a worker holds when it ends is open again. Other workers may have gone on to a later epoch by then: they take it
there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

Pass = tuple[int, int, int]  # number of the loader, epoch, and which iteration of that epoch


class Taken(NamedTuple):
    """What a worker is given.

    Attributes:
        epoch: Of the batch; one before the worker's own where a batch came back.
        batch: Its number in the epoch; -1: there is none now.
        is_over: All batches of the worker's own pass are finished.
        failure: Why there is none; "" unless the workers' loaders differ.
    """

    epoch: int
    batch: int
    is_over: bool = False
    failure: str = ""


@dataclass
class _State:
    facts: str
    num_batches: int
    next: int = 0
    num_finished: int = 0
    returned: deque[int] = field(default_factory=deque)


class BatchQueue:
    """The batches of all passes over all loaders. Not for several threads at once."""

    def __init__(self) -> None:
        self._passes: dict[Pass, _State] = {}
        self._held: dict[int, list[tuple[Pass, int]]] = {}

    def __repr__(self) -> str:
        held = sum(map(len, self._held.values()))
        return f"<BatchQueue {len(self._passes)} passes, {held} batches held>"

    def take(self, worker: int, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """The next batch for a worker: one that came back, of this loader, else the next of the pass.

        Args:
            worker: Who holds it then.
            wanted: The worker's pass.
            num_batches: Of the epoch.
            facts: What decides which samples a batch has; equal on all workers.
        """
        loader, epoch, _ = wanted
        state = self._passes.setdefault(wanted, _State(facts, num_batches))
        if (state.facts, state.num_batches) != (facts, num_batches):
            return Taken(
                epoch,
                -1,
                failure=(
                    f"worker {worker} has another loader than the worker that began epoch {epoch}: {num_batches} "
                    f"batches of {facts}, and there {state.num_batches} of {state.facts}"
                ),
            )
        for key in sorted(self._passes):
            if key[0] == loader and self._passes[key].returned:
                return self._hold(worker, key, self._passes[key].returned.popleft())
        if state.next < state.num_batches:
            state.next += 1
            return self._hold(worker, wanted, state.next - 1)
        return Taken(epoch, -1, is_over=state.num_finished == state.num_batches)

    def finish(self, worker: int) -> None:
        """The gradients of all that a worker holds are applied."""
        for key, _ in self._held.pop(worker, ()):
            self._passes[key].num_finished += 1

    def give_back(self, worker: int) -> None:
        """A worker has ended: others take what it holds."""
        for key, batch in self._held.pop(worker, ()):
            self._passes[key].returned.append(batch)

    def _hold(self, worker: int, key: Pass, batch: int) -> Taken:
        self._held.setdefault(worker, []).append((key, batch))
        return Taken(key[1], batch)
