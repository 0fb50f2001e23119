"""How samples become batches: whole batches at once, seeds by sample, workers that die, rows put back in order."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from evenstep import DataLoader
from evenstep.data.loading.fetch import MAX_BYTES, pack, unpack
from evenstep.data.loading.workers import suitable_workers
from evenstep.errors import ConfigurationError, DataError, MismatchError
from evenstep.ground.health.excepthook import describe
from tests.stub_worlds import stub_world

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine of one core


# ---------------------------------------------------------------------- batches at once


@pytest.mark.parametrize("num_workers", [0, 1])
def test_tensors_are_cut_at_once_and_as_torch_stacks_them(num_workers: int) -> None:
    dataset = TensorDataset(torch.randn(21, 3), torch.arange(21), torch.rand(21) > 0.5)
    ours = list(DataLoader(dataset, 4, num_workers=num_workers, world=stub_world()))
    theirs = list(torch.utils.data.DataLoader(dataset, batch_size=4))
    assert len(ours) == len(theirs)
    for mine, torchs in zip(ours, theirs, strict=True):
        assert type(mine) is type(torchs)
        assert all(one.dtype == two.dtype and torch.equal(one, two) for one, two in zip(mine, torchs, strict=True))


def test_a_data_set_that_gives_several_samples_is_asked_for_them() -> None:
    asked = []

    class Several(Dataset[int]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            raise AssertionError

        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            return [10 * index for index in indices]

    assert torch.cat(list(DataLoader(Several(), 4, world=stub_world()))).tolist() == list(range(0, 100, 10))
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# ---------------------------------------------------------------------- seeds


class Noisy(Dataset[torch.Tensor]):
    """Augmentation out of three libraries; whatever was drawn before must not matter."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
        random.random(), numpy.random.rand(index), torch.rand(index)
        return torch.tensor([index, *noise], dtype=torch.float64)


def _noise(world_size: int, epoch: int = 0, **arguments: Any) -> torch.Tensor:
    loaders = [
        DataLoader(Noisy(), 7, shuffle=True, sample_seed=True, seed=3, world=stub_world(rank, world_size), **arguments)
        for rank in range(world_size)
    ]
    for loader in loaders:
        loader.set_epoch(epoch)
    return torch.cat([torch.cat(shares) for shares in zip(*loaders, strict=True)])


def test_augmentation_is_keyed_by_sample_and_epoch() -> None:
    alone = _noise(1)
    for world_size, num_workers in ((1, 2), (3, 0), (2, 1)):
        assert torch.equal(_noise(world_size, num_workers=num_workers), alone)
    by_sample = [rows[rows[:, 0].argsort()] for rows in (alone, _noise(1, epoch=1))]
    assert torch.equal(by_sample[0][:, 0], by_sample[1][:, 0])
    assert len(torch.cat(by_sample)[:, 1:].unique()) == 2 * 24 * 3


def test_seeding_by_sample_leaves_the_process_s_streams_alone() -> None:
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    _noise(1)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert numpy.random.get_state()[1].tolist() == before[2]


# ---------------------------------------------------------------------- workers


