"""What exchanges over several ranks share: a header ends each window, and weights have one scale on all ranks."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.replica.gradients.exchange.base import Exchange, Trained
from evenstep.replica.gradients.exchange.header import Header
from evenstep.replica.gradients.exchange.weights import WeightScale, rescale
from evenstep.replica.gradients.window import Window


class AcrossRanks(Exchange):
    """An exchange over several ranks, but for the way of the gradients themselves.

    Args:
        trained: Whose gradients.
        device: Of what the transport carries.
    """

    travels = True

    def __init__(self, trained: Trained, device: torch.device) -> None:
        super().__init__(trained.parameters, trained.ending)
        self._world, self._transport, self._control = trained.world, trained.transport, trained.control
        self._recorder, self._module_buffers = trained.recorder, trained.module_buffers
        self._header = Header(len(trained.parameters), device, trained.observers)
        self._was_weighted: bool | None = None  # the last window; None: not known, as always on a GPU
        self._used = self._all_used = [True] * len(trained.parameters)
        self._weights: WeightScale

    def _scale_weights(self, *, overflows: bool) -> None:
        """Build the scale of weights, before the first window; ranks agree on one where gradients have 16 bits."""
        method = weakref.WeakMethod(self._rescale)  # or an exchange that is replaced would keep its buckets

        def rescale_window(by: float) -> None:
            if (rescales := method()) is not None:
                rescales(by)

        device = self._header.tensor.device
        self._weights = WeightScale(self._transport, device, rescale_window, is_needed=overflows)

    def _rescale(self, by: float) -> None:
        """Multiply the gradients of the window that runs."""
        rescale(self._parameters, by)

    def agree_scale(self, weight: float | Tensor | None, *, opens_window: bool) -> float:
        """See `Exchange`. Collective in the first windows of 16-bit models: see `WeightScale`."""
        if weight is not None and self._weights.is_due:
            self.announce()
            self._weights.start_agreement(weight)
            self._weights.finish_agreement(reads=True)
        # Also of a weight of 0: what ranks add up has one scale on all of them.
        self._weights.use(self._weights.agreed, opens_window=opens_window)
        return self._weights.agreed

    def adopt_scale(self, scale: float, *, opens_window: bool) -> None:
        """See `Exchange`."""
        self._weights.use(scale, opens_window=opens_window)

    @property
    def scale(self) -> float:
        """See `Exchange`."""
        return self._weights.of_window

    def was_weighted(self) -> bool:
        """See `Exchange`."""
        return bool(self._header.kinds()[0]) if self._was_weighted is None else self._was_weighted

    def unused(self) -> list[int]:
        """See `Exchange`."""
        return [index for index, used in enumerate(self._used) if not used]

    def _read_header(self, window: Window) -> None:
        """After the header has come. Collective as `_note_kind` says.

        Raises:
            UsageError: Ranks don't count gradients alike. Raised on all ranks.
        """
        if not self._header.is_late:
            self._note_kind(window)
        self._header.read()

    def _note_kind(self, window: Window) -> None:
        """After the header has come. Collective where the kind has changed and a rank had no pass, which all know.

        Such a rank has done with what was left in `p.grad` as it would have been right for the kind before.
        """
        num_weighted, num_plain = self._header.kinds()
        if not num_weighted and not num_plain:
            return
        before, self._was_weighted = self._was_weighted, num_weighted > 0
        if before in (None, self._was_weighted) or num_weighted + num_plain == self._world.world_size:
            return
        wrong = torch.tensor([float(window.has_leftovers)], dtype=torch.float64, device=self._header.tensor.device)
        self._transport.all_reduce(wrong).wait()
        if wrong.item():
            raise UsageError(
                "ranks changed between loss.backward() and model.backward(loss, ...) where an earlier step's gradients "
                "are left in p.grad and a rank's share is empty: what is left counts otherwise for the two. Call "
                "zero_grad between them."
            )
