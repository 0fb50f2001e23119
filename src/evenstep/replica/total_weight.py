"""The sum of all ranks' weights, known before gradients travel: communication hooks are handed means.

A hook compresses, and that depends on the unit. Gradients times a large weight overflow in 16 bits; and what PowerSGD
leaves out for the next step would count as much as that step's weights, after a full batch and before a short one many
times too much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.replica.weighting import Kind, Window
from evenstep.transport.base import Transport, Work


class TotalWeight:
    """By what gradients of a weighted window are divided before a hook averages them.

    A rank without samples doesn't know whether the others' passes have weights, so all ask in every window. Who has a
    pass asks as it begins, and waits for the answer in the middle of it, before the first bucket goes: by then nobody
    may need this rank for asking, also who waits for it in the statistics of a SyncBatchNorm.

    Args:
        transport: Carries the sum.
        device: Where it is needed.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device
        self._asked: tuple[Work, Tensor] | None = None

    def ask(self, window: Window, unit: float) -> None:
        """Collective, once a window's last pass has begun: begin to add weights. Again in the same window: nothing.

        Args:
            window: This rank's, to which nothing is added any more.
            unit: What weights were divided by before they multiplied gradients.
        """
        if self._asked is not None:
            return
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if window.kind is Kind.WEIGHTED:
            total += torch.as_tensor(window.weight / unit, dtype=total.dtype, device=self._device)
        self._asked = self._transport.all_reduce(total), total

    def divide(self, flat: Tensor) -> None:
        """Divide weighted gradients of this rank, so that the mean over ranks of what is left is the mean of all.

        Args:
            flat: A bucket's; zeros where no rank has a weight.
        """
        assert self._asked is not None
        work, total = self._asked
        work.wait()
        flat.div_(torch.where(total > 0, total / self._transport.world_size, torch.inf).to(flat.device))

    def end_window(self) -> None:
        """Wait for what nobody has waited for."""
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None
