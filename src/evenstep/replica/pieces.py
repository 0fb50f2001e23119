"""Which parts of which parameters lie in one rank's shard of a bucket."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from evenstep.replica.layout import BucketLayout


def in_memory_order(whole: Tensor, parameter: Tensor) -> Tensor:
    """[numel], a tensor of a parameter's shape in the order in which the parameter lies in memory."""
    if parameter.is_contiguous():
        return whole.reshape(-1)
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return whole.permute(order).reshape(-1)


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one rank's shard.

    Attributes:
        parameter: Index of the parameter in registration order.
        index: Number of its slot in the bucket.
        begin: First element, counted in the shard.
        offset: The same element, counted in the parameter, in the order of its memory.
        numel: Number of elements; 0 if nothing of the parameter is here.
    """

    parameter: int
    index: int
    begin: int
    offset: int
    numel: int

    @property
    def end(self) -> int:
        """Behind the last element, counted in the shard."""
        return self.begin + self.numel


def plan_pieces(layout: BucketLayout, rank: int, num_shards: int) -> tuple[Piece, ...]:
    """What lies in a rank's shard, one piece per slot. Pure."""
    length = layout.numel // num_shards
    first, last = rank * length, (rank + 1) * length
    pieces = []
    for index, slot in enumerate(layout.slots):
        begin = min(max(slot.offset_numel, first), last)
        end = max(min(slot.offset_numel + slot.numel, last), begin)
        offset = begin - slot.offset_numel if end > begin else 0
        pieces.append(Piece(slot.parameter, index, begin - first, offset, end - begin))
    return tuple(pieces)
