"""Digests: numbers that show whether ranks have the same tensors, and whether differences are rounding."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALL_BYTES = 64 << 10  # smaller tensors are copied together and read at once
# A prime, so that rows of a matrix begin in different columns, and swapping two rows changes the digest.
_NUM_COLUMNS = 1021
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """A hash of the bytes of some tensors, in the order of their elements: 0-dim, int64, on the first tensor's device.

    The same on every machine, for any strides. It consists of weighted sums over columns of 32-bit words, so it runs at
    the speed of memory. It isn't cryptographic: two tensors with the same digest are easy to construct.
    """
    total: Tensor | None = None
    for flat in together(tensors):
        raw = flat.view(torch.uint8)
        num_bytes = raw.numel() // 4 * 4
        body = raw[:num_bytes] if raw.storage_offset() % 4 == 0 else raw[:num_bytes].clone()
        part = _weigh(body.view(torch.int32))
        if num_bytes < raw.numel():
            part = part * _ODD + _weigh(raw[num_bytes:])
        total = part if total is None else total * _ODD + part.to(total.device)
    return torch.zeros((), dtype=torch.int64, device="cpu") if total is None else total * _ODD


def contrast(value: int | Tensor, rank: int, num_ranks: int) -> float | Tensor:
    """A rank's summand: the sum over all ranks is 0 if all have the same value, and almost never otherwise. Pure.

    Every rank except the first contributes the upper 40 bits of its value, and the first rank contributes minus its
    own, times the number of other ranks. If there are only two different values, as with two ranks, the sum isn't 0.
    With three or more different digests it is 0 by chance, once in 2^39. Integers below 2^53 are exact in a float64, so
    there is no false alarm among up to 8192 ranks. Several groups of ranks may add their summands together: the sum is
    0 if the ranks within each group are equal.

    Args:
        value: 64 bits, signed: a digest or a checksum.
        rank: This rank's number among the compared ranks.
        num_ranks: The number of compared ranks.

    Returns:
        A number; or, if the value is on a GPU, a 0-dim float64 tensor, so that nothing waits for the GPU.
    """
    if isinstance(value, Tensor) and value.device.type == "cpu":
        value = int(value)
    found = (value >> 24) * (1 if rank else 1 - num_ranks)
    return found.double() if isinstance(found, Tensor) else float(found)


def together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All elements in fewer, flat tensors: small neighbouring tensors are joined. Complex numbers become pairs."""
    # Skip tensors whose memory was freed: their owner will fill it again.
    filled = [each for each in tensors if each.numel() and each.untyped_storage().nbytes()]
    real = [torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in filled]
    runs = itertools.groupby([each.contiguous().reshape(-1) for each in real], _kind)
    return [torch.cat(run) if len(run) > 1 else run[0] for run in (list(each) for _, each in runs)]


def _kind(flat: Tensor) -> object:
    """The key by which neighbouring tensors are joined. Each large tensor has its own key."""
    return (flat.dtype, flat.device) if flat.nbytes <= _SMALL_BYTES else id(flat)


def _weigh(words: Tensor) -> Tensor:
    rows, rest = divmod(words.numel(), _NUM_COLUMNS)
    columns = words[: rows * _NUM_COLUMNS].view(rows, _NUM_COLUMNS).sum(0)
    columns[:rest] += words[rows * _NUM_COLUMNS :]
    return (columns * _weights(words.device)).sum()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd weights of columns: [_NUM_COLUMNS], int64. Not from torch's generators, which may change between versions."""
    draw = random.Random(1)
    numbers = [draw.getrandbits(62) * 2 + 1 for _ in range(_NUM_COLUMNS)]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def canonical(values: Tensor) -> Tensor:
    """A copy in which all NaNs have the same bits, and all zeros, too. Complex numbers become [..., 2]."""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return torch.where(values.isnan(), torch.full_like(values, torch.nan), values + 0.0)


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference over the largest value; infinite if only one of two elements is finite."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = float(torch.where(same, 0.0, (one - other).abs()).max())
    if apart == 0.0:
        return 0.0
    largest = max(float(torch.where(each.isfinite(), each.abs(), 0.0).max()) for each in (one, other))
    ratio = apart / largest if largest else float("inf")
    return ratio if ratio == ratio else float("inf")
