"""What one rank has to load: its share of every step of an epoch, computed some thousand positions at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep.data.plan import BatchPlan, Epoch, divide

_BLOCK = 16_384  # positions whose samples are computed at a time: the permutation costs as much for 10 as for 1,000


class Request(NamedTuple):
    """One batch to load.

    Attributes:
        epoch: Number of the epoch.
        step: Number of the step in the epoch.
        samples: Which samples; a list of int, or int64 [n] for data sets that give whole batches.
        example: Where `samples` is empty: a sample from which can be seen what a batch looks like; else None.
    """

    epoch: int
    step: int
    samples: Any
    example: int | None = None


def requests(
    epoch: Epoch, first_step: int, *, rank: int, world_size: int, lanes: int = 1, as_tensors: bool = False
) -> Iterator[Request]:
    """The requests of one rank from `first_step` on, one for every step. `lanes` are those of each rank."""
    plan, step = epoch.plan, first_step
    share = partial(divide, rank=rank, world_size=world_size, lanes=lanes)
    while step < plan.num_batches:
        spans = _equal_steps(plan, step, share)
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


def _equal_steps(plan: Any, step: int, share: Callable[[int, int], tuple[int, int]]) -> Tensor | None:
    """Positions of this rank, [steps, samples], in a run of steps of the usual size; None where there is none."""
    if not isinstance(plan, BatchPlan):
        return None
    num_full = plan.num_samples // plan.global_batch_size
    first, last = share(0, plan.global_batch_size)
    if step >= num_full or first == last:
        return None
    stop = min(num_full, step + max(1, _BLOCK // (last - first)))
    starts = torch.arange(step, stop, device="cpu").unsqueeze(1) * plan.global_batch_size
    return starts + torch.arange(first, last, device="cpu")


def _one_by_one(
    epoch: Epoch, step: int, share: Callable[[int, int], tuple[int, int]], as_tensors: bool
) -> Iterator[Request]:
    plan, order = epoch.plan, epoch.order
    while step < plan.num_batches:
        spans: list[tuple[int, int]] = []
        num_positions = 0
        while step + len(spans) < plan.num_batches and num_positions < _BLOCK:
            spans.append(share(*plan.global_batch(step + len(spans))))
            num_positions += spans[-1][1] - spans[-1][0]
        samples = order.at(torch.cat([torch.arange(*span, device="cpu") for span in spans]))
        for (start, stop), row in zip(
            spans, torch.split(samples, [stop - start for start, stop in spans]), strict=True
        ):
            if start == stop:
                example = int(order.at(torch.tensor(plan.global_batch(step)[0], device="cpu")))
                yield Request(epoch.number, step, [], example)
            else:
                yield Request(epoch.number, step, row if as_tensors else row.tolist())
            step += 1
