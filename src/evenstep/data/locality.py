"""Other orders of an epoch than a plain permutation: near neighbours together, and draws by weight.

[Note: locality]
A disk, and a page cache smaller than the file, read neighbours much faster than strangers. With `locality=(b, w)` the
epoch's samples are cut into blocks of b neighbours, the blocks are shuffled, and the samples of each w consecutive
blocks are shuffled among themselves:

    samples   0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15 |16 17        b = 4, the last block is short
    blocks    3, 0 | 1, 2 | the short one last                                 w = 2
    order     2 13  0 12  3 14 15  1 | 5  9 ...

At any time at most w blocks are being read, each of them to its end. The short block always comes last; so that this
favours no sample, everything is first turned by a number that depends on seed and epoch: sample s takes the place of
sample s + turn. Every sample is then at every position equally often.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from evenstep.data.order import EpochOrder, scramble
from evenstep.errors import ConfigurationError
from evenstep.randomness import mix

_TURN_TAG = 0x7475726E  # "turn"
_BLOCKS_TAG = 0x626C6F636B73  # "blocks"
_WINDOW_TAG = 0x77696E646F77  # "window"
_DRAW_TAG = 0x64726177  # "draw"
_MASK_32 = 0xFFFF_FFFF


@dataclass(frozen=True)
class LocalOrder:
    """An epoch shuffled in blocks, and within windows of blocks. Making one costs nothing, whatever the size.

    Attributes:
        num_samples: Size of the data set.
        block: Neighbouring samples that are read together.
        window: Blocks whose samples are shuffled among themselves.
        seed: Together with `epoch` it decides the order.
        epoch: Together with `seed` it decides the order.
    """

    num_samples: int
    block: int
    window: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        if self.block < 1 or self.window < 1:
            raise ConfigurationError(f"locality=({self.block}, {self.window}): both are at least 1.")

    def at(self, positions: Tensor) -> Tensor:
        """Sample indices at `positions`, any shape, int64.

        Raises:
            IndexError: A position outside of the epoch.
        """
        if positions.numel() == 0:
            return positions.clone()
        low, high = (int(end) for end in positions.aminmax())
        if low < 0 or high >= self.num_samples:
            raise IndexError(f"positions {low} to {high} asked of an epoch of {self.num_samples} samples")
        span = self.block * self.window
        flat = positions.reshape(-1)
        first, last = low // span, high // span
        if first == last:
            return self._samples(first, flat - first * span).reshape(positions.shape)
        samples = torch.empty_like(flat)
        numbers = torch.div(flat, span, rounding_mode="floor")
        for number in range(first, last + 1):
            inside = torch.nonzero(numbers == number).squeeze(1)
            if inside.numel():
                samples[inside] = self._samples(number, flat[inside] - number * span)
        return samples.reshape(positions.shape)

    def _samples(self, number: int, offsets: Tensor) -> Tensor:
        """Samples at the positions `offsets` of one window."""
        start = number * self.block * self.window
        size = min(self.block * self.window, self.num_samples - start)
        shuffled = EpochOrder(size, self.seed, mix(_WINDOW_TAG, self.epoch, number)).at(offsets)
        slots = torch.div(shuffled, self.block, rounding_mode="floor")
        # A table of the window's few blocks: by how much the sample in each slot has to move. Turned, and past the
        # end of the data set back to its beginning.
        moves = (self._blocks_of(number) - torch.arange(len(self._blocks_of(number)))) * self.block + self._turn
        samples = shuffled.add_(moves[slots])
        return samples.sub_((samples >= self.num_samples).long().mul_(self.num_samples))

    def _blocks_of(self, number: int) -> Tensor:
        """The block in each slot of a window, [at most window]; the short one has its own place, the last."""
        num_full = self.num_samples // self.block
        first = number * self.window
        full = self._blocks.slice(first, max(first, min(first + self.window, num_full)))
        if first + self.window > num_full:
            full = torch.cat([full, torch.tensor([num_full])])
        return full

    @cached_property
    def _turn(self) -> int:
        return mix(_TURN_TAG, self.seed, self.epoch) % self.num_samples

    @cached_property
    def _blocks(self) -> EpochOrder:
        return EpochOrder(self.num_samples // self.block, self.seed, mix(_BLOCKS_TAG, self.epoch))


class Weights:
    """What each sample is drawn by. Holds 8 bytes per sample.

    Args:
        weights: [num_samples], at least 0 and finite, not all of them 0.

    Raises:
        ConfigurationError: They are not; the message names the first.
    """

    def __init__(self, weights: Tensor) -> None:
        if weights.dim() != 1 or weights.numel() == 0 or weights.is_complex():
            raise ConfigurationError(f"weights of shape {list(weights.shape)}; one number for each sample.")
        weights = weights.detach().to("cpu", torch.float64)
        wrong = torch.nonzero(~(weights.isfinite() & (weights >= 0)))
        if wrong.numel():
            first = int(wrong[0])
            raise ConfigurationError(f"weights[{first}] is {float(weights[first])}; weights are finite and at least 0.")
        self.cumulative = weights.cumsum(0)  # [num_samples], float64
        self.total = float(self.cumulative[-1])
        if not 0 < self.total < float("inf"):
            raise ConfigurationError(f"the weights add up to {self.total}; there is nothing to draw by.")
        self.last = int(torch.nonzero(weights)[-1])

    def __len__(self) -> int:
        return len(self.cumulative)


@dataclass(frozen=True)
class WeightedOrder:
    """Draws with replacement: each position is drawn by itself, so any of them can be had without the others.

    Attributes:
        weights: What each sample is drawn by.
        num_samples: Draws of one epoch.
        seed: Together with `epoch` it decides the draws.
        epoch: Together with `seed` it decides the draws.
    """

    weights: Weights
    num_samples: int
    seed: int = 0
    epoch: int = 0

    def at(self, positions: Tensor) -> Tensor:
        """Sample indices drawn at `positions`, any shape, int64."""
        keys = _draw_keys(self.seed, self.epoch)
        low, high = positions & _MASK_32, positions >> 32
        words = [scramble(scramble(low ^ keys[i]) ^ high ^ keys[i + 1]) for i in (0, 2)]
        uniform = ((words[0] << 21) | (words[1] >> 11)).double() * 2.0**-53
        drawn = torch.searchsorted(self.weights.cumulative, uniform * self.weights.total, right=True)
        # The product may round up to the total, which lies behind every sample.
        return drawn.clamp_(max=self.weights.last)


@lru_cache(maxsize=16)
def _draw_keys(seed: int, epoch: int) -> list[int]:
    return [mix(_DRAW_TAG, seed, epoch, number) & _MASK_32 for number in range(4)]
