"""Which elements a rank holds, without ranks: every coordinate of a mesh in turn, against torch's own splitting."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.checkpoint.format.manifest import Part
from evenstep.checkpoint.format.regions import (
    Split,
    first_element,
    is_tiled,
    offsets_of,
    regions_of,
)
from evenstep.checkpoint.load.layouts import Layout, plan_copies


def parts_of(whole_tensor, mesh_sizes, order):
    """Each coordinate's part, divided by `torch.chunk` in `order`: (mesh dimension, dimension of the tensor)."""
    parts = {}
    for coordinate in itertools.product(*map(range, mesh_sizes)):
        part = whole_tensor
        for mesh_dim, dim in order:
            chunks = torch.chunk(part, mesh_sizes[mesh_dim], dim)
            index = coordinate[mesh_dim]
            part = chunks[index] if index < len(chunks) else part.narrow(dim, 0, 0)
        parts[coordinate] = part
    return parts


def random_case(generator):
    """(shape, mesh sizes, splits as a DTensor has them, order in which the tensor is really divided)."""
    shape = tuple(generator.randrange(8) for _ in range(generator.randrange(1, 4)))
    mesh_sizes = [generator.randrange(1, 5) for _ in range(generator.randrange(1, 4))]
    dims = [generator.choice([None, *range(len(shape))]) for _ in mesh_sizes]
    splits = [Split(dim) for dim in dims]
    order = [(mesh_dim, dim) for mesh_dim, dim in enumerate(dims) if dim is not None]
    if len(dims) > 1 and dims[0] is not None:
        inner = math.prod(size for size, dim in zip(mesh_sizes[1:], dims[1:], strict=True) if dim == dims[0])
        if inner > 1:  # as FSDP2 divides what tensor parallelism has divided
            splits[0] = Split(dims[0], inner)
            order = [*order[1:], order[0]]
    return shape, mesh_sizes, splits, order


def test_a_part_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \[3, 4\], which its placements don't explain"):
        regions_of((8, 4), (3, 4), (2,), (0,), [Split(0)])


def random_tiling(generator, shape):
    """Boxes that cover a shape, cut again and again at random."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(generator.randrange(8)):
        offsets, sizes = boxes.pop(generator.randrange(len(boxes)))
        dim = generator.randrange(len(shape))
        cut = generator.randrange(sizes[dim] + 1)
        for begin, length in ((0, cut), (cut, sizes[dim] - cut)):
            if length:
                moved = tuple(o + begin * (d == dim) for d, o in enumerate(offsets))
                boxes.append((moved, tuple(length if d == dim else n for d, n in enumerate(sizes))))
    return boxes


def test_a_tiling_covers_once(fresh_seed):
    generator = random.Random(fresh_seed)
    for _ in range(300):
        shape = tuple(generator.randrange(1, 7) for _ in range(generator.randrange(1, 4)))
        boxes = random_tiling(generator, shape)
        generator.shuffle(boxes)
        assert is_tiled(shape, boxes)
        assert not is_tiled(shape, boxes[:-1])
        assert not is_tiled(shape, [*boxes, boxes[0]])
        if len(boxes) > 1 and boxes[0][1] == boxes[1][1]:
            assert not is_tiled(shape, [boxes[0], boxes[0], *boxes[2:]]), "as many elements, one box twice"


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_a_part_of_one_layout_is_copied_to_another(seed):
    """Whatever boxes and runs were saved, and whatever a rank holds now."""
    generator = random.Random(seed)
    shape, mesh_sizes, splits, order = random_case(generator)
    if not math.prod(shape):
        return
    numbers = torch.arange(math.prod(shape)).view(shape)
    if generator.random() < 0.5:
        cuts = sorted({0, numbers.numel(), *(generator.randrange(numbers.numel()) for _ in range(3))})
        parts = [Part("f", "k", begin, end - begin, 0) for begin, end in itertools.pairwise(cuts)]
    else:
        parts = [
            Part("f", "k", first_element(shape, offsets), math.prod(sizes), 0, sizes)
            for offsets, sizes in random_tiling(generator, shape)
        ]
    for coordinate, part in parts_of(numbers, mesh_sizes, order).items():
        layout = Layout(tuple(part.shape), tuple(regions_of(shape, tuple(part.shape), mesh_sizes, coordinate, splits)))
        memory = torch.full(part.shape, -1)
        for saved in parts:
            if saved.sizes is None:
                values = numbers.reshape(-1)[saved.start : saved.start + saved.numel]
            else:
                offsets = offsets_of(shape, saved.start)
                box = tuple(slice(o, o + n) for o, n in zip(offsets, saved.sizes, strict=True))
                values = numbers[box].reshape(-1)
            for copy in plan_copies(saved, shape, layout):
                copy.target(memory).copy_(copy.source(values))
        assert torch.equal(memory, part)
