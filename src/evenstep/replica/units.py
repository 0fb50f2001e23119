"""By what weights are divided before they multiply gradients of 16 bits, which large weights would make overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evenstep.transport.base import Transport, Work

_NUM_WINDOWS = 16  # in which ranks ask each other


class Units:
    """The unit of a model's weights: 1, or about the sum of the weights where gradients have 16 bits.

    A power of two, so that nothing is rounded; agreed by all ranks in the first window that has weights, and kept. A
    rank without samples doesn't know whether the others' passes have weights, so all ask in every window until then;
    if the first `_NUM_WINDOWS` have none, the unit is 1 for good. Within a window what is in `p.grad` is a sum of
    weight / unit * gradient.

    Args:
        parameters: Those of the model.
        transport: Carries the agreement.
        is_needed: Gradients have 16 bits, or are added in 16 bits. The same on all ranks.

    Attributes:
        unit: What ranks have agreed on, or 1.
        is_due: In this window ranks ask each other, and this one hasn't yet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], transport: Transport, *, is_needed: bool) -> None:
        self.unit = 1.0
        self.is_due = is_needed
        self._windows_left = _NUM_WINDOWS if is_needed else 0
        self._parameters = parameters
        self._transport = transport
        self._asked: tuple[Work, Tensor] | None = None
        self._of_window: float | None = None

    @property
    def of_window(self) -> float:
        """By what the passes of this window so far have divided weights."""
        return self._of_window or 1.0

    def ask(self, weight: float | Tensor | None = None) -> None:
        """Collective, once per window while it is due, before anything else of the window: begin to ask.

        Args:
            weight: Of a WEIGHTED pass; None: there is none on this rank so far.
        """
        self.is_due = False
        total = torch.zeros(2, dtype=torch.float64, device=self._parameters[0].device)
        if weight is not None:
            total[:1].add_(weight)
            total[1:].fill_(1.0)
        self._asked = self._transport.all_reduce(total), total

    def hear(self, *, reads: bool) -> None:
        """Wait for what came of `ask`, if that is still open.

        Args:
            reads: The others' passes may have weights: learn it. On a GPU this waits for it.
        """
        if self._asked is None:
            return
        (work, total), self._asked = self._asked, None
        work.wait()
        if reads:
            weights, num_weighted = total.tolist()
            if num_weighted:
                self.unit = nearest_power_of_two(weights)
                self._windows_left = 0

    def count_in(self, unit: float, *, opens_window: bool) -> None:
        """Passes of this window may have had another unit: bring what there is to the one of the next pass."""
        if not opens_window and self._of_window is not None and unit != self._of_window:
            rescale(self._parameters, self._of_window / unit)
        self._of_window = unit

    def take(self) -> float:
        """The window ends: its unit."""
        if self._windows_left:
            self._windows_left -= 1
            self.is_due = self._windows_left > 0
        unit, self._of_window = self._of_window, None
        return unit or 1.0


def rescale(parameters: Sequence[nn.Parameter], by: float) -> None:
    """Multiply what there is in `p.grad`."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(by)


def nearest_power_of_two(total: float) -> float:
    """The scale by which weights are divided before they touch 16-bit gradients; exact in every dtype. Pure."""
    return 2.0 ** round(math.log2(total)) if total > 0 else 1.0
