"""Rows of all ranks, put back into the order of the data set."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.data.plan import Epoch, divide
from evenstep.errors import MismatchError
from evenstep.lanes import per_rank
from evenstep.transport.exchange import check_rows
from evenstep.world import World

_LEFT_OUT = (
    " Samples that were left out (on_error='skip') have no rows, and nobody knows which those would be: with such "
    "samples gather in the loop, with world.gather."
)


def positions_by_rank(epoch: Epoch, start: int, stop: int, world_size: int, lanes: int = 1) -> list[Tensor]:
    """Positions of each rank's samples between two steps, in the order in which it sees them. Pure.

    `lanes` are those of each rank.
    """
    plan = epoch.plan
    first, last = plan.step_at(start) or 0, plan.step_at(stop)
    spans = [plan.global_batch(step) for step in range(first, plan.num_batches if last is None else last)]
    parts = []
    for rank in range(world_size):
        shares = [
            torch.arange(*divide(*span, rank=rank, world_size=world_size, lanes=lanes), device="cpu") for span in spans
        ]
        parts.append(torch.cat(shares) if shares else torch.empty(0, dtype=torch.int64, device="cpu"))
    return parts


def gather_in_order(world: World, rows: Tensor, epoch: Epoch, start: int, stop: int, *, skips: bool = False) -> Tensor:
    """All ranks' rows by number of the sample. Collective.

    Args:
        world: The ranks.
        rows: [n, ...], this rank's.
        epoch: The one that was iterated.
        start: Position at which the iteration began.
        stop: Position to which it came.
        skips: Samples may have been left out, of which there are no rows.

    Raises:
        MismatchError: A rank has another number of rows than samples. Raised on all of them.
        ConfigurationError: No dense tensor.
    """
    check_rows(rows, rank=world.rank, what="loader.gather")
    parts = positions_by_rank(epoch, start, stop, world.world_size, per_rank(world.lanes))
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
