"""`DataLoader` and `DistributedSampler` on real ranks: nothing twice, nothing missing, the same steps everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import evenstep
from evenstep import DataLoader
from evenstep.testing import RankPool

SIZES = pytest.mark.parametrize("nproc", [2, 3])


def error_of(make: Callable[[int], Any]) -> tuple[str, str, float]:
    """Type and text of the error that a rank meets; the ranks still understand each other afterwards."""
    world = evenstep.init(quiet=True)
    try:
        make(world.rank)
    except evenstep.EvenstepError as error:
        return type(error).__name__, str(error), world.mean(float(world.rank))
    raise AssertionError("no error")


# ---------------------------------------------------------------------- stop and resume


def train(
    state: dict[str, Any] | None, num_steps: int, num_workers: int, consume: Callable[[Any], Any] = iter
) -> tuple[list[list[int]], dict[str, Any]]:
    """Some steps of real training; what this rank saw, and where the loader is then."""
    evenstep.init(quiet=True)
    dataset = TensorDataset(torch.randn(53, 2), torch.arange(53))
    context = "fork" if num_workers else None
    loader = DataLoader(dataset, 8, shuffle=True, num_workers=num_workers, multiprocessing_context=context, seed=4)
    model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if state is not None:
        loader.load_state_dict(state)
    seen: list[list[int]] = []
    for _ in loader.epochs(2):
        for x, y in consume(loader):
            if len(seen) == num_steps:
                return seen, loader.state_dict()
            model.backward(model(x).square().mean(), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(y.tolist())
    return seen, loader.state_dict()


@pytest.mark.extended
def test_a_run_goes_on_on_other_ranks_and_workers(ranks: RankPool) -> None:
    """With empty shares in the last global batch of each epoch, and a stop in the second epoch too."""
    (whole, _), *_ = ranks.run(train, 1, None, -1, 0)
    seen: list[list[int]] = []
    state = None
    for nproc, num_steps, num_workers in ((2, 3, 1), (3, 6, 0), (1, 1, 0), (2, -1, 0)):
        of_ranks = ranks.run(train, nproc, state, num_steps, num_workers)
        states = [state for _, state in of_ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
        seen += [list(chain.from_iterable(shares)) for shares in zip(*(steps for steps, _ in of_ranks), strict=True)]
    assert seen == whole
    assert (state["epoch"], state["position"]) == (2, 0)


# ---------------------------------------------------------------------- streams


class Shards(IterableDataset[int]):
    """Shard s has 3 * s records, so the ranks' parts end at very different times."""

    num_shards = 6

    def __init__(self, shards: range = range(6)) -> None:
        self.shards = shards

    def shard(self, *, num_shards: int, index: int) -> Shards:
        return Shards(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable([100 * s + i for i in range(3 * s)] for s in self.shards)


def train_on_shards(num_workers: int) -> tuple[list[int], int, float]:
    """Records seen, steps made, and the sum of all weights that took part in them."""
    world = evenstep.init(quiet=True)
    context = "fork" if num_workers else None
    loader = DataLoader(Shards(), 6, num_workers=num_workers, multiprocessing_context=context)
    model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1))
    seen, num_steps, weights = [], 0, 0.0
    for batch in loader:
        assert batch.dtype == torch.int64
        model.backward(model(batch.float().reshape(-1, 1)).mean(), weight=len(batch))
        total = torch.tensor(float(len(batch)))
        world.control.all_reduce(total).wait()
        weights += float(total)
        seen += batch.tolist()
        num_steps += 1
    return seen, num_steps, weights


@pytest.mark.parametrize(("nproc", "num_workers"), [(2, 0), (2, 2), (3, 0)])
def test_parts_of_a_stream_that_end_early_take_part(ranks: RankPool, nproc: int, num_workers: int) -> None:
    of_ranks = ranks.run(train_on_shards, nproc, num_workers)
    assert sorted(chain.from_iterable(seen for seen, _, _ in of_ranks)) == sorted(Shards())
    assert len({(num_steps, weights) for _, num_steps, weights in of_ranks}) == 1
    assert of_ranks[0][2] == 45.0
    lengths = [len(seen) for seen, _, _ in of_ranks]
    assert max(lengths) > min(lengths)


# ---------------------------------------------------------------------- evaluation


