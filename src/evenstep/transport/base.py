"""The seam between evenstep and whatever carries bytes.

A transport connects the ranks of one group for one purpose (gradients, control, …). Its calls are matched between
ranks by their order, so two purposes that may interleave differently on two ranks each get a transport of their own
(`split`). Everything above this file is written against `Transport`; `evenstep.testing` has the cases that every
implementation passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

# "mean" is of floating-point and complex numbers, "max" and "min" of ordered ones, the last three of integers and bool.
# Of bool, "sum" and "max" are "or", "product" and "min" are "and".
Op = Literal["sum", "max", "min", "mean", "product", "band", "bor", "bxor"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result may be used: on CPU by anybody, on CUDA by work queued later on this stream.

        Raises:
            PeerLostError: A peer died; the transport can no longer be used.
            CollectiveTimeoutError: A peer did not arrive before the deadline; the transport can no longer be used.
        """

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Never blocks."""


class Transport(Protocol):
    """The ranks of one group, and how they exchange tensors.

    Every collective is called by all ranks, in the same order, with equal shapes and dtypes. It returns at once;
    its tensors may not be touched before `Work.wait()` returns.

    Attributes:
        name: What the line printed at start calls it: "local", "shared memory", "host memory", "gloo", "nccl".
        rank: This rank.
        world_size: Number of ranks.
    """

    name: str
    rank: int
    world_size: int

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a bucket, zeroed: [numel]. Tensors from here travel with the fewest copies."""

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """Combine `tensor` (any shape, contiguous) over the ranks, in place, on every rank."""

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Make `tensor` (contiguous) equal to rank `src`'s, in place."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """Put every rank's `tensor` ([n]) one after the other into `out` ([world_size * n]), in order of rank."""

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
        """Let go of sockets and memory. Local: doesn't wait for anybody. Twice is once."""
