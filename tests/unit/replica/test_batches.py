"""Batches are divided without loss, and an empty one finds a stand-in."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigurationError
from evenstep.replica.batches import StandIn, batch_length, split

Pair = namedtuple("Pair", "x y")


@given(st.integers(0, 30), st.integers(1, 12))
def test_parts_put_together_are_the_batch(length, num_parts):
    batch = {"x": torch.randn(length, 3), "pair": Pair(torch.arange(length), ["text", torch.tensor(7)])}
    parts = split(batch, num_parts)
    assert len(parts) == min(length, num_parts)
    lengths = [len(part["x"]) for part in parts]
    assert sum(lengths) == length
    assert not lengths or max(lengths) - min(lengths) <= 1
    if parts:
        assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
        assert torch.equal(torch.cat([part["pair"].x for part in parts]), batch["pair"].x)
        assert all(part["pair"].y[0] == "text" and part["pair"].y[1] == 7 for part in parts)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_a_number_of_parts_that_is_none_is_refused(n):
    with pytest.raises(ConfigurationError, match="microbatches: n="):
        split(torch.ones(4), n)


@pytest.mark.parametrize("batch", [(torch.ones(3), torch.ones(4)), "text", (), torch.tensor(1.0)])
def test_a_batch_that_cannot_be_divided_is_refused(batch):
    with pytest.raises(ConfigurationError, match="the batch has"):
        split(batch, 2)


def test_a_batch_without_samples_is_told_what_one_is():
    with pytest.raises(ConfigurationError) as refused:
        split(torch.tensor(1.0), 2)
    assert str(refused.value) == (
        "microbatches: the batch has no tensor with a first dimension. It is divided along the first dimension, which "
        "counts its samples: pass a tensor, or a list, tuple or dictionary of tensors with as many."
    )


def test_the_length_of_a_batch_is_that_of_its_first_tensor():
    assert batch_length(("a", torch.tensor(1), {"x": torch.ones(5, 2)}, torch.ones(3))) == 5
    assert batch_length(("a", 3)) is None


def test_a_stand_in_is_the_first_sample_seen():
    stand_in = StandIn()
    stand_in.remember((torch.tensor([[7.0], [8.0]]),))
    stand_in.remember((torch.tensor([[9.0]]),))
    (built,) = stand_in.build((torch.empty(0, 1),))
    assert built.tolist() == [[7.0], [7.0]]


def test_without_a_sample_zeros_of_the_right_shape_stand_in():
    built = StandIn().build({"ids": torch.empty(0, 4, dtype=torch.int64), "flag": True})
    assert built["ids"].tolist() == [[0] * 4, [0] * 4]
    assert built["flag"] is True


def test_outputs_of_a_stand_in_have_no_rows_and_keep_their_graph():
    x = torch.ones(2, 3, requires_grad=True)
    rows, number = StandIn().empty_outputs((x * 2, x.sum()))
    assert rows.shape == (0, 3)
    assert rows.requires_grad
    assert number.dim() == 0
