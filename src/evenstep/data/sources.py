"""Where a loader's batches come from: numbered samples, or a stream. What differs between the two is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data import workers
from evenstep.data.division import Division
from evenstep.data.fetch import Fetcher, Loaded
from evenstep.data.gathering import gather_in_order
from evenstep.data.plan import BatchPlan, Epoch
from evenstep.data.position import Mark
from evenstep.data.readahead import reading_ahead
from evenstep.data.records import Records
from evenstep.data.requests import Request, requests
from evenstep.data.stream import StreamFetcher, is_sharded, stream_requests, until_all_end, until_the_end
from evenstep.errors import ConfigurationError, UsageError
from evenstep.lanes import per_rank
from evenstep.world import World


class Source(Protocol):
    """What the loader asks. `fetcher` loads one batch; `batches` are all of an iteration."""

    fetcher: Any

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one step, on all ranks together; None if steps are measured in tokens."""

    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks, and in a run that is resumed."""

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch; `TypeError` if nobody knows."""

    def begins_at(self, mark: Mark) -> bool:
        """Whether a step begins there."""

    def validate(self) -> None:
        """Raise if the data aren't any more what they were."""

    def batches(self, start: Mark, iteration: int, hired: TorchDataLoader[Any] | None) -> Iterator[tuple[int, Loaded]]:
        """This rank's batches, each with the position at its end; loaded here, or by the workers of `hired`."""

    def gather(self, rows: Tensor, start: Mark, end: Mark) -> Tensor:
        """All ranks' rows in the order of the data set. Collective."""

    def describe(self, epoch: int) -> str:
        """The data and its global batches."""


class SampleSource:
    """Numbered samples, divided by a `Division`."""

    def __init__(
        self,
        dataset: Any,
        division: Division,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        sample_seed: bool,
        skip: bool,
        num_workers: int,
        world: World,
    ) -> None:
        self.dataset, self.division, self.world = dataset, division, world
        self.global_batch_size = division.global_batch_size
        key = division.seed if sample_seed else None
        page = workers.new_page(num_workers)
        # On their way to a GPU batches are pinned by torch's thread, which would not look into the bytes.
        packs = world.device.type == "cpu"
        self.fetcher = Fetcher(dataset, collate_fn, sample_seed=key, skip=skip, page=page, packs=packs)

    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks, and in a run that is resumed."""
        return self.division.facts()

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        return self.division.epoch(epoch).plan.num_batches

    def begins_at(self, mark: Mark) -> bool:
        """Whether a step begins there."""
        return self.division.epoch(mark.epoch).plan.step_at(mark.position) is not None

    def validate(self) -> None:
        """Raise if the data aren't any more what they were.

        Raises:
            UsageError: The data set has another length.
            DataError: A file was changed.
        """
        if len(self.dataset) != self.division.num_samples:
            raise UsageError(
                f"DataLoader on rank {self.world.rank}: the data set had {self.division.num_samples} samples when the "
                f"loader was made and has {len(self.dataset)} now. Make a new loader, on every rank."
            )
        if isinstance(self.dataset, Records):
            self.dataset.validate_unchanged()

    def batches(self, start: Mark, iteration: int, hired: TorchDataLoader[Any] | None) -> Iterator[tuple[int, Loaded]]:
        """This rank's batches, each with the position at its end."""
        epoch = self.division.epoch(start.epoch)
        plan, step = epoch.plan, epoch.plan.step_at(start.position) or 0
        if hired is None:
            wanted = self._requests(epoch, step, as_tensors=self.fetcher.wants_tensors)
            for request in reading_ahead(self.dataset, epoch, wanted):
                yield plan.global_batch(request.step)[1], self.fetcher[request]
            return
        # To a worker a list: a tensor would travel through shared memory of its own.
        wanted = reading_ahead(self.dataset, epoch, self._requests(epoch, step))
        with workers.working(hired, wanted, partial(self._doing, epoch)) as batches:
            for number, loaded in enumerate(batches, step):
                yield plan.global_batch(number)[1], loaded

    def _requests(self, epoch: Epoch, step: int, *, as_tensors: bool = False) -> Iterator[Request]:
        rank, world_size, lanes = self.world.rank, self.world.world_size, per_rank(self.world.lanes)
        return requests(epoch, step, rank=rank, world_size=world_size, lanes=lanes, as_tensors=as_tensors)

    def _doing(self, epoch: Epoch, step: int, number: int) -> str:
        """What a worker was at: which sample, as far as can be known."""
        samples = next(self._requests(epoch, step)).samples
        where = f"epoch {epoch.number}, step {step}"
        if self.fetcher.notes_samples and number < len(samples):
            return f"sample {samples[number]} ({where}, number {number} of this rank's {len(samples)})"
        some = ", ".join(map(str, islice(samples, 8)))
        return f"samples {some}{', ...' if len(samples) > 8 else ''} ({where})"

    def gather(self, rows: Tensor, start: Mark, end: Mark) -> Tensor:
        """All ranks' rows in the order of the data set. Collective."""
        epoch, skips = self.division.epoch(start.epoch), self.fetcher.skips
        return gather_in_order(self.world, rows, epoch, start.position, end.position, skips=skips)

    def describe(self, epoch: int) -> str:
        """The data and its global batches."""
        return self.division.describe(epoch)


