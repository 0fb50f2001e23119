"""By what weights are divided before they multiply gradients of 16 bits, which large weights would make overflow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from evenstep.transport.base import Transport


class Units:
    """The unit of a model's weights: 1, or about the sum of the weights where gradients have 16 bits.

    A power of two, so that nothing is rounded; agreed by all ranks in the first window, and kept. Within a window what
    is in `p.grad` is a sum of weight / unit * gradient.

    Args:
        parameters: Those of the model.
        transport: Carries the agreement.
        is_needed: Gradients have 16 bits, or are added in 16 bits. The same on all ranks.

    Attributes:
        unit: What ranks have agreed on, or 1.
        is_open: It is needed, and not agreed on.
        is_unasked: Ranks haven't tried to, either.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], transport: Transport, *, is_needed: bool) -> None:
        self.unit = 1.0
        self.is_open = self.is_unasked = is_needed
        self._parameters = parameters
        self._transport = transport
        self._of_window: float | None = None

    def count_in(self, unit: float, *, opens_window: bool) -> None:
        """Passes of this window may have had another unit: bring what there is to the one of the next pass."""
        if not opens_window and self._of_window is not None and unit != self._of_window:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._of_window / unit)
        self._of_window = unit

    def take(self) -> float:
        """The unit of the window that ends."""
        unit, self._of_window = self._of_window, None
        return unit or 1.0

    def agree(self, weight: float | Tensor | None) -> None:
        """Collective, in the first window, of whichever kind it is: a rank without samples doesn't know.

        Args:
            weight: None: of a rank that has no WEIGHTED pass. Where all are so, it is asked again in a window that has.
        """
        total = torch.zeros(2, dtype=torch.float64, device=self._parameters[0].device)
        if weight is not None:
            total[:1].add_(weight)
            total[1:].fill_(1.0)
        self._transport.all_reduce(total).wait()
        weights, num_weighted = total.tolist()
        self.is_unasked = False
        if num_weighted:
            self.is_open = False
            self.unit = nearest_power_of_two(weights)


def nearest_power_of_two(total: float) -> float:
    """The scale by which weights are divided before they touch 16-bit gradients; exact in every dtype. Pure."""
    return 2.0 ** round(math.log2(total)) if total > 0 else 1.0
