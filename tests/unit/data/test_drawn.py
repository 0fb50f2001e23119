"""Orders that samplers and batch samplers of a script give: cut, divided, resumed and refused. Ranks are stubs here."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from evenstep import DataLoader
from evenstep.errors import UsageError
from tests.stub_worlds import stub_world

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine of one core
SIZE = 41


class OfTheProcess(Sampler[int]):
    """Draws from python's, torch's and numpy's streams, a number at a time; knows no epoch."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        for number in order:
            turn = int(torch.randint(2, ())) + int(np.random.randint(2))
            yield (number, (number + 1) % SIZE, (number + 2) % SIZE)[turn]

    def __len__(self) -> int:
        return SIZE


class ByEpoch(Sampler[int]):
    """Its generator is seeded by set_epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.generator.manual_seed(epoch)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SIZE, generator=self.generator).tolist()


class WithState(Sampler[int]):
    """A generator of its own, which goes on from epoch to epoch, and its state."""

    def __init__(self) -> None:
        self.random = random.Random(7)
        self.left: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.left = self.left or self.random.sample(range(SIZE), SIZE)
        while self.left:
            yield self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left), "random": self.random.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, numbers, gauss = state["random"]
        self.random.setstate((version, tuple(numbers), gauss))
        self.left = list(state["left"])


class ByLength(Sampler[list[int]]):
    """Batches of several sizes, whose number differs between epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def _sizes(self) -> list[int]:
        return [4 + self.epoch % 3] * 7

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(np.random.permutation(SIZE).tolist())
        for size in self._sizes():
            yield list(islice(order, size))

    def __len__(self) -> int:
        return len(self._sizes())


class Numpys(Sampler[int]):
    """A numpy generator of its own: no resume can know it."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(random.randrange(2**32))

    def __iter__(self) -> Iterator[int]:
        yield from self.generator.permutation(SIZE).tolist()


def by(kind: str) -> dict[str, Any]:
    """A loader's arguments."""
    given = torch.Generator().manual_seed(11)
    samplers = {
        "torch": lambda: RandomSampler(range(SIZE), generator=given),
        "some": lambda: SubsetRandomSampler(range(3, 30)),
        "in order": lambda: SequentialSampler(range(SIZE)),
        "weighted": lambda: WeightedRandomSampler(range(1, SIZE + 1), 50),
        "without replacement": lambda: WeightedRandomSampler(range(1, SIZE + 1), 30, replacement=False),
        "of the process": OfTheProcess,
        "by epoch": ByEpoch,
        "with state": WithState,
        "numpy": Numpys,
    }
    if kind == "batches":
        return {"batch_sampler": ByLength()}
    if kind == "batches of torch":
        return {"batch_sampler": BatchSampler(OfTheProcess(), 6, True)}
    return {"sampler": samplers[kind](), "global_batch_size": 6}


KINDS = ["torch", "some", "in order", "weighted", "without replacement", "of the process", "by epoch", "with state"]
KINDS += ["batches", "batches of torch"]


def loaders(world_size: int, arguments: dict[str, Any], **more: Any) -> list[DataLoader]:
    made = [copy.deepcopy(arguments) for _ in range(world_size)]
    return [
        DataLoader(range(SIZE), collate_fn=list, world=stub_world(rank, world_size), seed=3, **each, **more)
        for rank, each in enumerate(made)
    ]


def steps(of_ranks: list[DataLoader]) -> Iterator[list[int]]:
    iterators = [iter(each) for each in of_ranks]
    try:
        for shares in zip(*iterators, strict=True):
            yield list(chain.from_iterable(shares))
    finally:
        for each in iterators:
            each.close()