class StreamSource:
    """An `IterableDataset`: [Note: streams]."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        global_batch_size: int,
        drop_last: bool,
        num_workers: int,
        world: World,
    ) -> None:
        self.dataset, self.world = dataset, world
        self.global_batch_size: int = global_batch_size
        self.drop_last = drop_last
        self._num_parts = max(1, num_workers)
        self.by_shard = is_sharded(dataset, world.world_size * self._num_parts)
        if self.by_shard and world.lanes is not None:
            raise ConfigurationError(
                f"{type(dataset).__name__} is a stream that is divided by shards, whose order depends on the number of "
                f"ranks and workers; reproducible mode can't have that. Hide its num_shards, so that it is divided by "
                f"record, or use files (Records)."
            )
        if self.by_shard and drop_last:
            raise ConfigurationError(
                f"drop_last=True: {type(dataset).__name__} is a stream that is divided by shards, whose parts end at "
                f"different times: there is no last global batch that could be left out, but steps at the end in which "
                f"some ranks have fewer samples or none. Leave drop_last out and weight steps by their samples "
                f"(model.backward(loss, weight=len(x))), or hide its num_shards, so that it is divided by record."
            )
        self.fetcher = StreamFetcher(
            dataset,
            collate_fn,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            rank=world.rank,
            world_size=world.world_size,
            lanes=per_rank(world.lanes),
            num_workers=num_workers,
            by_shard=self.by_shard,
            packs=world.device.type == "cpu",
        )

    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks, and in a run that is resumed."""
        facts: dict[str, Any] = {"global_batch_size": self.global_batch_size, "drop_last": self.drop_last}
        if self.by_shard:
            facts["the number of ranks times workers"] = self.world.world_size * self._num_parts
        return facts

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch.

        Raises:
            TypeError: Nobody knows.
        """
        if self.by_shard:
            raise TypeError("a stream that is divided by shards has no length before it ends")
        full, rest = divmod(len(self.dataset), self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def begins_at(self, mark: Mark) -> bool:
        """Whether a step begins there: only the stream itself would know better."""
        return True

    def validate(self) -> None:
        """Nothing is known of a stream."""

    def batches(self, start: Mark, iteration: int, hired: TorchDataLoader[Any] | None) -> Iterator[tuple[int, Loaded]]:
        """This rank's batches, each with the position at its end: records, or steps if it is divided by shards."""
        num_done = 0 if self.by_shard else -(-start.position // self.global_batch_size)
        wanted = stream_requests(start.epoch, iteration, num_done)
        if hired is None:
            yield from self._measured(map(self.fetcher.__getitem__, wanted), start)
            return
        with workers.working(hired, wanted, lambda step, _: f"its part of step {step} of a stream") as batches:
            yield from self._measured(batches, start)

    def _measured(self, batches: Iterator[Loaded], start: Mark) -> Iterator[tuple[int, Loaded]]:
        if self.by_shard:
            # How much each part gave to a step isn't known before it is read: what is done is read again and dropped.
            own = until_all_end(until_the_end(batches, self._num_parts), self.world)
            yield from ((step, loaded) for step, loaded in enumerate(own, 1) if step > start.position)
            return
        position = start.position
        for loaded in batches:
            if not loaded.num_samples:
                return
            position += loaded.num_samples
            yield position, loaded

    def gather(self, rows: Tensor, start: Mark, end: Mark) -> Tensor:
        """All ranks' rows in the order of the stream. Collective."""
        if self.by_shard:
            raise UsageError("loader.gather: a stream divided by shards has no order that could be restored.")
        plan = BatchPlan(end.position, self.global_batch_size)
        return gather_in_order(self.world, rows, Epoch(0, plan, _InOrder(end.position)), start.position, end.position)

    def describe(self, epoch: int) -> str:
        """The data and its global batches."""
        return f"a stream in global batches of {self.global_batch_size}"


class _InOrder:
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def at(self, positions: Tensor) -> Tensor:
        return positions
