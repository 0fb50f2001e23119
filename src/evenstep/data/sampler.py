"""`DistributedSampler`: torch's, with an order that is computed instead of stored."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from evenstep import world
from evenstep.data.order import EpochOrder
from evenstep.errors import ConfigurationError

_CHUNK = 16_384  # indices at a time: enough to hide torch's cost per call, few enough to be instant


class DistributedSampler(TorchDistributedSampler[int]):
    """Divides a data set over ranks, for torch's own `DataLoader`. torch's signature, attributes and lengths.

    Like torch's, it gives every rank the same number of samples: the first samples of the epoch are repeated to fill
    up, or the last ones left out with `drop_last`. `evenstep.DataLoader(global_batch_size=)` needs no sampler and
    sees every sample exactly once. Unlike torch's, no list of the epoch is made: the first index comes at once and
    memory doesn't grow with the data set.

    Call `set_epoch` before each epoch, or every epoch has the same order.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None: the current world's. Never starts a collective.
        rank: This rank; None: the current world's.
        shuffle: A new order each epoch; False: the data set's own.
        seed: The same on all ranks.
        drop_last: Leave out the last samples instead of repeating the first.

    Raises:
        ConfigurationError: A data set without length, or a rank that is none. Also a `ValueError`, as in torch.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            own_rank, world_size = world.identity()
            num_replicas = world_size if num_replicas is None else num_replicas
            rank = own_rank if rank is None else rank
        _validate(dataset, num_replicas, rank)
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def __iter__(self) -> Iterator[int]:
        order = EpochOrder(len(self.dataset), seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)  # type: ignore[arg-type]
        return itertools.chain.from_iterable(self._chunks(order))

    def _chunks(self, order: EpochOrder) -> Iterator[list[int]]:
        for first in range(0, self.num_samples, _CHUNK):
            turns = torch.arange(first, min(first + _CHUNK, self.num_samples))
            # Positions behind the end are the padding: the epoch again from its beginning, as often as needed.
            positions = (turns * self.num_replicas + self.rank) % order.num_samples
            yield order.at(positions).tolist()

    def __repr__(self) -> str:
        return (
            f"<DistributedSampler epoch {self.epoch}, {self.num_samples} of {len(self.dataset)} samples "  # type: ignore[arg-type]
            f"for rank {self.rank} of {self.num_replicas}{', shuffled' if self.shuffle else ''}>"
        )


def _validate(dataset: Any, num_replicas: int, rank: int) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigurationError(
            f"DistributedSampler: {type(dataset).__name__} has no samples that could be numbered (it is an "
            f"IterableDataset or has no __len__). Divide its stream in the data set itself."
        )
    for name, value in (("num_replicas", num_replicas), ("rank", rank)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigurationError(f"DistributedSampler: {name}={value!r} is no whole number.")
    if num_replicas < 1:
        raise ConfigurationError(f"DistributedSampler: num_replicas={num_replicas}; there is at least one rank.")
    if not 0 <= rank < num_replicas:
        raise ConfigurationError(
            f"DistributedSampler: rank={rank} of num_replicas={num_replicas}; ranks are 0 to {num_replicas - 1}. "
            f"Leave both out to use the current world's."
        )
