"""Which positions of an epoch each rank takes in each step. Pure.

An epoch is cut into *global batches*, and each of them is divided over the ranks:

    position   0   1   2   3 | 4   5   6   7 | 8   9
    step       ------- 0 --- | ------- 1 --- | -- 2        global_batch_size 4, the last one short
    3 ranks    0   0   1   2 | 0   0   1   2 | 0   1       rank 2 has no sample in step 2, and takes part
    1 rank     0   0   0   0 | 0   0   0   0 | 0   0

The cuts between global batches don't depend on the number of ranks, and every rank has every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from evenstep.data.order import Order
from evenstep.lanes import begin_of


class Plan(Protocol):
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
    """All there is to know about one epoch: which sample is at which position, and where it is cut."""

    number: int
    plan: Plan
    order: Order


def divide(start: int, stop: int, *, rank: int, world_size: int, lanes: int = 1) -> tuple[int, int]:
    """The part of one rank: first, and the one after the last; equal if the rank has none.

    Parts are contiguous, in order of rank, and differ by at most one; rank 0 has one if anybody has. With several lanes
    a rank has so many parts of a division into `world_size * lanes`: see `evenstep.lanes`.
    """
    length, num_parts = stop - start, world_size * lanes
    return start + begin_of(length, rank * lanes, num_parts), start + begin_of(length, (rank + 1) * lanes, num_parts)


@dataclass(frozen=True)
class BatchPlan:
    """The global batches of an epoch, and their division over ranks.

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

    def share(self, step: int, *, rank: int, world_size: int, lanes: int = 1) -> tuple[int, int]:
        """The positions of one rank: see `divide`."""
        return divide(*self.global_batch(step), rank=rank, world_size=world_size, lanes=lanes)
