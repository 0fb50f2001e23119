"""`Records` and `TokenDataset`: files larger than memory, and what is said of damaged ones."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep import DataLoader, Records, TokenDataset
from evenstep.data.sources import files
from evenstep.errors import ConfigurationError, DataError, MismatchError
from tests.stub_worlds import stub_world

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine of one core


def _fixed(directory: Path, *counts: int, record_bytes: int = 12) -> tuple[list[Path], torch.Tensor]:
    """Files with these numbers of random records, and all records [n, record_bytes]."""
    table = torch.randint(256, (sum(counts), record_bytes), dtype=torch.uint8)
    paths = []
    for number, part in enumerate(table.split(list(counts))):
        paths.append(directory / f"part-{number}.bin")
        paths[-1].write_bytes(bytes(part.flatten().tolist()))
    return paths, table


# ---------------------------------------------------------------------- what is read


def test_lines_are_found_whatever_their_length(tmp_path: Path, fresh_seed: int) -> None:
    """Against python's own reading; pages of 16 KiB begin and end anywhere in them."""
    chance = random.Random(fresh_seed)
    lines, paths = [], []
    for number, end in enumerate(("\n", "\r\n", "", "\n")):
        mine = ["ü" * chance.choice([0, 1, 10, 200, 9000, 40_000]) + str(i) for i in range(chance.randrange(1, 120))]
        mine = [] if number == 3 else mine
        separator = "\r\n" if end == "\r\n" else "\n"
        paths.append(tmp_path / f"{number}.txt")
        paths[-1].write_bytes((separator.join(mine) + end).encode() if mine else b"")
        lines += mine
    records = Records(paths)
    assert len(records) == len(lines)
    order = list(range(len(lines)))
    assert [records[i] for i in order] == lines
    chance.shuffle(order)
    assert records.__getitems__(order) == [lines[i] for i in order]
    again = pickle.loads(pickle.dumps(records))
    assert [again[i] for i in order[:20]] == [lines[i] for i in order[:20]]
    with pytest.raises(IndexError):
        records[len(lines)]


def test_more_pages_than_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_PAGES", 64)
    lines = [f"{i:07d}" + "x" * 500 for i in range(5000)]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    records = Records(tmp_path / "a.txt")
    order = torch.randperm(5000).tolist()
    assert [records[i] for i in order] == [lines[i] for i in order]
    assert len(records.files[0]._breaks) <= 64


def test_json_lines_and_decode(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"x": 1}\n[2]')
    (tmp_path / "a.jsonl").write_text('"three"\n')
    records = Records(str(tmp_path / "*.jsonl"))
    assert [records[i] for i in range(3)] == ["three", {"x": 1}, [2]]
    assert Records(tmp_path / "b.jsonl", decode=len)[1] == 1
    assert Records(tmp_path / "b.jsonl", format="lines")[1] == "[2]"
    assert repr(records) == "<Records 3 of format jsonl in 2 files>"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fixed_records_shuffled_through_a_loader_are_the_files(tmp_path: Path, num_workers: int) -> None:
    paths, table = _fixed(tmp_path, 100, 1, 250)
    loader = DataLoader(
        shards=Records(paths, record_bytes=12),
        global_batch_size=16,
        shuffle=True,
        locality=(8, 4),
        num_workers=num_workers,
        world=stub_world(),
    )
    seen = torch.cat(list(loader))
    assert seen.shape == table.shape
    assert not torch.equal(seen, table)
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, table.tolist()))
    records = Records(paths, record_bytes=12)
    assert torch.equal(torch.stack([records[i] for i in range(351)]), table)


def test_headers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "h.bin").write_bytes(b"HEADabcdef")
    records = Records(tmp_path / "h.bin", record_bytes=3, header_bytes=4, decode=lambda row: bytes(row.tolist()))
    assert [records[i] for i in range(2)] == [b"abc", b"def"]


