"""Observers: the interface of the checks that watch a model's steps, or act in them (`monitors.checks` has most)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.window import Window


class Observer:
    """Watches the steps of one model on this rank. Every method does nothing here.

        a pass begins                begin_pass
        a pass ends, no window does  end_local_pass       `no_sync`, `accumulate`, all but the last of `microbatches`
        a pass goes past the model   passed_by            what it adds to `p.grad` is this rank's own
        the last pass has ended      end_window, forget_forwards
        a bucket is packed           totals_for, inspect  if `inspects_buckets`; while autograd runs, and the rest, with
                                                          shared memory always the last one, after `end_window`
        the header travels           header_numbers, judge
        gradients are averaged       act, step
        an optimizer has stepped     stepped

    A check that compares ranks has a few numbers in the header: `header_numbers` gives this rank's, `judge` is given
    their sums over ranks and decides, and `act` has `conclude` do what is to be done, which may take other collectives.
    On a GPU the sums are judged at the end of the next window, so that nothing waits for them, unless
    `is_read_at_once`.

    A rank's own gradients are readable in `inspect` only: in `header_numbers` some buckets travel already, and `p.grad`
    is a view of them. A world of one has no buckets and no header, so only the other methods are called there; and an
    observer that inspects buckets turns off its short path (`window.State.SINGLE`).

    Attributes:
        num_numbers: How many numbers it has in the header of every window. A constant of the class.
        is_read_at_once: Whether their sums are worth waiting for a GPU.
        inspects_buckets: Whether `totals_for` and `inspect` are called.
        sent: What the numbers of this window are about, for `judge`; None: nothing, so their sums aren't judged.
        found: What `judge` has found, for `conclude`; None: nothing. The same on all ranks, but for `sent` in it.
    """

    num_numbers = 0
    is_read_at_once = False
    inspects_buckets = False
    sent: Any = None
    found: Any = None

    def begin_pass(self) -> None:
        """A backward pass begins."""

    def end_local_pass(self) -> None:
        """A backward pass has ended within a window, and its gradients stay on this rank for now."""

    def passed_by(self, parameter: nn.Parameter) -> None:
        """A backward pass that isn't the wrapper's own has left a gradient in a parameter."""

    def forget_forwards(self, number: int) -> None:
        """So many training forward passes since the last window were reached by no backward pass."""

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

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """Return this rank's numbers for the header, [num_numbers], and set `sent`; a tensor only on a GPU."""
        return (0.0,) * self.num_numbers

    def judge(self, sent: Any, sums: Sequence[float]) -> None:
        """Judge numbers that have been added over ranks. All ranks see the same sums. Local: what follows is `act`'s.

        Here `sent` is found where a sum isn't 0.

        Args:
            sent: What the numbers are about: `sent`, as it was when they travelled.
            sums: Over ranks, of `header_numbers`: [num_numbers].
        """
        if any(sums):
            self.found = sent

    def act(self, window: Window) -> bool:
        """Do what follows from what has been judged. Collective if there is something, which all ranks know.

        Returns:
            Whether the window's gradients must be dropped, on all ranks alike.
        """
        found, self.found = self.found, None
        return found is not None and self.conclude(found)

    def conclude(self, found: Any) -> bool:
        """Raise, warn or act, as all ranks do. Collective. Returns as `act` does."""
        return False

    def step(self) -> None:
        """Step optimizers that step within the backward pass; gradients have been averaged."""

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer that has parameters of the model has stepped."""

    def set_apart(self, is_apart: bool) -> None:
        """Ranks step each for itself from now on, or together again: within a join they leave one by one."""


def overriding(observers: Sequence[Observer], method: str) -> list[Observer]:
    """Those that do something there; a step would else call most of them for nothing."""
    return [each for each in observers if getattr(type(each), method) is not getattr(Observer, method)]
