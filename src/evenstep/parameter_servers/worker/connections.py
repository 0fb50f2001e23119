"""A worker's way to the servers: what it can do, and the one of a world of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from evenstep.parameter_servers.embeddings.rows import Rows
from evenstep.parameter_servers.server.batch_queue import BatchQueue, Pass, Taken
from evenstep.parameter_servers.server.coordinator import Coordinator, Decision, Mode
from evenstep.parameter_servers.server.shard import Answer, Pushed, Shard
from evenstep.parameter_servers.traffic import OnAnswer


class Connection(Protocol):
    """A worker's way to all servers."""

    def initial(self) -> dict[str, Tensor]:
        """Tensors of the model that aren't trained, by name, as they are on the first server."""
        ...

    def start(self, pushed: Sequence[Pushed] | None, on_answer: OnAnswer) -> Callable[[], list[Answer]]:
        """Send each server its gradients, or ask for the parameters alone.

        Args:
            pushed: For each server; None: nothing.
            on_answer: See there.

        Returns:
            What waits until this worker may go on, with the parameters of every server.
        """
        ...

    def look_up(self, table: str, ids: Sequence[Tensor], on_answer: OnAnswer) -> Callable[[], list[Rows]]:
        """Ask servers for rows of a table: see `StartLookup`."""
        ...

    @property
    def num_pushes(self) -> int:
        """How many there were."""
        ...

    def take(self, push: int, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """This worker's next batch, from the first server.

        Args:
            push: Number of the push with which its gradients will come, from 1.
            wanted: The pass.
            num_batches: Of it.
            facts: See `BatchQueue.take`.
        """
        ...

    def give_back(self, push: int) -> None:
        """What was taken for a push goes to whoever takes it next."""
        ...

    def leave(self, failure: str) -> list[Answer]:
        """Tell the servers that this worker has ended; waits until all have, unless with a failure.

        Args:
            failure: "": none.
        """
        ...

    def staleness(self) -> dict[int, dict[int, int]]:
        """Each worker's histogram."""
        ...

    def close(self, *, gracefully: bool) -> None:
        """End it; gracefully is collective."""
        ...


class LocalConnection:
    """Worker and server in one process: no port, no thread."""

    def __init__(self, shard: Shard, mode: Mode, queue: BatchQueue, version: int = 0) -> None:
        self._shard, self._queue = shard, queue
        self._coordinator = Coordinator(mode, 1, [0], queue, version=version)
        self._error: Exception | None = None
        self._number = self._num_pulls = 0
        self._coordinator.join(0)

    def initial(self) -> dict[str, Tensor]:
        """See `Connection`."""
        return {}

    def start(self, pushed: Sequence[Pushed] | None, on_answer: OnAnswer) -> Callable[[], list[Answer]]:
        """See `Connection`."""
        if pushed is None:
            self._num_pulls += 1  # counted apart: a batch that was taken is known by the number of the next push
            key = (0, -self._num_pulls)
        else:
            self._number += 1
            key = (0, self._number)
        future, facts = self._shard.call(key, None if pushed is None else pushed[0])
        self._execute(self._coordinator.pull(key) if facts is None else self._coordinator.push(key, facts))
        if self._error is not None:
            raise self._error
        return lambda: [future.wait()]

    def look_up(self, table: str, ids: Sequence[Tensor], on_answer: OnAnswer) -> Callable[[], list[Rows]]:
        """See `Connection`."""
        rows = self._shard.look_up(0, table, ids[0])
        return lambda: [rows]

    @property
    def num_pushes(self) -> int:
        """See `Connection`."""
        return self._number

    def take(self, push: int, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """See `Connection`."""
        return self._queue.take((0, push), wanted, num_batches, facts)

    def give_back(self, push: int) -> None:
        """See `Connection`."""
        self._queue.give_back(0, (0, push))

    def leave(self, failure: str) -> list[Answer]:
        """See `Connection`."""
        self._number += 1
        key = (0, self._number)
        future, _ = self._shard.call(key, None)
        self._execute(self._coordinator.leave(key, failure))
        return [future.wait()]

    def staleness(self) -> dict[int, dict[int, int]]:
        """See `Connection`."""
        return {worker: dict(counts) for worker, counts in self._coordinator.staleness.items()}

    def save(self) -> tuple[Any, dict[str, Any]]:
        """(The shard's state, the queue's)."""
        decision = self._coordinator.save()
        self._execute([decision])
        return self._shard.take_copy(decision.number), self._queue.state()

    def close(self, *, gracefully: bool) -> None:
        """See `Connection`."""

    def _execute(self, decisions: list[Decision]) -> None:
        todo = list(decisions)
        while todo:
            outcome = self._shard.execute(todo.pop(0))
            for complete in outcome.complete:
                complete()
            for square in outcome.squares:
                todo += self._coordinator.measured(square)
            if outcome.error is not None:
                self._error = outcome.error
                return


def untrained(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and module buffers, by name."""
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    return frozen | dict(model.named_buffers())