def evaluate(size: int, shuffle: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Predictions in the data set's order, those of the batches as they came, and the mean over samples."""
    world = evenstep.init(quiet=True)
    dataset = TensorDataset(torch.arange(float(size)), torch.arange(size))
    loader = DataLoader(dataset, 8, shuffle=shuffle, seed=1)
    predictions, batches = [], []
    total = 0.0
    for x, _ in loader:
        predictions.append(torch.stack([x, x.square()], 1))
        batches.append(world.gather(x))
        total += float(x.sum())
    rows = torch.cat(predictions)
    return loader.gather(rows), torch.cat(batches), world.mean(total / max(1, len(rows)), weight=len(rows))


@SIZES
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_evaluation_is_that_of_one_process(ranks: RankPool, nproc: int, shuffle: bool) -> None:
    size = 8 * 4 + 1
    ((rows, batches, mean),) = ranks.run(evaluate, 1, size, shuffle)
    assert rows[:, 0].tolist() == list(range(size))
    for others in ranks.run(evaluate, nproc, size, shuffle):
        assert torch.equal(others[0], rows)
        assert torch.equal(others[1], batches)
        assert others[2] == pytest.approx(mean, rel=1e-12)


# ---------------------------------------------------------------------- mistakes


class OfOneRank(IterableDataset[int]):
    """Numbers that depend on the rank."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


def shuffled_by_rank(rank: int) -> None:
    """The third step is the first that differs."""
    numbers = list(range(40))
    numbers[16:] = random.Random(rank).sample(range(16, 40), 24)
    seen = [batch.tolist() for batch in collected(DataLoader(OfOneRank(numbers), 8))]
    raise AssertionError(seen)


def collected(loader: DataLoader) -> Iterator[Any]:
    """Batches; a rank that is given one of the third step or behind has been told too late."""
    for step, batch in enumerate(loader):
        assert step < 2
        yield batch


def shorter_on_rank_1(rank: int) -> None:
    for _ in DataLoader(OfOneRank(list(range(32 if rank == 1 else 40))), 8):
        pass


class Uncounted:
    """A data set whose own code fails."""

    def __len__(self) -> int:
        raise KeyError("train")

    def __getitem__(self, index: int) -> int:
        return index


def with_broken_code_on_rank_1() -> tuple[str, str, float]:
    """What a rank is told, and a mean over ranks, which understand each other afterwards."""
    world = evenstep.init(quiet=True)
    try:
        DataLoader(Uncounted() if world.rank == 1 else range(10), 4)
    except (KeyError, evenstep.EvenstepError) as error:
        return type(error).__name__, str(error), world.mean(float(world.rank))
    raise AssertionError("no error")


def test_what_the_data_sets_code_raises_on_one_rank_is_said_on_the_others(ranks: RankPool) -> None:
    others = ("OtherRankFailedError", "DataLoader on rank 1: KeyError: 'train'", 1.0)
    assert ranks.run(with_broken_code_on_rank_1, 3) == [others, ("KeyError", "'train'", 1.0), others]


def sampled_by_weight(rank: int) -> None:
    list(DataLoader(range(4), 4, sampler=WeightedRandomSampler([1, 1, 1, 1 + rank], 4)))


def with_fewer_rows(rank: int) -> None:
    loader = DataLoader(range(10), 4)
    loader.gather(torch.cat(list(loader))[rank:])


@SIZES
def test_ranks_that_differ_later_are_told_too(ranks: RankPool, nproc: int) -> None:
    for make, told in (
        (sampled_by_weight, "At the beginning of epoch 0, rank 1 got other samples than rank 0"),
        (with_fewer_rows, "loader.gather: rank 1 has"),
        (shuffled_by_rank, "In epoch 0, step 2, rank 1 got other records than rank 0"),
        (shorter_on_rank_1, "In epoch 0, step 4, it has ended on rank 1 and continues on rank 0"),
    ):
        errors = ranks.run(error_of, nproc, make)
        assert len(set(errors)) == 1
        assert errors[0][0] == "MismatchError"
        assert told in errors[0][1]


class Draws(Dataset[tuple[Tensor, Tensor]]):
    """Draws a number of each stream for a sample."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        drawn = [random.random(), float(torch.rand(())), float(numpy.random.rand())]
        return torch.tensor([float(number)]), torch.tensor(drawn, dtype=torch.float64)


def first_draws(seed: int) -> tuple[list[list[list[float]]], list[float]]:
    """(of two batches before and one behind the first training forward, what the samples drew; the script's own)."""
    evenstep.init(quiet=True).close()  # what an earlier test has left in this process of the pool
    with evenstep.init(seed=seed, quiet=True) as world:
        loader = DataLoader(Draws(), 8, shuffle=True)
        model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1).double().to(world.device))
        batches = []
        for step, (x, drawn) in enumerate(loader):
            batches.append(drawn.tolist())
            if step == 1:
                own = [random.random(), float(torch.rand(()))]
                model.backward(model(x.double()).sum(), weight=len(x))
        return batches, own


@SIZES
def test_samples_of_no_two_ranks_draw_the_same(ranks: RankPool, nproc: int, fresh_seed: int) -> None:
    """From the first batch on; and until a model is trained the script's own numbers are the same on all ranks."""
    results = ranks.run(first_draws, nproc, fresh_seed)
    for batch in range(3):
        drawn = [row for batches, _ in results for row in batches[batch]]
        for stream in range(3):
            assert len({row[stream] for row in drawn}) == len(drawn) == 8
    assert all(own == results[0][1] for _, own in results)
