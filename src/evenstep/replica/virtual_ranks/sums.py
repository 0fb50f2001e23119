"""The lower part of the tree over virtual ranks: adds one rank's virtual ranks in the order of a binary counter.

[Note: a binary counter]

A sum of 2 ** j neighbouring virtual ranks is at level j. A new virtual rank is at level 0. While its level already
holds a sum, the two are added and the result moves one level up. So a rank with 8 virtual ranks holds at most three
sums besides the gradients of the virtual rank that is being computed:

    virtual rank        0      1      2      3      4      5      6      7
    level 0     0             2             4             6
    level 1            01                          45
    level 2                          0123
    then                                                         07: into the buckets, while the backward pass runs

The sums are stored in tensors that autograd has made: nothing is copied, and a virtual rank costs one addition, as in
any accumulation.

*A missing gradient counts as zero.* A virtual rank without samples, or without a gradient of some parameter, adds 0.0,
on every rank. This matters for one bit only: -0.0 + 0.0 is 0.0.

The last virtual rank's gradients arrive bucket by bucket, and the sums of the virtual ranks before it are added to each
bucket as it is packed. Virtual ranks after the last one with samples are empty, so the right neighbours of that virtual
rank are zeros at every level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.ground.computing.virtual_ranks import VirtualRanks
from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.division import zero_where
from evenstep.replica.gradients.strategies import WindowEnd
from evenstep.replica.gradients.window import Window, drop_grads

Sums = list[Tensor | None]  # by parameter; None: no virtual rank had a gradient of the parameter


class VirtualRankSums(WindowEnd):
    """Adds the gradients of this rank's virtual ranks before a window ends.

    Args:
        virtual_ranks: The run's virtual ranks.
        parameters: All trained parameters.

    Attributes:
        is_open: Whether a loop over virtual ranks is running, so that the model may be called.
        at_end: Called when the last virtual rank is complete, before module buffers are sent.
    """

    sums_first = True

    def __init__(self, virtual_ranks: VirtualRanks, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(num_shares=virtual_ranks.num_virtual_ranks)
        self.is_open = False
        self.at_end: Callable[[], object] | None = None
        self._rank = virtual_ranks.rank
        self._parameters = parameters
        self._num_levels = virtual_ranks.per_rank.bit_length() - 1
        self._num_done = 0
        self._sums: dict[int, Sums] = {}  # by level
        self._weights: dict[int, float | Tensor] = {}

    def begin(self) -> None:
        """Called when a loop over this rank's virtual ranks begins."""
        self.is_open = True
        self._num_done = 0
        self._sums, self._weights = {}, {}

    def end(self) -> None:
        """Called when the loop has ended, perhaps by an exception."""
        self.is_open = False
        self.at_end = None
        self._sums, self._weights = {}, {}

    def validate_pass(self, what: str) -> None:
        """See `WindowEnd`.

        Raises:
            UsageError: No loop over virtual ranks runs.
        """
        if not self.is_open:
            raise UsageError(
                f"{what} on rank {self._rank} outside model.microbatches, but reproducible mode computes every batch "
                f"in virtual ranks. Write: for x, y in model.microbatches(batch): model.backward(loss_of(model(x), y), "
                f"weight=len(x)), and the optimizer's step after the loop. To evaluate, use torch.no_grad()."
            )

    def add_virtual_rank(self, window: Window | None, buckets: Sequence[Bucket]) -> None:
        """Move the gradients of a complete virtual rank into the sums, because another virtual rank will follow.

        Args:
            window: The window with this virtual rank's weight, which is also moved; None: there was no backward pass.
            buckets: Buckets in whose memory the sums must not stay.
        """
        sums = self._take({id(view) for bucket in buckets for view in bucket.views})
        weight = _taken_weight(window)
        if isinstance(weight, Tensor):  # not read, on a GPU: a virtual rank of weight 0 may have any gradient
            zero_where(weight == 0, [grad for grad in sums if grad is not None])
        level = 0
        while self._num_done >> level & 1:
            sums = _added(self._sums.pop(level), sums)
            weight = self._weights.pop(level) + weight
            level += 1
        self._sums[level], self._weights[level] = sums, weight
        self._num_done += 1

    def _take(self, views: set[int]) -> Sums:
        grads = [parameter.grad for parameter in self._parameters]
        drop_grads(self._parameters)
        # After zero_grad(set_to_none=False) autograd has added to views of the buckets, whose memory the next virtual
        # rank needs.
        return [grad.clone() if grad is not None and id(grad) in views else grad for grad in grads]

    def weight_of(self, window: Window) -> float | Tensor:
        """See `WindowEnd`: the sum of the weights of all virtual ranks, including the last."""
        weight = _wide(window.weight)
        for level in range(self._num_levels):
            weight = self._weights.get(level, 0.0) + weight
        return weight

    @torch.no_grad()
    def add_to(self, bucket: Bucket) -> None:
        """See `WindowEnd`: add the earlier virtual ranks' sums to a bucket with the last virtual rank's gradients."""
        missing = False
        here = {slot.parameter for slot in bucket.layout.slots}
        found: set[int] = set()
        for level in range(self._num_levels):
            sums = self._sums.get(level)
            pairs = [
                (view, grad)
                for slot, view in zip(bucket.layout.slots, bucket.views, strict=True)
                if sums is not None and (grad := sums[slot.parameter]) is not None
            ]
            missing = missing or len(pairs) < len(here)
            if pairs:
                torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])
                found |= {p for p in here if sums is not None and sums[p] is not None}
        if missing:
            bucket.flat.add_(0.0)
        if found:
            bucket.publish(found.__contains__)

    @torch.no_grad()
    def close(self, window: Window, buckets: Sequence[Bucket]) -> None:
        """See `WindowEnd`: the window's weight becomes the sum over virtual ranks; without buckets `p.grad`, too."""
        window.weight = self.weight_of(window)
        self._weights = {}
        if not buckets:
            total = [parameter.grad for parameter in self._parameters]
            for level in range(self._num_levels):
                total = _added(self._sums.pop(level, None), total)
            for parameter, grad in zip(self._parameters, total, strict=True):
                parameter.grad = grad
        if self.at_end is not None:
            self.at_end()

    def __repr__(self) -> str:
        return f"<VirtualRankSums {self._num_done} of {1 << self._num_levels} virtual ranks, {len(self._sums)} sums>"


def _taken_weight(window: Window | None) -> float | Tensor:
    if window is None:
        return 0.0
    weight, window.weight = window.weight, 0.0
    window.note_gradients(())
    return _wide(weight)


def _wide(weight: float | Tensor) -> float | Tensor:
    """A weight in float64, in which weights are sent, so that they are added in the same dtype."""
    return weight.double() if isinstance(weight, Tensor) else weight


@torch.no_grad()
def _added(left: Sums | None, right: Sums) -> Sums:
    """Add the sums of two neighbours, in the memory of one of them."""
    left = [None] * len(right) if left is None else left
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    alone = [a if b is None else b for a, b in zip(left, right, strict=True) if (a is None) is not (b is None)]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    if alone:
        torch._foreach_add_([each for each in alone if each is not None], 0.0)
    return [b if a is None else a for a, b in zip(left, right, strict=True)]