class Fatal(Dataset[int]):
    """Sample 13 ends the worker, one way or another."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        if index == 13:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "exits":
                os._exit(3)
            elif self.how == "sleeps":
                time.sleep(3)
            elif self.how == "says":
                raise DataError("image 13 is black")
            elif self.how == "waits":
                raise RuntimeError("the request timed out after 3 s; the helper exited unexpectedly")
            else:
                raise ValueError("image 13 is black")
        return index


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "killed",
            r"worker 1 \(pid \d+\) was killed by SIGKILL while loading sample 13 \(epoch 0, step 3, number 1 of",
        ),
        ("exits", r"worker 1 \(pid \d+\) exited with status 3 while loading sample 13 \(epoch 0, step 3"),
        ("sleeps", r"no batch came within timeout=1 s: .*worker 1 \(pid \d+\) is at sample 13 \(epoch 0, step 3"),
        ("says", r"^image 13 is black$"),
    ],
)
def test_a_worker_that_fails_is_named_with_its_sample(how: str, told: str) -> None:
    loader = DataLoader(Fatal(how), 4, num_workers=2, timeout=1 if how == "sleeps" else 0, world=stub_world())
    started = time.monotonic()
    with pytest.raises(DataError, match=told):
        list(loader)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("how", "kind", "told"), [("raises", ValueError, "is black"), ("waits", RuntimeError, "after 3")]
)
def test_an_exception_names_the_sample(how: str, kind: type[Exception], told: str, num_workers: int) -> None:
    """Whatever its text is like."""
    with pytest.raises(kind, match=told) as caught:
        list(DataLoader(Fatal(how), 4, num_workers=num_workers, world=stub_world()))
    assert type(caught.value) is kind
    if hasattr(caught.value, "add_note"):
        shown = "".join(traceback.format_exception(caught.value))
        assert "while evenstep loaded sample 13, epoch 0, step 3" in shown
        assert "in __getitem__" in shown


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_set_comes_with_what_its_code_raised(num_workers: int) -> None:
    class Lines(Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            try:
                return int("not this one")
            except ValueError as error:
                raise DataError(f"line {index} is damaged: {error}") from error

    with pytest.raises(DataError, match=r"^[^\n]*line 0 is damaged: .*not this one") as caught:
        list(DataLoader(Lines(), 1, num_workers=num_workers, world=stub_world()))
    if hasattr(caught.value, "add_note"):
        assert "in __getitem__" in describe(caught.value)


def test_workers_that_suit() -> None:
    assert [suitable_workers(num_cores=n, local_world_size=1, device_type="cpu") for n in (1, 2, 64)] == [0, 1, 1]
    assert suitable_workers(num_cores=16, local_world_size=16, device_type="cpu") == 0
    assert [suitable_workers(num_cores=n, local_world_size=2, device_type="cuda") for n in (2, 8, 64)] == [1, 3, 8]
    assert isinstance(DataLoader(range(4), 2, num_workers="auto", world=stub_world()).num_workers, int)
    for wrong in ("many", True, 1.0):
        with pytest.raises(ConfigurationError, match="num_workers="):
            DataLoader(range(4), 2, num_workers=wrong, world=stub_world())


# ---------------------------------------------------------------------- evaluation


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 200), st.integers(7, 60), st.integers(1, 7), st.booleans(), st.booleans())
def test_gathered_rows_have_the_order_of_the_data_set(
    size: int, batch: int, world_size: int, shuffle: bool, drop_last: bool
) -> None:
    drop_last = drop_last and size >= batch
    loaders = [
        DataLoader(range(size), batch, shuffle, drop_last=drop_last, world=stub_world(r, world_size))
        for r in range(world_size)
    ]
    rows = [torch.cat(list(loader)) for loader in loaders]
    seen = torch.cat(rows).sort().values
    for loader in loaders:
        loader.world.exchange = lambda value: [[len(each)] * 2 for each in rows]
        loader.world.gather = lambda mine: torch.cat(rows)  # of rows and of numbers, which are equal here
    for loader, mine in zip(loaders, rows, strict=True):
        assert torch.equal(loader.gather(mine), seen)
    assert len(seen) == size // batch * batch if drop_last else size


def test_rows_are_counted() -> None:
    loader = DataLoader(range(10), 4, world=stub_world())
    with pytest.raises(Exception, match="the loader wasn't iterated yet"):
        loader.gather(torch.zeros(10))
    next(iter(loader))
    assert loader.gather(torch.arange(4)).tolist() == [0, 1, 2, 3], "as far as it came"
    list(loader)
    with pytest.raises(MismatchError, match="rank 0 has 4 rows and has seen 10 samples"):
        loader.gather(torch.zeros(4))


# ---------------------------------------------------------------------- on the way


@pytest.mark.parametrize(
    "batch",
    [
        torch.randn(3, 4),
        [torch.zeros(0, 3), torch.tensor(7, dtype=torch.int16), "text", None, 1.5],
        {"a": torch.rand(5) > 0.5, "b": (torch.randn(2).bfloat16(), {"c": torch.randn(4, 4).t()})},
    ],
)
def test_small_batches_are_packed_and_come_back(batch: Any) -> None:
    data = pack(batch)
    assert data is not None
    again = unpack(data)
    leaves, structure = tree_flatten(batch)
    others, same = tree_flatten(again)
    assert structure == same
    for one, two in zip(leaves, others, strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == two.dtype
            assert torch.equal(one, two)
            two.zero_()  # writable, without a warning
        else:
            assert one == two


@pytest.mark.parametrize(
    "batch",
    [torch.zeros(MAX_BYTES + 1, dtype=torch.uint8), torch.ones(2, requires_grad=True), torch.eye(2).to_sparse()],
)
def test_other_batches_go_as_torch_sends_them(batch: torch.Tensor) -> None:
    assert pack([torch.zeros(1), batch]) is None


# ---------------------------------------------------------------------- epochs of numbered samples


class OfEpoch(Dataset[int]):
    """Samples that depend on the epoch that the data set was told."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch, self.told = size, -1, []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_numbered_data_set_is_told_the_epoch(num_workers: int, persistent: bool) -> None:
    """Also inside of torch's, and in workers that stay alive."""
    inner = OfEpoch(6)
    dataset = ConcatDataset([Subset(inner, range(3)), OfEpoch(2)])
    loader = DataLoader(dataset, 2, num_workers=num_workers, persistent_workers=persistent, world=stub_world())
    for epoch in loader.epochs(3):
        expected = [100 * epoch + index for index in (0, 1, 2, 0, 1)]
        assert torch.cat(list(loader)).tolist() == expected
    assert inner.told == ([] if num_workers else [0, 1, 2]), "once an epoch"
