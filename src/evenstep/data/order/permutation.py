"""The order of an epoch, as a pure function of (seed, epoch, position).

Nothing is stored and nothing grows with the data set: the sample at a position is computed on demand, from a
permutation keyed by seed and epoch. So any number of ranks can take any slices of the epoch, and a run can resume at
any position, without a list.

[Note: the permutation]
Positions are written as pairs (left, right) of a grid of a * b cells, a and b close to the square root. A Feistel
network with addition modulo a and modulo b (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002) permutes
the cells. A cell beyond the last sample is permuted again until a sample is reached ("cycle walking"); this permutes
the samples. The grid is always larger than the data set: rounds on an odd by odd grid are even permutations, so half of
all orders could never occur without such repetitions.

Data sets so small that eight rounds might leave a pattern are sorted by a random key instead: exactly uniform, and a
bounded amount of work.

Words have 32 bits, sides and multipliers 31, so products of 64 bits never overflow. The network runs on numpy's
unsigned arrays, which takes half of the time that torch's tensors take. Up to 2**31 samples the arrays have 32 bits,
and products wrap as the mask would cut them: this takes a third of the time. Checkpoints depend on the order, so a test
pins it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from evenstep.errors import ConfigurationError
from evenstep.ground.computing.randomness import mix

_NUM_ROUNDS = 8
_LARGEST_SORTED = 256
_LARGEST = 1 << 61  # sides of the grid stay below 2**31
_LARGEST_NARROW = 1 << 31
_BLOCK = 32_768  # positions at a time, so that intermediate tensors stay in the cache
_MASK_32 = 0xFFFF_FFFF
_SHUFFLE_TAG = 0x6F72646572  # "order": keys of other streams from the same seed stay unrelated


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
            IndexError: A position is outside of the epoch.
        """
        if stop <= start:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return self.at(torch.arange(start, stop, device="cpu"))

    def at(self, positions: Tensor) -> Tensor:
        """Sample indices at `positions`, any shape, int64.

        Raises:
            IndexError: A position is outside of the epoch.
        """
        if positions.numel() == 0:
            return positions.clone()
        low, high = (int(end) for end in positions.aminmax())
        if low < 0 or high >= self.num_samples:
            raise IndexError(f"positions {low} to {high} of an epoch of {self.num_samples} samples")
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
        word = numpy.uint32 if self.num_samples < _LARGEST_NARROW else numpy.uint64
        samples = self._permute(positions.numpy().astype(word))
        while True:
            (beyond,) = (samples >= self.num_samples).nonzero()
            if beyond.size == 0:
                return torch.from_numpy(samples.astype(numpy.int64))
            samples[beyond] = self._permute(samples[beyond])

    def _permute(self, cells: Any) -> Any:
        a, b = self._sides
        left = cells // b
        right = cells - left * b
        for number in range(0, _NUM_ROUNDS, 2):
            left = _add_modulo(left, _below(a, right ^ self._keys[number]), a)
            right = _add_modulo(right, _below(b, left ^ self._keys[number + 1]), b)
        left *= b
        left += right
        return left


def scramble(words: Any) -> Any:
    """Hash 32-bit words, held in 32 or 64 bits, into 32-bit words; in place. Takes torch's tensors, too.

    The finaliser of Ettinger ("lowbias32" family of Wellons' hash-prospector); both multipliers have less than 32
    bits, so that products fit into 63.
    """
    words ^= words >> 16
    for multiplier in (0x21F0AAAD, 0x735A2D97):
        words *= multiplier
        if words.itemsize > 4:  # narrower words wrap by themselves
            words &= _MASK_32
        words ^= words >> 15
    return words


def _below(bound: int, words: Any) -> Any:
    """Hash 32-bit words into 0 to bound - 1, in place. `bound` has at most half of the bits of the words' dtype.

    That is `words * bound >> 32`, put together from two products that fit.
    """
    words = scramble(words)
    upper = words >> 16
    upper *= bound
    words &= 0xFFFF
    words *= bound
    words >>= 16
    upper += words
    upper >>= 16
    return upper


def _add_modulo(values: Any, increments: Any, modulus: int) -> Any:
    """`(values + increments) % modulus`, for arguments below the modulus.

    A negative difference wraps, and is larger than any value.
    """
    values += increments
    return numpy.minimum(values, values - modulus)
