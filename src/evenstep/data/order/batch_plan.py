"""How the samples of a data set become epochs of global batches. Pure: the same for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from evenstep.data.budget import TokenBatches, validate_lengths
from evenstep.data.locality import ORDER_VERSION, LocalOrder, WeightedOrder, Weights
from evenstep.data.order import EpochOrder, Order
from evenstep.data.plan import BatchPlan, Epoch
from evenstep.errors import ConfigurationError
from evenstep.randomness import mix

_LARGEST = (1 << 63) - 1  # that torch can count to
_LARGEST_BLOCK = 1 << 31  # a window of such blocks can be counted too
_WINDOW = 16  # blocks that are shuffled together where only the block was given


@dataclass(frozen=True)
class Division:
    """What decides the epochs of a loader.

    Attributes:
        num_samples: Size of the data set.
        global_batch_size: Samples of a step; None with `max_tokens`.
        drop_last: Leave out a last global batch that is short.
        shuffle: A new order each epoch.
        seed: Of the order.
        locality: Block and window of `LocalOrder`; None: shuffle everything with everything.
        max_tokens: See `TokenBatches`; None with `global_batch_size`.
        lengths: [num_samples], int64; with `max_tokens`.
        weights: Draw by these, with replacement; None: every sample once.
        num_draws: Draws of an epoch, with `weights`.
    """

    num_samples: int
    global_batch_size: int | None
    drop_last: bool = False
    shuffle: bool = False
    seed: int = 0
    locality: tuple[int, int] | None = None
    max_tokens: int | None = None
    lengths: Tensor | None = None
    weights: Weights | None = None
    num_draws: int | None = None
    _latest: list[Epoch] = field(default_factory=list, repr=False, compare=False)

    def epoch(self, number: int) -> Epoch:
        """Order and global batches of one epoch."""
        if not self._latest or self._latest[0].number != number:
            self._latest[:] = [self._epoch(number)]
        return self._latest[0]

    def _epoch(self, number: int) -> Epoch:
        order = self._order(number)
        if self.max_tokens is None:
            assert self.global_batch_size is not None
            return Epoch(number, BatchPlan(order.num_samples, self.global_batch_size, self.drop_last), order)
        assert self.lengths is not None
        batches = TokenBatches(order, self.lengths, self.max_tokens, shuffle=self.shuffle, seed=self.seed, epoch=number)
        return Epoch(number, batches, batches)

    def _order(self, epoch: int) -> Order:
        if self.weights is not None:
            return WeightedOrder(self.weights, self.num_draws or len(self.weights), self.seed, epoch)
        if self.shuffle and self.locality is not None:
            return LocalOrder(self.num_samples, *self.locality, self.seed, epoch)
        return EpochOrder(self.num_samples, self.seed, epoch, self.shuffle)

    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks, and where a run is resumed; JSON types, the key is for people."""
        facts: dict[str, Any] = {
            "the length of the data set": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }
        if self.locality is not None:
            facts["locality"] = list(self.locality)
            facts["the version of locality's order"] = ORDER_VERSION
        if self.max_tokens is not None and self.lengths is not None:
            facts["max_tokens"] = self.max_tokens
            facts["the digest of lengths"] = digest(self.lengths)
        if self.weights is not None:
            facts["draws of an epoch"] = self.num_draws
            facts["the digest of weights"] = digest(self.weights.cumulative.view(torch.int64))
        return facts

    def describe(self, epoch: int) -> str:
        """The order and the global batches, for people."""
        plan = self.epoch(epoch).plan
        if self.weights is not None:
            order = f"{plan.num_samples} draws by weight of {self.num_samples} samples with seed {self.seed}"
        else:
            order = f"{plan.num_samples} samples {f'shuffled with seed {self.seed}' if self.shuffle else 'in order'}"
        if self.global_batch_size is None:
            return f"{order}, {plan.num_batches} global batches of at most {self.max_tokens} tokens"
        rest = plan.num_samples % self.global_batch_size
        last = "" if rest == 0 else f", {rest} left out" if self.drop_last else f", the last of {rest}"
        return f"{order}, {plan.num_batches} global batches of {self.global_batch_size}{last}"


