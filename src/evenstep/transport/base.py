"""The interface of all transports: collectives between the ranks of one group.

A transport connects the ranks of one group for one purpose (gradients, control, …). Its calls are matched between
ranks by their order, so two purposes that may interleave differently on two ranks each get a transport of their own
(`split`). Everything above this package is written against `Transport`; `evenstep.testing.transport` has the cases that
every implementation passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

# "mean" is of all numbers but unsigned ones of more than 8 bits, and that of integers is rounded towards zero, as NCCL
# does; "max" and "min" are of ordered ones, the last three of integers and bool. Of bool, "sum" and "max" are "or",
# "product" and "min" are "and".
Op = Literal["sum", "max", "min", "mean", "product", "band", "bor", "bxor"]


class Work(Protocol):
    """The handle of a collective in flight."""

    def wait(self) -> None:
        """Return when the result may be used: on CPU by all threads, on CUDA by work queued later on this stream.

        Raises:
            PeerLostError: A peer died; the transport can no longer be used.
            CollectiveTimeoutError: A peer did not arrive before the deadline; the transport can no longer be used.
        """

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""


class Carrier(Protocol):
    """What messages need of a transport: the calls of `Transport` that have these names."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`."""

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""


class Transport(Protocol):
    """The ranks of one group, and how they exchange tensors.

    Every collective is called by all ranks, in the same order, with equal shapes and dtypes. It returns at once;
    its tensors may not be touched before `Work.wait()` returns.

    Attributes:
        name: In messages: "local", "shared memory", "shared memory + gloo", "gloo", "nccl".
        rank: This rank.
        world_size: Number of ranks.
    """

    name: str
    rank: int
    world_size: int

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a bucket, zeroed: [numel]. Collectives copy such tensors least."""

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """Combine `tensor` (any shape, contiguous) over the ranks, in place, on every rank."""

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Make `tensor` (contiguous) equal to rank `src`'s, in place."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """Concatenate every rank's `tensor` ([n]) in `out` ([world_size * n]), in order of rank."""

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum") -> Work:
        """Combine `tensor` ([world_size * n]) over the ranks, and put part number `rank` of it into `out` ([n])."""

    def reduce(self, tensor: Tensor, dst: int, op: Op = "sum") -> Work:
        """As `all_reduce`, on rank `dst` only. What the others' `tensor` holds afterwards is undefined."""

    def gather(self, out: Tensor | None, tensor: Tensor, dst: int) -> Work:
        """As `all_gather`, on rank `dst` only; the others give no `out`."""

    def scatter(self, out: Tensor, tensor: Tensor | None, src: int) -> Work:
        """Put part number `rank` of rank `src`'s `tensor` ([world_size * n]) into `out` ([n]); others give none."""

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        splits: Sequence[int] | None = None,
    ) -> Work:
        """Send part number r of `tensor` to rank r; put what rank r sent into part number r of `out`.

        Args:
            out: [sum(out_splits)], or as long as `tensor`.
            tensor: [sum(splits)], or of a length divisible by the number of ranks.
            out_splits: [world_size], how many elements come from each rank; None, on all ranks: equal parts.
            splits: [world_size], how many elements go to each rank.
        """

    def barrier(self) -> Work:
        """Done when every rank has called it."""

    def split(self) -> Transport:
        """Collective: a second transport over the same ranks, whose calls can't mix with this one's."""

    def close(self) -> None:
        """Release sockets and memory. Local: waits for no other rank. Twice is once."""
