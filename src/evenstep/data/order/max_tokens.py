"""`TokenBatches`: a batch sampler whose global batches are limited by tokens instead of samples (`max_tokens`).

A padded batch costs the number of its samples times the longest of them. `max_tokens` bounds that product for the
*global* batch; shares hold equally many samples, of similar lengths, so the costs of ranks are similar.

That needs samples of similar length in one batch. So each window of the epoch's order (about a hundred batches) is
sorted by length and cut greedily, and the window's batches are shuffled:

    order      7  2  9  4  1  8  3  6        one window, with lengths  50 12 48 13 49 12 51 14
    sorted     2  8  4  6 | 9  1  7  3
    batches    2  8  4  6 | 9  1 | 7  3      max_tokens 102
    shuffled   7  3 | 2  8  4  6 | 9  1

The cuts depend on seed and epoch, not on the number of ranks, and every rank computes all of them. So the number of
steps is the same on all ranks without a comparison. Only the given lengths are kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from evenstep.data.order.permutation import EpochOrder
from evenstep.errors import ConfigurationError
from evenstep.ground.computing.randomness import mix

_SHUFFLE_TAG = 0x62617463686573  # "batches"
_BATCHES_PER_WINDOW = 100
_SMALLEST_WINDOW, _LARGEST_WINDOW = 1_000, 262_144


class TokenBatches:
    """Gives the global batches of one epoch after the other, as lists of indices.

    Args:
        lengths: [size of the data set], int64, at least 1: tokens of each sample.
        max_tokens: The limit on a global batch's number of samples times its longest sample.
        shuffle: False: the samples stay in their order, which is only cut.
        seed: Together with the epoch it decides the order.
    """

    def __init__(self, lengths: Tensor, max_tokens: int, *, shuffle: bool, seed: int = 0) -> None:
        self.lengths, self.max_tokens = lengths, max_tokens
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0
        self._window = window_of(lengths, max_tokens)
        self._length: tuple[int, int] = (-1, 0)  # (epoch, number of batches in it)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of later iterations, and of `len`."""
        self._epoch = epoch

    def __len__(self) -> int:
        if self._length[0] != self._epoch:
            self._length = self._epoch, sum(len(sizes) for _, sizes in self._windows())
        return self._length[1]

    def __iter__(self) -> Iterator[list[int]]:
        for samples, sizes in self._windows():
            for batch in torch.split(samples, sizes):
                yield batch.tolist()

    def _windows(self) -> Iterator[tuple[Tensor, list[int]]]:
        """For one window after the other: its samples, and the sizes of its batches."""
        size, epoch = len(self.lengths), self._epoch
        order = EpochOrder(size, self._seed, epoch, self._shuffle)
        for number, start in enumerate(range(0, size, self._window)):
            samples = order.slice(start, min(start + self._window, size))
            if self._shuffle:
                samples = samples[torch.argsort(self.lengths[samples], stable=True)]
            sizes = cut(self.lengths[samples], self.max_tokens)
            if self._shuffle:
                batches = torch.split(samples, sizes)
                key = mix(_SHUFFLE_TAG, epoch, number)
                turns = EpochOrder(len(sizes), self._seed, key).slice(0, len(sizes)).tolist()
                samples, sizes = torch.cat([batches[turn] for turn in turns]), [sizes[turn] for turn in turns]
            yield samples, sizes


def window_of(lengths: Tensor, max_tokens: int) -> int:
    """Samples that are sorted together."""
    mean = int(lengths.sum()) // len(lengths) or 1
    return max(_SMALLEST_WINDOW, min(_LARGEST_WINDOW, _BATCHES_PER_WINDOW * max_tokens // mean))


def cut(lengths: Tensor, max_tokens: int) -> list[int]:
    """Sizes of consecutive batches, each as large as `max_tokens` allows.

    Args:
        lengths: [n], int64, from 1 to `max_tokens`.
        max_tokens: The limit on a batch's number of samples times its longest sample.
    """
    sizes = []
    start, ahead = 0, 64
    while start < len(lengths):
        part = lengths[start : start + ahead]
        # Divide instead of multiplying: the product of the largest numbers would overflow. Both sides are monotonic.
        size = int((part.cummax(0).values <= max_tokens // torch.arange(1, len(part) + 1, device="cpu")).sum())
        if size == len(part) and start + size < len(lengths):
            ahead *= 2  # the batch may be longer than the range that was checked
            continue
        sizes.append(size)
        start += size
        ahead = max(16, 2 * size)
    return sizes


def validate_lengths(lengths: object, num_samples: int, max_tokens: int) -> Tensor:
    """`lengths` as an int64 tensor.

    Raises:
        ConfigurationError: `lengths` isn't one whole number for each sample, from 1 to `max_tokens`.
    """
    if lengths is None:
        raise ConfigurationError("max_tokens needs lengths=: the number of tokens of each sample.")
    try:
        given = torch.as_tensor(lengths, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"lengths ({type(lengths).__name__}) aren't numbers: {error}") from None
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
