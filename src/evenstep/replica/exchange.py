"""What happens to the gradients of a window when it ends: the seam between `engine` and what averages them.

`bucket_exchange.BucketExchange` sends buckets to the other ranks, `sharded_exchange.ShardedExchange` divides them
between ranks, too, and `no_exchange.NoExchange` has nobody to send them to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from evenstep.replica.bucket import Bucket
from evenstep.replica.bucket_exchange import BucketExchange
from evenstep.replica.comm_hook import CommHook
from evenstep.replica.lane_sums import LaneSums
from evenstep.replica.layout import Layout
from evenstep.replica.no_exchange import NoExchange
from evenstep.replica.trained import Trained
from evenstep.replica.uneven import Uneven
from evenstep.replica.weighting import Window


class Exchange(Protocol):
    """The seam between passes and windows (`engine`) and the exchange of gradients.

    Attributes:
        layout: Which gradient lies in which bucket; without buckets where nothing travels.
        buckets: Those buckets.
        lanes: In reproducible mode, the sums of this rank's lanes.
    """

    layout: Layout
    buckets: Sequence[Bucket]
    lanes: LaneSums | None

    def weight_from(self, weight: float | Tensor, scale: float, *, opens_window: bool) -> float | Tensor:
        """A pass of another model has reached this one: what it counts for here.

        Args:
            weight: By which that model's `backward` multiplies.
            scale: By which that model divided it.
            opens_window: Of this model.
        """

    def weight_scale(self, weight: float | Tensor | None, *, opens_window: bool) -> float:
        """By what weights are divided before they multiply gradients; the same in all passes of a window.

        Args:
            weight: Of the pass; None: there is none, and this rank doesn't know of what kind the others' are.
            opens_window: The pass is the first.
        """

    def open_window(self, *, is_running: bool) -> None:
        """The first pass of a window begins: make room in `p.grad` where autograd couldn't add to what is there.

        Args:
            is_running: Gradients of the pass may have come: those of parameters that the loss uses directly.
        """

    def cancel_window(self) -> None:
        """The pass was none that counts: `p.grad` is what it was before `open_window`."""

    def is_clear(self, bucket: Bucket) -> bool:
        """Whether a bucket's gradients are its views and all zero, as far as that can be seen without waiting."""

    def weigh(self, window: Window) -> None:
        """The last pass of a window has begun, and its weight is counted: tell the others, if they need it early."""

    def complete(self, bucket: int, window: Window) -> None:
        """A bucket has all its gradients: send it when its turn comes."""

    def was_weighted(self) -> bool:
        """Whether the last window that any rank had a pass in was WEIGHTED. On a GPU this waits for it."""

    def finish(self, window: Window) -> None:
        """Collective: end the window. Afterwards `p.grad` is the global mean on every rank."""

    def conclude(self) -> None:
        """Collective if ranks were found to differ, which all know: say in what."""

    def learn_order(self, ready_order: Sequence[int]) -> None:
        """Collective, once: lay the buckets out again in the order in which rank 0's gradients were ready."""

    def set_hook(self, hook: CommHook) -> None:
        """Hand complete buckets to a communication hook, which averages them over ranks."""

    def announce(self) -> None:
        """Tell the ranks that have left, once per window, to take part in it."""

    def set_uneven(self, uneven: Uneven | None) -> None:
        """From now on ranks may leave one by one; None: no longer."""

    def unused(self) -> list[int]:
        """The parameters that had no gradient on any rank when the last window ended."""

    def in_flight(self) -> list[int]:
        """Indices of the buckets that are travelling at this moment."""

    def reset(self) -> None:
        """Forget a window that failed."""


def build_exchange(trained: Trained) -> Exchange:
    """The exchange that suits a world."""
    return NoExchange(trained.parameters) if trained.world.world_size == 1 else BucketExchange(trained)
