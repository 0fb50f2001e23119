"""The value of a row before it is trained: a function of seed, table and the row's number only. Pure.

It depends neither on the number of servers nor on the order in which rows are first used, and an untrained row needs no
memory.

[Note: how a value is drawn]
A counter-based generator (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011) with SplitMix64's
finaliser (Steele, Lea and Flood, 2014) as its function: the counter is row * dim + column, the key a hash of seed and
name. The two halves of its 64 bits are the two uniform numbers of the transform of Box and Muller (1958).
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor

from evenstep.ground.computing.randomness import mix

_BLOCK = 65_536  # values per pass: intermediate arrays stay in the cache
_TAG = 0x726F7773  # "rows": keys of other streams from the same seed stay unrelated


def normal_rows(ids: Tensor, dim: int, *, table: str, seed: int, std: float, dtype: torch.dtype) -> Tensor:
    """Rows drawn from N(0, std^2).

    Args:
        ids: [n], int64, not negative.
        dim: Number of columns.
        table: The table's name, so that tables with the same seed differ.
        seed: The seed of all tables.
        std: Standard deviation; 0: zeros.
        dtype: The result's dtype.

    Returns:
        [n, dim].
    """
    rows = torch.empty(len(ids), dim, dtype=dtype, device="cpu")
    key = np.uint64(mix(_TAG, seed, zlib.crc32(table.encode())))
    columns = np.arange(dim, dtype=np.uint64)
    numbers = ids.numpy().astype(np.uint64)
    step = max(1, _BLOCK // max(1, dim))
    for first in range(0, len(numbers), step):
        block = numbers[first : first + step, None] * np.uint64(dim) + columns
        rows[first : first + step] = torch.from_numpy(_normal(block, key) * std)
    return rows


def _normal(counters: np.ndarray, key: np.uint64) -> np.ndarray:
    """Normal numbers from counters and a key: see [Note: how a value is drawn]."""
    bits = (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    radius = np.sqrt(-2 * np.log(((bits >> np.uint64(32)) + 0.5) / 2.0**32))
    angle = (bits & np.uint64(0xFFFF_FFFF)) * (2 * np.pi / 2.0**32)
    normal: np.ndarray = radius * np.cos(angle)
    return normal
