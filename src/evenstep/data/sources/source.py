"""`Source`: the data of a loader, and rows of all ranks gathered in the order of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loading.fetch import Loaded
from evenstep.data.order.batch_plan import Epoch, divide
from evenstep.data.position import Mark
from evenstep.errors import MismatchError
from evenstep.transport.core.object_collectives import check_rows
from evenstep.virtual_ranks import per_rank
from evenstep.world import World

_LEFT_OUT = (
    " Samples that were left out (on_error='skip') have no rows, and which ones were left out isn't known: with such "
    "samples gather in the loop, with world.gather."
)


class Source(Protocol):
    """The data of a loader. `fetcher` loads one batch; `batches` are all of an iteration."""

    fetcher: Any
    done: dict[int, frozenset[int]]
    """By epoch the steps that a resumed run leaves out: parameter servers' workers were done with them."""

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one step, on all ranks together; None if steps are measured in tokens."""

    def connect(self) -> None:
        """Collective: open what carries the ranks' messages about these data, and nothing else."""

    def facts(self) -> dict[str, Any]:
        """Values that must be equal on all ranks, and in a resumed run. Checkpoints hold them: keys never change."""

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch; `TypeError` if it is unknown."""

    def begins_at(self, mark: Mark) -> bool:
        """Whether a step begins there."""

    def step_at(self, mark: Mark) -> int:
        """The step that begins there."""

    def position_of(self, epoch: int, step: int) -> int:
        """Where a step begins; for the step behind the last, where that ends."""

    def validate(self) -> None:
        """Raise if the data have changed since the loader was made."""

    def batches(
        self, start: Mark, iteration: int, torch_loader: TorchDataLoader[Any] | None
    ) -> Iterator[tuple[int | Mark, Loaded]]:
        """This rank's batches, each with the position at its end; loaded here, or by the workers of `torch_loader`."""

    def gather(self, rows: Tensor, start: Mark, end: Mark) -> Tensor:
        """All ranks' rows in the order of the data set. Collective."""

    def describe(self, epoch: int) -> str:
        """The data and its global batches, for messages."""


def positions_by_rank(epoch: Epoch, start: int, stop: int, world_size: int, virtual_ranks: int = 1) -> list[Tensor]:
    """Positions of each rank's samples between two steps, in the order in which it loads them. Pure.

    `virtual_ranks` are those of each rank.
    """
    batches = epoch.batches
    first, last = batches.step_at(start) or 0, batches.step_at(stop)
    spans = [batches.global_batch(step) for step in range(first, batches.num_batches if last is None else last)]
    parts = []
    for rank in range(world_size):
        shares = [
            torch.arange(*divide(*span, rank=rank, world_size=world_size, virtual_ranks=virtual_ranks), device="cpu")
            for span in spans
        ]
        parts.append(torch.cat(shares) if shares else torch.empty(0, dtype=torch.int64, device="cpu"))
    return parts


def gather_in_order(world: World, rows: Tensor, epoch: Epoch, start: int, stop: int, *, skips: bool = False) -> Tensor:
    """Gather all ranks' rows by number of the sample. Collective.

    Args:
        world: The ranks.
        rows: [n, ...], this rank's.
        epoch: The iterated epoch.
        start: Position at which the iteration began.
        stop: Position at which it ended.
        skips: Samples may have been skipped; they have no rows.

    Raises:
        MismatchError: A rank has another number of rows than samples. Raised on all of them.
        ConfigurationError: No dense tensor.
    """
    check_rows(rows, rank=world.rank, what="loader.gather")
    parts = positions_by_rank(epoch, start, stop, world.world_size, per_rank(world.virtual_ranks))
    num_rows = len(rows) if rows.dim() else 1
    lengths = world.exchange(num_rows) if world.world_size > 1 else [num_rows]
    for rank, (length, part) in enumerate(zip(lengths, parts, strict=True)):
        if length != len(part):
            raise MismatchError(
                f"loader.gather: rank {rank} has {length} rows and has seen {len(part)} samples in the latest "
                f"iteration. Pass one row for each, of all batches (torch.cat of a list), in the order in which they "
                f"came.{_LEFT_OUT if skips else ''}"
            )
    gathered = world.gather(rows)
    samples = epoch.order.at(torch.cat(parts))
    return gathered[torch.argsort(samples, stable=True).to(gathered.device)]
