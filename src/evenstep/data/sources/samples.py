"""`SampleSource`: the batches of a data set whose samples are numbered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loading import workers
from evenstep.data.loading.fetch import Fetcher, Loaded
from evenstep.data.order.batch_plan import BatchPlan, Epoch, Request, requests
from evenstep.data.position import Mark
from evenstep.data.sources.source import gather_in_order
from evenstep.errors import UsageError
from evenstep.randomness import mix
from evenstep.virtual_ranks import per_rank
from evenstep.world import World


class BatchesToTake(Protocol):
    """Divides global batches over processes that take one after the other, each at its own speed."""

    def take(
        self, epoch: int, num_batches: int, facts: Mapping[str, Any], load: Callable[[int, int], tuple[int, Loaded]]
    ) -> Iterator[tuple[int, Loaded]]:
        """The batches of this process, loaded by epoch and step."""
        ...


class SampleSource:
    """Numbered samples, divided over ranks by a `BatchPlan`."""

    def __init__(
        self,
        dataset: Any,
        batch_plan: BatchPlan,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        sample_seed: bool,
        skip: bool,
        num_workers: int,
        world: World,
        queue: BatchesToTake | None = None,
    ) -> None:
        self._queue = queue
        self.done: dict[int, frozenset[int]] = {}
        self.dataset, self.batch_plan, self.world = dataset, batch_plan, world
        self.global_batch_size = batch_plan.global_batch_size
        key = batch_plan.seed if sample_seed else None
        page = workers.new_page(num_workers)
        # torch's thread pins batches for a GPU; it can't pin tensors inside the bytes.
        packs = world.device.type == "cpu"
        batch_seed = mix(batch_plan.seed, world.rank)
        self.fetcher = Fetcher(
            dataset, collate_fn, batch_seed=batch_seed, sample_seed=key, skip=skip, page=page, packs=packs
        )

    def facts(self) -> dict[str, Any]:
        """See `Source.facts`."""
        return self.batch_plan.facts()

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        return self.batch_plan.epoch(epoch).batches.num_batches

    def begins_at(self, mark: Mark) -> bool:
        """Whether a step begins there."""
        return self.batch_plan.epoch(mark.epoch).batches.step_at(mark.position) is not None

    def step_at(self, mark: Mark) -> int:
        """See `Source.step_at`."""
        return self.batch_plan.epoch(mark.epoch).batches.step_at(mark.position) or 0

    def position_of(self, epoch: int, step: int) -> int:
        """See `Source.position_of`."""
        batches = self.batch_plan.epoch(epoch).batches
        return batches.global_batch(step)[0] if step < batches.num_batches else batches.global_batch(step - 1)[1]

    def validate(self) -> None:
        """Raise if the data have changed since the loader was made.

        Raises:
            UsageError: The data set has another length.
        """
        planned = self.batch_plan.num_samples
        if len(self.dataset) != planned:
            raise UsageError(
                f"DataLoader on rank {self.world.rank}: the data set had {planned} samples when the loader was made "
                f"and has {len(self.dataset)} now. Make a new loader, on every rank."
            )

    def batches(
        self, start: Mark, iteration: int, torch_loader: TorchDataLoader[Any] | None
    ) -> Iterator[tuple[int, Loaded]]:
        """This rank's batches, each with the position at its end."""
        if self._queue is not None:
            yield from self._taken(self._queue, start.epoch)
            return
        epoch = self.batch_plan.epoch(start.epoch)
        global_batch, step = epoch.batches.global_batch, epoch.batches.step_at(start.position) or 0
        if torch_loader is None:
            for request in self._requests(epoch, step, as_tensors=self.fetcher.wants_tensors):
                yield global_batch(request.step)[1], self.fetcher[request]
            return
        # Lists for workers: each tensor would travel through its own shared memory.
        wanted = self._requests(epoch, step)
        done = self.done.get(epoch.number, frozenset())
        steps = (number for number in range(step, epoch.batches.num_batches) if number not in done)
        with workers.working(torch_loader, wanted, partial(self._doing, epoch)) as batches:
            for number, loaded in zip(steps, batches, strict=True):
                yield global_batch(number)[1], loaded

    def _taken(self, queue: BatchesToTake, number: int) -> Iterator[tuple[int, Loaded]]:
        """The global batches that this process takes from a queue, each whole."""

        def load(of_epoch: int, step: int) -> tuple[int, Loaded]:
            epoch = self.batch_plan.epoch(of_epoch)
            begin, end = epoch.batches.global_batch(step)
            samples = epoch.order.at(torch.arange(begin, end, device="cpu"))
            wanted: Any = samples if self.fetcher.wants_tensors else samples.tolist()
            return end, self.fetcher[Request(of_epoch, step, wanted)]

        yield from queue.take(number, self.num_steps(number), self.facts(), load)

    def _requests(self, epoch: Epoch, step: int, *, as_tensors: bool = False) -> Iterator[Request]:
        rank, world_size, virtual_ranks = self.world.rank, self.world.world_size, per_rank(self.world.virtual_ranks)
        wanted = requests(
            epoch, step, rank=rank, world_size=world_size, virtual_ranks=virtual_ranks, as_tensors=as_tensors
        )
        done = self.done.get(epoch.number)
        return wanted if not done else (request for request in wanted if request.step not in done)

    def _doing(self, epoch: Epoch, step: int, number: int) -> str:
        """The sample that a worker was loading, as far as its notes show."""
        samples = next(self._requests(epoch, step)).samples
        where = f"epoch {epoch.number}, step {step}"
        if self.fetcher.notes_samples and number < len(samples):
            return f"sample {samples[number]} ({where}, number {number} of this rank's {len(samples)})"
        some = ", ".join(map(str, islice(samples, 8)))
        return f"samples {some}{', ...' if len(samples) > 8 else ''} ({where})"

    def gather(self, rows: Tensor, start: Mark, end: Mark) -> Tensor:
        """All ranks' rows in the order of the data set. Collective."""
        epoch, skips = self.batch_plan.epoch(start.epoch), self.fetcher.skips
        return gather_in_order(self.world, rows, epoch, start.position, end.position, skips=skips)

    def describe(self, epoch: int) -> str:
        """See `Source.describe`."""
        return self.batch_plan.describe(epoch)
