"""Files asked for before they are read: the next window's blocks, each once, and nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep import DataLoader, Records
from evenstep.data.order.locality import LocalOrder
from evenstep.data.sources import readahead
from tests.stub_worlds import stub_world


class _Asked(Records):
    """Notes what was asked for, and which record was read last before that."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.asked: list[tuple[int, int]] = []
        self.order: list[Any] = []

    def will_need(self, first: int, last: int) -> None:
        self.asked.append((first, last))
        self.order.append(range(first, last))
        super().will_need(first, last)

    def batch_of(self, indices: torch.Tensor) -> torch.Tensor:
        self.order.append(indices.tolist())
        return super().batch_of(indices)


def _file(tmp_path: Path, num_records: int) -> Path:
    (tmp_path / "x.bin").write_bytes(os.urandom(num_records * 8))
    return tmp_path / "x.bin"


@pytest.mark.parametrize("start", [0, 96])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_window_is_asked_for_once_and_one_window_ahead(tmp_path: Path, world_size: int, start: int) -> None:
    num_records, block, window = 1003, 16, 4
    records = _Asked(_file(tmp_path, num_records), record_bytes=8)
    loader = DataLoader(
        records, 24, shuffle=True, locality=(block, window), world=stub_world(world_size - 1, world_size), seed=1
    )
    if start:
        loader.load_state_dict(loader.state_dict() | {"position": start})
    for _ in loader:
        pass
    order = loader._source.batch_plan.epoch(0).order  # type: ignore[attr-defined]
    expected = sorted(order.at(torch.arange(start // order.span * order.span, num_records)).tolist())
    assert sorted(sample for run in records.asked for sample in range(*run)) == expected
    there: set[int] = set()
    for number, event in enumerate(records.order):
        if isinstance(event, range):
            there |= set(event)
        else:
            assert there.issuperset(event), f"batch {number} was read before it was asked for"
            # Until the last window is there, the one after the batch's is there too.
            position = int((order.at(torch.arange(num_records)) == event[-1]).nonzero())
            begin = min((position // order.span + 1) * order.span, num_records)
            after = order.at(torch.arange(begin, min(begin + order.span, num_records)))
            assert there.issuperset(after.tolist())


@pytest.mark.parametrize("given", [{}, {"shuffle": True}, {"shuffle": True, "locality": (16, 4)}])
def test_orders_without_windows_or_with_huge_ones_are_left_to_the_system(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "_LARGEST_BYTES", 16 * 4 * 8 - 1)
    records = _Asked(_file(tmp_path, 100), record_bytes=8)
    assert sum(map(len, DataLoader(records, 24, world=stub_world(0, 1), **given))) == 100
    assert records.asked == []


@pytest.mark.parametrize(("size", "block", "window"), [(1, 1, 1), (103, 8, 3), (64, 8, 2), (50, 100, 7), (7, 2, 2**31)])
def test_runs_are_the_samples_of_each_window(size: int, block: int, window: int) -> None:
    for seed in range(20):
        order = LocalOrder(size, block, window, seed)
        for number in range(-(-size // order.span) + 1):
            start = number * order.span
            samples = order.at(torch.arange(start, max(start, min(start + order.span, size))))
            runs = order.runs(number)
            assert all(0 <= first < last <= size for first, last in runs)
            assert sorted(s for run in runs for s in range(*run)) == samples.sort().values.tolist(), (seed, number)


def test_what_is_asked_for_is_fetched_and_what_is_there_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(os.urandom(8 << 20))
    descriptor = os.open(tmp_path / "x.bin", os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    content = Records(tmp_path / "x.bin", record_bytes=1024).files[0].content
    if not readahead.will_need(content, 1 << 20, 2 << 20):
        pytest.skip("this file system keeps files in memory")
    deadline = time.monotonic() + 20
    while readahead.will_need(content, 1 << 20, 2 << 20):  # asked for, and on its way
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    assert not readahead.will_need(content, 8 << 20, 9 << 20), "nothing is behind the end"


def test_lines_are_asked_for_by_the_pages_that_hold_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps("x" * (i * 7919 % 900)) + "\n" for i in range(3000)))
    records = Records(tmp_path / "a.jsonl")
    file = records.files[0]
    for first, last in ((0, 1), (0, 3000), (17, 18), (500, 1700), (2999, 3000)):
        start, stop = file.bytes_around(first, last)
        end = file.start_of(last) if last < len(file) else file.size
        assert start <= file.start_of(first) < start + 2 * 16_384
        assert end <= stop < end + 2 * 16_384


def test_a_file_that_has_gone_is_left_to_whoever_reads_it(tmp_path: Path) -> None:
    records = Records(_file(tmp_path, 10), record_bytes=8)
    (tmp_path / "x.bin").unlink()
    records.will_need(0, 10)
