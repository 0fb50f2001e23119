"""The scale of loss weights: the number by which weights are divided before they multiply gradients.

[Note: the scale of weights]

*Before gradients.* Large weights make float16 overflow: in gradients of float16 parameters, and within autocast for
parameters of any dtype. A GradScaler would then skip steps that a single process makes. So weights are first divided by
a *scale*: the power of two nearest to the sum of all ranks' weights, so that nothing is rounded. All ranks agree on the
scale in the first window that they average, and keep it. A rank without samples doesn't know whether the other ranks'
passes have weights, so all ranks take part in the agreement. Only ranks with weights or without samples wait for the
result.

    the first window has no weights    the scale stays 1; with float16 gradients ranks try again in the next window
    a pass only adds to `p.grad`       a rank may run it alone, so ranks agree in the pass that ends the window. But
                                       they agree at once if float16 could overflow: float16 gradients, a GradScaler
    some rank has had such a pass      its window has begun with scale 1, so the new scale holds from the next window on

Ranks must not have different scales: the backward pass of a SyncBatchNorm adds gradients of all ranks. A pass through
several models has one weight, so it has one scale: that of the model with the most ranks, which include all ranks of
the other models.

*Before a communication hook.* The result of a compressing hook depends on the magnitude of gradients. Gradients times a
large weight overflow in 16 bits. And the remainder that PowerSGD keeps for the next step would have this step's weight,
which is many times too large if a short batch follows a full one. So hooks get means: the weights of all ranks are
added when the last pass begins, and ranks wait for the sum before they launch the first bucket. This rank's all-reduce
is already issued then, so peers can't block on it, not even those that wait in the statistics of a SyncBatchNorm.
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
    """The scale of the weights of one rank, without agreement with other ranks.

    The scale is the window's first weight, so that a window of one pass needs no division. Within a window `p.grad` is
    the sum of weight / scale * gradient.

    Args:
        rescale: Multiplies the gradients of the open window by a factor.
        is_one: Whether the scale is always 1.

    Attributes:
        of_window: The scale of the open window.
    """

    def __init__(self, rescale: Callable[[float], object], *, is_one: bool = False) -> None:
        self.of_window = 1.0
        self._rescale = rescale
        self._is_one = is_one

    def agree(self, weight: float | Tensor | None, *, opens_window: bool, is_urgent: bool) -> float:
        """Return the scale by which weights are divided before they multiply gradients; one for all passes of a window.

        Args:
            weight: The pass's weight; None: this rank has no pass, and doesn't know the kind of the other ranks'
                passes.
            opens_window: Whether the pass is the first of its window.
            is_urgent: Whether gradients are averaged over ranks after the pass, or a GradScaler has scaled its loss.
        """
        if opens_window and not self._is_one:
            self.of_window = weight if isinstance(weight, float) and weight > 0 else 1.0
        return self.of_window

    def start_agreement(self, weight: float | Tensor | None = None, *, is_under_way: bool = False) -> None:
        """See `AgreedScale`. Does nothing for one rank."""

    def adopt(self, scale: float, *, opens_window: bool) -> None:
        """Use the scale of another model that shares a loss with this one.

        Args:
            scale: The other model's scale.
            opens_window: As in `agree`. If False, the window's gradients so far are converted to the new scale.
        """
        if self._is_one:
            return
        if not opens_window and scale != self.of_window:
            self._rescale(self.of_window / scale)
        self.of_window = scale


class AgreedScale(Scale):
    """The scale of weights on which all ranks agree, and the sum of weights: see [Note: the scale of weights].

    Args:
        transport: Carries the agreements.
        device: The device of the tensors that the transport carries.
        rescale: As in `Scale`.
        is_needed: Whether gradients are float16, or are added in float16. The same on all ranks.
        is_one: Whether the scale is always 1 unless `is_needed`.

    Attributes:
        of_window: As in `Scale`.
        agreed: The scale on which ranks have agreed, or 1.
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
        self._is_due = is_needed or not is_one  # whether ranks have to agree in this window, and have not begun
        self.announce: Callable[[], object] = lambda: None
        self.agreed = 1.0
        self._transport, self._device = transport, device
        self._agreement: tuple[Work, Tensor] | None = None
        self._is_put_off = False  # whether the agreed scale holds only from the next window on
        self._total: tuple[Work, Tensor] | None = None

    def agree(self, weight: float | Tensor | None, *, opens_window: bool, is_urgent: bool) -> float:
        """See `Scale`. Collective in the first window that ends on all ranks; in more windows for 16-bit models."""
        if weight is not None and self._is_due and (is_urgent or self._is_needed):
            self.announce()
            self.start_agreement(weight, is_under_way=not opens_window)
            self._finish_agreement(reads=True)
        # Also for a weight of 0: all ranks' summands must have the same scale.
        scale = 1.0 if self._is_put_off else self.agreed
        self.adopt(scale, opens_window=opens_window)
        return scale

    def start_agreement(self, weight: float | Tensor | None = None, *, is_under_way: bool = False) -> None:
        """Begin to agree, if necessary. Collective, once per window, before any other collective of the window.

        Args:
            weight: Weight of a WEIGHTED pass; None: this rank has had no such pass so far.
            is_under_way: Whether this rank has had an earlier pass in the window.
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
            reads: Whether to read the scale, because other ranks' passes may have weights. On a GPU this waits for the
                device.
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
        """Begin to add all ranks' weights. Collective, once per window; a second call does nothing.

        Args:
            window: This rank's complete window.
        """
        if self._total is not None:
            return
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if window.kind is Kind.WEIGHTED:
            weight = window.weight / self.of_window
            total += torch.as_tensor(weight, dtype=total.dtype, device=total.device)
        self._total = self._transport.all_reduce(total), total

    def divide_by_total(self, flat: Tensor) -> None:
        """Divide this rank's weighted gradients, so that their plain mean over ranks is the weighted mean.

        Args:
            flat: The bucket's flat tensor. It becomes zero if no rank has a weight.
        """
        assert self._total is not None
        work, total = self._total
        work.wait()
        flat.div_(torch.where(total > 0, total / self._transport.world_size, torch.inf).to(flat.device))

    def end_window(self, kind: Kind | None) -> float:
        """Wait for the collectives that were started, and return the window's scale.

        Args:
            kind: The window's kind. If it is PLAIN, no rank has weights, and the scale isn't read.
        """
        self._finish_agreement(reads=kind is not Kind.PLAIN)
        if self._total is not None:
            self._total[0].wait()
            self._total = None
        self._is_due, self._is_put_off = self._is_needed, False
        scale, self.of_window = self.of_window, 1.0
        return scale


def rescale(parameters: Sequence[nn.Parameter], by: float) -> None:
    """Multiply the gradients in `p.grad` by a factor."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(by)


def nearest_power_of_two(total: float) -> float:
    """The power of two nearest to a sum of weights: a scale that is exact in every dtype. Pure."""
    return 2.0 ** round(math.log2(total)) if total > 0 else 1.0
