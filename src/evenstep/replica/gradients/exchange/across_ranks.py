"""Base class of exchanges over several ranks: a header ends each window, and weights have one scale on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from evenstep.errors import UsageError
from evenstep.replica.gradients.exchange.base import Exchange, Trained
from evenstep.replica.gradients.exchange.header import Header
from evenstep.replica.gradients.exchange.weights import AgreedScale, rescale
from evenstep.replica.gradients.window import Window


class AcrossRanks(Exchange):
    """Everything of an exchange over several ranks except the exchange of the gradients.

    Args:
        trained: The parameters whose gradients are exchanged.
        device: The device of the tensors that the transport carries.
    """

    travels = True
    scale: AgreedScale

    def __init__(self, trained: Trained, device: torch.device) -> None:
        super().__init__(trained.parameters, trained.ending)
        self._world, self._transport, self._control = trained.world, trained.transport, trained.control
        self._recorder, self._module_buffers = trained.recorder, trained.module_buffers
        self._header = Header(len(trained.parameters), device, trained.observers)
        self._was_weighted: bool | None = None  # the last window; None: unknown, as always on a GPU
        self._used = self._all_used = [True] * len(trained.parameters)

    def _scale_weights(self, dtypes: Iterable[torch.dtype], *others: Callable[[float], object]) -> None:
        """Build the scale of weights, before the first window.

        Args:
            dtypes: The dtypes in which gradients are accumulated and added.
            others: Functions that rescale those gradients of the open window that aren't in `p.grad`.
        """
        parameters = self._parameters  # a reference to `self` would keep a replaced exchange's buckets alive

        def rescale_window(by: float) -> None:
            rescale(parameters, by)
            for other in others:
                other(by)

        self.scale = AgreedScale(
            self._transport,
            self._header.tensor.device,
            rescale_window,
            is_needed=torch.float16 in dtypes,
            is_one=self._ending.sums_first,
        )

    def was_weighted(self) -> bool:
        """See `Exchange`."""
        return bool(self._header.kinds()[0]) if self._was_weighted is None else self._was_weighted

    def unused(self) -> list[int]:
        """See `Exchange`."""
        return [index for index, used in enumerate(self._used) if not used]

    def _read_header(self, window: Window) -> None:
        """Read the header after its sum has arrived. Collective when `_note_kind` is.

        Raises:
            UsageError: Some ranks' windows were PLAIN and others' WEIGHTED. Raised on all ranks.
        """
        if not self._header.is_late:
            self._note_kind(window)
        self._header.read()

    def _note_kind(self, window: Window) -> None:
        """Record the window's kind. Collective if the kind has changed and a rank had no pass (all ranks know this).

        A rank without a pass has treated the gradients left in `p.grad` as the previous kind requires.
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
                "ranks changed between loss.backward() and model.backward(loss, ...) while gradients of an earlier "
                "step were left in p.grad and a rank's share was empty. The two calls treat such gradients "
                "differently. Call zero_grad between them."
            )
