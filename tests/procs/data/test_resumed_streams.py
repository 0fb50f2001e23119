"""Streams stopped in the middle of an epoch and resumed on ranks: exactly, or refused.

Those of other libraries need `datasets` and `webdataset`, which `make test-peers` installs.
"""

from __future__ import annotations

import importlib.util
import io
import random
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

import evenstep
from evenstep import DataLoader
from evenstep.testing import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine of one core
NUM_RECORDS = 61
NUM_SHARDS = 9
GLOBAL_BATCH = 8
NUM_EPOCHS = 2
Steps = list[tuple[int, list[int]]]  # the epoch, and records


class Numbers(IterableDataset[int]):
    """0, 1, 2, ... in an order of the epoch's; a shard has every ninth."""

    def __init__(self, shards: range | None = None) -> None:
        self.shards, self.epoch, self.place, self.begin = shards, 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["epoch"] == self.epoch
        self.begin = state["place"]

    def __iter__(self) -> Iterator[int]:
        shards = range(NUM_SHARDS) if self.shards is None else self.shards
        numbers = [n for n in range(NUM_RECORDS) if n % NUM_SHARDS in shards]
        random.Random(self.epoch).shuffle(numbers)
        begin, self.begin = self.begin, 0
        for self.place, number in enumerate(numbers[begin:], begin + 1):
            yield number


class Sharded(Numbers):
    num_shards = NUM_SHARDS

    def shard(self, *, num_shards: int, index: int) -> Sharded:
        return Sharded(range(index, NUM_SHARDS, num_shards))


def opened(kind: str, folder: str) -> Any:
    """A stream, or numbered samples, that give NUM_RECORDS numbers."""
    if "tars" in kind:
        import webdataset

        urls = f"{folder}/shard-{{0..{NUM_SHARDS - 1}}}.tar"
        shuffled = kind == "shuffled tars"
        pipeline = webdataset.WebDataset(urls, shardshuffle=4 if shuffled else False)
        return (pipeline.shuffle(10) if shuffled else pipeline).decode().map(in_tar)
    if kind in ("plain", "sharded"):
        return Numbers() if kind == "plain" else Sharded()
    import datasets
    import pyarrow

    # A fingerprint of its own: computing one pickles the table, which is no part of this.
    table = datasets.Dataset(pyarrow.table({"number": list(range(NUM_RECORDS))}), fingerprint="some")
    if kind == "map":
        return table
    stream = table.to_iterable_dataset(num_shards=1 if kind == "one shard" else NUM_SHARDS)
    return stream.shuffle(seed=5, buffer_size=10) if kind == "buffer" else stream


def in_tar(sample: dict[str, Any]) -> dict[str, int]:
    return {"number": sample["cls"]}


def as_numbers(samples: list[Any]) -> list[int]:
    return [sample if isinstance(sample, int) else int(sample["number"]) for sample in samples]


def seen(
    kind: str, folder: str, num_workers: int, state: Any = None, stop: int | None = None, how: str = "replay"
) -> tuple[Steps, Any]:
    """This rank's part of each step until it stops, so many steps after its beginning; and the loader's state then."""
    evenstep.init(quiet=True)
    loader = DataLoader(
        opened(kind, folder),
        GLOBAL_BATCH,
        seed=3,
        collate_fn=as_numbers,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        resume_streams=how,
        **{"shuffle": True} if kind == "map" else {},
    )
    if state is not None:
        loader.load_state_dict(state)
    steps: Steps = []
    for epoch in loader.epochs(NUM_EPOCHS):
        for batch in loader:
            steps.append((epoch, batch))
            loader.commit()
            if len(steps) == stop:
                return steps, loader.state_dict()
    return steps, None


def refusal(*given: Any) -> str:
    try:
        seen(*given)
    except evenstep.EvenstepError as error:
        return str(error)
    raise AssertionError("no error")


def joined(of_ranks: list[tuple[Steps, Any]]) -> Steps:
    """The global batches."""
    steps = zip(*(steps for steps, _ in of_ranks), strict=True)
    return [(parts[0][0], [record for _, part in parts for record in part]) for parts in steps]


