"""`TokenDataset`: windows of files, shards and tensors, and what is said of damaged files."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenstep import DataLoader, TokenDataset
from evenstep.errors import ConfigurationError, DataError
from tests.stub_worlds import stub_world

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine of one core


def shards(directory: Path, tokens: np.ndarray[Any, Any], sizes: list[int], header: bytes = b"") -> list[Path]:
    """Files with so many of the tokens each, behind a header."""
    paths = []
    for number, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        paths.append(directory / f"{number}.bin")
        paths[-1].write_bytes(header + part.tobytes())
    return paths


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, "int32", np.uint32, torch.int64, ">u2"])
def test_windows_of_a_file_and_of_a_tensor(tmp_path: Path, dtype: Any) -> None:
    numbers = torch.randint(256 if dtype is torch.uint8 else 65_000 if dtype == ">u2" else 32_000, (1003,))
    kind = np.dtype(str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype)
    path = tmp_path / "tokens.bin"
    path.write_bytes(numbers.numpy().astype(kind).tobytes())
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
    assert len(pickle.dumps(from_file)) < 1000, "a file isn't copied to workers"
    for index in (-1, 100):
        with pytest.raises(IndexError, match=f"windows {index} to {index} of 100"):
            from_file[index]


def in_a_loop(tokens: list[int], context: int, stride: int, documents: list[int] | None) -> list[tuple[Any, Any]]:
    """The windows as the obvious loop would cut them."""
    found, begin = [], 0
    for size in documents or [len(tokens)]:
        text = tokens[begin : begin + size]
        for first in range(0, size - 1, stride):
            window = text[first : first + context + 1]
            if documents is None and len(window) <= context:
                break
            x, y = window[:-1], window[1:]
            found.append((x + [0] * (context - len(x)), y + [-100] * (context - len(y))))
        begin += size
    return found


@pytest.mark.parametrize("header", [b"", b"HEADER!"])
@pytest.mark.parametrize("has_documents", [False, True])
def test_shards_are_one_text(tmp_path: Path, has_documents: bool, header: bytes, fresh_seed: int) -> None:
    """Windows cross from one file into the next, over empty and tiny ones; documents are cut anywhere."""
    chance = random.Random(fresh_seed)
    for _ in range(20):
        sizes = [chance.choice([0, 1, 2, 5, 30]) for _ in range(chance.randint(1, 9))] + [chance.randint(20, 60)]
        chance.shuffle(sizes)
        numbers = np.random.default_rng(fresh_seed).integers(0, 60_000, sum(sizes)).astype(np.uint16)
        documents = None
        if has_documents:
            cuts = sorted(chance.randint(0, len(numbers)) for _ in range(chance.randint(0, 6)))
            documents = np.diff([0, *cuts, len(numbers)]).tolist()
        context, stride = chance.randint(1, 15), chance.randint(1, 15)
        dataset = TokenDataset(
            shards(tmp_path, numbers, sizes, header),
            context,
            header_bytes=len(header),
            stride=stride,
            documents=documents,
        )
        expected = in_a_loop(numbers.tolist(), context, stride, documents)
        assert len(dataset) == len(expected)
        order = torch.randperm(len(dataset))
        x, y = dataset.batch_of(order)
        assert [(x, y) for x, y in zip(x.tolist(), y.tolist(), strict=True)] == [expected[i] for i in order.tolist()]
        assert repr(dataset) == f"<TokenDataset {len(expected)} windows of {context} in {len(numbers)} tokens>"


# ---------------------------------------------------------------------- what is damaged, or wrong


@pytest.mark.parametrize("change", ["shorter", "gone", "other", "touched"])
def test_files_that_change_are_noticed_before_they_kill(tmp_path: Path, change: str) -> None:
    """Reading a mapping behind the file's end would be SIGBUS."""
    paths = shards(tmp_path, np.zeros(6000, np.uint16), [100, 5900])
    batches = iter(DataLoader(TokenDataset(paths, 9), 400, world=stub_world()))
    next(batches)
    if change == "shorter":
        os.truncate(paths[1], 7000)
        told = "1.bin was changed since the data set was made: 11800 bytes then, 7000 bytes now"
    elif change == "gone":
        paths[1].unlink()
        told = "1.bin can't be read any more: No such file"
    elif change == "other":
        paths[1].write_bytes(bytes(11_802))
        told = "11800 bytes then, 11802 bytes now"
    else:
        os.utime(paths[1], (1, 1))
        told = "11800 bytes then, 11800 bytes now"
    with pytest.raises(DataError, match=told):
        next(batches)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {},
            r"tokens.bin, token 20, byte 40: the file ends after 1 of the token's 2 bytes.*or dtype=uint16 or header_b",
        ),
        ({"header_bytes": 2}, r"token 19, byte 40: the file ends after 1"),
        ({"header_bytes": 42}, r"tokens.bin, byte 41: the file ends inside of its header of 42 bytes"),
    ],
)
def test_files_that_are_cut_off(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(41))
    with pytest.raises(DataError, match=told):
        TokenDataset(tmp_path / "tokens.bin", 4, **arguments)
    assert TokenDataset(tmp_path / "tokens.bin", 4, header_bytes=1).num_tokens == 20


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"tokens": "none.bin"}, "none.bin is not there"),
        ({"tokens": "."}, r"\. is no file"),
        ({"tokens": [__file__, 5]}, "a file of numbers, a list of such files"),
        ({"tokens": []}, "whole numbers in a row"),
        ({"tokens": torch.zeros(5)}, "float32"),
        ({"tokens": torch.zeros(5, 2, dtype=torch.int64)}, r"shape \[5, 2\]"),
        ({"tokens": torch.zeros(5, dtype=torch.bool)}, "bool; whole numbers in a row"),
        ({"tokens": torch.zeros(4, dtype=torch.int64)}, "4 tokens are too few for a window of 4"),
        ({"context": 0}, "context=0"),
        ({"stride": 0}, "stride=0"),
        ({"header_bytes": -1}, "header_bytes=-1"),
        ({"dtype": torch.float32}, "whole numbers"),
        ({"dtype": "u2, u4"}, "whole numbers"),
        ({"dtype": bool}, "whole numbers"),
        ({"documents": [3, 3]}, "have 6 tokens together, but there are 10"),
        ({"documents": [1] * 10}, "no document has two tokens"),
        ({"documents": [11, -1]}, "documents are numbers of tokens"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        TokenDataset(**{"tokens": torch.arange(10), "context": 4, **arguments})
