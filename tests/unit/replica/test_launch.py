"""Every bucket is launched once, in order, whatever order gradients come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.replica.gradients.buckets.launch import LaunchOrder, LaunchOrderError


@given(st.integers(1, 30), st.randoms(), st.floats(0, 1), st.booleans())
def test_every_bucket_is_launched_once_and_in_order(num_buckets, random, fraction_complete, keeps_last):
    order = LaunchOrder(num_buckets, keeps_last=keeps_last)
    for _ in range(3):  # it is used again and again
        complete = [i for i in range(num_buckets) if random.random() <= fraction_complete]
        random.shuffle(complete)
        launched = []
        for turn, bucket in enumerate(complete):
            for launch in order.complete(bucket):
                assert launch in complete[: turn + 1]
                assert not (keeps_last and launch == num_buckets - 1), "it is kept for the end of the pass"
                launched.append(launch)
            assert order.num_launched == len(launched)
        launched += order.finish()
        assert launched == list(range(num_buckets))
        assert order.num_launched == num_buckets
        with pytest.raises(LaunchOrderError, match="for the second time"):
            order.complete(0)
        order.reset()
