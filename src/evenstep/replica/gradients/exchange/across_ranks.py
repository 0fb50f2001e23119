"""What exchanges over several ranks share: a header ends each window, and weights have one scale on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from evenstep.errors import UsageError
from evenstep.replica.gradients.exchange.base import Exchange, Trained
from evenstep.replica.gradients.exchange.header import Header
from evenstep.replica.gradients.exchange.weights import AgreedScale, rescale
from evenstep.replica.gradients.window import Window


class AcrossRanks(Exchange):
    """An exchange over several ranks, but for the way of the gradients themselves.

    Args:
        trained: Whose gradients.
        device: Of what the transport carries.
    """

    travels = True
    scale: AgreedScale

    def __init__(self, trained: Trained, device: torch.device) -> None:
        super().__init__(trained.parameters, trained.ending)
        self._world, self._transport, self._control = trained.world, trained.transport, trained.control
        self._recorder, self._module_buffers = trained.recorder, trained.module_buffers
        self._header = Header(len(trained.parameters), device, trained.observers)
        self._was_weighted: bool | None = None  # the last window; None: not known, as always on a GPU
        self._used = self._all_used = [True] * len(trained.parameters)

    def _scale_weights(self, dtypes: Iterable[torch.dtype], *others: Callable[[float], object]) -> None:
        """Build the scale of weights, before the first window.

        Args:
            dtypes: Those in which gradients are accumulated and added.
            others: Each multiplies gradients of the window that runs which aren't in `p.grad`.
        """
        parameters = self._parameters  # not by way of `self`: an exchange that is replaced would keep its buckets

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