def digest(values: Tensor) -> int:
    """A number that tells tensors of int64 apart: products with odd multipliers, added up and wrapping. Pure."""
    multipliers = torch.arange(1, 2 * len(values), 2, device="cpu")
    return mix(int((values * multipliers * 0x2545F4914F6CDD1D).sum()), len(values)) >> 1


def plan_division(
    num_samples: int,
    *,
    global_batch_size: Any,
    drop_last: bool,
    shuffle: bool,
    seed: Any,
    locality: Any,
    max_tokens: Any,
    lengths: Any,
    weights: Weights | None,
    num_draws: int | None,
    world_size: int,
) -> Division:
    """Check what a loader was given.

    Raises:
        ConfigurationError: Something is wrong with it.
    """
    if num_samples == 0:
        raise ConfigurationError("the data set is empty: it has no samples.")
    _whole(seed, "seed", smallest=0, largest=_LARGEST, otherwise="None for the world's")
    division = Division(num_samples, global_batch_size, drop_last, shuffle, seed, weights=weights, num_draws=num_draws)
    if max_tokens is not None:
        return _by_tokens(division, locality, max_tokens, lengths, world_size)
    if lengths is not None:
        raise ConfigurationError("lengths= goes with max_tokens=, the tokens of one step; it is missing.")
    if global_batch_size is None:
        raise ConfigurationError("global_batch_size is missing: the samples of one step, on all ranks together.")
    _whole(global_batch_size, "global_batch_size", smallest=1)
    if global_batch_size < world_size:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size} is smaller than the number of ranks, {world_size}: some would "
            f"never have a sample. Use at least {world_size}, or fewer ranks."
        )
    epoch_size = num_draws if num_draws is not None else num_samples
    if drop_last and epoch_size < global_batch_size:
        raise ConfigurationError(
            f"drop_last=True leaves no batch at all: {epoch_size} samples are fewer than "
            f"global_batch_size={global_batch_size}."
        )
    if weights is not None and (len(weights) != num_samples or locality is not None):
        raise ConfigurationError(
            f"the sampler has {len(weights)} weights and the data set {num_samples} samples; one weight for each, and "
            f"no locality, which has no meaning for draws."
        )
    return replace(division, locality=_locality(locality, shuffle))


def _by_tokens(division: Division, locality: Any, max_tokens: Any, lengths: Any, world_size: int) -> Division:
    _whole(max_tokens, "max_tokens", smallest=1, largest=_LARGEST)
    for name, value in (("global_batch_size", division.global_batch_size), ("sampler", division.weights)):
        if value is not None:
            raise ConfigurationError(f"max_tokens and {name} exclude each other: each says how large a step is.")
    if division.drop_last:
        raise ConfigurationError("drop_last=True: with max_tokens no batch is short, so there is none to leave out.")
    if max_tokens < world_size:
        raise ConfigurationError(f"max_tokens={max_tokens} is smaller than the number of ranks, {world_size}.")
    return replace(
        division,
        max_tokens=max_tokens,
        lengths=validate_lengths(lengths, division.num_samples, max_tokens),
        locality=_locality(locality, division.shuffle),
    )


def _locality(given: Any, shuffle: bool) -> tuple[int, int] | None:
    if given is None:
        return None
    block, window = given if isinstance(given, tuple | list) and len(given) == 2 else (given, _WINDOW)
    for name, value in (("block", block), ("window", window)):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_BLOCK:
            raise ConfigurationError(
                f"locality={given!r}: the {name} is a whole number, at least 1 (and at most 2**31). Pass the number of "
                f"neighbours that are read together, or that and the number of such blocks that are shuffled with each "
                f"other."
            )
    if not shuffle:
        raise ConfigurationError("locality says how to shuffle, and shuffle=False. Leave one of them out.")
    return block, window


def _whole(value: Any, name: str, *, smallest: int, largest: int | None = None, otherwise: str | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest or (largest and value > largest):
        bounds = f"at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise ConfigurationError(
            f"{name}={value!r}: a whole number, {bounds}{'' if otherwise is None else f', or {otherwise}'}."
        )
