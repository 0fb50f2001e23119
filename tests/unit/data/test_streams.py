"""`IterableDataset`s through `DataLoader`: every record once, on any ranks and workers. Ranks are stubs here."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from evenstep import DataLoader
from evenstep.errors import ConfigurationError, MismatchError
from tests.stub_worlds import stub_world

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine of one core


class Numbers(IterableDataset[int]):
    """0, 1, 2, ...; plus 100 for each epoch, as a data set may shuffle."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + self.count))


class DividesItself(Numbers):
    """As torch's documentation says to."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.count, step))


class Sharded(Numbers):
    """Shard s has s records; `shard` as Hugging Face's streams have it."""

    num_shards = 8

    def __init__(self, shards: range = range(8)) -> None:
        self.shards, self.epoch = shards, 0

    def shard(self, *, num_shards: int, index: int) -> Sharded:
        return Sharded(self.shards[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return (
            iter(range(0))
            if not self.shards
            else chain.from_iterable([10 * s + i for i in range(s)] for s in self.shards)
        )


def _epoch(dataset: Any, world_size: int, batch: int = 8, state: Any = None, **arguments: Any) -> list[list[int]]:
    """Global batches; every rank must make the same steps."""
    loaders = [
        DataLoader(dataset, batch, collate_fn=torch.tensor, world=stub_world(rank, world_size), **arguments)
        for rank in range(world_size)
    ]
    for loader in loaders if state is not None else []:
        loader.load_state_dict(state)
    return [torch.cat(shares).tolist() for shares in zip(*loaders, strict=True)]


@pytest.mark.parametrize(
    ("dataset", "count", "num_workers"),
    [
        (Numbers, 21, 0),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in [(Numbers, 0, 0), (Numbers, 1, 0), (Numbers, 16, 0), (Numbers, 0, 1), (DividesItself, 21, 2)]
        ),
    ],
)
def test_global_batches_are_those_of_one_process(dataset: type[Numbers], count: int, num_workers: int) -> None:
    expected = [list(range(first, min(first + 8, count))) for first in range(0, count, 8)]
    for world_size in (1, 3):
        assert _epoch(dataset(count), world_size, num_workers=num_workers) == expected
    full = [batch for batch in expected if len(batch) == 8]
    assert _epoch(dataset(count), 2, num_workers=num_workers, drop_last=True) == full


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_tell_the_data_set_and_begin_anew(persistent: bool) -> None:
    loader = DataLoader(
        Numbers(5), 2, collate_fn=list, num_workers=1, persistent_workers=persistent, world=stub_world()
    )
    for epoch in loader.epochs(2):
        for _ in range(2):
            assert list(loader) == [[100 * epoch + i for i in part] for part in ([0, 1], [2, 3], [4])]
    assert loader.epoch == 2


def test_a_stream_resumes_on_other_ranks_and_workers() -> None:
    loader = DataLoader(Numbers(40), 6, collate_fn=list, world=stub_world())
    for step, _ in enumerate(loader):
        loader.commit()
        if step == 2:
            break
    state = loader.state_dict()
    assert state["position"] == 18
    expected = [list(range(first, min(first + 6, 40))) for first in range(18, 40, 6)]
    for world_size, num_workers in ((1, 0), (3, 0), (2, 2)):
        assert _epoch(Numbers(40), world_size, 6, state, num_workers=num_workers) == expected


@pytest.mark.parametrize("num_workers", [1, 3])
def test_shards_are_divided_where_there_are_enough(num_workers: int) -> None:
    loader = DataLoader(Sharded(), 4, collate_fn=list, num_workers=2, world=stub_world())
    batches = list(loader)
    assert sorted(chain.from_iterable(batches)) == sorted(Sharded())
    assert all(len({number // 10 % 2 for number in batch}) == 1 for batch in batches), "each worker its own shards"
    loader = DataLoader(Sharded(), 4, collate_fn=list, num_workers=2, world=stub_world())
    for step, _ in enumerate(loader):
        loader.commit()
        if step == 2:
            break
    resumed = DataLoader(Sharded(), 4, collate_fn=list, num_workers=2, world=stub_world())
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == batches[3:]
    other = DataLoader(Sharded(), 4, collate_fn=list, num_workers=num_workers, world=stub_world())
    with pytest.raises(ConfigurationError, match="the number of ranks times workers was 2 and is"):
        other.load_state_dict(loader.state_dict())


def test_gathered_rows_have_the_stream_s_order() -> None:
    loader = DataLoader(Numbers(10), 4, world=stub_world())
    rows = torch.cat(list(loader))
    assert torch.equal(loader.gather(rows), torch.arange(10))


def test_length_and_repr() -> None:
    class WithLength(Numbers):
        def __len__(self) -> int:
            return self.count

    assert len(DataLoader(WithLength(10), 4, world=stub_world())) == 3
    assert len(DataLoader(WithLength(10), 4, drop_last=True, world=stub_world())) == 2
    loader = DataLoader(Numbers(10), 4, world=stub_world())
    with pytest.raises(TypeError):
        len(loader)
    assert "a stream in global batches of 4" in repr(loader)
    assert len(list(loader.world.progress(loader))) == 3


@pytest.mark.parametrize(("name", "value"), [("shuffle", True), ("sample_seed", True), ("max_tokens", 10)])
def test_what_a_stream_cannot_have(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} doesn't go with Numbers, an IterableDataset"):
        DataLoader(Numbers(3), 2, world=stub_world(), **{name: value})


# ---------------------------------------------------------------------- streams that shuffle themselves


def _by_torch(numbers: list[int]) -> None:
    numbers[:] = [numbers[i] for i in torch.randperm(len(numbers))]


class Shuffled(IterableDataset[int]):
    """0, 1, 2, ..., in an order that it draws, and draws again after each record."""

    def __init__(self, count: int, shuffle: Callable[[list[int]], object]) -> None:
        self.count, self.shuffle = count, shuffle

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.count))
        while left:
            self.shuffle(left)
            yield left.pop()


@pytest.mark.parametrize(
    "shuffle",
    [random.shuffle, *(pytest.param(each, marks=pytest.mark.extended) for each in (np.random.shuffle, _by_torch))],
)
def test_a_shuffle_is_keyed_by_seed_and_epoch(shuffle: Callable[[list[int]], object], fresh_seed: int) -> None:
    """Ranks are loaders of one process here, which draw in turns: their streams don't mix, nor with the loop's."""
    count = 20 + fresh_seed % 20
    orders = []
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        state = DataLoader(Shuffled(count, shuffle), 8, seed=seed, world=stub_world()).state_dict() | {"epoch": epoch}
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        expected = _epoch(Shuffled(count, shuffle), 1, state=state, seed=seed)
        drawn = random.random(), np.random.random(), torch.rand(1).item()
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        assert drawn == (random.random(), np.random.random(), torch.rand(1).item())
        assert sorted(chain.from_iterable(expected)) == list(range(count))
        for world_size, num_workers in ((3, 0), (1, 2)):
            assert (
                _epoch(Shuffled(count, shuffle), world_size, state=state, seed=seed, num_workers=num_workers)
                == expected
            )
        later = _epoch(Shuffled(count, shuffle), 2, state=state | {"position": 16}, seed=seed)
        assert later == expected[2:]
        orders.append(expected)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    with pytest.raises(ConfigurationError, match="seed was 2 and is 0"):
        _epoch(Shuffled(count, shuffle), 1, state=state)


class ShuffledShards(Sharded):
    """Divides the order of shards that it draws when it is iterated; then draws a number for each record."""

    num_shards = 8

    def __init__(self, num_parts: int = 1, index: int = 0) -> None:
        self.num_parts, self.index, self.epoch = num_parts, index, 0

    def shard(self, *, num_shards: int, index: int) -> ShuffledShards:
        return ShuffledShards(num_shards, index)

    def __iter__(self) -> Iterator[Any]:
        shards = list(range(8))
        random.shuffle(shards)
        for shard in shards[self.index :: self.num_parts]:
            for number in range(4):
                yield 10 * shard + number, random.random()


def test_parts_divide_one_order_of_shards_and_draw_otherwise_inside() -> None:
    epochs = []
    loader = DataLoader(ShuffledShards(), 4, collate_fn=list, num_workers=2, world=stub_world())
    for _ in loader.epochs(2):
        records = list(chain.from_iterable(loader))
        assert sorted(number for number, _ in records) == [10 * shard + i for shard in range(8) for i in range(4)]
        assert len({drawn for _, drawn in records}) >= len(records) - 1, "the first record of each part is drawn alike"
        epochs.append(records)
    assert epochs[0] != epochs[1]


def test_workers_that_run_through_different_streams_are_an_error() -> None:
    unseeded = Shuffled(40, lambda numbers: np.random.default_rng().shuffle(numbers))
    loader = DataLoader(unseeded, 8, num_workers=2, world=stub_world())
    with pytest.raises(MismatchError, match="In epoch 0, step 1, the workers of rank 0 got different records"):
        list(loader)
    loader = DataLoader(unseeded, 8, num_workers=1, world=stub_world())
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(40)), "one process alone may draw as it likes"


# ---------------------------------------------------------------------- a stream's own state


class Stateful(Numbers):
    """Counts what it yields; a buffer of two is lost with it."""

    def __init__(self, count: int, buffer: int = 0) -> None:
        super().__init__(count)
        self.begin = self.read = 0
        self.buffer = buffer

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["read"]

    def __iter__(self) -> Iterator[int]:
        waiting = []
        for number in range(self.begin, self.count):
            self.read = number + 1
            waiting.append(100 * self.epoch + number)
            if len(waiting) > self.buffer:
                yield waiting.pop(0)
        yield from waiting


@pytest.mark.parametrize(("buffer", "lost"), [(0, []), (2, [15, 16])])
def test_a_stream_s_own_state_is_faster_and_loses_its_buffer(buffer: int, lost: list[int]) -> None:
    loader = DataLoader(Stateful(40, buffer), 5, collate_fn=list, resume_streams="state", world=stub_world())
    for step, _ in enumerate(loader):
        loader.commit()
        if step == 2:
            break
    state = loader.state_dict()
    dataset = Stateful(40, buffer)
    resumed = DataLoader(dataset, 5, collate_fn=list, resume_streams="state", world=stub_world())
    with pytest.warns(UserWarning, match=r"The records .* in its shuffle buffers are lost; resume_streams='replay' is"):
        resumed.load_state_dict(state)
    assert resumed.state_dict() == state, "nothing was used since"
    left = list(chain.from_iterable(resumed))
    assert left == [number for number in range(15, 40) if number not in lost]
    assert list(chain.from_iterable(resumed)) == list(range(100, 140)), "the next epoch begins at its beginning"
    assert dataset.begin == 0, "the script's own stream has no place in it"
    with pytest.raises(ConfigurationError, match="resume_streams was 'state' and is None"):
        DataLoader(Stateful(40), 5, world=stub_world()).load_state_dict(state)
    other = DataLoader(Stateful(40), 5, resume_streams="state", num_workers=2, world=stub_world())
    told = "ranks times workers was 1 and is 2; the number of workers of a rank was 1 and is 2"
    with pytest.raises(ConfigurationError, match=told):
        other.load_state_dict(state)


def test_only_a_stream_with_a_state_resumes_by_it() -> None:
    with pytest.raises(ConfigurationError, match="resume_streams='state': Numbers has no state_dict"):
        DataLoader(Numbers(40), 5, resume_streams="state", world=stub_world())
    with pytest.raises(ConfigurationError, match="resume_streams='state' is for streams"):
        DataLoader(range(40), 5, resume_streams="state", world=stub_world())
