"""Computes which elements of a tensor a rank holds if the tensor is a DTensor. Pure.

A tensor is divided along its dimensions, and along one dimension as `torch.chunk` does: chunks of ceil(length / ranks),
the last ones shorter or empty. So a rank holds a *region*: a box of the tensor, or several boxes. FSDP2 on top of
tensor parallelism divides one dimension twice, first over the tensor ranks:

    8 rows      tensor rank 0   tensor rank 1
    shard 0     rows 0-1        rows 4-5
    shard 1     rows 2-3        rows 6-7

torch writes that as `_StridedShard(0, split_factor=2), Shard(0)`, the outer mesh dimension first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenstep.ground.compat.torch_tensors import local_part, split_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Shape = tuple[int, ...]
Runs = list[tuple[int, int]]  # consecutive indices, [begin, end)


@dataclass(frozen=True)
class Split:
    """The division of a tensor over one dimension of a mesh.

    Attributes:
        dim: The tensor's dimension; None: all ranks along this mesh dimension have the same elements.
        factor: Number of chunks into which later mesh dimensions have divided `dim` before this one.
    """

    dim: int | None
    factor: int = 1


@dataclass(frozen=True)
class Region:
    """A box of a tensor that a rank holds.

    Attributes:
        offsets: First index along each dimension of the whole tensor.
        sizes: Length along each dimension.
        at: First index along each dimension of the tensor that the rank holds.
    """

    offsets: Shape
    sizes: Shape
    at: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def whole(shape: Shape) -> Region:
    """The region that is the whole tensor."""
    zeros = (0,) * len(shape)
    return Region(zeros, shape, zeros)


def regions_of(
    shape: Shape, held: Shape, mesh_sizes: Sequence[int], coordinate: Sequence[int], splits: Sequence[Split]
) -> list[Region]:
    """The regions of a tensor that a rank holds, without empty ones.

    Args:
        shape: Shape of the whole tensor.
        held: Shape of the tensor that the rank holds.
        mesh_sizes: The mesh's sizes.
        coordinate: The rank's coordinate in the mesh.
        splits: The tensor's division over each dimension of the mesh.

    Raises:
        ValueError: This division doesn't explain the shape that the rank holds.
    """
    along: list[Runs] = []
    for dim, length in enumerate(shape):
        steps = [
            (size, place, split.factor)
            for size, place, split in zip(mesh_sizes, coordinate, splits, strict=True)
            if split.dim == dim
        ]
        found = next((runs for runs in _orders(length, steps) if _length(runs) == held[dim]), None)
        if found is None or len(held) != len(shape):
            raise ValueError(f"its part here has the shape {list(held)}, which its placements don't explain")
        along.append(found)
    regions = []
    for runs in itertools.product(*(_with_places(each) for each in along)):
        offsets, ends, at = (tuple(numbers) for numbers in zip(*runs, strict=True)) if runs else ((), (), ())
        regions.append(Region(offsets, tuple(e - o for o, e in zip(offsets, ends, strict=True)), at))
    return regions


def held_regions(value: DTensor) -> list[Region]:
    """The regions of a DTensor that this rank holds.

    Raises:
        ValueError: The placements don't explain the shape of this rank's part.
    """
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    splits = [Split(*found) for each in value.placements if (found := split_of(each)) is not None]
    held = tuple(local_part(value).shape)
    return regions_of(tuple(value.shape), held, tuple(value.device_mesh.shape), coordinate, splits)


def _orders(length: int, steps: list[tuple[int, int, int]]) -> Iterable[Runs]:
    """The indices that a rank may hold along one dimension, in both orders of division: FSDP2's, and mesh order."""
    inner = [step for step in steps if step[2] == 1]
    outer = [step for step in steps if step[2] > 1]
    if len(outer) == 1 and steps[0] == outer[0] and outer[0][2] == math.prod(size for size, _, _ in inner):
        # FSDP2's order: the outer mesh dimension divides last. Mesh order may give other indices if a division is
        # uneven.
        yield _divide(length, [*inner, (outer[0][0], outer[0][1], 1)])
    yield _divide(length, steps)


def _divide(length: int, steps: Iterable[tuple[int, int, int]]) -> Runs:
    runs: Runs = [(0, length)] if length else []
    for size, place, factor in steps:
        parts = [_chunk(runs, factor, index) for index in range(factor)] if factor > 1 else [runs]
        runs = _joined(run for part in parts for run in _chunk(part, size, place))
    return runs


