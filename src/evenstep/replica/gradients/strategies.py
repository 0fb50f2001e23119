"""The ways in which a model's windows end: with the mean over all ranks, over fewer ranks, or over virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from evenstep.errors import UsageError
from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.window import Window


class WindowEnd:
    """Ends every window with the mean of the gradients over all ranks.

    `LocalWindowEnd` ends windows on each rank alone, `ReplicaWindowEnd` within each replica of a divided model,
    `virtual_ranks.sums.VirtualRankSums` adds up virtual ranks first.

    Args:
        num_shares: The number of ranks, or of virtual ranks: the divisor of PLAIN passes.

    Attributes:
        exchanges: Whether gradients travel to other ranks.
        sums_first: Whether gradients are divided only after all of them have been added, never before.
        owner: The object that has replaced the model's own `WindowEnd` by this one; None: this is the model's own.
    """

    exchanges = True
    sums_first = False
    owner: object = None

    def __init__(self, num_shares: int) -> None:
        self.num_shares = num_shares

    def validate_pass(self, what: str) -> None:
        """Raise if no pass may begin now.

        Args:
            what: The call that begins, for the message.

        Raises:
            UsageError: `what` isn't possible now.
        """

    def weight_of(self, window: Window) -> float | Tensor:
        """This rank's weight in the window, once the window's last pass has begun."""
        return window.weight

    def add_to(self, bucket: Bucket) -> None:
        """Add the sums of earlier parts of the window to a packed bucket, before it is sent."""

    def close(self, window: Window, buckets: Sequence[Bucket]) -> None:
        """Complete this rank's gradients and weight, after the window's last pass.

        Args:
            window: This rank's window.
            buckets: The exchange's buckets.
        """


class LocalWindowEnd(WindowEnd):
    """Ends every window on each rank alone, with this rank's own mean: local SGD.

    Args:
        owner: The `LocalSGD` that uses this.
    """

    exchanges = False

    def __init__(self, owner: object) -> None:
        super().__init__(num_shares=1)
        self.owner = owner


class ReplicaWindowEnd(WindowEnd):
    """Ends every window with the mean over the ranks that hold the parts of one replica: local SGD of a divided model.

    Args:
        num_shares: The number of these ranks.
        owner: The `LocalSGD` that uses this; None: no pass is allowed, because replicas would drift apart.
    """

    def __init__(self, num_shares: int, owner: object = None) -> None:
        super().__init__(num_shares)
        self.owner = owner

    def validate_pass(self, what: str) -> None:
        """See `WindowEnd`."""
        if self.owner is None:
            raise UsageError(
                f"{what}, and no LocalSGD averages its replicas, each of which steps independently (local_steps=True). "
                f"Make evenstep.LocalSGD(model, optimizer, every=...) before the loop. After its close() such a model "
                f"can't be trained any more."
            )
