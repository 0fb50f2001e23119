"""Objects survive the trip without pickle, and what can't travel is named."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigurationError
from evenstep.transport.core.codec import decode, encode, to_bytes, to_tensor

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(plain)
def test_plain_data_comes_back_equal(value):
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex128]
)
def test_tensors_come_back_with_dtype_and_shape(dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    back = decode(encode({"a": [tensor, tensor.T], "~b": (torch.tensor(1.5), torch.empty(0, 2))}))
    assert back["a"][0].dtype == dtype
    assert torch.equal(back["a"][0], tensor)
    assert torch.equal(back["a"][1], tensor.T)
    assert back["~b"][0] == 1.5
    assert back["~b"][1].shape == (0, 2)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {2}]}, r"object\['a'\]\[1\] is a builtins.set"),
        ({1: 2}, "key 1 of type int"),
        (lambda: 0, "builtins.function"),
        (torch.eye(2).to_sparse(), "sparse"),
    ],
)
def test_what_cannot_travel_is_named_with_its_path(value, path):
    with pytest.raises(ConfigurationError, match=path):
        encode(value)


@given(st.binary(max_size=100))
def test_bytes_to_tensor_and_back(data):
    assert to_bytes(to_tensor(data)) == data