def _chunk(runs: Runs, num_chunks: int, index: int) -> Runs:
    """The indices in chunk `index` of `torch.chunk`, which may return fewer chunks than requested."""
    size = -(-_length(runs) // num_chunks)
    begin, end = index * size, (index + 1) * size
    found, position = [], 0
    for first, last in runs:
        low, high = max(begin - position, 0), min(end - position, last - first)
        if low < high:
            found.append((first + low, first + high))
        position += last - first
    return found


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    joined: Runs = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def _length(runs: Runs) -> int:
    return sum(end - begin for begin, end in runs)


def _with_places(runs: Runs) -> Iterable[tuple[int, int, int]]:
    position = 0
    for begin, end in runs:
        yield begin, end, position
        position += end - begin


# ---------------------------------------------------------------------- boxes and consecutive elements


def strides(shape: Shape) -> Shape:
    """Distance of neighbours along each dimension, in a contiguous tensor of this shape."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def first_element(shape: Shape, offsets: Shape) -> int:
    """The place of a box's first element in the flattened tensor."""
    return sum(offset * stride for offset, stride in zip(offsets, strides(shape), strict=True))


def offsets_of(shape: Shape, element: int) -> Shape:
    """The inverse of `first_element`."""
    return tuple(element // stride % max(size, 1) for size, stride in zip(shape, strides(shape), strict=True))


def is_consecutive(shape: Shape, sizes: Shape) -> bool:
    """Whether the elements of a box follow one another in the flattened tensor."""
    divided = [dim for dim, (size, length) in enumerate(zip(sizes, shape, strict=True)) if size != length]
    return not divided or all(size == 1 for size in sizes[: divided[-1]])


def boxes_of_elements(shape: Shape, start: int, numel: int) -> list[tuple[Shape, Shape, int]]:
    """Consecutive elements of a flattened tensor as boxes: (offsets, sizes, place among the elements).

    There are at most two for each dimension, plus one: the end of a row, whole rows, the beginning of a row.
    """
    if numel == 0:
        return []
    if not shape:
        return [((), (), 0)]
    stride = math.prod(shape[1:])
    boxes: list[tuple[Shape, Shape, int]] = []
    position = 0
    while position < numel:
        row, inside = divmod(start + position, stride)
        rest = numel - position
        if inside == 0 and rest >= stride:
            rows = rest // stride
            boxes.append(((row, *(0 for _ in shape[1:])), (rows, *shape[1:]), position))
            position += rows * stride
            continue
        length = min(stride - inside, rest)
        for offsets, sizes, place in boxes_of_elements(shape[1:], inside, length):
            boxes.append(((row, *offsets), (1, *sizes), position + place))
        position += length
    return boxes


def common(one: tuple[Shape, Shape], other: tuple[Shape, Shape]) -> tuple[Shape, Shape] | None:
    """The box in which two boxes (offsets, sizes) overlap; None if they don't."""
    offsets = tuple(map(max, one[0], other[0]))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    sizes = tuple(end - offset for offset, end in zip(offsets, ends, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def is_tiled(shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether boxes (offsets, sizes), none of them empty, cover a tensor of this shape once."""
    if math.prod(shape) != sum(math.prod(sizes) for _, sizes in boxes):
        return False
    return _is_tiled(shape, list(boxes))


def _is_tiled(shape: Shape, boxes: list[tuple[Shape, Shape]]) -> bool:
    """Sweep along the first dimension. Boxes with the same begin and end are checked together."""
    if not shape:
        return len(boxes) == 1
    spans: dict[tuple[int, int], list[tuple[Shape, Shape]]] = {}
    for offsets, sizes in boxes:
        spans.setdefault((offsets[0], offsets[0] + sizes[0]), []).append((offsets[1:], sizes[1:]))
    ordered = sorted(spans)
    if all(one[1] == two[0] for one, two in itertools.pairwise(ordered)):
        ends = (ordered[0][0], ordered[-1][1]) if ordered else (0, 0)
        return ends == (0, shape[0]) and all(_is_tiled(shape[1:], inside) for inside in spans.values())
    cuts = sorted({0, shape[0], *(cut for span in spans for cut in span)})
    if cuts[0] < 0 or cuts[-1] > shape[0]:
        return False
    return all(
        _is_tiled(shape[1:], [box for span in ordered if span[0] <= cut < span[1] for box in spans[span]])
        for cut in cuts[:-1]
    )
