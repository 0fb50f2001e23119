"""The parts of parameters that lie in a rank's shard of a bucket. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evenstep.replica.gradients.buckets.layout import BucketLayout


@dataclass(frozen=True)
class ShardSlice:
    """The part of one parameter that lies in one rank's shard.

    Attributes:
        parameter: Index of the parameter in registration order.
        index: Number of the parameter's slot in the bucket.
        begin: Index of the first element in the shard.
        offset: Index of the same element in the parameter, in the order of its memory.
        numel: Number of elements; 0 if no part of the parameter is in the shard.
    """

    parameter: int
    index: int
    begin: int
    offset: int
    numel: int

    @property
    def end(self) -> int:
        """Index after the last element in the shard."""
        return self.begin + self.numel

    def of_shard(self, shard: Tensor) -> Tensor:
        """View this slice of a tensor that is laid out like the shard: [numel]."""
        return shard[self.begin : self.end]

    def of_whole(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This slice of a tensor of the parameter's shape: [numel].

        Args:
            whole: The tensor; its memory may have another order.
            parameter: The parameter, which shows the order of the bucket's memory.
        """
        strides = parameter.stride()
        order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
        return whole.permute(order).reshape(-1)[self.offset : self.offset + self.numel]


def plan_slices(layout: BucketLayout, rank: int, num_shards: int) -> tuple[ShardSlice, ...]:
    """The slices of a rank's shard, one per slot. Pure."""
    length = layout.numel // num_shards
    first, last = rank * length, (rank + 1) * length
    slices = []
    for index, slot in enumerate(layout.slots):
        begin = min(max(slot.offset_numel, first), last)
        end = max(min(slot.offset_numel + slot.numel, last), begin)
        offset = begin - slot.offset_numel if end > begin else 0
        slices.append(ShardSlice(slot.parameter, index, begin - first, offset, end - begin))
    return tuple(slices)
