"""`DataLoader` and `DistributedSampler` on real ranks: nothing twice, nothing missing, the same steps everywhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import evenstep
from evenstep import DataLoader, DistributedSampler
from evenstep.errors import ConfigurationError, MismatchError
from evenstep.testing import RankPool

SIZES = pytest.mark.parametrize("nproc", [2, 3])


def epochs_of(size: int, batch: int, num_workers: int) -> list[list[list[int]]]:
    """What this rank sees in three epochs, step by step."""
    evenstep.init(quiet=True)
    dataset = TensorDataset(torch.arange(float(size)).reshape(-1, 1), torch.arange(size))
    # A rank of the pool was itself started with "spawn", which its children would inherit: seconds for each worker.
    context = "fork" if num_workers else None
    loader = DataLoader(dataset, batch, shuffle=True, num_workers=num_workers, multiprocessing_context=context, seed=1)
    seen = []
    for _ in loader.epochs(3):
        steps = []
        for x, y in loader:
            assert x.shape == (len(y), 1)
            assert x.flatten().tolist() == y.tolist()
            steps.append(y.tolist())
        assert len(steps) == len(loader)
        seen.append(steps)
    return seen


def _joined(of_ranks: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    return [
        [list(chain.from_iterable(shares)) for shares in zip(*steps_of_ranks, strict=True)]
        for steps_of_ranks in zip(*of_ranks, strict=True)
    ]


@SIZES
@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_see_the_batches_of_one_process_and_every_sample_once(
    ranks: RankPool, nproc: int, num_workers: int
) -> None:
    """The last global batch has one sample, so one rank or two have none of it."""
    joined = _joined(ranks.run(epochs_of, nproc, 41, 8, num_workers))
    assert joined == _joined(ranks.run(epochs_of, 1, 41, 8, 0))
    for epoch in joined:
        assert sorted(chain.from_iterable(epoch)) == list(range(41))


def error_of(make: Callable[[int], Any]) -> tuple[str, str, float]:
    """Type and text of the error that a rank meets; the ranks still understand each other afterwards."""
    world = evenstep.init(quiet=True)
    try:
        make(world.rank)
    except evenstep.EvenstepError as error:
        return type(error).__name__, str(error), world.mean(float(world.rank))
    raise AssertionError("no error")


def longer_on_rank_1(rank: int) -> None:
    DataLoader(range(10 + (rank == 1)), 4)


def seeded_by_rank(rank: int) -> None:
    DataLoader(range(10), 4, shuffle=True, seed=rank)


def empty_on_the_last_rank(rank: int) -> None:
    DataLoader(range(10) if rank == 0 else [], 4)


def batch_of_one(rank: int) -> None:
    DataLoader(range(10), 1)


@SIZES
@pytest.mark.parametrize(
    ("make", "kind", "told"),
    [
        (longer_on_rank_1, MismatchError, "the length of the data set is 10 on rank 0 and 11 on rank 1"),
        (seeded_by_rank, MismatchError, "seed is 0 on rank 0 and 1 on rank 1"),
        (empty_on_the_last_rank, ConfigurationError, "on rank 1: the data set (list) is empty"),
        (batch_of_one, ConfigurationError, "DataLoader: global_batch_size=1 is smaller than the number of ranks"),
    ],
)
def test_a_mistake_is_raised_on_all_ranks_with_one_text(
    ranks: RankPool, nproc: int, make: Callable[[int], Any], kind: type[Exception], told: str
) -> None:
    errors = ranks.run(error_of, nproc, make)
    assert len(set(errors)) == 1
    name, text, mean = errors[0]
    assert name == kind.__name__
    assert told in text
    assert mean == (nproc - 1) / 2


def sampled(size: int) -> tuple[int, list[int]]:
    evenstep.init(quiet=True)
    sampler = DistributedSampler(range(size), seed=2)
    return sampler.rank, list(sampler)


@SIZES
def test_the_sampler_finds_its_rank_by_itself(ranks: RankPool, nproc: int) -> None:
    shares = ranks.run(sampled, nproc, 6 * nproc - 1)
    assert [rank for rank, _ in shares] == list(range(nproc))
    assert {len(share) for _, share in shares} == {6}
    assert set(chain.from_iterable(share for _, share in shares)) == set(range(6 * nproc - 1))
