"""Samplers of a script on real ranks: compared before each batch; and data sets that differ between ranks."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, RandomSampler

import evenstep
from evenstep import DataLoader
from evenstep.errors import EvenstepError, MismatchError
from evenstep.testing import RankPool
from tests.ranks import on_ranks


class OwnLoss:
    """Follows what a rank has seen itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        yield from range(12)
        yield from (12 + (place + self.rank) % 8 for place in range(8))


class Shorter:
    """Ends earlier on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(20 - 8 * (self.rank == 1)))


def error_of(make: Callable[[int], Any], num_workers: int) -> tuple[list[int], str, float]:
    """(what came before the error, the error, a mean over the ranks, which still understand each other)."""
    world = evenstep.init(quiet=True)
    context = "fork" if num_workers else None
    loader = DataLoader(
        range(20),
        4,
        sampler=make(world.rank),
        num_workers=num_workers,
        multiprocessing_context=context,
        collate_fn=list,
    )
    seen: list[int] = []
    try:
        for batch in loader:
            seen += batch
    except MismatchError as error:
        again = DataLoader(range(20), 4, sampler=range(20), collate_fn=list)
        assert sum(map(len, again)) > 0
        return seen, str(error), world.mean(float(world.rank))
    raise AssertionError("no error")


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("make", "num_before", "told"),
    [
        (OwnLoss, 12, "rank 1 got other samples than rank 0"),
        (Shorter, 12, "it has ended on rank 1 and continues on rank 0"),
    ],
)
def test_samplers_that_differ_are_an_error_on_all_ranks_before_that_batch(
    ranks: RankPool, nproc: int, num_workers: int, make: Callable[[int], Any], num_before: int, told: str
) -> None:
    found = ranks.run(error_of, nproc, make, num_workers)
    assert sorted(chain.from_iterable(seen for seen, _, _ in found)) == list(range(num_before))
    assert {mean for _, _, mean in found} == {(nproc - 1) / 2}
    assert len({text for _, text, _ in found}) == 1
    assert f"DataLoader: {make.__name__} (" in found[0][1]
    assert "test_samplers.py:" in found[0][1]
    assert told in found[0][1]


def resumed_with_rank_s_own(stop: int) -> str:
    """A state of a sampler that one rank draws otherwise now."""
    world = evenstep.init(quiet=True)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    loader = DataLoader(range(20), 4, sampler=list(range(20)))
    for step, _ in enumerate(loader):
        optimizer.step()
        if step == stop:
            break
    again = DataLoader(range(20), 4, sampler=list(range(20)) if world.rank == 0 else [0, *range(2, 20)])
    again.load_state_dict(loader.state_dict())
    try:
        next(iter(again))
    except EvenstepError as error:
        return type(error).__name__
    return ""


def test_a_resume_that_differs_on_one_rank_raises_on_all(ranks: RankPool) -> None:
    assert ranks.run(resumed_with_rank_s_own, 3, 1) == ["UsageError"] * 3


def shuffled_by_torch(num_workers: int) -> list[list[int]]:
    """Two epochs; the process's own streams are another on each rank."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    context = "fork" if num_workers else None
    sampler = RandomSampler(range(23))
    arguments = {"num_workers": num_workers, "multiprocessing_context": context, "collate_fn": list}
    loader = DataLoader(range(23), 5, sampler=sampler, seed=1, **arguments)
    return [list(loader) for _ in range(2)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_all_ranks_draw_one_order(ranks: RankPool, num_workers: int) -> None:
    (whole,) = ranks.run(shuffled_by_torch, 1, 0)
    for nproc in (2, 4):
        found = ranks.run(shuffled_by_torch, nproc, num_workers)
        for epoch, expected in enumerate(whole):
            steps = zip(*(of_rank[epoch] for of_rank in found), strict=True)
            assert [list(chain.from_iterable(shares)) for shares in steps] == expected
        assert sorted(chain.from_iterable(whole[0])) == list(range(23))


class Listed(Dataset[torch.Tensor]):
    """Samples of files, in the order in which a rank lists them."""

    def __init__(self, order: list[int], noise: bool = False) -> None:
        self.order, self.noise = order, noise

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.order[index]]) + (torch.rand(1) if self.noise else 0)


def warnings_of(num_workers: int, differs: bool, noise: bool) -> list[str]:
    """What a rank warns of in two epochs, whose own streams stay as they were."""
    world = evenstep.init(quiet=True)
    order = list(range(40))
    if differs and world.rank == 1:
        order.reverse()
    context = "fork" if num_workers else None
    loader = DataLoader(Listed(order, noise), 8, shuffle=True, num_workers=num_workers, multiprocessing_context=context)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in loader.epochs(2):
            for batch in loader:
                world.mean(float(batch.sum()))
    return [str(each.message) for each in found if "data set" in str(each.message)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_sets_that_differ_are_warned_of(ranks: RankPool, num_workers: int) -> None:
    for each in ranks.run(warnings_of, 2, num_workers, True, False):
        assert len(each) == 1
        assert "the data set isn't the same on rank 0 and rank 1" in each[0]
    assert ranks.run(warnings_of, 2, num_workers, False, False) == [[], []]
    assert ranks.run(warnings_of, 2, num_workers, True, True) == [[], []], "augmented: no verdict"


class Folder(Listed):
    """As torchvision's: a list of (path, class)."""

    def __init__(self, root: str, order: list[int]) -> None:
        super().__init__(order)
        self.samples = [(f"{root}/{number % 3}/{number}.png", number % 3) for number in order]


@on_ranks(2)
def test_files_in_another_order_are_an_error(world: evenstep.World) -> None:
    """Folders may have other names."""
    root, order = f"/tmp/of-rank-{world.rank}/data", list(range(40))
    DataLoader(Folder(root, order), 8)
    with pytest.raises(MismatchError, match="the digest of its file names is"):
        DataLoader(Folder(root, order[:: 1 - 2 * world.rank]), 8)


def evaluated_by_rank_0() -> int:
    """A rank may iterate alone where nothing is drawn by a sampler."""
    world = evenstep.init(quiet=True)
    loader = DataLoader(range(40), 8)
    num_seen = sum(len(batch) for batch in loader) if world.rank == 0 else 0
    world.barrier()
    return num_seen


def test_a_rank_may_iterate_alone(ranks: RankPool) -> None:
    assert ranks.run(evaluated_by_rank_0, 2) == [20, 0]
