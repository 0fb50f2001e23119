"""`LocalOrder`: an epoch shuffled so that neighbours on disk are read together.

[Note: locality]
A disk, and a page cache smaller than the file, read neighbours much faster than strangers. With `locality=(b, w)` the
epoch's samples are cut into blocks of b neighbours, the blocks are shuffled, and the samples of each w consecutive
blocks are shuffled among themselves:

    samples   0  1  2  3 | 4  5  6  7 | 8  9 10 11 |12 13 14 15 |16 17        b = 4, the last block is short
    blocks    3, 0 | 1, 2 | the short one last                                 w = 2
    order     2 13  0 12  3 14 15  1 | 5  9 ...

At any time at most w blocks are being read, each of them to its end. The short block always comes last. To favour no
sample, samples are first rotated by a number that depends on seed and epoch: sample s takes the place of sample
s + turn. Every sample is then at every position equally often.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evenstep.data.order.permutation import EpochOrder, sorted_by_key, validate_positions
from evenstep.errors import ConfigurationError
from evenstep.randomness import mix

ORDER_VERSION = 2  # another order for the same seed is another number: a state of the old one is refused

_TURN_TAG = 0x7475726E  # "turn"
_BLOCKS_TAG = 0x626C6F636B73  # "blocks"
_WINDOW_TAG = 0x77696E646F77  # "window"
_MASK_32 = 0xFFFF_FFFF
_LARGEST_HELD = 1 << 18  # samples of a window whose order is computed at once and remembered: 2 MiB
_NUM_HELD = 2  # such windows: positions of one request may begin in one and end in the next
_NUM_BLOCKS = 1024  # blocks whose order is computed at a time


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
        low, high = validate_positions(positions, self.num_samples)
        span = self.span
        flat = positions.reshape(-1)
        first, last = low // span, high // span
        if first == last:
            return self._samples(first, flat - first * span).reshape(positions.shape)
        samples = torch.empty_like(flat)
        numbers, places = torch.div(flat, span, rounding_mode="floor").sort()
        # Only the windows of these positions: there may be any number of others between.
        windows, sizes = torch.unique_consecutive(numbers, return_counts=True)
        for number, inside in zip(windows.tolist(), torch.split(places, sizes.tolist()), strict=True):
            samples[inside] = self._samples(number, flat[inside] - number * span)
        return samples.reshape(positions.shape)

    @property
    def span(self) -> int:
        """Positions of a window, of which the last may have fewer."""
        return self.block * self._width

    def runs(self, number: int) -> list[tuple[int, int]]:
        """Neighbours, first and one after the last, that hold the samples of a window; none behind the epoch's last."""
        num_left = self.num_samples - number * self.span
        runs = []
        for first in self._firsts(number).tolist() if num_left > 0 else ():
            # The last block may be short, and one of them crosses the end of the data set.
            size = min(self.block, num_left)
            num_left -= size
            beyond = max(0, first + size - self.num_samples)
            runs += [(first, first + size - beyond)] * (size > beyond) + [(0, beyond)] * (beyond > 0)
        return runs

    def _samples(self, number: int, offsets: Tensor) -> Tensor:
        """Samples at the positions `offsets` of one window."""
        span = self.span
        if span <= _LARGEST_HELD:
            return self._window(number)[offsets]
        size = min(span, self.num_samples - number * span)
        shuffled = EpochOrder(size, self.seed, mix(_WINDOW_TAG, self.epoch, number)).at(offsets)
        slots = torch.div(shuffled, self.block, rounding_mode="floor")
        inside = shuffled.sub_(slots * self.block)
        return self._turned(inside.add_(self._firsts(number)[slots]))

    def _window(self, number: int) -> Tensor:
        """All samples of a window in their order, [at most block * window]. The latest two are remembered."""
        order = self._windows.get(number)
        if order is None:
            span = self.span
            key = mix(_WINDOW_TAG, self.seed, self.epoch, number)
            shuffled = sorted_by_key(min(span, self.num_samples - number * span), key & _MASK_32, key >> 32 & _MASK_32)
            firsts = self._firsts(number)
            samples = firsts.unsqueeze(1) + torch.arange(self.block, device="cpu")
            if int(firsts.max()) + self.block > self.num_samples:
                self._turned(samples)
            order = samples.view(-1)[shuffled]
            if len(self._windows) >= _NUM_HELD:
                del self._windows[next(iter(self._windows))]
            self._windows[number] = order
        return order

    def _firsts(self, number: int) -> Tensor:
        """The first sample of the block in each slot of a window, [width]; turned."""
        return self._turned(self._blocks_of(number) * self.block + self._turn)

    def _turned(self, samples: Tensor) -> Tensor:
        """Past the end of the data set back to its beginning, in place."""
        return samples.sub_((samples >= self.num_samples).long().mul_(self.num_samples))

    def _blocks_of(self, number: int) -> Tensor:
        """The block in each slot of a window, [width]; the short one has its own place, the last. Behind it, any."""
        # Many windows at a time: the network costs as much for 16 blocks as for 1,000.
        num_windows = max(1, _NUM_BLOCKS // self._width)
        group, place = divmod(number, num_windows)
        if group not in self._groups:
            num_full = self.num_samples // self.block
            first = group * num_windows * self._width
            stop = first + num_windows * self._width
            full = self._blocks.slice(min(first, num_full), min(stop, num_full))
            rest = torch.full((stop - first - len(full),), num_full, device="cpu")
            self._groups.clear()
            self._groups[group] = torch.cat([full, rest]).view(num_windows, self._width)
        return self._groups[group][place]

    @property
    def _width(self) -> int:
        """Blocks of a window, of which there are no more than the epoch has."""
        return min(self.window, self.num_samples // self.block + 1)

    @cached_property
    def _windows(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def _groups(self) -> dict[int, Tensor]:
        return {}

    @cached_property
    def _turn(self) -> int:
        return mix(_TURN_TAG, self.seed, self.epoch) % self.num_samples

    @cached_property
    def _blocks(self) -> EpochOrder:
        return EpochOrder(self.num_samples // self.block, self.seed, mix(_BLOCKS_TAG, self.epoch))
