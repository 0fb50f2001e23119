"""Draws by weight, batches by tokens: permutations, uniform, bounded."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, WeightedRandomSampler

from evenstep import DataLoader
from evenstep.data.order.max_tokens import TokenBatches, cut
from evenstep.data.order.weighted import WeightedOrder, Weights
from evenstep.errors import ConfigurationError, UsageError
from tests.stub_worlds import stub_world

# ---------------------------------------------------------------------- weights


def test_draws_follow_the_weights_and_any_of_them_can_be_had_alone() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 5.0, 0.0])
    order = WeightedOrder(Weights(weights), 200_000, seed=1, epoch=2)
    draws = order.at(torch.arange(200_000))
    counts = torch.bincount(draws, minlength=6).double()
    expected = weights.double() / 8 * 200_000
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert float(((counts - expected)[[1, 3, 4]] ** 2 / expected[[1, 3, 4]]).sum()) < 20  # chi-square, 2 degrees
    assert torch.equal(order.at(torch.tensor([7, 199_999])), draws[[7, 199_999]])
    assert not torch.equal(WeightedOrder(Weights(weights), 100, 1, 3).at(torch.arange(100)), draws[:100])


def test_weights_of_torchs_sampler_are_drawn_by_our_order() -> None:
    """On any ranks, also inside of torch's BatchSampler; more than 2**24 of them, which torch refuses."""
    sampler = WeightedRandomSampler([1, 2, 3, 4], 21)
    draws = WeightedOrder(Weights(torch.tensor([1, 2, 3, 4])), 21, seed=5).at(torch.arange(21)).tolist()
    for world_size in (1, 3):
        for arguments in (
            {"global_batch_size": 8, "sampler": sampler},
            {"batch_sampler": BatchSampler(sampler, 8, False)},
        ):
            worlds = [stub_world(rank, world_size) for rank in range(world_size)]
            loaders = [DataLoader(range(4), world=world, seed=5, **arguments) for world in worlds]
            batches = [torch.cat(shares) for shares in zip(*loaders, strict=True)]
            assert [len(batch) for batch in batches] == [8, 8, 5]
            assert torch.cat(batches).tolist() == draws
    assert "21 draws by weight of 4 samples" in repr(loaders[0])
    many = WeightedRandomSampler([1.0], 100)
    many.weights = torch.ones(2**24 + 5)
    assert int(next(iter(DataLoader(range(2**24 + 5), 10, sampler=many, world=stub_world()))).max()) < 2**24 + 5


def test_weights_may_change_between_epochs() -> None:
    """Each epoch is drawn by those at its beginning; a resume with others is refused."""
    sampler = WeightedRandomSampler([1.0, 0.0], 6)
    loader = DataLoader(range(2), 2, sampler=sampler, collate_fn=list, world=stub_world())
    assert list(loader) == [[0, 0]] * 3
    sampler.weights = torch.tensor([0.0, 1.0], dtype=torch.float64)
    iterator = iter(loader)
    assert next(iterator) == [1, 1]
    loader.commit()
    state = loader.state_dict()
    assert list(iterator) == [[1, 1]] * 2
    resumed = DataLoader(range(2), 2, sampler=sampler, collate_fn=list, world=stub_world())
    resumed.load_state_dict(state)
    assert list(resumed) == [[1, 1]] * 2
    sampler.weights = torch.tensor([1.0, 1.0], dtype=torch.float64)
    resumed.load_state_dict(state)
    with pytest.raises(UsageError, match="with other weights than the sampler has now"):
        next(iter(resumed))


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ([1.0, -1.0], r"weights\[1\] is -1.0"),
        ([1.0, float("nan")], r"weights\[1\] is nan"),
        ([0.0, 0.0], "add up to 0.0"),
        ([1.0], "1 weights and the data set 2 samples"),
    ],
)
def test_bad_weights(weights: list[float], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        DataLoader(range(2), 2, sampler=WeightedRandomSampler(weights, 3), world=stub_world())


# ---------------------------------------------------------------------- tokens


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=300), st.integers(30, 200), st.booleans())
def test_batches_of_tokens_keep_the_budget_and_lose_nothing(lengths: list[int], budget: int, shuffle: bool) -> None:
    given_lengths = torch.tensor(lengths)
    sampler = TokenBatches(given_lengths, budget, shuffle=shuffle, seed=1)
    sampler.set_epoch(2)
    batches = list(sampler)
    samples = list(chain.from_iterable(batches))
    assert sorted(samples) == list(range(len(lengths)))
    assert shuffle or samples == list(range(len(lengths)))
    assert len(sampler) == len(batches)
    for batch in batches:
        assert len(batch) * int(given_lengths[batch].max()) <= budget
    if not shuffle:
        for batch, after in pairwise(batches):  # as long as they can be
            assert (len(batch) + 1) * int(given_lengths[[*batch, after[0]]].max()) > budget


def test_cutting_looks_as_far_as_it_must() -> None:
    assert cut(torch.ones(1000, dtype=torch.int64), 999) == [999, 1]
    assert cut(torch.tensor([1] * 500 + [100]), 600) == [500, 1]
    assert cut(torch.tensor([5]), 5) == [1]
    largest = 2**63 - 1
    assert cut(torch.tensor([1, largest, largest // 2, largest // 2, 1]), largest) == [1, 1, 2, 1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"max_tokens": 10}, "max_tokens needs lengths"),
        ({"max_tokens": 10, "lengths": [1, 2]}, r"lengths of shape \[2\]"),
        ({"max_tokens": 10, "lengths": [1, 2, 0]}, "sample 2 has 0 tokens"),
        ({"max_tokens": 10, "lengths": [1, 20, 3]}, "sample 1 has 20 tokens; with max_tokens=10"),
        ({"max_tokens": 10, "lengths": [1.0, 2.0, 3.0]}, "float32"),
        ({"max_tokens": 10, "lengths": [1, 2, 3], "global_batch_size": 3}, "exclude each other"),
        ({"max_tokens": 10, "lengths": [1, 2, 3], "drop_last": True}, "drop_last=True"),
        ({"max_tokens": 0, "lengths": [1, 2, 3]}, "max_tokens=0"),
        ({"max_tokens": 10**30, "lengths": [1, 2, 3]}, "max_tokens=1000.* from 1 to 9223372036854775807"),
        ({"lengths": [1, 2, 3], "global_batch_size": 3}, "lengths= needs max_tokens"),
    ],
)
def test_bad_divisions(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        DataLoader(range(3), world=stub_world(), **arguments)


# ---------------------------------------------------------------------- epochs
