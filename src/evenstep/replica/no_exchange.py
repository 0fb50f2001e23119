"""The exchange of a world of one, where gradients stay where autograd put them.

Packing buckets that travel nowhere would cost a copy and a call per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from evenstep.replica.bucket import Bucket
from evenstep.replica.comm_hook import CommHook
from evenstep.replica.lane_sums import LaneSums
from evenstep.replica.layout import Layout
from evenstep.replica.uneven import Uneven
from evenstep.replica.units import rescale
from evenstep.replica.weighting import Window, divide_by_weight


class NoExchange:
    """The exchange of a world of one. Only weights are left to divide by."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.layout = Layout((), (0,) * len(parameters))
        self.buckets: Sequence[Bucket] = ()
        self.lanes: LaneSums | None = None
        self._parameters = parameters
        self._scale = 1.0

    def weight_from(self, weight: float | Tensor, scale: float, *, opens_window: bool) -> float | Tensor:
        """See `exchange.Exchange.weight_from`. What there is of the window gets the other model's scale."""
        if self.lanes is None:
            if not opens_window and scale != self._scale:
                rescale(self._parameters, self._scale / scale)
            self._scale = scale
        return weight

    def weight_scale(self, weight: float | Tensor | None, *, opens_window: bool) -> float:
        """The window's first weight: a window of one pass then has nothing to divide by. In lanes 1, as elsewhere."""
        if opens_window and self.lanes is None:
            self._scale = weight if isinstance(weight, float) and weight > 0 else 1.0
        return self._scale

    def open_window(self, *, is_running: bool) -> None:
        """See `exchange.Exchange.open_window`; autograd can add to every gradient."""

    def cancel_window(self) -> None:
        """See `exchange.Exchange.cancel_window`."""

    def is_clear(self, bucket: Bucket) -> bool:
        """See `exchange.Exchange.is_clear`; there are no buckets."""
        return False

    def weigh(self, window: Window) -> None:
        """See `exchange.Exchange.weigh`; there is nobody."""

    def complete(self, bucket: int, window: Window) -> None:
        """See `exchange.Exchange.complete`; there are no buckets."""

    def was_weighted(self) -> bool:
        """See `exchange.Exchange.was_weighted`: what is left is this rank's own, and added to."""
        return False

    def finish(self, window: Window) -> None:
        """Divide by the window's weight."""
        if self.lanes is None:
            divide_by_weight(self._parameters, window, self._scale)
        else:
            self.lanes.divide(window)

    def conclude(self) -> None:
        """See `exchange.Exchange.conclude`; there is nobody to differ from."""

    def learn_order(self, ready_order: Sequence[int]) -> None:
        """See `exchange.Exchange.learn_order`; there are no buckets."""

    def set_hook(self, hook: CommHook) -> None:
        """See `exchange.Exchange.set_hook`; there is no bucket to hand over."""

    def announce(self) -> None:
        """See `exchange.Exchange.announce`; there is nobody."""

    def set_uneven(self, uneven: Uneven | None) -> None:
        """See `exchange.Exchange.set_uneven`; there is nobody who could leave."""

    def unused(self) -> list[int]:
        """See `exchange.Exchange.unused`."""
        return [index for index, parameter in enumerate(self._parameters) if parameter.grad is None]

    def in_flight(self) -> list[int]:
        """See `exchange.Exchange.in_flight`: nothing."""
        return []

    def reset(self) -> None:
        """See `exchange.Exchange.reset`; there is nothing to forget."""
