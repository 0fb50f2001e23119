"""`DistributedSampler`, for torch's loader: its order is computed, and not stored."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from evenstep import checks, world
from evenstep.data.order.permutation import EpochOrder
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.health import excepthook
from evenstep.ground.health.users_code import warn

_CHUNK = 16_384  # indices at a time: enough to hide torch's cost per call, few enough to be instant


class DistributedSampler(TorchDistributedSampler[int]):
    """Divides a data set over ranks, for torch's own `DataLoader`. It has torch's signature, attributes and lengths.

    Like torch's, it gives every rank the same number of samples: the first samples of the epoch are repeated at the
    end, or, with `drop_last`, the last ones are left out. `evenstep.DataLoader(global_batch_size=)` needs no sampler
    and sees every sample exactly once. Unlike torch's, no list of the epoch is made: the first index comes at once and
    memory doesn't grow with the data set.

    Call `set_epoch` before each epoch; forgetting it gives every epoch the same order, and rank 0 warns when the second
    epoch begins.

    Args:
        dataset: Anything with a length.
        num_replicas: Number of ranks; None: the current world's, which is read without a collective.
        rank: This rank; None: the current world's.
        shuffle: A new order each epoch; False: the data set's own.
        seed: The seed of the order; the same on all ranks.
        drop_last: Leave out the last samples instead of repeating the first.
        pad: False: no sample is repeated. Some ranks then have one sample less: use it with
            `DistributedDataParallel.join`.

    Raises:
        ConfigurationError: The data set has no length, or the rank doesn't exist. Also a `ValueError`, as in torch.
        UsageError: From the iteration: the data set's length has changed.
    """

    @excepthook.for_users
    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigurationError(
                f"DistributedSampler: {type(dataset).__name__} has no numbered samples (it is an IterableDataset or "
                f"has no __len__). Divide the stream in the data set itself."
            )
        num_replicas, rank = _choose_rank("DistributedSampler", num_replicas, rank)
        seed = checks.whole("DistributedSampler: seed", seed)
        checks.switches("DistributedSampler: ", shuffle=shuffle, drop_last=drop_last, pad=pad)
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._size = len(dataset)
        self.pad = pad
        if not pad and not drop_last:
            self.total_size = self._size
            self.num_samples = len(range(rank, self._size, num_replicas))
        self._was_set = True  # since the latest iteration began; True before the first
        self._has_warned = False
        self._start = 0  # position at which the next iteration begins
        self._begun_at = 0  # position at which the latest iteration began
        self._iteration = 0
        # Counts the indices that the latest iteration has yielded, without python code per index: all up to the end of
        # a chunk, less those left in the chunk's list iterator.
        self._yielded: tuple[int, Iterator[int]] = (0, iter(()))
        self._has_ended = False  # whether the latest iteration has ended

    def set_epoch(self, epoch: int) -> None:
        """Choose the next iteration's epoch. An epoch that was interrupted before a resume continues at its position.

        Raises:
            ConfigurationError: `epoch` is negative or not a whole number.
        """
        epoch = checks.whole("DistributedSampler.set_epoch: epoch", epoch, least=0)
        if epoch != self.epoch:
            self._start = 0
        self._was_set = True
        super().set_epoch(epoch)

    def state_dict(self, consumed: int | None = None) -> dict[str, int]:
        """The position of training, valid for any number of ranks.

        It is equal on all ranks after their loops have ended, and whenever they have used equally many samples: read it
        then. In between, ranks with different counts have different positions. Once this rank's iterator has ended, the
        position is the data set's size, even if this rank had one sample less than others.

        Args:
            consumed: Samples of the epoch that this rank has used since its iteration began. None: the samples that
                were yielded, which is right for a loader without workers. Workers prefetch, so pass the number with
                them.
        """
        end, chunk = self._yielded
        number = end - operator.length_hint(chunk)
        if consumed is not None:
            number = checks.whole("DistributedSampler.state_dict: consumed", consumed, least=0)
        size = len(self.dataset)  # type: ignore[arg-type]
        has_all = self._has_ended and number >= self._num_left(self._begun_at)
        position = size if has_all else min(size, self._begun_at + number * self.num_replicas)
        return {"epoch": self.epoch, "position": position, "seed": self.seed, "size": size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next iteration at the position of a `state_dict`, on any number of ranks.

        Raises:
            ConfigurationError: The state has another data set's size or another seed.
        """
        where = "DistributedSampler.load_state_dict"
        if not isinstance(state, dict):
            raise checks.refuse(f"{where}: state", state, "what state_dict() returned")
        for name, own in (("seed", self.seed), ("size", len(self.dataset))):  # type: ignore[arg-type]
            if state.get(name) != own:
                raise ConfigurationError(
                    f"{where}: {name} was {state.get(name)} and is {own}; the remaining samples can't be distinguished "
                    f"from the used ones."
                )
        epoch, position = (checks.whole(f"{where}: {name}", state.get(name), least=0) for name in ("epoch", "position"))
        self.epoch, self._start = epoch, position
        self._begun_at, self._yielded, self._has_ended = self._start, (0, iter(())), False
        self._was_set = True

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)  # type: ignore[arg-type]
        if size != self._size:
            raise UsageError(
                f"DistributedSampler on rank {self.rank}: the data set had {self._size} samples when the sampler was "
                f"made and has {size} now. Make a new sampler, on every rank."
            )
        if not (self._was_set or self._has_warned) and self.shuffle and self.rank == 0:
            self._has_warned = True
            warn(
                f"DistributedSampler: epoch {self.epoch} begins for the second time, in the same order. Call "
                f"sampler.set_epoch(epoch) before each epoch.",
            )
        self._was_set = False
        self._begun_at, self._start = self._start, 0
        self._iteration, self._yielded, self._has_ended = self._iteration + 1, (0, iter(())), False
        order = EpochOrder(size, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        return itertools.chain.from_iterable(self._chunks(order, self._begun_at, self._iteration))

    def _chunks(self, order: EpochOrder, start: int, iteration: int) -> Iterator[Iterator[int]]:
        num_left = self._num_left(start)
        for first in range(0, num_left, _CHUNK):
            turns = torch.arange(first, min(first + _CHUNK, num_left), device="cpu")
            # Positions after the end are the padding: the epoch again from its beginning, as often as needed.
            positions = (start + turns * self.num_replicas + self.rank) % order.num_samples
            chunk = iter(order.at(positions).numpy().tolist())  # torch's `tolist` takes a quarter longer
            if iteration == self._iteration:
                self._yielded = (first + len(turns), chunk)
            yield chunk
        if iteration == self._iteration:
            self._has_ended = True

    def _num_left(self, start: int) -> int:
        """Samples of this rank from a position on."""
        if start == 0:
            return self.num_samples
        size = len(self.dataset)  # type: ignore[arg-type]
        left = max(0, (self.total_size if self.drop_last else size) - start)
        if self.drop_last or not self.pad:
            return left // self.num_replicas if self.drop_last else len(range(self.rank, left, self.num_replicas))
        return -(-left // self.num_replicas)

    def __repr__(self) -> str:
        return (
            f"<DistributedSampler epoch {self.epoch}, {self.num_samples} of {len(self.dataset)} samples "  # type: ignore[arg-type]
            f"for rank {self.rank} of {self.num_replicas}{', shuffled' if self.shuffle else ''}>"
        )


def _choose_rank(what: str, num_replicas: Any, rank: Any) -> tuple[int, int]:
    """Number of ranks and rank as ints; None: the current world's.

    Raises:
        ConfigurationError: There is no such rank.
    """
    if num_replicas is None or rank is None:
        own_rank, world_size = world.identity()
        num_replicas = world_size if num_replicas is None else num_replicas
        rank = own_rank if rank is None else rank
    num_replicas = checks.whole(f"{what}: num_replicas", num_replicas, least=1)
    rank = checks.whole(f"{what}: rank", rank)
    if not 0 <= rank < num_replicas:
        raise ConfigurationError(
            f"{what}: rank={rank} of num_replicas={num_replicas}; ranks are 0 to {num_replicas - 1}. "
            f"Leave both out to use the current world's."
        )
    return num_replicas, rank
