"""A worker's way to the servers: what it can do, and the one of a world of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn

from evenstep.parameter_servers.batch_queue import Pass, Taken
from evenstep.parameter_servers.shard import Answer, Pushed, Shard


class Connection(Protocol):
    """A worker's way to all servers."""

    def initial(self) -> dict[str, Tensor]:
        """Tensors of the model that aren't trained, by name, as they are on the first server."""
        ...

    def pull(self) -> list[Answer]:
        """The parameters of every server."""
        ...

    def push(self, pushed: Sequence[Pushed]) -> list[Answer]:
        """Send each server its gradients, and wait until this worker may go on."""
        ...

    def take(self, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """This worker's next batch, from the first server."""
        ...

    def leave(self, failure: str) -> list[Answer]:
        """Tell the servers that this worker has ended; waits until all have, unless with a failure."""
        ...

    def staleness(self) -> list[dict[int, int]]:
        """Every server's histogram."""
        ...

    def close(self, *, gracefully: bool) -> None:
        """End it; gracefully is collective."""
        ...


class LocalConnection:
    """Worker and server in one process: no port, no thread."""

    def __init__(self, shard: Shard, initial: dict[str, Tensor]) -> None:
        self._shard, self._initial = shard, initial

    def initial(self) -> dict[str, Tensor]:
        """See `Connection`."""
        return self._initial

    def pull(self) -> list[Answer]:
        """See `Connection`."""
        return [self._shard.pull(0)]

    def push(self, pushed: Sequence[Pushed]) -> list[Answer]:
        """See `Connection`."""
        answer: Answer = self._shard.push(0, pushed[0]).wait()
        if self._shard.error is not None:
            raise self._shard.error
        return [answer]

    def take(self, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """See `Connection`."""
        return self._shard.take(0, wanted, num_batches, facts)

    def leave(self, failure: str) -> list[Answer]:
        """See `Connection`."""
        return [self._shard.leave(0, failure).wait()]

    def staleness(self) -> list[dict[int, int]]:
        """See `Connection`."""
        return [dict(self._shard.staleness)]

    def close(self, *, gracefully: bool) -> None:
        """See `Connection`."""


def untrained(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and module buffers, by name."""
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    return frozen | dict(model.named_buffers())
