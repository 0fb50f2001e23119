"""`DataLoader`: the same global batches for any number of ranks, and every sample once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

import evenstep.world
from evenstep.data import arguments, workers
from evenstep.data.ahead import on_device
from evenstep.data.epochs import EpochCounter
from evenstep.data.fetch import Loaded
from evenstep.data.position import Mark, Progress
from evenstep.data.sources import SampleSource, Source, StreamSource
from evenstep.errors import ConfigurationError, EvenstepError, UsageError
from evenstep.randomness import mix
from evenstep.world import World

_WORKERS_TAG = 0x776F726B6572  # "worker": other streams from the same seed stay unrelated
_MAX_TOLD = 3  # skipped samples that are told of one by one


class DataLoader:
    """Loads this rank's share of every global batch, onto this rank's device.

    Over all ranks every sample comes once per epoch. The global batches, and the order inside them, are the same for
    any number of ranks and workers; every rank makes the same number of steps. A rank takes a contiguous slice of each
    global batch; sizes differ by at most one. A short last global batch is divided in the same way, so a rank may get
    no sample of it: its batch then has tensors of length 0, with the dtype and the other sizes of the usual ones. (For
    that the rank loads one sample once and twice, compares what `collate_fn` makes of it, and removes what grows.)

    `collate_fn`, `timeout`, `worker_init_fn`, `multiprocessing_context` and `prefetch_factor` are torch's. Random
    numbers drawn in workers differ between epochs and ranks, are the same in every run with the same seed, and take
    none from this process's streams.

    Epochs. `for epoch in loader.epochs(10): for x, y in loader:` says all there is to say. Without it, every new
    iteration is the next epoch, whether or not the one before was finished; `set_epoch` chooses the next. With
    `shuffle=False` the order is that of the data set in every epoch.

    Resuming. `state_dict` says how far training has come: to the last batch after which an optimizer stepped. See
    docs/data.md.

    Streams (`IterableDataset`) are divided over ranks and workers by record, or by shard where the data set has shards:
    [Note: streams] in `data/stream.py`. They have the order that they have: `shuffle`, `locality`, `max_tokens` and
    `sampler` don't go with them.

    Collective: with several ranks, every rank makes the loader, with the same arguments. For a loader on one rank
    alone pass `world=World.alone()`.

    Args:
        dataset: Has `__len__` and `__getitem__`, and the same length on every rank; or an `IterableDataset`.
        global_batch_size: Samples of one step, on all ranks together; at least the number of ranks.
        shuffle: A new order each epoch, computed and not stored.
        shards: Instead of `dataset`: files of records, as for `Records`: paths, a pattern, or a `Records`.
        num_workers: Processes that load; "auto": what suits the rank's cores and device.
        pin_memory: None: where batches go to a GPU. Without effect where they don't.
        drop_last: Leave out a last global batch that is short.
        persistent_workers: None: keep workers between epochs if they are expensive to start (not forked).
        locality: Shuffle for data on disk: neighbours that are read together, or (that, blocks of them that are
            shuffled with each other; 16).
        max_tokens: Instead of `global_batch_size`: samples of a global batch times the longest of them, at most.
        lengths: With `max_tokens`: tokens of each sample.
        sample_seed: Key python's, torch's and numpy's random numbers in `__getitem__` by (seed, epoch, sample), so that
            augmentation is the same for any number of ranks and workers. None: in reproducible mode.
        on_error: "raise", or "skip": leave out samples that raise `DataError`, count them in `num_skipped` and say so;
            batches are shorter then. None: what the data set has as `on_error`, or "raise".
        seed: Of the order and of random numbers; None: the world's, or 0.
        world: The ranks that share the data; None: the current world.
        sampler: A `WeightedSampler`, or a `DistributedSampler(pad=False)`, of which seed, `shuffle` and weights are
            taken. Others are refused: the loader decides itself which rank sees what.
        batch_size: Refused: torch counts it per rank. The message says what to write.
        batch_sampler: Refused, and so are `generator`, `pin_memory_device` and `in_order=False`.
        generator: Refused.
        pin_memory_device: Empty.
        in_order: True.

    Raises:
        ConfigurationError: An argument is wrong. Raised on all ranks if it is wrong on one.
        MismatchError: Data set's length, batch size, seed or another argument that decides which sample comes when
            differs between ranks. Raised on all of them.
    """

    def __init__(
        self,
        dataset: Any = None,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        *,
        shards: Any = None,
        num_workers: int | str = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        locality: int | tuple[int, int] | None = None,
        max_tokens: int | None = None,
        lengths: Any = None,
        sample_seed: bool | None = None,
        on_error: str | None = None,
        seed: int | None = None,
        world: World | None = None,
        sampler: Any = None,
        batch_size: int | None = None,
        batch_sampler: Any = None,
        generator: Any = None,
        pin_memory_device: str = "",
        in_order: bool = True,
    ) -> None:
        self.world = evenstep.world.chosen(world, "DataLoader")
        self.drop_last = False
        self.num_skipped = 0  # samples of this rank that could not be loaded
        self.pin_memory = self.world.device.type == "cuda" and pin_memory is not False
        self._epochs = EpochCounter()
        self._progress = Progress()
        self._iterated: tuple[Mark, Mark] | None = None  # what `gather` speaks of
        self._num_iterations = 0
        problem: str | None = None
        try:
            arguments.validate_refused(batch_size, batch_sampler, generator, pin_memory_device, in_order)
            global_batch_size, max_tokens, seed = map(arguments.plain, (global_batch_size, max_tokens, seed))
            global_batch_size, max_tokens = arguments.as_measured(global_batch_size, max_tokens)
            arguments.validate_switches(
                shuffle=shuffle,
                drop_last=drop_last,
                sample_seed=sample_seed,
                pin_memory=pin_memory,
                persistent_workers=persistent_workers,
            )
            arguments.validate_workers(collate_fn, worker_init_fn, timeout, prefetch_factor)
            self.drop_last = bool(drop_last)
            self.dataset = arguments.choose_dataset(dataset, shards, on_error)
            self.num_workers = workers.choose_workers(num_workers, self.world)
            order = arguments.order_of(sampler, shuffle, seed, self.world.seed)
            self.shuffle, self.seed = order.shuffle, order.seed
            self._source = self._choose_source(
                order,
                global_batch_size,
                collate_fn,
                sample_seed=arguments.choose_sample_seed(sample_seed, self.dataset, self.world),
                skip=arguments.choose_skips(self.dataset, on_error, self.world),
                locality=locality,
                max_tokens=max_tokens,
                lengths=lengths,
            )
            self._torch_loader = workers.torch_loader(
                self._source.fetcher,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                timeout=timeout,
                worker_init_fn=worker_init_fn,
                multiprocessing_context=multiprocessing_context,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
            )
        except (EvenstepError, TypeError, ValueError, RuntimeError, OSError) as error:
            problem = str(error).removeprefix("DataLoader: ")
        # Beyond what a resume depends on: what would make the ranks' samples, or their number, differ.
        others = {"sample_seed": bool(sample_seed), "on_error": on_error}
        arguments.agree(self.world, problem, lambda: self._source.facts() | others)

    def _choose_source(
        self,
        order: arguments.OrderAsked,
        global_batch_size: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        sample_seed: bool,
        skip: bool,
        **given: Any,
    ) -> Source:
        """Samples or a stream. Raises `ConfigurationError`."""
        world_size = self.world.world_size
        if isinstance(self.dataset, IterableDataset):
            others = given | {"sample_seed": sample_seed, "on_error": skip}
            arguments.validate_stream(self.dataset, order, global_batch_size, world_size, others)
            return StreamSource(
                self.dataset,
                collate_fn,
                global_batch_size=global_batch_size,
                drop_last=self.drop_last,
                num_workers=self.num_workers,
                world=self.world,
            )
        given |= {"global_batch_size": global_batch_size, "drop_last": self.drop_last}
        return SampleSource(
            self.dataset,
            arguments.divide_dataset(self.dataset, order, world_size=world_size, **given),
            collate_fn,
            sample_seed=sample_seed,
            skip=skip,
            num_workers=self.num_workers,
            world=self.world,
        )

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one step, on all ranks together; None with `max_tokens`."""
        return self._source.global_batch_size

    def __len__(self) -> int:
        """Steps of an epoch, on every rank; with `max_tokens`, of the present one.

        Raises:
            TypeError: A stream that doesn't say how long it is.
        """
        return self._source.num_steps(self.epoch)

    def __repr__(self) -> str:
        return (
            f"<DataLoader epoch {self.epoch}: {self._source.describe(self.epoch)}; rank {self.world.rank} of "
            f"{self.world.world_size} on {self.world.device}, {self.num_workers} workers>"
        )

    # ------------------------------------------------------------------ epochs and position

    @property
    def epoch(self) -> int:
        """The epoch being iterated; between two iterations, the one that comes next."""
        return self._epochs.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have consumed: up to the last optimizer's step."""
        return self._progress.committed.position

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. `epochs` does it for you.

        The epoch in which a resumed run was interrupted goes on where it was.
        """
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ConfigurationError(f"DataLoader.set_epoch: epoch={epoch!r}; a whole number, at least 0.")
        if self._epochs.waits is not None and self._epochs.waits.epoch != epoch:
            arguments.warn_of_jump(self._epochs.waits, epoch)
        self._progress.jump(self._epochs.set(epoch))

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the next `num_epochs` epochs, each of which the loader has while the caller's loop runs.

        Begins with the first epoch that isn't finished: 0 in a new loader, also after a look at a first batch. Inside
        the loop every iteration is of the loop's epoch, however often one iterates. In a resumed run epochs that were
        finished are counted and left out, and the one that was interrupted goes on where it was.

        Raises:
            ConfigurationError: `num_epochs` is negative or no whole number.
        """
        if not isinstance(num_epochs, int) or isinstance(num_epochs, bool) or num_epochs < 0:
            raise ConfigurationError(f"DataLoader.epochs: num_epochs={num_epochs!r}; a whole number, at least 0.")
        return self._epochs.loop(num_epochs)

    def commit(self) -> None:
        """Count the batch that was handed out last as consumed. The step of any torch optimizer does it by itself."""
        self._progress.commit()

    def state_dict(self) -> dict[str, Any]:
        """How far training has come, in JSON types; equal on all ranks, and good for any number of them."""
        mark = self._progress.committed
        return {
            "version": 1,
            "epoch": mark.epoch,
            "position": mark.position,
            "first_epoch": self._epochs.base,
            "data": self._source.facts(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; every rank calls this with the same state.

        Raises:
            ConfigurationError: The state is of another data set, batch size, seed, or version: all differences are
                named, and nothing is changed.
        """
        mark, base = arguments.read_state(state, self._source.facts())
        if not self._source.begins_at(mark):
            raise ConfigurationError(f"DataLoader.load_state_dict: no step begins at position {mark.position}.")
        self._epochs.resume(mark, base)
        self._progress.jump(mark)

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        self._source.validate()
        mark = self._epochs.begin()
        self._num_iterations += 1
        # The seed of the workers' streams is drawn from here instead of from the process's own stream.
        key = mix(_WORKERS_TAG, self.seed, mark.epoch, self.world.rank) >> 1
        self._torch_loader.generator = torch.Generator().manual_seed(key)
        hired = self._torch_loader if self.num_workers else None
        batches = self._source.batches(mark, self._num_iterations, hired)
        if self.world.device.type != "cpu":
            are_pinned = self.pin_memory and self.num_workers > 0
            batches = on_device(batches, self.world.device, pin=self.pin_memory, are_pinned=are_pinned)
        return self._handed_out(batches, mark)

    def _handed_out(self, batches: Iterator[tuple[int, Loaded]], start: Mark) -> Iterator[Any]:
        progress, epoch = self._progress, start.epoch
        finished = False
        num_skipped = self.num_skipped
        told: list[str] = []
        progress.start(start)
        try:
            for position, loaded in batches:
                if loaded.skipped:
                    self.num_skipped += len(loaded.skipped)
                    told += loaded.skipped[: _MAX_TOLD - len(told)]
                progress.handed_out = Mark(epoch, position)
                yield loaded.batch
            finished = True
        finally:
            self._iterated = (start, progress.handed_out)
            self._epochs.end(epoch, finished=finished)
            if finished:
                progress.end(Mark(epoch + 1))
            batches.close()  # type: ignore[attr-defined]  # now, and with it the workers
            if self.num_skipped > num_skipped:
                self._tell(self.num_skipped - num_skipped, epoch, told)

    def _tell(self, num_skipped: int, epoch: int, told: list[str]) -> None:
        more = "" if num_skipped <= len(told) else f", and {num_skipped - len(told)} more"
        warnings.warn(
            f"DataLoader: rank {self.world.rank} left out {num_skipped} samples in epoch {epoch}: "
            f"{'; '.join(told)}{more}.",
            stacklevel=3,
        )

    # ------------------------------------------------------------------ evaluation

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' rows for the latest iteration, in the order of the data set; equal for any number of ranks.

        Collective: every rank calls this after its loop. In the loop, where the order inside a global batch is that of
        one process already, use `world.gather`.

        Args:
            rows: [n, ...]: one row for each sample that this rank has seen in the iteration, in that order.

        Returns:
            [samples seen by all ranks, ...], by number of the sample, on every rank.

        Raises:
            MismatchError: A rank has more or fewer rows than samples. Raised on all of them.
            UsageError: There was no iteration, or a stream divided by shards, which has no order.
        """
        if self._iterated is None:
            raise UsageError("loader.gather: nothing was iterated yet; call it after the loop.")
        return self._source.gather(rows, *self._iterated)
