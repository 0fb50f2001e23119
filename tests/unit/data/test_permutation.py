"""The order of an epoch: a permutation, keyed, uniform, and never stored; and its division into global batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenstep.data.order import permutation as order_module
from evenstep.data.order.permutation import EpochOrder
from evenstep.errors import ConfigurationError

# Seeds are fixed, so these tests can't flake; the bound is five standard deviations from what chance gives.
_NUM_DEVIATIONS = 5.0


def _epoch(num_samples: int, seed: int = 0, epoch: int = 0) -> Tensor:
    return EpochOrder(num_samples, seed, epoch).slice(0, num_samples)


def _assert_uniform(cells: Tensor, num_cells: int, *, deviations: float = _NUM_DEVIATIONS) -> None:
    """Chi-square: neither too uneven nor too even. Its mean is df and its variance 2 * df."""
    expected = len(cells) / num_cells
    assert expected >= 20, "too few draws for the approximation"
    statistic = float(((torch.bincount(cells, minlength=num_cells) - expected) ** 2 / expected).sum())
    freedom = num_cells - 1
    assert abs(statistic - freedom) < deviations * (2 * freedom) ** 0.5, f"chi-square {statistic:.1f} for df {freedom}"


# ---------------------------------------------------------------------- a permutation


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.integers(0, 10_000))
def test_is_a_permutation_for_any_size_seed_and_epoch(num_samples: int, seed: int, epoch: int) -> None:
    assert torch.equal(_epoch(num_samples, seed, epoch).sort().values, torch.arange(num_samples))


def test_the_network_alone_permutes_the_smallest_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sets normally take the other path; the network has its corners there (sides of 1, long walks)."""
    monkeypatch.setattr(order_module, "_LARGEST_SORTED", 0)
    for num_samples in range(1, 301):
        assert torch.equal(_epoch(num_samples).sort().values, torch.arange(num_samples)), num_samples


@pytest.mark.parametrize("num_samples", [10**6 + 3, 10**12, 10**12 + 39, 2**61 - 1])
def test_large_sets_have_no_duplicates_and_stay_in_range(num_samples: int) -> None:
    generator = torch.Generator().manual_seed(1)
    ends = torch.cat([torch.arange(1000), torch.arange(num_samples - 1000, num_samples)])
    positions = torch.cat([ends, torch.randint(num_samples, (100_000,), generator=generator)]).unique()
    samples = EpochOrder(num_samples, seed=3, epoch=4).at(positions)
    assert int(samples.min()) >= 0
    assert int(samples.max()) < num_samples
    assert len(samples.unique()) == len(positions)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_slice_does_not_depend_on_how_it_is_asked_for(data: st.DataObject) -> None:
    num_samples = data.draw(st.integers(1, 80_000))
    start = data.draw(st.integers(0, num_samples))
    stop = data.draw(st.integers(start, num_samples))
    order = EpochOrder(num_samples, seed=5, epoch=6)
    assert torch.equal(order.slice(start, stop), _epoch(num_samples, 5, 6)[start:stop])
    if stop > start:
        assert int(order.at(torch.tensor(start))) == int(order.slice(start, start + 1)[0])


def test_the_order_is_pinned() -> None:
    """A checkpoint says (seed, epoch, position): another order would resume on the wrong samples without a sound."""
    assert EpochOrder(10, seed=1, epoch=2).slice(0, 10).tolist() == [9, 1, 5, 6, 7, 3, 4, 2, 8, 0]
    assert EpochOrder(1000, seed=1, epoch=2).slice(0, 5).tolist() == [362, 206, 389, 875, 438]
    assert EpochOrder(10**12, seed=1, epoch=2).slice(0, 3).tolist() == [825194048969, 528968624121, 402064083804]


@pytest.mark.parametrize("num_samples", [257, 1000, 10**6, 2**31 - 1])
def test_words_of_32_and_of_64_bits_give_the_same_order(num_samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.cat([torch.arange(200), torch.arange(num_samples - 50, num_samples)])
    order = EpochOrder(num_samples, seed=num_samples + 1, epoch=3)
    narrow = order.at(positions)
    monkeypatch.setattr(order_module, "_LARGEST_NARROW", 0)
    assert torch.equal(order.at(positions), narrow)
    assert torch.equal(positions[:3], torch.arange(3)), "what is asked stays as it is"


def test_positions_outside_of_the_epoch_are_refused() -> None:
    for order in (EpochOrder(10), EpochOrder(1000), EpochOrder(10, shuffle=False)):
        for positions in ([-1], [0, order.num_samples]):
            with pytest.raises(IndexError, match=f"epoch of {order.num_samples} samples"):
                order.at(torch.tensor(positions))
        assert order.slice(3, 3).tolist() == []
    assert EpochOrder(0).slice(0, 0).dtype == torch.int64
    for size in (-1, 2**61):
        with pytest.raises(ConfigurationError, match="num_samples"):
            EpochOrder(size)


# ---------------------------------------------------------------------- uniform


@pytest.mark.parametrize("num_samples", [300_000, 10**9])
@pytest.mark.parametrize("lag", [1, 2, 7, 548])
def test_neighbours_in_the_order_are_unrelated(num_samples: int, lag: int) -> None:
    """Serial tests: pairs over a grid of cells, and the distances between neighbours."""
    samples = EpochOrder(num_samples, seed=9, epoch=1).slice(0, 100_000)
    before, after = samples[:-lag], samples[lag:]
    _assert_uniform((before * 16 // num_samples) * 16 + after * 16 // num_samples, 256)
    _assert_uniform((after - before) % num_samples * 100 // num_samples, 100)


# ---------------------------------------------------------------------- global batches
