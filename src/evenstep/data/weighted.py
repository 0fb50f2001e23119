"""`WeightedSampler`: draws with replacement, divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from evenstep import checks, randomness, world
from evenstep.data.locality import WeightedOrder, Weights
from evenstep.data.sampler import Turns, validate_rank
from evenstep.errors import ConfigurationError

_CHUNK = 16_384


class WeightedSampler(Sampler[int]):
    """Draws samples by weight, with replacement; each rank has its own draws, and together they are one process's.

    For `evenstep.DataLoader(..., sampler=)`, which takes draws by position and is exact for any number of ranks, and
    for torch's own loader, where each rank gets every n-th draw. Every draw depends on (seed, epoch, position) alone.

    In torch's loader call `set_epoch` before each epoch, or pass `auto_epoch=True`; forgetting it gives every epoch the
    same draws, which rank 0 says when the second one begins. (`evenstep.DataLoader` counts epochs itself.)

    Args:
        weights: [size of the data set]: finite, at least 0, not all 0; they need not add up to 1.
        num_samples: Draws of an epoch, on all ranks together; None: as many as samples.
        num_replicas: Number of ranks; None: the current world's. Never starts a collective.
        rank: This rank; None: the current world's.
        seed: The same on all ranks.
        auto_epoch: Each iteration is the epoch after the one before.

    Raises:
        ConfigurationError: Weights or another argument are wrong.
    """

    def __init__(
        self,
        weights: Any,
        num_samples: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        *,
        auto_epoch: bool = False,
    ) -> None:
        if num_replicas is None or rank is None:
            own_rank, world_size = world.identity()
            num_replicas = world_size if num_replicas is None else num_replicas
            rank = own_rank if rank is None else rank
        num_replicas, rank = validate_rank("WeightedSampler", num_replicas, rank)
        checks.switches("WeightedSampler: ", auto_epoch=auto_epoch)
        try:
            given = torch.as_tensor(weights, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise checks.refuse("WeightedSampler: weights", weights, "one number for each sample") from None
        try:
            self.weights = Weights(given)
        except ConfigurationError as error:
            raise ConfigurationError(f"WeightedSampler: {error}") from None
        self.num_draws = len(self.weights)
        if num_samples is not None:
            self.num_draws = checks.whole("WeightedSampler: num_samples", num_samples, least=1)
        self.num_replicas, self.rank = num_replicas, rank
        self.seed = randomness.validate_seed("WeightedSampler", seed, otherwise="") or 0
        self.epoch = 0
        self.auto_epoch = auto_epoch
        self._turns = Turns("WeightedSampler", "with the same draws")

    def set_epoch(self, epoch: int) -> None:
        """Choose the draws of the next iteration.

        Raises:
            ConfigurationError: `epoch` is negative or no whole number.
        """
        self.epoch = checks.whole("WeightedSampler.set_epoch: epoch", epoch, least=0)
        self._turns.was_set = True

    def __len__(self) -> int:
        """Draws of this rank: the same on all, the draws going on behind the epoch's last where they don't divide."""
        return -(-self.num_draws // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        self.epoch = self._turns.begin(self.epoch, counts=self.auto_epoch, warns=self.rank == 0)
        order = WeightedOrder(self.weights, self.num_draws, self.seed, self.epoch)
        return (sample for chunk in self._chunks(order) for sample in chunk.tolist())

    def _chunks(self, order: WeightedOrder) -> Iterator[Tensor]:
        for first in range(0, len(self), _CHUNK):
            turns = torch.arange(first, min(first + _CHUNK, len(self)), device="cpu")
            yield order.at(turns * self.num_replicas + self.rank)

    def __repr__(self) -> str:
        return (
            f"<WeightedSampler epoch {self.epoch}, {self.num_draws} draws of {len(self.weights)} samples, rank "
            f"{self.rank} of {self.num_replicas}>"
        )