def test_shards_are_paths_or_a_pattern_for_the_loader(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("1\n2\n3\n")
    for shards in (tmp_path / "x.jsonl", str(tmp_path / "*.jsonl"), [tmp_path / "x.jsonl"]):
        assert torch.cat(list(DataLoader(shards=shards, global_batch_size=2, world=stub_world()))).tolist() == [1, 2, 3]


# ---------------------------------------------------------------------- what is damaged


def test_a_cut_off_file_is_named_with_record_and_byte(tmp_path: Path) -> None:
    (path,), _ = _fixed(tmp_path, 10)
    os.truncate(path, 115)
    with pytest.raises(DataError, match=r"part-0.bin, record 9, byte 108: the file ends after 7 of the record's 12 b"):
        Records(path, record_bytes=12)
    records = Records(path, record_bytes=12, on_error="skip")
    assert (len(records), records.num_incomplete) == (9, 1)


DAMAGED = '{"a": 1}\n{"a": 2}\n{"a": \n{"a": 4}\n\xff\n{"a": 6}\n'


def test_damaged_json_is_named_with_record_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(DAMAGED.encode("latin1"))
    records = Records(path)
    with pytest.raises(DataError, match=r"d.jsonl, record 2, byte 24: no JSON: Expecting value"):
        records[2]
    with pytest.raises(DataError, match=r"d.jsonl, record 4, byte 34: damaged: 'utf-8' codec"):
        records[4]


def test_the_byte_of_a_damaged_record_is_counted_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes('{"é": }\n'.encode() + b'{"a": "\xff"}\n')
    records = Records(path)
    with pytest.raises(DataError, match=r"record 0, byte 7: no JSON"):
        records[0]
    with pytest.raises(DataError, match=r"record 1, byte 16: damaged: 'utf-8' codec"):
        records[1]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    for name in ("part[1].txt", "part1.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    assert Records(str(tmp_path / "part[1].txt"))[0] == "part[1].txt"
    assert len(Records(str(tmp_path / "part[0-9].txt"))) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_damaged_records_can_be_left_out_and_are_counted(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(DAMAGED.encode("latin1"))
    loader = DataLoader(shards=path, global_batch_size=2, on_error="skip", num_workers=num_workers, world=stub_world())
    with pytest.warns(UserWarning, match=r"rank 0 left out 2 samples in epoch 0: sample 2: .*d.jsonl, record 2, byte"):
        batches = list(loader)
    assert [batch["a"].tolist() for batch in batches] == [[1, 2], [4], [6]]
    assert loader.num_skipped == 2
    loader = DataLoader(shards=path, global_batch_size=2, num_workers=num_workers, world=stub_world())
    with pytest.raises(DataError, match=r"^[^\n]*d.jsonl, record 2, byte 24: no JSON"):
        list(loader)


def test_a_share_of_damaged_records_only_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("{\n{\n3\n4\n")
    loader = DataLoader(shards=path, global_batch_size=2, on_error="skip", world=stub_world())
    with pytest.warns(UserWarning, match="left out 2"):
        batches = list(loader)
    assert [batch.tolist() for batch in batches] == [[], [3, 4]]
    assert batches[0].dtype == batches[1].dtype
    with pytest.raises(MismatchError, match="rank 0 has 2 rows and has seen 4 samples"):
        loader.gather(torch.cat(batches))


@pytest.mark.parametrize("change", ["shorter", "gone", "longer"])
def test_files_that_change_are_noticed_before_they_kill(tmp_path: Path, change: str) -> None:
    """Reading a mapping behind the file's end would be SIGBUS."""
    paths, _ = _fixed(tmp_path, 10, 3000)
    records = Records(paths, record_bytes=12)
    loader = DataLoader(records, 8, world=stub_world())
    next(batches := iter(loader))
    if change == "shorter":
        os.truncate(paths[1], 7000)
        told = "part-1.bin, record 583, byte 7000: the file ends here and had 36000 bytes"
    elif change == "gone":
        paths[1].unlink()
        told = "part-1.bin can't be read any more: No such file"
    else:
        paths[1].write_bytes(bytes(36_012))
        told = "part-1.bin was changed since it was opened: 36000 bytes then, 36012 bytes now"
    with pytest.raises(DataError, match=told):
        list(batches)
    with pytest.raises(DataError, match=told):
        iter(loader)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"shards": "nothing/*.jsonl"}, "no file matches"),
        ({"shards": []}, "shards is empty"),
        ({"shards": "missing.jsonl"}, "missing.jsonl is not there"),
        ({"shards": "."}, r"\. is no file"),
        ({"record_bytes": 0}, "record_bytes=0"),
        ({"record_bytes": 4, "format": "jsonl"}, "belong together"),
        ({"format": "fixed"}, "belong together"),
        ({"format": "csv"}, "'lines', 'jsonl' or 'fixed'"),
        ({}, "what is in x.data isn't clear from its name"),
        ({"record_bytes": 2, "on_error": "ignore"}, "on_error='ignore'"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    (tmp_path / "x.data").write_bytes(b"abcd")
    with pytest.raises(ConfigurationError, match=told):
        Records(**{"shards": tmp_path / "x.data", **arguments})


def test_dataset_and_shards_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dataset and shards exclude each other"):
        DataLoader(range(3), 2, shards="x.jsonl", world=stub_world())
    with pytest.raises(ConfigurationError, match=r"DataLoader: shards: x.jsonl is not there"):
        DataLoader(shards="x.jsonl", global_batch_size=2, world=stub_world())
    with pytest.raises(ConfigurationError, match="on_error='maybe'"):
        DataLoader(range(3), 2, on_error="maybe", world=stub_world())


# ---------------------------------------------------------------------- tokens


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.uint32, torch.int64])
def test_windows_of_a_file_and_of_a_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    numbers = torch.randint(256 if dtype is torch.uint8 else 65_000, (1003,))
    path = tmp_path / "tokens.bin"
    size = dtype.itemsize
    path.write_bytes(b"".join(number.to_bytes(size, "little") for number in numbers.tolist()))
    from_file, held = TokenDataset(path, 10, dtype=dtype), TokenDataset(numbers, 10)
    assert len(from_file) == len(held) == 100
    for window in (0, 57, 99):
        x, y = from_file[window]
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x, numbers[10 * window : 10 * window + 10])
        assert torch.equal(y, numbers[10 * window + 1 : 10 * window + 11])
        assert all(map(torch.equal, held[window], (x, y)))
    x, y = next(iter(DataLoader(from_file, 100, world=stub_world())))
    assert torch.equal(x.flatten(), numbers[:1000])
    assert torch.equal(y.flatten(), numbers[1:1001])
    assert len(TokenDataset(numbers, 10, stride=3)) == 331
    assert torch.equal(TokenDataset(numbers, 10, stride=3)[330][1], numbers[991:1001])
    assert torch.equal(pickle.loads(pickle.dumps(from_file))[99][0], numbers[990:1000])