@pytest.mark.extended(beyond=12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_stop_is_resumed_exactly_on_any_ranks(kind: str, num_workers: int, fresh_seed: int) -> None:
    draws, arguments = random.Random(fresh_seed), by(kind)
    (alone,) = loaders(1, arguments)
    expected = [list(steps([alone])) for _ in range(3)]
    assert expected[0] != expected[1] or kind == "in order"
    seen: list[list[list[int]]] = [[], [], []]
    state = None
    while len(seen[2]) < len(expected[2]):
        of_ranks = loaders(draws.randint(1, 4), arguments, num_workers=num_workers)
        for each in of_ranks if state is not None else ():
            each.load_state_dict(state)
        for epoch in range(of_ranks[0].epoch, 3):
            stop = draws.choice((1, 2, 4, 100))
            running = steps(of_ranks)
            for batch in islice(running, stop):
                seen[epoch].append(batch)
                for each in of_ranks:
                    each.commit()
            if len(seen[epoch]) < len(expected[epoch]):
                running.close()
                break
            assert next(running, None) is None
        states = [each.state_dict() for each in of_ranks]
        assert all(other == states[0] for other in states)
        state = json.loads(json.dumps(states[0]))
    assert seen == expected


class CountsYielded(WithState):
    """Another kind of state, as torchdata's have it: how many indices of the epoch were given."""

    def __init__(self) -> None:
        self.random, self.done, self.skips = random.Random(7), 0, 0

    def __iter__(self) -> Iterator[int]:
        self.done, self.skips = self.skips, 0
        for index in range(self.done, SIZE):
            self.done += 1
            yield index

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skips = state["done"]


@pytest.mark.parametrize("sampler", [WithState, CountsYielded])
def test_a_sampler_with_a_state_goes_on_from_every_step(sampler: type[WithState]) -> None:
    """Also from the last of an epoch, after whose state the sampler would begin again, and from between two epochs."""

    def loader() -> DataLoader:
        return DataLoader(range(SIZE), 6, sampler=sampler(), collate_fn=list, world=stub_world(), seed=3)

    whole = loader()
    expected = [(epoch, batch) for epoch in whole.epochs(3) for batch in whole]
    assert [len(batch) for _, batch in expected] == [6, 6, 6, 6, 6, 6, 5] * 3
    for stop in range(1, len(expected)):
        for ends in (False, True):  # whether the loop over the epoch came to its end
            first = loader()
            seen = []
            for epoch in first.epochs(3):
                for batch in first:
                    seen.append((epoch, batch))
                    first.commit()
                    if len(seen) == stop and not (ends and stop % 7 == 0):
                        break
                if len(seen) == stop:
                    break
            state = json.loads(json.dumps(first.state_dict()))
            second = loader()
            second.load_state_dict(state)
            seen += [(epoch, batch) for epoch in second.epochs(3) for batch in second]
            assert seen == expected, (stop, ends)


def test_a_generator_of_its_own_is_refused_by_a_resume(fresh_seed: int) -> None:
    """Before the first batch, with the class and the two ways out."""
    random.seed(fresh_seed)
    (loader,) = loaders(1, by("numpy"))
    iterator = iter(loader)
    next(iterator)
    loader.commit()
    (resumed,) = loaders(1, by("numpy"))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(UsageError, match=r"Numpys \(.*test_drawn.py:\d+\) gives other .* set_epoch.* state_dict"):
        next(iter(resumed))


@pytest.mark.parametrize("kind", [*KINDS, "numpy"])
def test_the_scripts_streams_are_as_without_a_sampler(kind: str) -> None:
    (loader,) = loaders(1, by(kind))
    streams = (random.random, lambda: float(torch.rand(1)), lambda: float(np.random.rand()))
    expected = []
    for has_loader in (False, True):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        found = [
            [draw() for draw in streams] for _, _ in zip(range(3), loader if has_loader else range(3), strict=False)
        ]
        expected = expected or found
    assert found == expected


@pytest.mark.parametrize("arguments", [{"shuffle": True}, {"sampler": OfTheProcess()}])
def test_another_global_batch_size_counts_from_the_next_batch_on(arguments: dict[str, Any]) -> None:
    """Said once; also twice in one epoch, with a last batch that is short or left out."""
    (alone,) = loaders(1, arguments | {"global_batch_size": 6})
    order = list(chain.from_iterable(alone))
    done, state = 0, {}
    for size, num_steps in ((6, 2), (5, 3), (8, 9)):
        of_ranks = loaders(2, arguments | {"global_batch_size": size})
        if done:
            with pytest.warns(UserWarning, match=f"and is {size}, from the next batch on .epoch 0, position {done}"):
                of_ranks[0].load_state_dict(state)
            of_ranks[1].load_state_dict(state)
        found = []
        for batch in islice(steps(of_ranks), num_steps):
            found += batch
            for each in of_ranks:
                each.commit()
            assert batch == order[done : done + size]
            done += len(batch)
        state = of_ranks[0].state_dict()
    assert done == SIZE


@pytest.mark.parametrize("kind", ["by epoch", "batches"])
def test_a_set_epoch_of_the_script_is_the_loaders(kind: str) -> None:
    """As in `for epoch in range(2, n): sampler.set_epoch(epoch)` of a run that goes on."""
    (alone,) = loaders(1, by(kind))
    expected = [list(alone) for _ in range(4)]
    arguments = by(kind)
    loader = DataLoader(range(SIZE), collate_fn=list, world=stub_world(), seed=3, **arguments)
    sampler = arguments.get("sampler") or arguments["batch_sampler"]
    for epoch in (2, 3):
        sampler.set_epoch(epoch)
        assert loader.epoch == sampler.epoch == epoch
        assert list(loader) == expected[epoch]
    assert list(islice(loader, 1)) != expected[3][:1], "none was set: the next"


class Words(Dataset[str]):
    """Samples that have words for numbers, and one that has a number."""

    words = [f"sample {number}" for number in range(SIZE - 1)] + [7]

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, word: Any) -> Any:
        return word

    def __iter__(self) -> Iterator[Any]:
        return iter(self.words)


@pytest.mark.parametrize("step", [2, 11])
def test_samples_without_numbers_go_on_where_they_were(step: int) -> None:
    """A resume draws them again all at once; the digest doesn't depend on that."""
    words = Words()
    loader = DataLoader(words, 4, sampler=words, collate_fn=list, world=stub_world())
    for _ in islice(loader, step):
        loader.commit()
    again = DataLoader(words, 4, sampler=words, collate_fn=list, world=stub_world())
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert list(chain.from_iterable(again)) == words.words[4 * step :]
