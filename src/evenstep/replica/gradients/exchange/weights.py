"""The scale of loss weights: what weights are divided by before they multiply gradients.

[Note: the scale of weights]

*Before gradients.* Large weights make float16 overflow, in gradients of float16 parameters and within autocast,
whatever the parameters are; a GradScaler would skip steps that one process makes. So weights are divided by a *scale*
first: the power of two next to the sum of all ranks' weights, so that nothing is rounded. All ranks agree on it in the
first window that they average, and keep it. A rank without samples doesn't know whether the others' passes have
weights, so all take part; only those with weights, or without samples, wait.

    the first window has no weights    the scale stays 1; with float16 gradients the next window tries again
    a pass only adds to `p.grad`       a rank may run it alone, so it doesn't agree: the pass that ends the window does.
                                       It does where float16 would overflow: float16 gradients, a GradScaler's loss
    some rank has had such a pass      its window has begun with 1, so the scale counts from the next window on

A scale of each rank's own would be wrong: the backward pass of a SyncBatchNorm adds gradients of all ranks. A pass
through several models has one weight, so one scale: that of the model with the most ranks, which all ranks of the
others know alike.

*Before a communication hook.* A hook compresses, and that depends on the magnitude. Gradients times a large weight
overflow in 16 bits; and what PowerSGD leaves out for the next step would count as much as that step's weights, after a
full batch and before a short one many times too much. So hooks are handed means: weights of all ranks are added as the
last pass begins, and awaited before the first bucket is launched. This rank's all-reduce is already issued then, so
peers can't block on it, not even those that wait in the statistics of a SyncBatchNorm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from evenstep.replica.gradients.window import Kind, Window
from evenstep.transport.base import Work
from evenstep.transport.core.transport import Transport


class Scale:
    """The scale of the weights of one rank, which needs nobody's agreement.

    It is a window's first weight, so that a window of one pass has nothing to divide by. Within a window what is in
    `p.grad` is a sum of weight / scale * gradient.

    Args:
        rescale: Multiplies the gradients of the window that runs.
        is_one: Weights aren't scaled.

    Attributes:
        of_window: The scale of the window that runs.
    """

    def __init__(self, rescale: Callable[[float], object], *, is_one: bool = False) -> None:
        self.of_window = 1.0
        self._rescale = rescale
        self._is_one = is_one

    def agree(self, weight: float | Tensor | None, *, opens_window: bool, is_urgent: bool) -> float:
        """Return the scale that divides weights before they multiply gradients; one for all passes of a window.

        Args:
            weight: Of the pass; None: this rank has no pass, and doesn't know of what kind the others' are.
            opens_window: The pass is the first of its window.
            is_urgent: Gradients are averaged over ranks behind the pass, or its loss was multiplied by a GradScaler.
        """
        if opens_window and not self._is_one:
            self.of_window = weight if isinstance(weight, float) and weight > 0 else 1.0
        return self.of_window

    def adopt(self, scale: float, *, opens_window: bool) -> None:
        """Use the scale of another model, with which this one shares a loss.

        Args:
            scale: By which that model divides weights.
            opens_window: As in `agree`; else what there is of the window is brought to the scale of its next pass.
        """
        if self._is_one:
            return
        if not opens_window and scale != self.of_window:
            self._rescale(self.of_window / scale)
        self.of_window = scale


class AgreedScale(Scale):
    """The scale that all ranks of a model have for its weights, and their sum; see [Note: the scale of weights].

    Args:
        transport: Carries the agreements.
        device: Of what it carries.
        rescale: As in `Scale`.
        is_needed: Gradients are float16, or are added in it. The same on all ranks.
        is_one: Weights aren't scaled unless that is needed.

    Attributes:
        of_window: As in `Scale`.
        agreed: The scale that ranks have agreed on, or 1.
        announce: Called before the first collective of a window; see `join.Uneven.announce`.
    """

    def __init__(
        self,
        transport: Transport,
        device: torch.device,
        rescale: Callable[[float], object],
        *,
        is_needed: bool,
        is_one: bool,
    ) -> None:
        super().__init__(rescale)
        self._is_needed = is_needed  # until ranks have agreed
        self._is_due = is_needed or not is_one  # in this window, and not begun
        self.announce: Callable[[], object] = lambda: None
        self.agreed = 1.0
        self._transport, self._device = transport, device
        self._agreement: tuple[Work, Tensor] | None = None
        self._is_put_off = False  # what was agreed on counts from the next window on
        self._total: tuple[Work, Tensor] | None = None

    def agree(self, weight: float | Tensor | None, *, opens_window: bool, is_urgent: bool) -> float:
        """See `Scale`. Collective in the first window that ends on all ranks, and in more of 16-bit models."""
        if weight is not None and self._is_due and (is_urgent or self._is_needed):
            self.announce()
            self.start_agreement(weight, is_under_way=not opens_window)
            self._finish_agreement(reads=True)
        # Also of a weight of 0: what ranks add up has one scale on all of them.
        scale = 1.0 if self._is_put_off else self.agreed
        self.adopt(scale, opens_window=opens_window)
        return scale

    def start_agreement(self, weight: float | Tensor | None = None, *, is_under_way: bool = False) -> None:
        """Begin to agree, if that is due. Collective, once per window, before anything else of the window.

        Args:
            weight: Of a WEIGHTED pass; None: there is none on this rank so far.
            is_under_way: This rank has had an earlier pass in the window.
        """
        if not self._is_due:
            return
        self._is_due = False
        total = torch.tensor([0.0, weight is not None, is_under_way], dtype=torch.float64, device=self._device)
        if weight is not None:
            total[:1].add_(weight)
        self._agreement = self._transport.all_reduce(total), total

    def _finish_agreement(self, *, reads: bool) -> None:
        """Wait for the agreement, if one was started.

        Args:
            reads: The others' passes may have weights: learn the scale. On a GPU this waits for it.
        """
        if self._agreement is None:
            return
        (work, total), self._agreement = self._agreement, None
        work.wait()
        if reads:
            weights, num_weighted, num_under_way = total.tolist()
            if num_weighted:
                self._is_put_off = num_under_way > 0 and not self._is_needed
                self.agreed = nearest_power_of_two(weights)
                self._is_needed = False

    def start_total(self, window: Window) -> None:
        """Begin to add all ranks' weights. Collective, once per window; again in the same window: nothing.

        Args:
            window: This rank's, to which nothing is added any more.
        """
        if self._total is not None:
            return
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if window.kind is Kind.WEIGHTED:
            weight = window.weight / self.of_window
            total += torch.as_tensor(weight, dtype=total.dtype, device=total.device)
        self._total = self._transport.all_reduce(total), total

    def divide_by_total(self, flat: Tensor) -> None:
        """Divide weighted gradients of this rank, so that the mean of what is left over ranks is the mean of all.

        Args:
            flat: A bucket's; zeros where no rank has a weight.
        """
        assert self._total is not None
        work, total = self._total
        work.wait()
        flat.div_(torch.where(total > 0, total / self._transport.world_size, torch.inf).to(flat.device))

    def end_window(self, kind: Kind | None) -> float:
        """Wait for whatever was started, and return the window's scale.

        Args:
            kind: Of the window; if it is PLAIN nobody's has weights, and nothing is learned.
        """
        self._finish_agreement(reads=kind is not Kind.PLAIN)
        if self._total is not None:
            self._total[0].wait()
            self._total = None
        self._is_due, self._is_put_off = self._is_needed, False
        scale, self.of_window = self.of_window, 1.0
        return scale


def rescale(parameters: Sequence[nn.Parameter], by: float) -> None:
    """Multiply what there is in `p.grad`."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(by)


def nearest_power_of_two(total: float) -> float:
    """The scale by which weights are divided before they touch 16-bit gradients; exact in every dtype. Pure."""
    return 2.0 ** round(math.log2(total)) if total > 0 else 1.0