def test_documents_have_windows_of_their_own() -> None:
    """As the obvious loop would cut them."""
    sizes = [7, 1, 0, 4, 12, 2]
    numbers = torch.arange(100, 100 + sum(sizes))
    expected, start = [], 0
    for size in sizes:
        text = numbers[start : start + size].tolist()
        for first in range(0, size - 1, 4):
            window = text[first : first + 5]
            x, y = window[:-1], window[1:]
            expected.append((x + [0] * (4 - len(x)), y + [-100] * (4 - len(y))))
        start += size
    dataset = TokenDataset(numbers, 4, documents=sizes)
    assert [(x.tolist(), y.tolist()) for x, y in (dataset[i] for i in range(len(dataset)))] == expected
    x, y = dataset.batch_of(torch.arange(len(dataset)))
    assert list(zip(x.tolist(), y.tolist(), strict=True)) == expected


def test_token_files_that_are_wrong(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(41))
    with pytest.raises(DataError, match=r"tokens.bin, token 20, byte 40: the file ends after 1 of the token's 2 bytes"):
        TokenDataset(path, 4)
    for arguments, told in (
        ({"tokens": tmp_path / "none.bin"}, "none.bin is not there"),
        ({"tokens": torch.zeros(5)}, "float32"),
        ({"tokens": torch.zeros(4, dtype=torch.int64)}, "4 tokens are too few for a window of 4"),
        ({"context": 0}, "context=0"),
        ({"stride": 0}, "stride=0"),
        ({"dtype": torch.float32}, "whole numbers"),
        ({"documents": [3, 3]}, "have 6 tokens together, and there are 10"),
        ({"documents": [1] * 10}, "no document has two tokens"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            TokenDataset(**{"tokens": torch.arange(10), "context": 4, **arguments})


def test_the_index_of_lines_is_small(tmp_path: Path) -> None:
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(i) + "\n" for i in range(100_000)))
    records = Records(tmp_path / "many.jsonl")
    size = (tmp_path / "many.jsonl").stat().st_size
    assert len(records) == 100_000
    assert records[99_999] == 99_999
    assert records.files[0]._before.itemsize * len(records.files[0]._before) < size / 1000
