"""The order of an epoch, as a pure function of (seed, epoch, position).

Nothing is stored and nothing grows with the data set: the sample at a position is computed on demand, from a
permutation keyed by seed and epoch. So any number of ranks can take any slices of the epoch, and a run can resume at
any position, without a list.

[Note: the permutation]
Positions are written as pairs (left, right) of a grid of a * b cells, a and b close to the square root. A Feistel
network with addition modulo a and modulo b (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002) permutes
the cells; a walk that ends on a cell that is no sample goes on until it reaches one ("cycle walking"), which permutes
the samples. The grid is always larger than the data set: rounds on an odd by odd grid are even permutations, so half
of all orders could never occur if no walk broke that.

Sets so small that eight rounds might leave a trace are sorted by a random key instead, which is a bounded amount of
work and exactly uniform.

All arithmetic is on int64 and stays below 2**63: words have 32 bits, multipliers 31, so nothing overflows and a right
shift never sees a sign. It is written with operators that numpy's arrays and torch's tensors share. Where numpy is
installed the network runs on its arrays, to the same numbers, in half of torch's time; up to 2**31 samples on uint32,
whose products wrap as the mask demands, in a third. The order is part of what a checkpoint relies on: a test pins it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError
from evenstep.randomness import mix

try:
    import numpy
except ImportError:  # torch alone does it too
    numpy = None  # type: ignore[assignment]

_NUM_ROUNDS = 8
_LARGEST_SORTED = 256
_LARGEST = 1 << 61  # sides of the grid stay below 2**31
_LARGEST_NARROW = 1 << 31
_BLOCK = 32_768  # positions at a time: intermediate tensors stay in the cache
_MASK_32 = 0xFFFF_FFFF
_SHUFFLE_TAG = 0x6F72646572  # "order": keys of other streams from the same seed stay unrelated


class Order(Protocol):
    """The sample at each position of an epoch. Local, and the same on every rank."""

    @property
    def num_samples(self) -> int:
        """Positions of the epoch."""

    def at(self, positions: Tensor) -> Tensor:
        """Sample indices at `positions`, any shape, int64."""


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch. Making one costs nothing, whatever the size.

    Attributes:
        num_samples: Size of the data set.
        seed: Together with `epoch` it decides the order.
        epoch: Together with `seed` it decides the order.
        shuffle: False: position and sample are the same.
    """

    num_samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.num_samples < _LARGEST:
            raise ConfigurationError(f"num_samples={self.num_samples}: an order has from 0 to 2**61 - 1 samples.")

    def slice(self, start: int, stop: int) -> Tensor:
        """Sample indices at the positions from `start` to `stop` (excluded): [stop - start], int64.

        Raises:
            IndexError: A position outside of the epoch.
        """
        if stop <= start:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return self.at(torch.arange(start, stop, device="cpu"))

    def at(self, positions: Tensor) -> Tensor:
        """Sample indices at `positions`, any shape, int64.

        Raises:
            IndexError: A position outside of the epoch.
        """
        if positions.numel() == 0:
            return positions.clone()
        validate_positions(positions, self.num_samples)
        if not self.shuffle:
            return positions.clone()
        if self.num_samples <= _LARGEST_SORTED:
            return self._sorted_by_key[positions]
        blocks = torch.split(positions.reshape(-1), _BLOCK)
        return torch.cat([self._walk(block) for block in blocks]).reshape(positions.shape)

    @cached_property
    def _keys(self) -> list[int]:
        return [mix(_SHUFFLE_TAG, self.seed, self.epoch, number) & _MASK_32 for number in range(_NUM_ROUNDS)]

    @cached_property
    def _sides(self) -> tuple[int, int]:
        # See [Note: the permutation]: strictly more cells than samples.
        a = math.isqrt(self.num_samples) + 1
        return a, self.num_samples // a + 1

    @cached_property
    def _sorted_by_key(self) -> Tensor:
        """[num_samples], int64; at most `_LARGEST_SORTED`."""
        words = torch.arange(self.num_samples, device="cpu")
        high = scramble(scramble(words ^ self._keys[0]) ^ self._keys[1])
        low = scramble(scramble(words ^ self._keys[2]) ^ self._keys[3])
        return torch.argsort((high >> 1 << 32) | low, stable=True)

    def _walk(self, positions: Tensor) -> Tensor:
        """[n] to [n], int64; `positions` stays as it is."""
        if numpy is None:
            samples = self._permute(positions)
            while True:
                (astray,) = torch.nonzero(samples >= self.num_samples, as_tuple=True)
                if astray.numel() == 0:
                    return samples
                samples[astray] = self._permute(samples[astray])
        is_narrow = self.num_samples < _LARGEST_NARROW
        permute = self._permute_narrow if is_narrow else self._permute
        array = permute(positions.numpy().astype(numpy.uint32 if is_narrow else numpy.int64, copy=False))
        while True:
            (beyond,) = (array >= self.num_samples).nonzero()
            if beyond.size == 0:
                return torch.from_numpy(array.astype(numpy.int64, copy=False))
            array[beyond] = permute(array[beyond])

    def _permute(self, cells: Any) -> Any:
        a, b = self._sides
        left = cells // b
        right = cells - left * b
        for number in range(0, _NUM_ROUNDS, 2):
            _add_modulo_(left, _below(a, right ^ self._keys[number]), a)
            _add_modulo_(right, _below(b, left ^ self._keys[number + 1]), b)
        left *= b
        left += right
        return left

    def _permute_narrow(self, cells: Any) -> Any:
        """`_permute` on numpy's uint32; the sides are below 2**16."""
        a, b = self._sides
        left = cells // b
        right = cells - left * b
        for number in range(0, _NUM_ROUNDS, 2):
            left = _add_modulo_narrow(left, _below_narrow(a, right ^ self._keys[number]), a)
            right = _add_modulo_narrow(right, _below_narrow(b, left ^ self._keys[number + 1]), b)
        left *= b
        left += right
        return left


