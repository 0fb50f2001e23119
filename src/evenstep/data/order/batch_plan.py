"""Which samples each rank loads in each step of an epoch. Pure: the same cuts for any number of ranks.

An epoch is cut into *global batches*, and each of them is divided over the ranks:

    position   0   1   2   3 | 4   5   6   7 | 8   9
    step       ------- 0 --- | ------- 1 --- | -- 2        global_batch_size 4, the last one short
    3 ranks    0   0   1   2 | 0   0   1   2 | 0   1       rank 2 has no sample in step 2, and takes part
    1 rank     0   0   0   0 | 0   0   0   0 | 0   0

The cuts between global batches don't depend on the number of ranks, and every rank has every step.

`BatchPlan` is what a loader's arguments decide; its `epoch` gives the order and the global batches of one epoch, and
`requests` what one rank loads of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from evenstep.data.order.max_tokens import TokenBatches, validate_lengths
from evenstep.data.order.permutation import EpochOrder, Order
from evenstep.data.order.weighted import WeightedOrder, Weights
from evenstep.errors import ConfigurationError
from evenstep.randomness import mix
from evenstep.virtual_ranks import begin_of

_LARGEST = (1 << 63) - 1  # that torch can count to
# Facts by what people call them; others are arguments, and called by their names.
_WORDS = {
    "num_samples": "the length of the data set",
    "lengths_digest": "the digest of lengths",
    "num_draws": "draws of an epoch",
    "weights_digest": "the digest of weights",
    "num_parts": "the number of ranks times workers",
}
_POSITIONS = 16_384  # whose samples are computed at a time: the permutation costs as much for 10 as for 1,000


class GlobalBatches(Protocol):
    """The global batches of one epoch."""

    @property
    def num_samples(self) -> int:
        """Positions of the epoch."""

    @property
    def num_batches(self) -> int:
        """Steps of the epoch, on every rank."""

    def global_batch(self, step: int) -> tuple[int, int]:
        """First position of a global batch, and the position after its last."""

    def step_at(self, position: int) -> int | None:
        """The step that begins at `position`; None if none does."""


@dataclass(frozen=True)
class Epoch:
    """One epoch: the sample at each position, and the cuts between global batches."""

    number: int
    batches: GlobalBatches
    order: Order


def divide(start: int, stop: int, *, rank: int, world_size: int, virtual_ranks: int = 1) -> tuple[int, int]:
    """The share of one rank, [start, stop); empty if both are equal.

    Shares are contiguous, in order of rank, and their sizes differ by at most one, larger ones first. With several
    virtual ranks a rank has that many shares of a division into `world_size * virtual_ranks`: see
    `evenstep.virtual_ranks`.
    """
    length, num_parts = stop - start, world_size * virtual_ranks
    return start + begin_of(length, rank * virtual_ranks, num_parts), start + begin_of(
        length, (rank + 1) * virtual_ranks, num_parts
    )


@dataclass(frozen=True)
class FixedBatches:
    """Global batches of a fixed size, the last one maybe shorter.

    Attributes:
        num_samples: Size of the data set.
        global_batch_size: Samples of one step on all ranks together, at least 1.
        drop_last: Leave out a last global batch that is short.
    """

    num_samples: int
    global_batch_size: int
    drop_last: bool = False

    @property
    def num_batches(self) -> int:
        """Steps of one epoch, on every rank."""
        full, rest = divmod(self.num_samples, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def global_batch(self, step: int) -> tuple[int, int]:
        """First position of a global batch, and the position after its last."""
        start = step * self.global_batch_size
        return start, min(start + self.global_batch_size, self.num_samples)

    def step_at(self, position: int) -> int | None:
        """The step that begins at `position`; None if none does. The end of the epoch is the step after the last."""
        if position == self.num_samples or position == self.num_batches * self.global_batch_size:
            return self.num_batches
        step, rest = divmod(position, self.global_batch_size)
        return step if rest == 0 and 0 <= step < self.num_batches else None

    def share(self, step: int, *, rank: int, world_size: int, virtual_ranks: int = 1) -> tuple[int, int]:
        """The positions of one rank: see `divide`."""
        return divide(*self.global_batch(step), rank=rank, world_size=world_size, virtual_ranks=virtual_ranks)


@dataclass(frozen=True)
class BatchPlan:
    """The arguments of a loader that decide order and global batches of its epochs.

    Attributes:
        num_samples: Size of the data set.
        global_batch_size: Samples of a step; None with `max_tokens`.
        drop_last: Leave out a last global batch that is short.
        shuffle: A new order each epoch.
        seed: Of the order.
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
            return Epoch(number, FixedBatches(order.num_samples, self.global_batch_size, self.drop_last), order)
        assert self.lengths is not None
        batches = TokenBatches(order, self.lengths, self.max_tokens, shuffle=self.shuffle, seed=self.seed, epoch=number)
        return Epoch(number, batches, batches)

    def _order(self, epoch: int) -> Order:
        if self.weights is not None:
            return WeightedOrder(self.weights, self.num_draws or len(self.weights), self.seed, epoch)
        return EpochOrder(self.num_samples, self.seed, epoch, self.shuffle)

    def facts(self) -> dict[str, Any]:
        """Values that must be equal on all ranks and in a resumed run; JSON types. Keys never change."""
        facts: dict[str, Any] = {
            "num_samples": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }
        if self.max_tokens is not None and self.lengths is not None:
            facts["max_tokens"] = self.max_tokens
            facts["lengths_digest"] = digest(self.lengths)
        if self.weights is not None:
            facts["num_draws"] = self.num_draws
            facts["weights_digest"] = digest(self.weights.cumulative.view(torch.int64))
        return facts

    def describe(self, epoch: int) -> str:
        """The order and the global batches in words."""
        batches = self.epoch(epoch).batches
        if self.weights is not None:
            order = f"{batches.num_samples} draws by weight of {self.num_samples} samples with seed {self.seed}"
        else:
            order = f"{batches.num_samples} samples {f'shuffled with seed {self.seed}' if self.shuffle else 'in order'}"
        if self.global_batch_size is None:
            return f"{order}, {batches.num_batches} global batches of at most {self.max_tokens} tokens"
        rest = batches.num_samples % self.global_batch_size
        last = "" if rest == 0 else f", {rest} left out" if self.drop_last else f", the last of {rest}"
        return f"{order}, {batches.num_batches} global batches of {self.global_batch_size}{last}"


