"""Layouts cover each element once, respect their caps, and follow the order they were given."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigurationError
from evenstep.replica.gradients.buckets.layout import BucketPolicy, ParameterSpec, plan_layout

CPU = torch.device("cpu")
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
specs = st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=40).map(
    lambda pairs: [ParameterSpec(f"p{i}", shape, dtype, CPU) for i, (shape, dtype) in enumerate(pairs)]
)
policies = st.builds(BucketPolicy, st.lists(st.integers(1, 5000), min_size=1, max_size=4).map(tuple))


@given(specs, policies, st.randoms())
def test_a_layout_covers_each_parameter_once_without_overlap(specs, policy, random):
    order = random.sample(range(len(specs)), len(specs))
    layout = plan_layout(specs, order, policy)
    seen = [slot.parameter for bucket in layout.buckets for slot in bucket.slots]
    assert sorted(seen) == list(range(len(specs)))
    for bucket in layout.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset_numel >= end
            assert slot.offset_numel * bucket.dtype.itemsize % 64 == 0
            assert slot.numel == specs[slot.parameter].numel
            assert specs[slot.parameter].dtype == bucket.dtype
            assert layout.bucket_of[slot.parameter] == bucket.index
            end = slot.offset_numel + slot.numel
        assert end <= bucket.numel


@given(specs, policies, st.randoms())
def test_only_the_last_parameter_may_exceed_its_cap_from_before_its_half(specs, policy, random):
    order = random.sample(range(len(specs)), len(specs))
    for bucket in plan_layout(specs, order, policy).buckets:
        cap, last = max(policy.caps_bytes), bucket.slots[-1].offset_numel * bucket.dtype.itemsize
        assert 2 * last < cap or bucket.numel * bucket.dtype.itemsize <= cap


@given(specs, policies, st.randoms())
def test_buckets_come_in_the_order_in_which_they_fill(specs, policy, random):
    order = random.sample(range(len(specs)), len(specs))
    turn = {parameter: i for i, parameter in enumerate(order)}
    layout = plan_layout(specs, order, policy)
    fills_at = [max(turn[slot.parameter] for slot in bucket.slots) for bucket in layout.buckets]
    assert fills_at == sorted(fills_at)
    for bucket in layout.buckets:
        turns = [turn[slot.parameter] for slot in bucket.slots]
        assert turns == sorted(turns)


def test_the_first_bucket_is_small_and_the_others_are_larger():
    specs = [ParameterSpec(f"p{i}", (1024,), torch.float32, CPU) for i in range(20)]
    layout = plan_layout(specs, range(19, -1, -1), BucketPolicy((4096, 16384)))
    assert [len(bucket.slots) for bucket in layout.buckets] == [1, 4, 4, 4, 4, 3]
    assert layout.buckets[0].slots[0].parameter == 19


def test_a_bias_travels_with_the_weight_that_comes_next():
    """By itself it would leave the weight, larger than the first bucket's cap, to wait for the whole next bucket."""
    specs = [ParameterSpec(f"p{i}", shape, torch.float32, CPU) for i, shape in enumerate([(2000,), (9,)] * 2)]
    layout = plan_layout(specs, range(3, -1, -1), BucketPolicy((4096, 65536)))
    assert [[slot.parameter for slot in bucket.slots] for bucket in layout.buckets] == [[3, 2], [1, 0]]


@pytest.mark.parametrize("caps", [(0, 1), (1, 0), (-1, 5), ()])
def test_a_bucket_without_room_is_refused(caps):
    with pytest.raises(ConfigurationError, match="greater than 0"):
        BucketPolicy(caps)
