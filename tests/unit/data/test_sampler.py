"""`DistributedSampler` against torch's: same lengths, same padding, an order of its own."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

import evenstep
from evenstep import DistributedSampler
from evenstep.data.order.permutation import EpochOrder
from evenstep.errors import ConfigurationError, UsageError

sizes = st.integers(0, 200)
world_sizes = st.integers(1, 7)


@settings(max_examples=200, deadline=None)
@given(sizes, world_sizes, st.booleans())
def test_without_shuffling_it_is_torchs_sampler_to_the_index(size: int, world_size: int, drop_last: bool) -> None:
    """Which shows padding and dropping too."""
    for rank in range(world_size):
        arguments = {"num_replicas": world_size, "rank": rank, "shuffle": False, "drop_last": drop_last}
        ours, theirs = DistributedSampler(range(size), **arguments), TorchDistributedSampler(range(size), **arguments)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)
        names = ("num_samples", "total_size", "num_replicas", "rank", "epoch", "seed", "shuffle", "drop_last")
        assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 500), world_sizes, st.booleans(), st.integers(0, 5))
def test_shuffled_shares_are_the_epochs_order_dealt_in_turn(
    size: int, world_size: int, drop_last: bool, epoch: int
) -> None:
    order = EpochOrder(size, seed=4, epoch=epoch).slice(0, size).tolist()
    for rank in range(world_size):
        sampler = DistributedSampler(range(size), world_size, rank, seed=4, drop_last=drop_last)
        sampler.set_epoch(epoch)
        dealt = (order * world_size)[: sampler.total_size][rank::world_size]
        assert list(sampler) == dealt
        assert len(dealt) == len(sampler)


def test_crossing_its_chunks_loses_nothing() -> None:
    size = 40_000
    shares = [list(DistributedSampler(range(size), 2, rank)) for rank in range(2)]
    assert sorted(shares[0] + shares[1]) == list(range(size))


# ---------------------------------------------------------------------- what torch's doesn't have


def test_a_forgotten_set_epoch_is_said_once_and_on_one_rank() -> None:
    samplers = [DistributedSampler(range(20), 2, rank) for rank in range(2)]
    first = [list(sampler) for sampler in samplers]
    with pytest.warns(
        UserWarning, match=r"epoch 0 begins for the second time, in the same order. Call sampler.set_epoch"
    ):
        assert list(samplers[0]) == first[0]
    assert list(samplers[0]) == first[0], "not twice"
    assert list(samplers[1]) == first[1], "not on rank 1"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), world_sizes, st.booleans())
def test_without_padding_every_sample_comes_once(size: int, world_size: int, shuffle: bool) -> None:
    samplers = [DistributedSampler(range(size), world_size, rank, shuffle, pad=False) for rank in range(world_size)]
    shares = [list(sampler) for sampler in samplers]
    assert sorted(sample for share in shares for sample in share) == list(range(size))
    assert [len(sampler) for sampler in samplers] == [len(share) for share in shares]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 200), world_sizes, world_sizes, st.integers(0, 100), st.booleans())
def test_a_sampler_resumes_on_any_ranks(size: int, before: int, after: int, stop: int, pad: bool) -> None:
    firsts = [DistributedSampler(range(size), before, rank, seed=1, pad=pad) for rank in range(before)]
    stop = min(stop, *map(len, firsts))
    seen, states = [], []
    for sampler in firsts:
        sampler.set_epoch(2)
        iterator = iter(sampler)
        seen += [next(iterator) for _ in range(stop)]
        states.append(sampler.state_dict())
        assert sampler.state_dict(consumed=stop) == states[-1]
    assert all(state == states[0] for state in states)
    seconds = [DistributedSampler(range(size), after, rank, seed=1, pad=pad) for rank in range(after)]
    shares = []
    for sampler in seconds:
        sampler.load_state_dict(states[0])
        assert sampler.state_dict() == states[0]
        sampler.set_epoch(2)
        shares.append(list(sampler))
        ended = {**states[0], "position": size}
        assert sampler.state_dict() == sampler.state_dict(len(shares[-1])) == ended, "the same on all ranks"
    rest = [sample for share in shares for sample in share]
    assert set(seen) | set(rest) == set(range(size))
    if pad:
        assert len({len(share) for share in shares}) == 1
    else:
        assert sorted(seen + rest) == list(range(size))
    for sampler in seconds:
        sampler.set_epoch(2)
        assert len(list(sampler)) == len(sampler), "the next iteration is whole again"
        sampler.load_state_dict(states[0])
        sampler.set_epoch(3)
        assert len(list(sampler)) == len(sampler), "another epoch begins at its beginning"


@pytest.mark.parametrize("size", [7, 11])
def test_a_data_set_that_changed_its_length(size: int) -> None:
    """Else it would repeat samples, or never give the new ones, without a word."""
    samples = list(range(9))
    sampler = DistributedSampler(samples, 2, 1)
    samples[:] = range(size)
    with pytest.raises(UsageError, match=f"on rank 1: the data set had 9 samples when .* made and has {size} now"):
        iter(sampler)


def test_states_of_other_samplers_are_refused() -> None:
    state = DistributedSampler(range(20), 2, 0).state_dict()
    for other in (DistributedSampler(range(21), 2, 0), DistributedSampler(range(20), 2, 0, seed=1)):
        with pytest.raises(ConfigurationError, match="can't be distinguished from the used ones"):
            other.load_state_dict(state)


def test_without_ranks_it_takes_the_current_worlds() -> None:
    sampler = DistributedSampler(range(10))
    assert (sampler.rank, sampler.num_replicas) == (0, 1)
    with evenstep.init(device="cpu", quiet=True):
        assert len(DistributedSampler(range(10))) == 10


class _Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((range(10), 2, 2), "rank=2 of num_replicas=2; ranks are 0 to 1"),
        ((range(10), 2, -1), "rank=-1 of num_replicas=2"),
        ((range(10), 0, 0), "num_replicas=0; a whole number, at least 1"),
        ((range(10), 2.0, 0), "num_replicas=2.0; a whole number"),
        ((range(10), 2, True), "rank=True; a whole number"),
        ((_Stream(), 2, 0), "_Stream has no numbered samples"),
        ((iter([]), 2, 0), "list_iterator has no numbered samples"),
    ],
)
def test_bad_arguments(arguments: tuple[object, ...], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        DistributedSampler(*arguments)
    assert issubclass(ConfigurationError, ValueError), "scripts that catch torch's ValueError"