def check_resumes(
    ranks: RankPool, chance: random.Random, kind: str, folder: str, num_workers: int, nproc: int, how: str = "replay"
) -> Steps:
    """A run stopped anywhere goes on with the batches of one that wasn't; a stream divided by shard nowhere else.

    Returns:
        The global batches of the run that wasn't stopped.
    """
    straight = joined(ranks.run(seen, nproc, kind, folder, num_workers, None, None, how))
    for epoch in range(NUM_EPOCHS):
        records = [record for number, batch in straight for record in batch if number == epoch]
        assert sorted(records) == list(range(NUM_RECORDS)), "every record once an epoch"
    stop = chance.randrange(1, len(straight))
    _, state = ranks.run(seen, nproc, kind, folder, num_workers, None, stop, how)[0]
    assert joined(ranks.run(seen, nproc, kind, folder, num_workers, state, None, how)) == straight[stop:], stop
    num_parts, other = nproc * max(1, num_workers), chance.choice([each for each in (1, 2, 3, 4) if each != nproc])
    if (num_parts > 1 and is_divided_by_shard(kind)) or how == "state":
        told = ranks.run(refusal, other, kind, folder, num_workers, state, None, how)
        now = other * max(1, num_workers)
        assert all(f"ranks times workers was {num_parts} and is {now}" in each for each in told), told
    elif not is_divided_by_shard(kind):
        there = joined(ranks.run(seen, other, kind, folder, 1 - min(1, num_workers), state))
        assert there == straight[stop:], (stop, other)
    return straight


def is_divided_by_shard(kind: str) -> bool:
    return kind not in ("plain", "map", "one shard")


@pytest.mark.extended
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_streams_resume_exactly(ranks: RankPool, tmp_path: Path, kind: str, num_workers: int, fresh_seed: int) -> None:
    chance, folder = random.Random(fresh_seed), str(tmp_path)
    runs = [check_resumes(ranks, chance, kind, folder, num_workers, nproc) for nproc in (1, 2, 3, 4)]
    if kind == "plain":
        assert all(run == runs[0] for run in runs), "equal batches on any number of ranks"
    for nproc in (1, 2, 3):
        assert check_resumes(ranks, chance, kind, folder, num_workers, nproc, "state") == runs[nproc - 1]


# ---------------------------------------------------------------------- other libraries


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def write_shards(folder: Path) -> None:
    """The numbers as webdataset has them, in tar files of unequal sizes."""
    sizes = [1, 2, 11, 7, 7, 7, 7, 7, 12]
    numbers = iter(range(NUM_RECORDS))
    for shard, size in enumerate(sizes):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
            for number in islice(numbers, size):
                member = tarfile.TarInfo(f"{number:05d}.cls")
                member.size = len(str(number))
                tar.addfile(member, io.BytesIO(str(number).encode()))
    assert next(numbers, None) is None


def check_library(ranks: RankPool, kind: str, folder: Path, num_workers: int, seed: int, how: str = "replay") -> None:
    chance = random.Random(seed)
    runs = [check_resumes(ranks, chance, kind, str(folder), num_workers, nproc, how) for nproc in (1, 2, 3, 4)]
    for steps in runs:
        epochs = [[batch for number, batch in steps if number == epoch] for epoch in range(NUM_EPOCHS)]
        if kind in ("map", "buffer", "shuffled tars"):
            assert epochs[0] != epochs[1], "each epoch has an order of its own"
        elif kind == "tars":
            assert epochs[0] == epochs[1]
    assert is_divided_by_shard(kind) or all(steps == runs[0] for steps in runs), "equal batches on any number of ranks"


@pytest.mark.extended
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "one shard", "shards", "buffer"])
def test_other_libraries_data_sets_resume_exactly(
    ranks: RankPool, tmp_path: Path, kind: str, num_workers: int, fresh_seed: int
) -> None:
    needs("datasets")
    check_library(ranks, kind, tmp_path, num_workers, fresh_seed)
    if kind in ("one shard", "shards"):
        check_library(ranks, kind, tmp_path, num_workers, fresh_seed, "state")


@pytest.mark.extended
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["tars", "shuffled tars"])
def test_other_libraries_pipelines_resume_exactly(
    ranks: RankPool, tmp_path: Path, kind: str, num_workers: int, fresh_seed: int
) -> None:
    needs("webdataset")
    write_shards(tmp_path)
    check_library(ranks, kind, tmp_path, num_workers, fresh_seed)