def in_words(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a source by what people call them, for messages. Pure."""
    return {_WORDS.get(name, name): value for name, value in facts.items()}


def digest(values: Tensor) -> int:
    """A digest of int64 values: their products with odd multipliers, added up and wrapping. Pure."""
    multipliers = torch.arange(1, 2 * len(values), 2, device="cpu")
    return mix(int((values * multipliers * 0x2545F4914F6CDD1D).sum()), len(values)) >> 1


def plan_batches(
    num_samples: int,
    *,
    global_batch_size: Any,
    drop_last: bool,
    shuffle: bool,
    seed: Any,
    max_tokens: Any,
    lengths: Any,
    weights: Weights | None,
    num_draws: int | None,
    world_size: int,
) -> BatchPlan:
    """Check a loader's arguments, and make a `BatchPlan` of them.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    if num_samples == 0:
        raise ConfigurationError("the data set is empty: it has no samples.")
    _whole(seed, "seed", smallest=0, largest=_LARGEST, otherwise="None for the world's")
    plan = BatchPlan(num_samples, global_batch_size, drop_last, shuffle, seed, weights=weights, num_draws=num_draws)
    if max_tokens is not None:
        return _by_tokens(plan, max_tokens, lengths, world_size)
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
    if weights is not None and len(weights) != num_samples:
        raise ConfigurationError(
            f"the sampler has {len(weights)} weights and the data set {num_samples} samples; one weight for each."
        )
    return plan


def _by_tokens(plan: BatchPlan, max_tokens: Any, lengths: Any, world_size: int) -> BatchPlan:
    _whole(max_tokens, "max_tokens", smallest=1, largest=_LARGEST)
    for name, value in (("global_batch_size", plan.global_batch_size), ("sampler", plan.weights)):
        if value is not None:
            raise ConfigurationError(f"max_tokens and {name} exclude each other: each says how large a step is.")
    if plan.drop_last:
        raise ConfigurationError("drop_last=True: with max_tokens no batch is short, so there is none to leave out.")
    if max_tokens < world_size:
        raise ConfigurationError(f"max_tokens={max_tokens} is smaller than the number of ranks, {world_size}.")
    return replace(plan, max_tokens=max_tokens, lengths=validate_lengths(lengths, plan.num_samples, max_tokens))


def _whole(value: Any, name: str, *, smallest: int, largest: int | None = None, otherwise: str | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest or (largest and value > largest):
        bounds = f"at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        raise ConfigurationError(
            f"{name}={value!r}: a whole number, {bounds}{'' if otherwise is None else f', or {otherwise}'}."
        )


class Request(NamedTuple):
    """One batch to load.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step in the epoch.
        samples: Which samples; a list of int, or int64 [n] for data sets that give whole batches.
        example: A sample to build the batch of no samples from, if `samples` is empty; else None.
    """

    epoch: int
    step: int
    samples: Any
    example: int | None = None


def requests(
    epoch: Epoch, first_step: int, *, rank: int, world_size: int, virtual_ranks: int = 1, as_tensors: bool = False
) -> Iterator[Request]:
    """The requests of one rank from `first_step` on, one for every step. `virtual_ranks` are those of each rank."""
    batches, step = epoch.batches, first_step
    share = partial(divide, rank=rank, world_size=world_size, virtual_ranks=virtual_ranks)
    while step < batches.num_batches:
        spans = _equal_steps(batches, step, share)
        if spans is None:
            yield from _one_by_one(epoch, step, share, as_tensors)
            return
        samples = epoch.order.at(spans)
        # Rows of a table: cut by torch or by `tolist`, not by python.
        rows: Any = samples.unbind() if as_tensors else to_list(samples)
        for row in rows:
            yield Request(epoch.number, step, row)
            step += 1


def to_list(samples: Tensor) -> Any:
    """`tolist`, through numpy where it is installed: a quarter faster."""
    try:
        return samples.numpy().tolist()
    except RuntimeError:
        return samples.tolist()


def _equal_steps(batches: Any, step: int, share: Callable[[int, int], tuple[int, int]]) -> Tensor | None:
    """Positions of this rank, [steps, samples], in a run of steps of the usual size; None where there is none."""
    if not isinstance(batches, FixedBatches):
        return None
    num_full = batches.num_samples // batches.global_batch_size
    first, last = share(0, batches.global_batch_size)
    if step >= num_full or first == last:
        return None
    stop = min(num_full, step + max(1, _POSITIONS // (last - first)))
    starts = torch.arange(step, stop, device="cpu").unsqueeze(1) * batches.global_batch_size
    return starts + torch.arange(first, last, device="cpu")


def _one_by_one(
    epoch: Epoch, step: int, share: Callable[[int, int], tuple[int, int]], as_tensors: bool
) -> Iterator[Request]:
    batches, order = epoch.batches, epoch.order
    while step < batches.num_batches:
        spans: list[tuple[int, int]] = []
        num_positions = 0
        while step + len(spans) < batches.num_batches and num_positions < _POSITIONS:
            spans.append(share(*batches.global_batch(step + len(spans))))
            num_positions += spans[-1][1] - spans[-1][0]
        samples = order.at(torch.cat([torch.arange(*span, device="cpu") for span in spans]))
        for (start, stop), row in zip(
            spans, torch.split(samples, [stop - start for start, stop in spans]), strict=True
        ):
            if start == stop:
                example = int(order.at(torch.tensor(batches.global_batch(step)[0], device="cpu")))
                yield Request(epoch.number, step, [], example)
            else:
                yield Request(epoch.number, step, row if as_tensors else row.tolist())
            step += 1
