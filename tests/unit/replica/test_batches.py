"""Batches are divided without loss, and an empty one is replaced by a dummy batch."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigurationError
from evenstep.replica.batches import DummyBatch, is_empty_batch, split

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
    with pytest.raises(ConfigurationError, match="it has"):
        split(batch, 2)


def test_a_batch_is_empty_if_all_its_tensors_with_rows_are():
    assert is_empty_batch(("a", torch.tensor(1), {"x": torch.ones(0, 2)}, torch.ones(0)))
    assert not is_empty_batch((torch.ones(0, 2), {"ids": torch.ones(5)}))
    assert not is_empty_batch(("a", 3, torch.tensor(1)))
    assert is_empty_batch(torch.ones(4, 0), dim=1)


def test_a_dummy_batch_is_the_sample_remembered():
    dummy = DummyBatch()
    dummy.remember((torch.tensor([[7.0], [8.0], [9.0]]), torch.empty(0, 2)))
    one, other = dummy.build((torch.empty(0, 1), torch.empty(0, 2)))
    assert one.tolist() == [[7.0], [7.0]]
    assert other.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_without_a_sample_zeros_of_the_right_shape_are_the_dummy_batch():
    built = DummyBatch().build({"ids": torch.empty(0, 4, dtype=torch.int64), "flag": True})
    assert built["ids"].tolist() == [[0] * 4, [0] * 4]
    assert built["flag"] is True


def test_outputs_of_a_dummy_batch_have_no_rows_and_keep_their_graph():
    x = torch.ones(2, 3, requires_grad=True)
    rows, flat, number = DummyBatch().empty_outputs((x * 2, x.repeat(4, 1), x.sum()))
    assert rows.shape == flat.shape == (0, 3)
    assert rows.requires_grad
    assert flat.requires_grad
    assert number.dim() == 0


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
@pytest.mark.parametrize("dim", [0, 1])
def test_outputs_that_depend_on_rows_are_found_by_another_number_of_rows(num_rows, dim):
    def run(
        x,
    ):  # [n, 4, 3], or [4, n, 3]: as they are, flattened, a pair from each, against each other; a table, a loss
        rows = x.transpose(0, dim)
        return [x, x.reshape(-1, 3), {"pairs": rows[::2]}, rows[:, 0] @ rows[:, 0].T, torch.ones(6, 6), x.sum()]

    dummy = DummyBatch(dim)
    x = torch.ones(num_rows, 4, 3).transpose(0, dim)
    dummy.remember(x)
    dummy.remember_outputs(run(x))
    built = dummy.build(x.narrow(dim, 0, 0))
    assert built.shape[dim] not in (0, 1, num_rows)
    same, flat, pairs, square, table, loss = dummy.empty_outputs(run(built))
    assert same.shape == x.narrow(dim, 0, 0).shape
    assert flat.shape == (0, 3)
    assert pairs["pairs"].numel() == 0 or len(built.transpose(0, dim)[::2]) == len(x.transpose(0, dim)[::2])
    assert 0 in square.shape
    assert table.shape == (6, 6)
    assert loss.dim() == 0
