"""Every bucket is launched once, in order, whatever order gradients come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.replica.gradients.buckets.launch import LaunchOrder, LaunchOrderError


@given(st.integers(1, 30), st.randoms(), st.floats(0, 1))
def test_every_bucket_is_launched_once_and_in_order(num_buckets, random, fraction_complete):
    order = LaunchOrder(num_buckets)
    for _ in range(3):  # it is used again and again
        complete = [i for i in range(num_buckets) if random.random() <= fraction_complete]
        random.shuffle(complete)
        launched = []
        for turn, bucket in enumerate(complete):
            for launch in order.complete(bucket):
                assert launch in complete[: turn + 1]
                launched.append(launch)
            assert order.num_launched == len(launched)
        launched += order.finish()
        assert launched == list(range(num_buckets))
        assert order.num_launched == num_buckets
        order.reset()


@given(st.integers(1, 10), st.randoms())
def test_the_last_bucket_is_kept_for_the_end_of_the_pass(num_buckets, random):
    order = LaunchOrder(num_buckets, keeps_last=True)
    for _ in range(2):
        shuffled = random.sample(range(num_buckets), num_buckets)
        early = [launch for bucket in shuffled for launch in order.complete(bucket)]
        assert early == list(range(num_buckets - 1))
        assert list(order.finish()) == [num_buckets - 1]
        order.reset()


def test_what_cannot_happen_is_an_error():
    order = LaunchOrder(2, keeps_last=True)
    order.complete(1)
    with pytest.raises(LaunchOrderError, match="bucket 1 is complete for the second time"):
        order.complete(1)
    order.finish()
    with pytest.raises(LaunchOrderError, match="bucket 0 is complete for the second time"):
        order.complete(0)
    with pytest.raises(LaunchOrderError, match="ends for the second time"):
        order.finish()
