"""The arithmetic of reductions: slices, the tree over ranks, precision."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigurationError
from evenstep.transport.base import Row
from evenstep.transport.core.reduction import Scratch, divisor_of, plan_arithmetic, plan_slices, plan_tree, reduce_into

NUMEL = 300_001  # more than a block of sums


@given(st.integers(0, 100_000), st.integers(1, 70), st.sampled_from([1, 2, 4, 8, 16]))
def test_slices_cover_each_element_once_and_share_no_cache_line(numel, num_slices, itemsize):
    slices = plan_slices(numel, num_slices, itemsize)
    assert len(slices) == num_slices
    position = 0
    for begin, end in slices:
        assert begin == position or begin == end == numel
        assert begin == numel or begin * itemsize % 64 == 0
        position = max(position, end)
    assert position == numel


@given(st.integers(1, 64))
def test_the_tree_adds_every_rank_once_and_is_shallow(num_ranks):
    depth = [0] * num_ranks
    members = [{rank} for rank in range(num_ranks)]
    for a, b in plan_tree(num_ranks):
        assert members[a].isdisjoint(members[b])
        members[a] |= members[b]
        depth[a] = max(depth[a], depth[b]) + 1
    assert members[0] == set(range(num_ranks))
    assert depth[0] == (num_ranks - 1).bit_length()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_sums_are_rounded_once(dtype, num_ranks):
    inputs = [torch.randn(NUMEL).to(dtype) for _ in range(num_ranks)]
    outputs = [torch.empty(NUMEL, dtype=dtype) for _ in range(2)]
    reduce_into(outputs, inputs, plan_arithmetic("sum", dtype), Scratch())
    partial = [each.float() for each in inputs]
    for a, b in plan_tree(num_ranks):
        partial[a] = partial[a] + partial[b]
    for output in outputs:
        assert torch.equal(output, partial[0].to(dtype))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 300])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_means_of_integers_are_what_nccl_gives(dtype, num_ranks, fresh_seed):
    """The sum in the tensor's dtype, as it overflows there, divided towards zero; more ranks than a byte counts."""
    info, generator = torch.iinfo(dtype), torch.Generator().manual_seed(fresh_seed)
    draw = (max(info.min, -(1 << 60)), min(info.max, 1 << 60))
    inputs = [torch.randint(*draw, (50,), dtype=dtype, generator=generator) for _ in range(num_ranks)]
    inputs[0][:2] = torch.tensor([info.max, info.min], dtype=dtype)
    outputs = [torch.empty(50, dtype=dtype) for _ in range(2)]
    reduce_into(outputs, inputs, plan_arithmetic("mean", dtype), Scratch(), divisor=num_ranks)
    expected = []
    for column in zip(*(each.tolist() for each in inputs), strict=True):
        total = (sum(column) - info.min) % (1 << info.bits) + info.min
        expected.append(abs(total) // num_ranks * (-1 if total < 0 else 1))
    assert [each.tolist() for each in outputs] == [expected] * 2


@pytest.mark.parametrize(
    ("op", "dtype", "words"),
    [
        ("average", torch.float32, "there are sum, mean"),
        ("max", torch.complex64, "no order"),
        ("band", torch.float32, "integers and bool"),
        ("mean", torch.uint32, "torch divides no uint32"),
        ("mean", torch.bool, "neither true nor false"),
        ("sum", torch.float8_e5m2, "8-bit floats"),
    ],
)
def test_what_has_no_meaning_is_refused(op, dtype, words):
    with pytest.raises(ConfigurationError, match=words):
        plan_arithmetic(op, dtype)


@pytest.mark.parametrize(
    ("rows", "divisor"),
    [
        ([Row(3.0, 1.0, 0.0), Row(0.5, 1.0, 0.0)], 3.5),
        ([Row(3.0, 1.0, 0.0), Row()], 3.0),
        ([Row(0.0, 1.0, 0.0), Row()], math.inf),
        ([Row(0.0, 0.0, 1.0), Row(0.0, 0.0, 1.0), Row()], 7.0),
        ([Row(), Row()], 7.0),
    ],
)
def test_a_divisor_is_the_sum_of_weights_or_what_is_named(rows: list[Row], divisor: float) -> None:
    """Weighted; beside a rank without samples; no weight at all; plain; nothing."""
    assert divisor_of(rows, 7.0) == divisor


def test_weights_are_added_in_the_order_of_all_sums(fresh_seed: int) -> None:
    """So two ranks with half the rows each, added first, have the divisor of all: reproducible mode needs that."""
    shared = random.Random(fresh_seed)
    rows = [Row(10 ** shared.uniform(-12, 12), 1.0, 0.0) for _ in range(64)]
    halves = [Row(divisor_of(half, 1.0), 1.0, 0.0) for half in (rows[:32], rows[32:])]
    assert divisor_of(halves, 1.0) == divisor_of(rows, 1.0)
    assert divisor_of(rows, 1.0) == pytest.approx(math.fsum(row.weight for row in rows), rel=1e-15)
