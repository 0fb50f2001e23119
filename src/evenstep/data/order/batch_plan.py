"""Plans which samples each rank loads in each step of an epoch. Pure.

An epoch is cut into *global batches*, and each of them is divided over the ranks:

    position   0   1   2   3 | 4   5   6   7 | 8   9
    step       ------- 0 --- | ------- 1 --- | -- 2        global_batch_size 4, the last one short
    3 ranks    0   0   1   2 | 0   0   1   2 | 0   1       rank 2 has no sample in step 2, and takes part
    1 rank     0   0   0   0 | 0   0   0   0 | 0   0

The cuts between global batches don't depend on the number of ranks, and every rank has every step.

A `BatchPlan` holds the decisions of a loader's arguments. Its `begin` gives the `Epoch` of one iteration: a
`ComputedEpoch`, whose `requests` of one rank are computed from any step on, or the `Drawing` of a sampler, drawn from
the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, WeightedRandomSampler

from evenstep.data.order.drawn import Drawing, Sampling
from evenstep.data.order.max_tokens import TokenBatches, validate_lengths
from evenstep.data.order.permutation import EpochOrder
from evenstep.data.order.weighted import WeightedOrder, Weights, digest
from evenstep.data.position import Mark
from evenstep.errors import ConfigurationError
from evenstep.ground.computing.virtual_ranks import begin_of

# The names of facts for people. Other facts are shown under the names of their arguments.
_WORDS = {
    "num_samples": "the length of the data set",
    "lengths_digest": "the digest of lengths",
    "num_draws": "draws of an epoch",
    "num_parts": "the number of ranks times workers",
    "num_workers": "the number of workers of a rank",
}
_POSITIONS = 16_384  # positions that are computed at a time: the permutation costs the same for 10 as for 1,000


def divide(start: int, stop: int, *, rank: int, world_size: int, virtual_ranks: int = 1) -> tuple[int, int]:
    """The share of one rank, [start, stop); empty if both are equal.

    Shares are contiguous, in order of rank, and their sizes differ by at most one, larger ones first. With several
    virtual ranks per rank, a rank has that many shares of a division into `world_size * virtual_ranks`: see
    `ground.computing.virtual_ranks`.
    """
    length, num_parts = stop - start, world_size * virtual_ranks
    return start + begin_of(length, rank * virtual_ranks, num_parts), start + begin_of(
        length, (rank + 1) * virtual_ranks, num_parts
    )


@dataclass(frozen=True)
class ComputedEpoch:
    """An epoch whose order is computed, in global batches of a fixed size, the last one maybe shorter.

    Attributes:
        order: The sample at each position.
        global_batch_size: Samples of one step on all ranks together, at least 1.
        drop_last: Leave out a short last global batch.
        offset: Position at which step 0 would begin, below `global_batch_size`; not 0 if a run was resumed with another
            batch size.
    """

    order: EpochOrder | WeightedOrder
    global_batch_size: int
    drop_last: bool = False
    offset: int = 0

    @property
    def number(self) -> int:
        """The number of the epoch."""
        return self.order.epoch

    @property
    def digest(self) -> int:
        """A digest of the weights, which a script may change between epochs; 0: samples aren't drawn by weight."""
        return self.order.weights.digest if isinstance(self.order, WeightedOrder) else 0

    @property
    def num_batches(self) -> int:
        """Steps of the epoch, on every rank."""
        full, rest = divmod(self.order.num_samples - self.offset, self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def global_batch(self, step: int) -> tuple[int, int]:
        """First position of a global batch, and the position after its last."""
        start = self.offset + step * self.global_batch_size
        return start, min(start + self.global_batch_size, self.order.num_samples)

    def step_at(self, position: int) -> int | None:
        """The step that begins at `position`; None: no step does. The end of the epoch is the step after the last."""
        if position == self.order.num_samples:
            return self.num_batches
        step, rest = divmod(position - self.offset, self.global_batch_size)
        return step if rest == 0 and 0 <= step <= self.num_batches else None

    def at(self, positions: Tensor) -> Tensor:
        """Sample indices at `positions`, any shape, int64."""
        return self.order.at(positions)

    def requests(
        self, first_step: int, share: Callable[[int, int], tuple[int, int]], *, as_tensors: bool = False
    ) -> Iterator[Request]:
        """The requests of one rank from `first_step` on, one for every step; `share` is this rank's `divide`."""
        step = first_step
        while step < self.num_batches:
            spans = self._equal_steps(step, share)
            if spans is None:  # the last, short batch, or an empty share
                first, last = self.global_batch(step)
                start, stop = share(first, last)
                samples = self.at(torch.arange(start, stop, device="cpu"))
                example = None if stop > start else int(self.at(torch.tensor(first, device="cpu")))
                yield Request(self.number, step, samples if as_tensors else samples.tolist(), example)
                step += 1
                continue
            samples = self.at(spans)
            # The samples are rows of a table, cut by torch, or by `tolist` (numpy's is a quarter faster): python is
            # slower.
            rows: Any = samples.unbind() if as_tensors else samples.numpy().tolist()
            for row in rows:
                yield Request(self.number, step, row)
                step += 1

    def _equal_steps(self, step: int, share: Callable[[int, int], tuple[int, int]]) -> Tensor | None:
        """Positions of this rank, [steps, samples], in successive steps of the usual size; None without such steps."""
        num_full = (self.order.num_samples - self.offset) // self.global_batch_size
        first, last = share(0, self.global_batch_size)
        if step >= num_full or first == last:
            return None
        stop = min(num_full, step + max(1, _POSITIONS // (last - first)))
        starts = torch.arange(step, stop, device="cpu").unsqueeze(1) * self.global_batch_size
        return starts + self.offset + torch.arange(first, last, device="cpu")


Epoch = ComputedEpoch | Drawing


class Request(NamedTuple):
    """One batch to load.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step in the epoch.
        samples: Numbers of the samples; a list of int, or int64 [n] for data sets that return whole batches.
        example: If `samples` is empty, a sample from which the batch without samples is built; else None.
        has_digests: Whether to make digests of a few fixed samples, too, to compare the ranks' data sets.
    """

    epoch: int
    step: int
    samples: Any
    example: Any = None
    has_digests: bool = False


@dataclass(frozen=True)
class BatchPlan:
    """A loader's arguments that decide the order and the global batches of its epochs.

    Attributes:
        num_samples: Size of the data set.
        global_batch_size: Samples of a step; None if a batch sampler decides.
        drop_last: Leave out a short last global batch.
        shuffle: A new order each epoch.
        seed: The seed of the order.
        by_weight: A sampler: samples are drawn with replacement by its weights; None: every sample once.
        sampling: The sampler or batch sampler that gives the order; None: it is computed.
    """

    num_samples: int
    global_batch_size: int | None
    drop_last: bool = False
    shuffle: bool = False
    seed: int = 0
    by_weight: WeightedRandomSampler | None = None
    sampling: Sampling | None = None
    _weights: list[Weights] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_compared(self) -> bool:
        """Whether the order depends on a sampler of the script, which may differ between ranks."""
        return self.by_weight is not None or (self.sampling is not None and not self.sampling.is_ours)

    def begin(self, start: Mark) -> Epoch:
        """The epoch of an iteration; with a sampler a `Drawing`, from which the caller draws."""
        if self.sampling is not None:
            return Drawing(self.sampling, start)
        self._weights.clear()
        return self.epoch(start.epoch, start.position)

    def epoch(self, number: int, position: int = 0) -> ComputedEpoch:
        """A computed epoch, cut from `position` on. Not with a sampler."""
        assert self.global_batch_size is not None
        order: EpochOrder | WeightedOrder = EpochOrder(self.num_samples, self.seed, number, self.shuffle)
        if self.by_weight is not None:
            order = WeightedOrder(self.weights(), self.by_weight.num_samples, self.seed, number)
        offset = position % self.global_batch_size if position < order.num_samples else 0
        return ComputedEpoch(order, self.global_batch_size, self.drop_last, offset)

    def weights(self) -> Weights:
        """The sampler's weights at the beginning of the latest iteration."""
        assert self.by_weight is not None
        if not self._weights:
            self._weights.append(Weights(self.by_weight.weights))
        if len(self._weights[0]) != self.num_samples:
            raise ConfigurationError(
                f"the sampler has {len(self._weights[0])} weights and the data set {self.num_samples} samples; give "
                f"one weight for each."
            )
        return self._weights[0]

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch; `TypeError` if a sampler has no length."""
        return self.epoch(epoch).num_batches if self.sampling is None else self.sampling.num_batches(epoch)

    def facts(self) -> dict[str, Any]:
        """Values that must be equal on all ranks and in a resumed run; JSON types. Keys never change."""
        facts: dict[str, Any] = {
            "num_samples": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }
        if self.by_weight is not None:
            facts["num_draws"] = self.by_weight.num_samples
        if self.sampling is not None and self.sampling.is_ours:
            facts["max_tokens"] = self.sampling.sampler.max_tokens
            facts["lengths_digest"] = digest(self.sampling.sampler.lengths)
        elif self.sampling is not None:
            facts["sampler"] = type(self.sampling.sampler).__name__
        return facts

    def describe(self, epoch: int) -> str:
        """The order and the global batches in words."""
        order = f"{self.num_samples} samples {f'shuffled with seed {self.seed}' if self.shuffle else 'in order'}"
        if self.sampling is not None and self.sampling.is_ours:
            return f"{order}, global batches of at most {self.sampling.sampler.max_tokens} tokens"
        if self.sampling is not None:
            size = "its own" if self.global_batch_size is None else f"{self.global_batch_size} samples"
            return f"drawn by {type(self.sampling.sampler).__name__} with seed {self.seed}, in global batches of {size}"
        present = self.epoch(epoch)
        num_samples = present.order.num_samples
        if self.by_weight is not None:
            order = f"{num_samples} draws by weight of {self.num_samples} samples with seed {self.seed}"
        rest = num_samples % present.global_batch_size
        last = "" if rest == 0 else f", {rest} left out" if self.drop_last else f", the last of {rest}"
        return f"{order}, {present.num_batches} global batches of {self.global_batch_size}{last}"


def in_words(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A source's facts, under names for people. Pure."""
    return {_WORDS.get(name, name): value for name, value in facts.items()}


def plan_batches(
    num_samples: int,
    *,
    global_batch_size: int | None,
    drop_last: bool,
    shuffle: bool,
    seed: int,
    world_size: int,
    max_tokens: int | None = None,
    lengths: Any = None,
    sampler: Any = None,
    batch_sampler: Any = None,
) -> BatchPlan:
    """Make a `BatchPlan` from a loader's arguments.

    Raises:
        ConfigurationError: The arguments don't fit together.
    """
    if lengths is not None and max_tokens is None:
        raise ConfigurationError("lengths= needs max_tokens=, the tokens of one step, which is missing.")
    if type(batch_sampler) is BatchSampler:  # torch's class, which cuts a sampler as a loader would
        sampler, global_batch_size, drop_last = batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
    elif batch_sampler is not None or max_tokens is not None:
        if drop_last:
            raise ConfigurationError("drop_last=True: all batches of batch_sampler or max_tokens are used.")
        if max_tokens is not None:
            if global_batch_size is not None:
                raise ConfigurationError("max_tokens and global_batch_size exclude each other: both are a step's size.")
            _validate_size("max_tokens", max_tokens, world_size)
            valid = validate_lengths(lengths, num_samples, max_tokens)
            batch_sampler = TokenBatches(valid, max_tokens, shuffle=shuffle, seed=seed)
        sampling = Sampling(batch_sampler, None, False, seed)
        return BatchPlan(num_samples, None, shuffle=shuffle, seed=seed, sampling=sampling)
    if global_batch_size is None:
        raise ConfigurationError("global_batch_size is missing: the samples of one step, on all ranks together.")
    _validate_size("global_batch_size", global_batch_size, world_size)
    plan = BatchPlan(num_samples, global_batch_size, drop_last, shuffle, seed)
    if type(sampler) is WeightedRandomSampler and sampler.replacement:
        plan = replace(plan, by_weight=sampler)
        plan.weights()
    elif sampler is not None:
        return replace(plan, sampling=Sampling(sampler, global_batch_size, drop_last, seed))
    epoch_size = num_samples if plan.by_weight is None else plan.by_weight.num_samples
    if drop_last and epoch_size < global_batch_size:
        raise ConfigurationError(
            f"drop_last=True leaves no batch at all: {epoch_size} samples are fewer than "
            f"global_batch_size={global_batch_size}."
        )
    return plan


def _validate_size(name: str, size: int, world_size: int) -> None:
    if size < world_size:
        raise ConfigurationError(
            f"{name}={size} is smaller than the number of ranks, {world_size}: some would never have a sample. Use at "
            f"least {world_size}, or fewer ranks."
        )
