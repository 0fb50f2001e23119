"""The transport of CPU ranks of one node, through shared memory."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError
from evenstep.transport.base import Collective
from evenstep.transport.core.validation import is_carried
from evenstep.transport.shm.collectives import splits_row
from evenstep.transport.shm.lanes import Lanes
from evenstep.transport.shm.queue import SharedWork
from evenstep.transport.shm.segment import EAGER_BYTES


class SharedMemoryTransport(Lanes):
    """Collectives and messages of the ranks of one node. `connect_shared_memory` makes it."""

    _carries = staticmethod(is_carried)

    def _start(self, call: Collective) -> SharedWork:
        try:
            work = SharedWork(call)
        except RuntimeError:
            raise ConfigurationError(  # raise here: inside such a function no refusal could be sent to the others
                f"{call.kind} on rank {self.rank}: the tensor has no memory of its own, as under torch.vmap or "
                f"torch.func.grad. Call it outside of them, or through torch.distributed."
            ) from None
        if call.splits is None:
            return self._start_all(work)
        mine = splits_row(call.splits)
        work.is_eager = False  # the lengths of the parts are known only when the call begins
        work.splits = torch.empty((self.world_size, *mine.shape), dtype=torch.int64, device="cpu")
        gathering = Collective("all_gather", mine, work.splits)
        self.arguments.prepare(gathering)
        # Calls run one after the other: the second call uses the result of the first.
        return self._start_all(SharedWork(gathering), work)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`: memory that the other ranks can access, so that collectives need no copies.

        Raises:
            ConfigurationError: There isn't enough memory; the message has the bytes needed and available.
            PeerLostError: This transport has been closed.
        """
        if device.type != "cpu" or numel * dtype.itemsize <= EAGER_BYTES:  # an eager call needs no shared tensors
            return torch.zeros(numel, dtype=dtype, device=device)
        with self._lock:
            if self._is_closed and self._failure is not None:
                raise self._failure
            return self._context.arena.allocate(numel, dtype)

    def set_timeout(self, timeout_s: float) -> None:
        """See `Transport.set_timeout`."""
        super().set_timeout(timeout_s)
        if not self._is_closed:
            self.counters.set_timeout(timeout_s)

    def compare_as(self, number: int, name: str, packed: bytes) -> None:
        """See `Transport.compare_as`."""
        super().compare_as(number, name, packed)
        self._context.part_of = number, name

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "failed" if self._failure else f"{len(self._queue)} in flight"
        return f"<SharedMemoryTransport rank {self.rank}/{self.world_size} {self.num_calls} calls, {state}>"
