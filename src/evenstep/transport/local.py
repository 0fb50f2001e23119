"""The transport of a world of one: every collective has already ended. One process takes the same path as many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenstep.transport.base import Op, Transport, Work


class _Done:
    def wait(self, timeout_s: float | None = None) -> None:
        return

    def is_completed(self) -> bool:
        return True

    def add_done_callback(self, callback: Callable[[None], object]) -> None:
        callback(None)


_DONE = _Done()


class LocalTransport:
    """The transport of a world of one. Opens nothing, never waits."""

    name = "local"
    rank = 0
    world_size = 1

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Transport.allocate`."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`: of one rank, the tensor as it is."""
        return _DONE

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`: of one rank, the tensor as it is."""
        return _DONE

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`: of one rank, a copy."""
        _copy(out, tensor)
        return _DONE

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.reduce_scatter`: of one rank, a copy."""
        _copy(out, tensor)
        return _DONE

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum") -> Work:
        """See `Transport.reduce`: of one rank, the tensor as it is."""
        return _DONE

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """See `Transport.gather`: of one rank, a copy."""
        assert out is not None
        _copy(out, tensor)
        return _DONE

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """See `Transport.scatter`: of one rank, a copy."""
        assert tensor is not None
        _copy(out, tensor)
        return _DONE

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """See `Transport.all_to_all`: of one rank, a copy."""
        _copy(out, tensor)
        return _DONE

    def barrier(self) -> Work:
        """See `Transport.barrier`."""
        return _DONE

    def compare_call(self, collective: str, text: bytes = b"") -> Work:
        """See `SharedMemoryTransport.compare_call`: there is no rank to disagree with."""
        return _DONE

    def compare_as(self, number: int, name: str, packed: bytes) -> None:
        """See `SharedMemoryTransport.compare_as`."""

    def name_ranks(self, known_as: Sequence[int]) -> None:
        """See `SharedMemoryTransport.name_ranks`."""

    def split(self) -> Transport:
        """See `Transport.split`."""
        return LocalTransport()

    def close(self) -> None:
        """See `Transport.close`."""

    def __repr__(self) -> str:
        return "<LocalTransport>"


def _copy(out: Tensor, tensor: Tensor) -> None:
    """Of any strides; and `out` has no part in `tensor`'s gradient, as with more ranks."""
    with torch.no_grad():
        out.copy_(tensor.reshape(out.shape))
