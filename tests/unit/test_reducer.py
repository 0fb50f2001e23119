"""The state machine launches every bucket once, in order, whatever order gradients come in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.replica.layout import BucketPolicy, ParameterSpec, plan_layout
from evenstep.replica.reducer import BucketState, LateGradientError, LaunchReduce, Reducer, ReducerStateError


def make_layout(num_parameters, cap_bytes=256):
    specs = [ParameterSpec(f"p{i}", (16,), torch.float32, torch.device("cpu")) for i in range(num_parameters)]
    return plan_layout(specs, range(num_parameters), BucketPolicy(cap_bytes, cap_bytes))


@given(st.integers(1, 30), st.integers(64, 600), st.randoms(), st.floats(0, 1))
def test_every_bucket_is_launched_once_and_in_order(num_parameters, cap_bytes, random, fraction_used):
    layout = make_layout(num_parameters, cap_bytes)
    reducer = Reducer(layout)
    for _ in range(3):  # a reducer is used again and again
        used = [i for i in range(num_parameters) if random.random() <= fraction_used]
        random.shuffle(used)
        launched = []
        ready = set()
        for parameter in used:
            ready.add(parameter)
            for action in reducer.gradient_ready(parameter):
                assert {slot.parameter for slot in layout.buckets[action.bucket].slots} <= ready
                launched.append(action.bucket)
        launched += [action.bucket for action in reducer.finish()]
        assert launched == list(range(len(layout.buckets)))
        assert reducer.ready_order == used
        for bucket in launched:
            assert reducer.state(bucket) is BucketState.REDUCING
            reducer.arrived(bucket)
        reducer.reset()


def test_a_bucket_that_fills_early_waits_for_its_turn():
    reducer = Reducer(make_layout(4, cap_bytes=128))  # buckets (0, 1) and (2, 3)
    assert reducer.gradient_ready(2) == ()
    assert list(reducer.gradient_ready(3)) == []
    assert reducer.state(1) is BucketState.READY
    assert reducer.gradient_ready(1) == ()
    assert list(reducer.gradient_ready(0)) == [LaunchReduce(0), LaunchReduce(1)]


def test_a_second_gradient_is_ignored_while_the_bucket_fills_and_refused_once_it_travels():
    reducer = Reducer(make_layout(2, cap_bytes=128))
    reducer.gradient_ready(0)
    assert reducer.gradient_ready(0) == ()
    assert list(reducer.gradient_ready(1)) == [LaunchReduce(0)]
    with pytest.raises(LateGradientError) as error:
        reducer.gradient_ready(0)
    assert error.value.parameter == 0


def test_an_event_that_the_table_does_not_know_is_an_error():
    reducer = Reducer(make_layout(2, cap_bytes=128))
    with pytest.raises(ReducerStateError, match="ARRIVE while FILLING"):
        reducer.arrived(0)
    reducer.finish()
    with pytest.raises(ReducerStateError, match="RESET while REDUCING"):
        reducer.reset()


def test_its_text_shows_its_state():
    assert repr(Reducer(make_layout(4, cap_bytes=128))) == "<Reducer next 0/2: FILLING FILLING>"
