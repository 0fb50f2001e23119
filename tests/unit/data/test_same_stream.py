"""`same_stream`: what a digest of records tells apart, and what it doesn't look at."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from evenstep.data.loading.digests import digest_of


class Pair(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


@dataclass
class Sample:
    """A dataclass."""

    x: Any


class Opaque:
    """Nothing is known of what it holds, but its address differs."""


RECORDS: list[Any] = [
    0,
    1,
    1.0,
    True,
    None,
    -0.0,
    0.0,
    "a",
    b"a",
    "ab" * 5000,
    "ba" * 5000,
    [1, 2],
    [2, 1],
    (1, 2),
    [[1], 2],
    {"a": 1},
    {"b": 1},
    {"a": 2},
    Pair(1, 2),
    Pair(2, 1),
    Sample(1),
    Sample(2),
    torch.zeros(3),
    torch.zeros(4),
    torch.ones(3),
    torch.zeros(3, 1),
    torch.zeros(3, dtype=torch.float64),
    torch.zeros(3, dtype=torch.bfloat16),
    torch.zeros(3, dtype=torch.bool),
    torch.zeros(2, dtype=torch.complex64),
    torch.ones(2, dtype=torch.complex64).conj() * 1j,
    torch.zeros(()),
    torch.zeros(0),
    torch.arange(10_000),
    torch.arange(10_000) + 1,
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6.0).reshape(3, 2).T,
    np.zeros(3),
    np.ones(3),
    np.float32(1),
    np.int64(1),
    Opaque(),
]


def test_records_of_other_content_have_other_digests() -> None:
    digests = [digest_of([record]) for record in RECORDS]
    assert len(set(digests)) == len(digests)
    assert digests == [digest_of([copy.deepcopy(record)]) for record in RECORDS]
    assert all(0 <= digest < 1 << 56 for digest in digests)


def test_another_process_has_the_same_digest() -> None:
    """Texts are hashed otherwise in every process."""
    script = (
        "from evenstep.data.loading.digests import digest_of\n"
        "print(digest_of([{'text': 'abc', 'label': 2.5, 'kind': {'a'}}]))"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert int(told) == digest_of([{"text": "abc", "label": 2.5, "kind": {"b"}}])
