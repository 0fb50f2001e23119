"""`DataLoader` in one process: contents, empty shares, epochs, workers, bad input. Ranks are stubs here."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import textwrap
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

import evenstep
from evenstep import DataLoader, DistributedSampler
from evenstep.data.loading.nested import emptied, move
from evenstep.errors import ConfigurationError, MismatchError, UsageError
from tests.stub_worlds import stub_world

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine of one core


def _workers() -> list[Any]:
    """Live loader processes; the pool of ranks may have some of its own, which are named."""
    return [child for child in multiprocessing.active_children() if child.name.startswith("Process-")]


def _loaders(dataset: Any, size: int, world_size: int, **arguments: Any) -> list[DataLoader]:
    return [DataLoader(dataset, size, world=stub_world(rank, world_size), **arguments) for rank in range(world_size)]


def _global_batches(loaders: list[DataLoader]) -> list[list[int]]:
    """One epoch of a data set of numbers, ranks one after the other; every rank must make the same steps."""
    return [torch.cat(shares).tolist() for shares in zip(*loaders, strict=True)]


def _numbers(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(count)).reshape(-1, 1).expand(count, 3), torch.arange(count))


def _padded_by_name(samples: list[Any]) -> dict[str, Any]:
    """A batch whose length is 2, and whose tensors have their samples in the second dimension."""
    x = torch.nn.utils.rnn.pad_sequence([sample["x"] for sample in samples])
    return {"x": x, "y": torch.tensor([sample["y"] for sample in samples])}


class _Records(IterableDataset[Any]):
    def __init__(self, records: list[Any]) -> None:
        self.records = records

    def __iter__(self) -> Any:
        return iter(self.records)


# ---------------------------------------------------------------------- who sees what


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 120), st.integers(7, 40), st.booleans(), st.booleans(), st.integers(0, 3))
def test_global_batches_do_not_depend_on_the_number_of_ranks(
    size: int, batch: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    drop_last = drop_last and size >= batch
    expected: list[list[int]] | None = None
    for world_size in range(1, 8):
        loaders = _loaders(range(size), batch, world_size, shuffle=shuffle, drop_last=drop_last, seed=3)
        for loader in loaders:
            loader.set_epoch(epoch)
        batches = _global_batches(loaders)
        assert all(len(loader) == len(batches) for loader in loaders)
        expected = expected or batches
        assert batches == expected
    assert expected is not None
    seen = [sample for samples in expected for sample in samples]
    assert len(seen) == (size // batch * batch if drop_last else size)
    assert len(set(seen)) == len(seen)
    if not shuffle:
        assert seen == list(range(len(seen)))


def test_long_epochs_are_planned_in_blocks_without_a_seam() -> None:
    size = 30_000
    loaders = _loaders(range(size), 64, 3, shuffle=True, collate_fn=torch.tensor)
    batches = _global_batches(loaders)
    assert sorted(chain.from_iterable(batches)) == list(range(size))
    assert batches == _global_batches(_loaders(range(size), 64, 1, shuffle=True, collate_fn=torch.tensor))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_come_whole_and_empty_shares_keep_dtype_and_shape(num_workers: int) -> None:
    for loader in _loaders(_numbers(9), 4, 4, num_workers=num_workers):
        rank = loader.world.rank
        batches = list(loader)
        assert [y.tolist() for _, y in batches] == [[rank], [4 + rank], [8] if rank == 0 else []]
        for x, y in batches:
            assert x.dtype == torch.float32
            assert y.dtype == torch.int64
            assert x.tolist() == [[float(sample)] * 3 for sample in y]
            assert x.shape == (len(y), 3)
    assert not _workers()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["tensors", "dictionaries", "stream"])
def test_a_loader_counts_its_ranks_samples_of_each_batch(kind: str, num_workers: int) -> None:
    """Whatever a batch looks like: its length may be the number of its keys, or the longest of its sequences."""
    samples: Any = [{"x": torch.ones(i + 1), "y": i, "z": 0} for i in range(13)]
    if kind == "stream":
        samples = _Records(samples)
    collate: dict[str, Any] = {"collate_fn": _padded_by_name}
    if kind == "tensors":
        samples, collate = _numbers(11), {}
    counted = []
    for loader in _loaders(samples, 5, 3, num_workers=num_workers, **collate):
        assert loader.num_samples == 0
        counted.append([loader.num_samples for _ in loader])
    last = [1, 0, 0] if kind == "tensors" else [1, 1, 1]  # a rank may get no sample
    assert [each[:2] for each in counted] == [[2, 2], [2, 2], [1, 1]]
    assert [each[2] for each in counted] == last


# ---------------------------------------------------------------------- empty shares

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class _Record:
    x: torch.Tensor
    note: str


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, tuple | list):
        return type(one) is type(two) and len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, dict | UserDict):
        return type(one) is type(two) and list(one) == list(two) and all(_same(one[key], two[key]) for key in one)
    return type(one) is type(two) and bool(one == two)


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (lambda n: torch.ones(n, 3, 2), torch.ones(0, 3, 2)),
        (lambda n: torch.ones(5, n, dtype=torch.int16), torch.ones(5, 0, dtype=torch.int16)),
        (lambda n: [torch.ones(n, 3), [torch.ones(n)]], [torch.ones(0, 3), [torch.ones(0)]]),
        (lambda n: (torch.ones(n), torch.eye(3)), (torch.ones(0), torch.eye(3))),
        (lambda n: Pair(torch.ones(n), y=torch.ones(n)), Pair(torch.ones(0), torch.ones(0))),
        (lambda n: OrderedDict(b=torch.ones(n), a=None), OrderedDict(b=torch.ones(0), a=None)),
        (lambda n: UserDict(b=torch.ones(n)), UserDict(b=torch.ones(0))),
        (lambda n: {"tokens": torch.ones(7 * n), "count": 7 * n}, {"tokens": torch.ones(0), "count": 0}),
        (lambda n: (["a.png"] * n, "train", b"raw"), ([], "train", b"raw")),
        (lambda n: ((torch.ones(3, 4),) * n, [{"box": torch.ones(2)}] * n), ((), [])),
        (lambda n: (torch.tensor(2.5 * n), torch.tensor(7)), (torch.tensor(0.0), torch.tensor(7))),
        (lambda n: (True, 0.5, 1.5 * n), (True, 0.5, 0.0)),
    ],
)
def test_what_grows_with_the_samples_becomes_empty(collate: Callable[[int], Any], expected: Any) -> None:
    assert _same(emptied(collate(1), collate(2)), expected)


def test_what_cannot_be_emptied_is_named() -> None:
    packed = [torch.nn.utils.rnn.pack_sequence([torch.ones(3)] * n) for n in (1, 2)]
    with pytest.raises(UsageError, match=r"the batch is a PackedSequence, of which .* drop_last=True"):
        emptied(*packed)
    with pytest.raises(UsageError, match=r"the batch\[1\] is a object, of which .* drop_last=True"):
        emptied((torch.ones(1), object()), (torch.ones(2), object()))


@pytest.mark.parametrize(
    ("collate", "told"),
    [
        (lambda n: torch.ones(n, 3).squeeze(0), r"the batch is of shape \[3\] for one sample and of shape \[2, 3\]"),
        (lambda n: {f"a{i}": 1 for i in range(n)}, "the batch is of 1 entries for one sample and of 2 for two"),
        (lambda n: [torch.ones(3)] if n == 1 else torch.ones(n, 3), "the batch is a list for one sample and a Tensor"),
    ],
)
def test_batches_that_depend_on_the_number_of_samples_are_named(collate: Callable[[int], Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        emptied(collate(1), collate(2))


# ---------------------------------------------------------------------- devices


def test_moving_reaches_into_nests_and_leaves_the_rest() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    nest = {"a": [torch.ones(1), Pair(torch.ones(2), "text")], "b": _Record(torch.ones(3), "n"), "c": packed}
    moved = move(nest, torch.device("meta"), non_blocking=False)
    assert moved["a"][0].device == moved["a"][1].x.device == moved["b"].x.device == torch.device("meta")
    assert moved["a"][1].y == "text"
    assert moved["c"].data.device.type == "meta"
    assert moved["c"].batch_sizes.device.type == "cpu"  # as torch demands
    assert nest["b"].x.device.type == "cpu", "the original is as it was"


# ---------------------------------------------------------------------- epochs


def _shuffled(**arguments: Any) -> DataLoader:
    return DataLoader(range(50), 10, shuffle=True, world=stub_world(), **arguments)


def _order_of(loader: DataLoader) -> list[int]:
    return torch.cat(list(loader)).tolist()


def _order_at(epoch: int) -> list[int]:
    loader = _shuffled()
    loader.set_epoch(epoch)
    return _order_of(loader)


def test_epochs_and_bare_iterations_go_on_from_one_another() -> None:
    loader = _shuffled()
    for epoch in loader.epochs(2):
        assert loader.epoch == epoch
        for _ in range(2):  # a second look within the epoch is of the same epoch
            assert _order_of(loader) == _order_at(epoch)
    for _ in loader:
        assert loader.epoch == 2
        break
    assert _order_of(loader) == _order_at(3), "also after one that stopped early"
    for epoch in loader.epochs(10):
        next(iter(loader))
        if epoch == 5:
            break
    assert loader.epoch == 6
    assert [_order_of(loader), _order_of(loader)] == [_order_at(6), _order_at(7)], "bare iterations count again"
    for epoch in (4, 4, 2):  # as torch's scripts use it
        loader.set_epoch(epoch)
        assert _order_of(loader) == _order_at(epoch)
    loader.set_epoch(7)
    assert list(loader.epochs(2)) == [7, 8]


# ---------------------------------------------------------------------- workers


def test_a_loop_left_early_leaves_no_worker() -> None:
    for _ in DataLoader(range(100), 2, num_workers=2, world=stub_world()):
        assert len(_workers()) == 2
        break
    assert not _workers()


def test_persistent_workers_serve_every_epoch_and_end_with_the_loader() -> None:
    """Without the garbage collector: the iteration leaves no cycle behind, also not on python 3.10."""
    loader = _shuffled(num_workers=1, persistent_workers=True)
    gc.collect()
    gc.disable()
    try:
        assert _order_of(loader) == _order_at(0)
        (worker,) = _workers()
        next(iter(loader))
        assert _workers() == [worker]
        del loader
        assert not _workers()
    finally:
        gc.enable()


# ---------------------------------------------------------------------- bad input


class _Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class _NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "arguments", "told"),
    [
        ([], {"global_batch_size": 4}, r"the data set \(list\) is empty"),
        (_Stream(), {"global_batch_size": 4, "shuffle": True}, "shuffle doesn't go with _Stream, an IterableDataset"),
        (_Stream(), {"global_batch_size": 2}, "global_batch_size=2 is smaller than the number of ranks"),
        (_NoLength(), {"global_batch_size": 4}, "_NoLength lacks __len__"),
        (
            {"train": [1, 2, 3], "test": [4]},
            {"global_batch_size": 4},
            r"keys such as 'train': .* dataset\[0\] to .*\[1\]",
        ),
        ({0: "a", 2: "b"}, {"global_batch_size": 4}, r"\(dict\) has keys such as 0: .* list\(dataset.values\(\)\)"),
        (range(9), {}, "global_batch_size is missing"),
        (range(9), {"global_batch_size": 0}, "global_batch_size=0; a whole number, at least 1"),
        (range(9), {"global_batch_size": 4.0}, "global_batch_size=4.0"),
        (range(9), {"global_batch_size": 2}, "global_batch_size=2 is smaller than the number of ranks, 3"),
        (range(9), {"batch_size": 4}, r"Write global_batch_size=4 .* or global_batch_size=4 \* world.world_size"),
        (range(9), {"global_batch_size": 4, "sampler": 5}, "sampler=5; an object that yields indices"),
        (
            range(9),
            {"global_batch_size": 4, "batch_sampler": [[1]]},
            "batch_sampler and global_batch_size exclude each",
        ),
        (range(9), {"batch_sampler": [[1]], "drop_last": True}, "drop_last=True: all batches of batch_sampler"),
        (range(9), {"batch_sampler": [[1]], "sampler": range(9)}, "batch_sampler and sampler exclude each other"),
        (range(9), {"global_batch_size": 4, "sampler": range(9), "shuffle": True}, "sampler and shuffle exclude"),
        (
            range(9),
            {"global_batch_size": 4, "sampler": DistributedSampler(range(9), 2, 0, pad=False)},
            "sampler=DistributedSampler: it gives one rank's part of the order",
        ),
        (
            range(9),
            {"batch_sampler": BatchSampler(TorchDistributedSampler(range(9), 2, 0), 3, False)},
            "batch_sampler=DistributedSampler: it gives one rank's part",
        ),
        (range(9), {"global_batch_size": 4, "generator": torch.Generator()}, "generator: .* seed="),
        (
            range(9),
            {"global_batch_size": 4, "pin_memory_device": "cuda:1"},
            "pin_memory_device='cuda:1': .* world.device",
        ),
        (range(9), {"global_batch_size": 4, "seed": -1}, "seed=-1"),
        (range(9), {"global_batch_size": 10, "drop_last": True}, "drop_last=True leaves no batch at all: 9 samples"),
        (range(9), {"global_batch_size": 4, "num_workers": -1}, "num_workers"),
    ],
)
def test_bad_arguments(dataset: Any, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^DataLoader: .*{told}"):
        DataLoader(dataset, **arguments, world=stub_world(world_size=3))


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("the length of the data set", 8),
        ("global_batch_size", 5),
        ("seed", 1),
        ("shuffle", True),
        ("drop_last", True),
    ],
)
def test_ranks_that_differ(fact: str, value: int) -> None:
    world = stub_world(world_size=3)
    world.exchange = lambda own: [own, own, own | {"facts": own["facts"] | {fact: value}}]
    with pytest.raises(MismatchError, match=f"DataLoader: {fact} is .* on rank 0 and {value} on rank 2"):
        DataLoader(range(9), 4, world=world)


def test_a_data_set_that_changed_its_length() -> None:
    samples = list(range(9))
    loader = DataLoader(samples, 4, world=stub_world())
    samples.pop()
    with pytest.raises(UsageError, match="had 9 samples when the loader was made and has 8 now"):
        iter(loader)


def test_workers_survive_the_signals_that_ask_a_run_to_stop_and_what_they_start_does_not() -> None:
    script = """
        import os, signal, subprocess, sys, time
        from evenstep import DataLoader, World

        class Data:
            def __len__(self):
                return 100

            def __getitem__(self, index):
                if index == 0:
                    child = subprocess.Popen(["sleep", "1000"])
                    time.sleep(0.2)
                    os.kill(child.pid, signal.SIGTERM)
                    assert child.wait() == -signal.SIGTERM
                elif index == 99:
                    time.sleep(1000)
                for which in (signal.SIGTERM, signal.SIGUSR1):
                    os.kill(os.getpid(), which)
                return index

        loader = DataLoader(Data(), 1, num_workers=2, world=World.alone(), persistent_workers=True)
        kept = iter(loader)  # until the interpreter's end, where one of its workers is in a long sample
        assert [next(kept).item() for _ in range(98)] == list(range(98))
        print("came")
    """
    # Multiprocessing would wait for a worker that survives.
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=80)
    assert (done.returncode, done.stdout) == (0, "came\n"), done.stderr


def test_no_two_loaders_have_the_same_order(fresh_seed: int) -> None:
    """Pairs of `zip(photos, paintings)` differ, and so do epochs of a loader that is made anew in each."""

    def order(**settings: Any) -> list[int]:
        return [int(number) for batch in DataLoader(range(1000), 10, **settings) for number in batch]

    def orders() -> list[list[int]]:
        with evenstep.init(seed=fresh_seed, quiet=True):
            return [order(shuffle=True), order(shuffle=True), order(sampler=RandomSampler(range(1000))), order()]

    first, second, drawn, plain = found = orders()
    assert plain == list(range(1000))
    for one, two in combinations([first, second, drawn], 2):
        assert sum(a == b for a, b in zip(one, two, strict=True)) < 30
    assert orders() == found  # a run that is begun again has the same
    with evenstep.init(seed=fresh_seed, quiet=True):
        order()  # takes none of the numbers
        assert order(shuffle=True) == first
        assert order(shuffle=True, seed=fresh_seed) == first  # its own seed is its order
        assert order(shuffle=True) == second


def test_a_resumed_loader_has_the_order_of_its_state_whichever_it_is(fresh_seed: int) -> None:
    """Made as the third of a run, it goes on as the first; a seed of its own stays, and refuses another."""

    def rest(loader: DataLoader, batches: int) -> list[list[int]]:
        return [batch.tolist() for _, batch in zip(range(batches), loader, strict=False)]

    with evenstep.init(seed=fresh_seed, quiet=True):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        optimizer.param_groups[0]["params"][0].grad = torch.zeros(1)
        first = DataLoader(range(100), 10, shuffle=True)
        whole = rest(DataLoader(range(100), 10, shuffle=True, seed=fresh_seed), 10)
        for step, _ in enumerate(first):
            optimizer.step()
            if step == 3:
                break
        state = first.state_dict()
        DataLoader(range(100), 10, shuffle=True)
        again = DataLoader(range(100), 10, shuffle=True)
        again.load_state_dict(state)
        assert rest(again, 6) == whole[4:]
        assert again.state_dict()["data"] == state["data"]
        other = DataLoader(range(100), 10, shuffle=True, seed=(fresh_seed + 1) % (1 << 31))
        with pytest.raises(ConfigurationError, match="seed was"):
            other.load_state_dict(state)