def validate_positions(positions: Tensor, num_samples: int) -> tuple[int, int]:
    """The lowest and the highest of some positions, at least one.

    Raises:
        IndexError: A position outside of the epoch.
    """
    low, high = (int(end) for end in positions.aminmax())
    if low < 0 or high >= num_samples:
        raise IndexError(f"positions {low} to {high} of an epoch of {num_samples} samples")
    return low, high


def scramble(words: Any) -> Any:
    """Hash 32-bit words, held in int64, into 32-bit words; in place.

    The finaliser of Ettinger ("lowbias32" family of Wellons' hash-prospector); both multipliers have less than 32
    bits, so that products fit into 63.
    """
    words ^= words >> 16
    words *= 0x21F0AAAD
    words &= _MASK_32
    words ^= words >> 15
    words *= 0x735A2D97
    words &= _MASK_32
    words ^= words >> 15
    return words


def _below(bound: int, words: Any) -> Any:
    """Hash 32-bit words into 0 to bound - 1, in place; `bound` below 2**31."""
    words = scramble(words)
    words *= bound
    words >>= 32
    return words


def _add_modulo_(values: Any, increments: Any, modulus: int) -> None:
    """`(values + increments) % modulus`, in place; both below `modulus`. A shift is ten times faster than `%`."""
    values += increments
    values -= modulus
    values += (values >> 63) & modulus


def _below_narrow(bound: int, words: Any) -> Any:
    """`_below` on uint32: the product's upper half, put together from two products that fit; `bound` below 2**16."""
    _scramble_narrow_(words)
    upper = words >> 16
    upper *= bound
    words &= 0xFFFF
    words *= bound
    words >>= 16
    upper += words
    upper >>= 16
    return upper


def _scramble_narrow_(words: Any) -> None:
    """`scramble` on uint32."""
    words ^= words >> 16
    words *= 0x21F0AAAD
    words ^= words >> 15
    words *= 0x735A2D97
    words ^= words >> 15


def _add_modulo_narrow(values: Any, increments: Any, modulus: int) -> Any:
    """`(values + increments) % modulus` on uint32: below 0 wraps to what is larger than any value."""
    values += increments
    return numpy.minimum(values, values - modulus)
