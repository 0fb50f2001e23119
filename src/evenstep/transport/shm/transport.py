"""The transport of CPU ranks of one node, through memory that they share.

Each method checks the caller's tensors, makes them flat, and launches a call; `queue` runs it, and copies results back
to tensors that aren't contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenstep.transport.base import Op, Transport, Work
from evenstep.transport.shm.peers import PeerProcess
from evenstep.transport.shm.queue import CallQueue
from evenstep.transport.shm.segment import EAGER_BYTES, Segment
from evenstep.transport.shm.sync import WaitPolicy


class SharedMemoryTransport(CallQueue):
    """Collectives of the ranks of one node. Made by `connect_shared_memory`, not by calling the class.

    Args:
        segment: The shared segment, in which all ranks have signed.
        processes: The rank processes, in order of rank.
        rank: This rank.
        policy: How to wait for peers, and until when.
        split_by: Makes what `split` returns.
    """

    def __init__(
        self,
        segment: Segment,
        processes: Sequence[PeerProcess],
        *,
        rank: int,
        policy: WaitPolicy,
        split_by: Callable[[SharedMemoryTransport], Transport],
    ) -> None:
        super().__init__(segment, processes, rank=rank, policy=policy)
        self._split_by = split_by

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`: memory that the other ranks can reach, so that nothing has to be copied.

        Raises:
            ConfigurationError: There isn't enough memory; the message has the bytes needed and available.
        """
        if device.type != "cpu" or numel * dtype.itemsize <= EAGER_BYTES:  # an eager call needs no shared tensors
            return torch.zeros(numel, dtype=dtype, device=device)
        with self._launching:
            return self._context.arena.allocate(numel, dtype)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`; also of tensors that aren't contiguous."""
        flat, back = self._arguments.flatten(tensor)
        return self._launch("all_reduce", tensor, flat, flat, op=op, back=back)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`; also of tensors that aren't contiguous."""
        self._arguments.check_rank("broadcast", "src", src)
        flat, back = self._arguments.flatten(tensor)
        return self._launch("broadcast", tensor, flat, flat, source=src, back=back)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""
        self._arguments.check_sizes("all_gather", "out", out, "tensor", tensor)
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)
        return self._launch("all_gather", tensor, flat, into, back=back)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.reduce_scatter`."""
        self._arguments.check_sizes("reduce_scatter", "tensor", tensor, "out", out)
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)
        return self._launch("reduce_scatter", tensor, flat, into, op=op, back=back)

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum") -> Work:
        """See `Transport.reduce`; also of tensors that aren't contiguous."""
        self._arguments.check_rank("reduce", "dst", dst)
        flat, back = self._arguments.flatten(tensor)
        back = back if dst == self.rank else None
        return self._launch("reduce", tensor, flat, flat, op=op, receiver=dst, back=back)

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """See `Transport.gather`."""
        self._arguments.check_rank("gather", "dst", dst)
        flat, _ = self._arguments.flatten(tensor)
        if dst != self.rank:
            return self._launch("gather", tensor, flat, flat, receiver=dst)
        out = self._arguments.require("gather", "out", out)
        self._arguments.check_sizes("gather", "out", out, "tensor", tensor)
        into, back = self._arguments.flatten(out)
        return self._launch("gather", tensor, flat, into, receiver=dst, back=back)

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """See `Transport.scatter`."""
        self._arguments.check_rank("scatter", "src", src)
        into, back = self._arguments.flatten(out)
        if src == self.rank:
            tensor = self._arguments.require("scatter", "tensor", tensor)
            self._arguments.check_sizes("scatter", "tensor", tensor, "out", out)
            flat, _ = self._arguments.flatten(tensor)
        else:
            flat = out.new_empty(1).expand(self.world_size * out.numel())  # only its length counts
        return self._launch("scatter", out, flat, into, source=src, back=back)

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """See `Transport.all_to_all`."""
        flat, _ = self._arguments.flatten(tensor)
        into, back = self._arguments.flatten(out)
        self._arguments.check_all_to_all(out, tensor, out_splits, splits)
        if out_splits is None or splits is None:
            return self._launch("all_to_all", tensor, flat, into, back=back)
        mine = torch.tensor([list(splits), list(out_splits)], dtype=torch.int64, device="cpu")
        of_all = torch.empty((self.world_size, *mine.shape), dtype=torch.int64, device="cpu")
        with self._launching:  # no other thread launches a call between these two
            # Calls run one after the other: the second finds what the first has gathered.
            self._launch("all_gather", mine, mine.view(-1), of_all.view(-1))
            return self._launch("all_to_all", flat[:0], flat, into, splits=of_all, back=back)

    def barrier(self) -> Work:
        """See `Transport.barrier`."""
        return self.compare_call("barrier")

    def split(self) -> Transport:
        """See `Transport.split`: a segment of its own."""
        return self._split_by(self)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "failed" if self._failure else f"{len(self._queue)} in flight"
        return f"<SharedMemoryTransport rank {self.rank}/{self.world_size} {self._num_calls} calls, {state}>"
