"""Observers: the interface of the monitors that watch a model's steps, or act in them (`monitors` has them all)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.window import Window


class Observer:
    """Watches the steps of one model on this rank. Every method does nothing here.

        a pass begins                begin_pass
        a pass ends, no window does  end_local_pass       `no_sync`, `accumulate`, all but the last of `microbatches`
        the last pass has ended      end_window
        a bucket is packed           totals_for, inspect  if `inspects_buckets`; while autograd runs, and the rest, with
                                                          shared memory always the last one, after `end_window`
        the header travels           header_numbers, read_header
        gradients are averaged       rejects, raise_found, step

    A rank's own gradients are readable in `inspect` only: in `header_numbers` some buckets travel already, and `p.grad`
    is a view of them. A world of one has no buckets and no header, so only the other methods are called there; and an
    observer that inspects buckets turns off its short path (`window.SINGLE_PASS`).

    Attributes:
        num_numbers: How many numbers it has in the header of every window. A constant of the class.
        inspects_buckets: Whether `totals_for` and `inspect` are called.
    """

    num_numbers = 0
    inspects_buckets = False

    def begin_pass(self) -> None:
        """A backward pass begins."""

    def end_local_pass(self) -> None:
        """A backward pass has ended within a window, and its gradients stay on this rank for now."""

    def watch_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Buckets have been laid out."""

    def totals_for(self, bucket: Bucket) -> list[float] | None:
        """Return a list that `Bucket.pack` is to fill with sums of the bucket, or None; called before it is packed."""
        return None

    def inspect(self, bucket: Bucket, totals: Sequence[float] | None = None) -> None:
        """Inspect a bucket that holds this rank's gradients, before it travels.

        They may be smaller, as [Note: one division] in `division` says, or by the scale of float16 weights; in
        reproducible mode earlier virtual ranks are added.

        Args:
            bucket: The bucket.
            totals: The sums that `Bucket.pack` has taken of it; None: it took none.
        """

    def end_window(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """The last pass of a window has ended.

        Args:
            names: Of the parameters whose gradients travel in no bucket.
            parameters: Those parameters.
        """

    def header_numbers(self) -> Sequence[float] | Tensor:
        """Return this rank's numbers for the header, [num_numbers]; on a GPU they may be a tensor."""
        return (0.0,) * self.num_numbers

    def read_header(self, sums: Sequence[float] | Tensor) -> None:
        """Read the sums over ranks of `header_numbers`: [num_numbers]; on a GPU a view, to be cloned if it is kept.

        Collective if the sums say so, which all ranks see alike.
        """

    def rejects(self, window: Window) -> bool:
        """Return whether the window's gradients must be dropped, on all ranks alike. May be collective."""
        return False

    def raise_found(self) -> None:
        """Raise an error for a difference between ranks. Collective if one was found, which all ranks know."""

    def step(self) -> None:
        """Step optimizers that step within the backward pass; gradients have been averaged."""

    def set_join(self, is_open: bool) -> None:
        """A join begins or ends: within it ranks leave one by one, and don't come to the same windows."""
