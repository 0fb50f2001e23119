"""Observers: the interface of the checks that watch a model's steps or act in them (most are in `monitors.checks`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.window import Window


class Observer:
    """Watches the steps of one model on this rank. In this base class most methods do nothing.

        a pass begins                begin_pass
        a pass ends in a window      end_local_pass       `no_sync`, `accumulate`, all but the last of `microbatches`
        a pass bypasses the model    passed_by            its gradients in `p.grad` are this rank's own
        the last pass has ended      end_window, forget_forwards
        a bucket is packed           totals_for, inspect  if `inspects_buckets`; while autograd runs or after
                                                          `end_window` (with shared memory the last bucket always is)
        the header is sent           header_numbers, judge
        gradients are averaged       act, step
        an optimizer has stepped     stepped

    A check that compares ranks has a few numbers in the header. `header_numbers` returns this rank's numbers, `judge`
    receives their sums over ranks and decides, and `act` calls `conclude`, which raises, warns or acts, and may use
    other collectives. On a GPU the sums are judged at the end of the next window, so that nothing waits for them,
    unless `is_read_at_once`.

    A rank's own gradients are readable in `inspect` only: when `header_numbers` is called some buckets are already in
    flight, and `p.grad` is a view of them. A world of one has no buckets and no header, so only the other methods are
    called there, and in its single-pass fast path (`window.State.SINGLE`) none. An observer that inspects buckets
    disables that path.

    Attributes:
        num_numbers: The number of its numbers in every window's header: the same on all ranks, and constant. Numbers
            are only added: for a maximum, give each rank its own place, with 0 in the others' places.
        is_read_at_once: Whether the sums are read at once, even if this waits for a GPU.
        inspects_buckets: Whether `totals_for` and `inspect` are called.
        sent: An object that describes this window's numbers, for `judge`. `header_numbers` sets it; None: `judge` isn't
            called.
        found: The finding of `judge`, for `conclude`; None: nothing was found. The same on all ranks, except for a
            `sent` in it.
    """

    num_numbers = 0
    is_read_at_once = False
    inspects_buckets = False
    sent: Any = None
    found: Any = None

    def begin_pass(self) -> None:
        """Called when a backward pass begins."""

    def end_local_pass(self) -> None:
        """Called when a backward pass has ended within a window: its gradients stay on this rank for now."""

    def passed_by(self, parameter: nn.Parameter) -> None:
        """Called when a backward pass that isn't the wrapper's own has left a gradient in a parameter."""

    def forget_forwards(self, number: int) -> None:
        """Called with the number of training forward passes since the last window that no backward pass has reached."""

    def watch_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Called when buckets have been laid out."""

    def totals_for(self, bucket: Bucket) -> list[float] | None:
        """Return a list that `Bucket.pack` is to fill with sums of the bucket, or None; called before it is packed."""
        return None

    def inspect(self, bucket: Bucket, totals: Sequence[float] | None = None) -> None:
        """Inspect a bucket that holds this rank's gradients, before it travels.

        The gradients may have been made smaller already: see [Note: one division] in `division`, and the scale of
        float16 weights. In reproducible mode the sums of earlier virtual ranks are added.

        Args:
            bucket: The bucket.
            totals: The sums that `Bucket.pack` computed; None: it computed none.
        """

    def end_window(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        """Called when the last pass of a window has ended.

        Args:
            names: Names of the parameters whose gradients are in no bucket.
            parameters: Those parameters.
        """

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """Return this rank's numbers for the header, [num_numbers], and set `sent`; a tensor only on a GPU."""
        return (0.0,) * self.num_numbers

    def judge(self, sent: Any, sums: Sequence[float]) -> None:
        """Judge the sums of the numbers over ranks. All ranks get the same sums. Local; `act` is the collective part.

        This implementation sets `found` to `sent` if a sum isn't 0.

        Args:
            sent: The value of the attribute `sent` when the numbers were sent.
            sums: Sums over ranks of `header_numbers`: [num_numbers].
        """
        if any(sums):
            self.found = sent

    def act(self, window: Window) -> bool:
        """Act on `found`. Collective if something was found, which all ranks know.

        Returns:
            Whether the window's gradients must be dropped; the same on all ranks.
        """
        found, self.found = self.found, None
        return found is not None and self.conclude(found)

    def conclude(self, found: Any) -> bool:
        """Raise, warn or act, the same on all ranks. Collective. Returns what `act` returns."""
        return False

    def step(self) -> None:
        """Step optimizers that step within the backward pass; gradients have been averaged."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Called when an optimizer that has parameters of the model has stepped."""

    def set_apart(self, is_apart: bool) -> None:
        """Called when ranks begin to step independently, or step together again.

        Ranks also step independently within a join, where they leave one by one.
        """


def overriding(observers: Sequence[Observer], method: str) -> list[Observer]:
    """The observers that override a method: a step calls only these."""
    return [each for each in observers if getattr(type(each), method) is not getattr(Observer, method)]
