"""`TokenBatches`: global batches limited by tokens instead of samples (`max_tokens`). Pure.

A batch that is padded costs the number of its samples times its longest one. `max_tokens` bounds that product for the
*global* batch; shares hold equally many samples, of similar lengths, so each rank has about its part of it.

That needs samples of similar length in one batch, so each window of the epoch's order (a hundred batches or so) is
sorted by length, cut greedily, and the batches of the window shuffled:

    order      7  2  9  4  1  8  3  6        one window, with lengths  50 12 48 13 49 12 51 14
    sorted     2  8  4  6 | 9  1  7  3
    batches    2  8  4  6 | 9  1 | 7  3      max_tokens 102
    shuffled   7  3 | 2  8  4  6 | 9  1

The cuts depend on seed and epoch and not on the number of ranks, and every rank knows all of them: the number of steps
is the same everywhere. In memory are the lengths (given) and the position at which each batch of the epoch begins.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import torch
from torch import Tensor

from evenstep.data.order.permutation import EpochOrder, Order
from evenstep.errors import ConfigurationError
from evenstep.randomness import mix

_SHUFFLE_TAG = 0x62617463686573  # "batches"
_BATCHES_PER_WINDOW = 100
_SMALLEST_WINDOW, _LARGEST_WINDOW = 1_000, 262_144


class TokenBatches:
    """An epoch's order and global batches in one; both use the same positions.

    Args:
        order: The epoch's samples before they are sorted.
        lengths: [size of the data set], int64, at least 1: tokens of each sample.
        max_tokens: Samples times longest sample of a global batch, at most.
        shuffle: False: `order` stays as it is, and is only cut.
        seed: Together with `epoch` it decides the order of the batches in a window.
        epoch: Together with `seed` it decides the order of the batches in a window.
    """

    def __init__(
        self, order: Order, lengths: Tensor, max_tokens: int, *, shuffle: bool, seed: int = 0, epoch: int = 0
    ) -> None:
        self.num_samples = order.num_samples
        self._order, self._lengths, self._max_tokens = order, lengths, max_tokens
        self._shuffle, self._seed, self._epoch = shuffle, seed, epoch
        self._window = window_of(lengths, max_tokens)
        sizes: list[int] = []
        self._samples: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64, device="cpu"))
        for number in range(-(-self.num_samples // self._window)):
            sizes += self._arrange(number)[1]
        self._bounds = list(accumulate(sizes, initial=0))

    @property
    def num_batches(self) -> int:
        """Steps of this epoch, on every rank."""
        return len(self._bounds) - 1

    def global_batch(self, step: int) -> tuple[int, int]:
        """First position of a global batch, and the position after its last."""
        return self._bounds[step], self._bounds[step + 1]

    def step_at(self, position: int) -> int | None:
        """The step that begins at `position`; None if none does. The end of the epoch is the step after the last."""
        step = bisect_left(self._bounds, position)
        return step if step < len(self._bounds) and self._bounds[step] == position else None

    def at(self, positions: Tensor) -> Tensor:
        """Sample indices at `positions`, any shape, int64."""
        samples = torch.empty_like(positions)
        windows = positions // self._window
        for number in sorted(set(windows.reshape(-1).tolist())):
            if self._samples[0] != number:
                self._samples = (number, self._arrange(number)[0])
            inside = windows == number
            samples[inside] = self._samples[1][positions[inside] - number * self._window]
        return samples

    def _arrange(self, number: int) -> tuple[Tensor, list[int]]:
        """The samples of a window in their final order, and the sizes of its batches."""
        start = number * self._window
        samples = self._order.at(torch.arange(start, min(start + self._window, self.num_samples), device="cpu"))
        lengths = self._lengths[samples]
        if self._shuffle:
            by_length = torch.argsort(lengths, stable=True)
            samples, lengths = samples[by_length], lengths[by_length]
        sizes = cut(lengths, self._max_tokens)
        if self._shuffle:
            batches = torch.split(samples, sizes)
            turns = EpochOrder(len(sizes), self._seed, mix(_SHUFFLE_TAG, self._epoch, number)).slice(0, len(sizes))
            samples = torch.cat([batches[turn] for turn in turns.tolist()])
            sizes = [sizes[turn] for turn in turns.tolist()]
        return samples, sizes


def window_of(lengths: Tensor, max_tokens: int) -> int:
    """Samples that are sorted together."""
    mean = int(lengths.sum()) // len(lengths) or 1
    return max(_SMALLEST_WINDOW, min(_LARGEST_WINDOW, _BATCHES_PER_WINDOW * max_tokens // mean))


def cut(lengths: Tensor, max_tokens: int) -> list[int]:
    """Sizes of consecutive batches, each as large as `max_tokens` allows.

    Args:
        lengths: [n], int64, from 1 to `max_tokens`.
        max_tokens: Samples times longest sample of a batch, at most.
    """
    sizes = []
    start, look = 0, 64
    while start < len(lengths):
        part = lengths[start : start + look]
        # Divided and not multiplied: products of the largest numbers would wrap around. Both sides are monotonic.
        size = int((part.cummax(0).values <= max_tokens // torch.arange(1, len(part) + 1, device="cpu")).sum())
        if size == len(part) and start + size < len(lengths):
            look *= 2  # the batch may be longer than what was looked at
            continue
        sizes.append(size)
        start += size
        look = max(16, 2 * size)
    return sizes


def validate_lengths(lengths: object, num_samples: int, max_tokens: int) -> Tensor:
    """`lengths` as an int64 tensor.

    Raises:
        ConfigurationError: Not one whole number for each sample, from 1 to `max_tokens`.
    """
    if lengths is None:
        raise ConfigurationError("max_tokens needs lengths=: the number of tokens of each sample.")
    try:
        given = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"lengths ({type(lengths).__name__}) are no numbers: {error}") from None
    if given.dim() != 1 or len(given) != num_samples or given.is_floating_point() or given.is_complex():
        raise ConfigurationError(
            f"lengths of shape {list(given.shape)}, {given.dtype}; one whole number for each of {num_samples} samples."
        )
    given = given.to("cpu", torch.int64)
    wrong = torch.nonzero((given < 1) | (given > max_tokens))
    if wrong.numel():
        first = int(wrong[0])
        raise ConfigurationError(
            f"sample {first} has {int(given[first])} tokens; with max_tokens={max_tokens} a sample has from 1 to "
            f"{max_tokens}. Cut longer ones, leave empty ones out, or raise max_tokens."
        )
    return given
