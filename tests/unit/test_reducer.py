"""The state machine launches every bucket once, in order, whatever order gradients come in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.replica.reducer import BucketState, LaunchReduce, Reducer, ReducerStateError


@given(st.integers(1, 30), st.randoms(), st.floats(0, 1))
def test_every_bucket_is_launched_once_and_in_order(num_buckets, random, fraction_complete):
    reducer = Reducer(num_buckets)
    for _ in range(3):  # a reducer is used again and again
        complete = [i for i in range(num_buckets) if random.random() <= fraction_complete]
        random.shuffle(complete)
        launched = []
        for turn, bucket in enumerate(complete):
            for action in reducer.complete(bucket):
                assert action.bucket in complete[: turn + 1]
                launched.append(action.bucket)
        launched += [action.bucket for action in reducer.finish()]
        assert launched == list(range(num_buckets))
        for bucket in launched:
            assert reducer.state(bucket) is BucketState.REDUCING
            reducer.arrived(bucket)
        reducer.reset()


def test_a_bucket_that_fills_early_waits_for_its_turn():
    reducer = Reducer(2)
    assert list(reducer.complete(1)) == []
    assert reducer.state(1) is BucketState.READY
    assert list(reducer.complete(0)) == [LaunchReduce(0), LaunchReduce(1)]


@given(st.integers(1, 10), st.randoms())
def test_the_last_bucket_is_kept_for_the_end_of_the_pass(num_buckets, random):
    reducer = Reducer(num_buckets, keeps_last=True)
    for _ in range(2):
        order = random.sample(range(num_buckets), num_buckets)
        early = [action.bucket for bucket in order for action in reducer.complete(bucket)]
        assert early == list(range(num_buckets - 1))
        assert list(reducer.finish()) == [LaunchReduce(num_buckets - 1)]
        for bucket in range(num_buckets):
            reducer.arrived(bucket)
        reducer.reset()


def test_an_event_that_the_table_does_not_know_is_an_error():
    reducer = Reducer(1)
    with pytest.raises(ReducerStateError, match="ARRIVE while FILLING"):
        reducer.arrived(0)
    reducer.finish()
    with pytest.raises(ReducerStateError, match="RESET while REDUCING"):
        reducer.reset()
    with pytest.raises(ReducerStateError, match="COMPLETE while REDUCING"):
        reducer.complete(0)


def test_its_text_shows_its_state():
    assert repr(Reducer(2)) == "<Reducer next 0/2: FILLING FILLING>"
