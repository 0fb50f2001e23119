"""Which samples each rank loads in each step of an epoch. Pure: the same cuts for any number of ranks.

An epoch is cut into *global batches*, and each of them is divided over the ranks:

    position   0   1   2   3 | 4   5   6   7 | 8   9
    step       ------- 0 --- | ------- 1 --- | -- 2        global_batch_size 4, the last one short
    3 ranks    0   0   1   2 | 0   0   1   2 | 0   1       rank 2 has no sample in step 2, and takes part
    1 rank     0   0   0   0 | 0   0   0   0 | 0   0

The cuts between global batches don't depend on the number of ranks, and every rank has every step.

`BatchPlan` is what a loader's arguments decide; its `epoch` gives the order and the global batches of one epoch, and
`requests` what one rank loads of them. Where a sampler of the script gives the order, `begin` gives a `Drawing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, WeightedRandomSampler

from evenstep.data.order.drawn import Drawing, Sampling
from evenstep.data.order.max_tokens import TokenBatches, validate_lengths
from evenstep.data.order.permutation import EpochOrder, Order
from evenstep.data.order.weighted import WeightedOrder, Weights, digest
from evenstep.data.position import Mark
from evenstep.errors import ConfigurationError
from evenstep.virtual_ranks import begin_of

_LARGEST = (1 << 63) - 1  # that torch can count to
# Facts by what people call them; others are arguments, and called by their names.
_WORDS = {
    "num_samples": "the length of the data set",
    "lengths_digest": "the digest of lengths",
    "num_draws": "draws of an epoch",
    "num_parts": "the number of ranks times workers",
    "num_workers": "the number of workers of a rank",
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
    """One epoch: the sample at each position, and the cuts between global batches.

    Attributes:
        number: Of the epoch.
        batches: The cuts.
        order: The samples.
        digest: Of the weights by which samples are drawn, which a script may change between epochs; 0: of none.
    """

    number: int
    batches: GlobalBatches
    order: Order
    digest: int = 0


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
        offset: Where step 0 would begin, below `global_batch_size`: not 0 where a run was resumed with another size.
    """

    num_samples: int
    global_batch_size: int
    drop_last: bool = False
    offset: int = 0

    @property
    def num_batches(self) -> int:
        """Steps of one epoch, on every rank."""
        full, rest = divmod(self.num_samples - self.offset, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def global_batch(self, step: int) -> tuple[int, int]:
        """First position of a global batch, and the position after its last."""
        start = self.offset + step * self.global_batch_size
        return start, min(start + self.global_batch_size, self.num_samples)

    def step_at(self, position: int) -> int | None:
        """The step that begins at `position`; None if none does. The end of the epoch is the step after the last."""
        if position == self.num_samples:
            return self.num_batches
        step, rest = divmod(position - self.offset, self.global_batch_size)
        return step if rest == 0 and 0 <= step <= self.num_batches else None

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
        by_weight: Draw by its weights, with replacement; None: every sample once.
        sampling: The script's sampler, which gives the order; None: none.
    """

    num_samples: int
    global_batch_size: int | None
    drop_last: bool = False
    shuffle: bool = False
    seed: int = 0
    max_tokens: int | None = None
    lengths: Tensor | None = None
    by_weight: WeightedRandomSampler | None = None
    sampling: Sampling | None = None
    _latest: list[Epoch] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_compared(self) -> bool:
        """Whether a sampler of the script, which may differ between ranks, has a part in the order."""
        return self.by_weight is not None or self.sampling is not None

    def begin(self, start: Mark) -> Epoch:
        """The epoch of an iteration; with a sampler a `Drawing`, which is drawn on by who loads."""
        if self.sampling is not None:
            drawing = Drawing(self.sampling, start)
            return Epoch(start.epoch, drawing, drawing)
        if self.by_weight is not None:
            self._latest.clear()
        return self.epoch(start.epoch, start.position)

    def epoch(self, number: int, position: int = 0) -> Epoch:
        """Order and global batches of one epoch, cut from `position` on. Not with a sampler."""
        offset = position % self.global_batch_size if self.global_batch_size and position < self.num_samples else 0
        latest = self._latest[0] if self._latest else None
        if latest is None or latest.number != number or getattr(latest.batches, "offset", 0) != offset:
            self._latest[:] = [self._epoch(number, offset)]
        return self._latest[0]

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch; `TypeError` if a sampler doesn't say."""
        return self.epoch(epoch).batches.num_batches if self.sampling is None else self.sampling.num_batches

    def _epoch(self, number: int, offset: int) -> Epoch:
        order = self._order(number)
        if self.max_tokens is None:
            assert self.global_batch_size is not None
            fixed = FixedBatches(order.num_samples, self.global_batch_size, self.drop_last, offset)
            return Epoch(number, fixed, order, order.weights.digest if isinstance(order, WeightedOrder) else 0)
        assert self.lengths is not None
        batches = TokenBatches(order, self.lengths, self.max_tokens, shuffle=self.shuffle, seed=self.seed, epoch=number)
        return Epoch(number, batches, batches)

    def _order(self, epoch: int) -> Order:
        if self.by_weight is not None:
            return WeightedOrder(self._weights(), self.by_weight.num_samples, self.seed, epoch)
        return EpochOrder(self.num_samples, self.seed, epoch, self.shuffle)

    def _weights(self) -> Weights:
        """The sampler's, as they are now."""
        assert self.by_weight is not None
        weights = Weights(self.by_weight.weights)
        if len(weights) != self.num_samples:
            raise ConfigurationError(
                f"the sampler has {len(weights)} weights and the data set {self.num_samples} samples; one weight each."
            )
        return weights

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
        if self.by_weight is not None:
            facts["num_draws"] = self.by_weight.num_samples
        if self.sampling is not None:
            facts["sampler"] = type(self.sampling.sampler).__name__
        return facts

    def describe(self, epoch: int) -> str:
        """The order and the global batches in words."""
        if self.sampling is not None:
            size = "its own" if self.global_batch_size is None else f"{self.global_batch_size} samples"
            return f"drawn by {type(self.sampling.sampler).__name__} with seed {self.seed}, in global batches of {size}"
        batches = self.epoch(epoch).batches
        if self.by_weight is not None:
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


def plan_batches(
    num_samples: int,
    *,
    global_batch_size: Any,
    drop_last: bool,
    shuffle: bool,
    seed: Any,
    max_tokens: Any,
    lengths: Any,
    sampler: Any,
    batch_sampler: Any,
    world_size: int,
) -> BatchPlan:
    """Check a loader's arguments, and make a `BatchPlan` of them.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    if num_samples == 0:
        raise ConfigurationError("the data set is empty: it has no samples.")
    _whole(seed, "seed", smallest=0, largest=_LARGEST, otherwise="None for the world's")
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        if drop_last:
            raise ConfigurationError(
                "drop_last=True: the batches of batch_sampler are the global batches, all of them."
            )
        plan = BatchPlan(num_samples, None, False, shuffle, seed)
        return replace(plan, sampling=Sampling(batch_sampler, None, False, seed))
    if batch_sampler is not None:  # torch's: a sampler that is cut as a loader would
        sampler, global_batch_size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
    plan = BatchPlan(num_samples, global_batch_size, drop_last, shuffle, seed)
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
    if type(sampler) is WeightedRandomSampler and sampler.replacement:
        plan = replace(plan, by_weight=sampler)
        plan._weights()
    elif sampler is not None:
        return replace(plan, sampling=Sampling(sampler, global_batch_size, drop_last, seed))
    epoch_size = num_samples if plan.by_weight is None else plan.by_weight.num_samples
    if drop_last and epoch_size < global_batch_size:
        raise ConfigurationError(
            f"drop_last=True leaves no batch at all: {epoch_size} samples are fewer than "
            f"global_batch_size={global_batch_size}."
        )
    return plan


def _by_tokens(plan: BatchPlan, max_tokens: Any, lengths: Any, world_size: int) -> BatchPlan:
    _whole(max_tokens, "max_tokens", smallest=1, largest=_LARGEST)
    if plan.global_batch_size is not None:
        raise ConfigurationError("max_tokens and global_batch_size exclude each other: each says how large a step is.")
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
        looks: Also make digests of a few fixed samples, by which the ranks' data sets are compared.
    """

    epoch: int
    step: int
    samples: Any
    example: Any = None
    looks: bool = False


def requests(
    epoch: Epoch, first_step: int, share: Callable[[int, int], tuple[int, int]], *, as_tensors: bool = False
) -> Iterator[Request]:
    """The requests of one rank from `first_step` on, one for every step; `share` is its `divide`."""
    batches, step = epoch.batches, first_step
    while step < batches.num_batches:
        spans = _equal_steps(batches, step, share)
        if spans is None:  # the last, short one; or a share of nothing
            first, last = batches.global_batch(step)
            start, stop = share(first, last)
            samples = epoch.order.at(torch.arange(start, stop, device="cpu"))
            example = None if stop > start else int(epoch.order.at(torch.tensor(first, device="cpu")))
            yield Request(epoch.number, step, samples if as_tensors else samples.tolist(), example)
            step += 1
            continue
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
    num_full = (batches.num_samples - batches.offset) // batches.global_batch_size
    first, last = share(0, batches.global_batch_size)
    if step >= num_full or first == last:
        return None
    stop = min(num_full, step + max(1, _POSITIONS // (last - first)))
    starts = torch.arange(step, stop, device="cpu").unsqueeze(1) * batches.global_batch_size
    return starts + batches.offset + torch.arange(first, last, device="cpu")
