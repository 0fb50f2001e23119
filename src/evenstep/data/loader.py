"""`DataLoader`: the same global batches for any number of ranks; every sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset, WeightedRandomSampler

import evenstep.world
from evenstep import checks
from evenstep.data.loading import workers
from evenstep.data.loading.device_prefetch import on_device
from evenstep.data.loading.fetch import Loaded
from evenstep.data.order.batch_plan import in_words, plan_batches
from evenstep.data.order.epochs import Epochs
from evenstep.data.position import EpochCounter, Mark, Progress
from evenstep.data.sources.same_data import digest_of_names
from evenstep.data.sources.samples import BatchesToTake, SampleSource
from evenstep.data.sources.source import Source
from evenstep.data.sources.streams import StreamSource
from evenstep.errors import ConfigurationError, EvenstepError, UsageError
from evenstep.ground.computing.randomness import LARGEST_SEED, mix
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.environment import settings
from evenstep.ground.health import excepthook
from evenstep.ground.health.steps import count_batch
from evenstep.ground.health.users_code import warn
from evenstep.world import World

_WORKERS_TAG = 0x776F726B6572  # "worker": other streams from the same seed stay unrelated
_LOADER_TAG = 0x6C6F61646572  # "loader"
_MOST_ORDERS = 10_000  # the most loaders of a run whose default seeds are recognised in states
_STATE_VERSION = 1
_ADVICE = "Make the same loaders on all ranks, in the same order, from the same data set and with the same arguments."


class DataLoader:
    """Loads this rank's share of every global batch, onto this rank's device.

    Over all ranks every sample comes once per epoch. The global batches, and the order inside them, are the same for
    any number of ranks and workers; every rank makes the same number of steps. A rank loads a contiguous slice of each
    global batch; the slices' sizes differ by at most one. A short last global batch is divided in the same way, so a
    rank may get no sample of it: its batch then has tensors of length 0, with the usual dtype and other sizes. (The
    rank makes this batch as follows: it collates one sample alone and twice, compares the two batches, and cuts the
    dimensions that differ.)

    `collate_fn`, `timeout`, `worker_init_fn`, `multiprocessing_context` and `prefetch_factor` are torch's. Random
    numbers drawn in workers are keyed by (seed, epoch, batch, rank), also after a resume and on any number of workers.
    They don't change this process's streams. A seed that `worker_init_fn` sets holds until the first batch.

    Epochs. `for epoch in loader.epochs(10): for x, y in loader:` sets every epoch. Without `epochs`, every new
    iteration is the next epoch, even if the last iteration wasn't finished; `set_epoch` chooses the next epoch. With
    `shuffle=False` every epoch has the data set's order.

    Resuming. `state_dict` holds the position of training: the end of the last batch that an optimizer's step has used,
    also if a library between loader and loop reads batches ahead. See docs/how-to/data.md.

    Orders. `sampler` and `batch_sampler` may be any sampler that doesn't divide by rank: every rank draws the whole
    order, and loads its slice of each global batch. A resume draws the indices again, loads no data, and raises if they
    differ from those of the interrupted run. A sampler's random numbers, from python, torch and numpy, are keyed by
    (seed, epoch), and the script's streams stay as they are. The loader calls `set_epoch` of the sampler and of the
    data set, and of a `.sampler`, `.batch_sampler` or `.dataset` inside, with the epoch of each iteration. If the
    script calls one of them, it chooses the loader's epoch. See docs/how-to/data.md.

    Streams (`IterableDataset`) are divided over ranks and workers by record, or by shard if the data set has shards:
    [Note: streams] in `data/sources/streams.py`. They keep their own order: `shuffle`, `max_tokens` and `sampler` are
    refused. Random numbers that they draw themselves are keyed by (seed, epoch). Every rank must iterate.

    Collective: with several ranks, every rank makes the loader, with the same arguments. For a loader on one rank
    alone pass `world=World.alone()`.

    Args:
        dataset: Has `__len__` and `__getitem__`, and the same length on every rank; or an `IterableDataset`.
        global_batch_size: Samples of one step, on all ranks together; at least the number of ranks.
        shuffle: A new order each epoch. It is computed, not stored.
        num_workers: Processes that load; "auto": a number that suits the rank's cores and device.
        pin_memory: Copy batches from pinned memory; None: if they go to a GPU. No effect on a CPU.
        drop_last: Leave out a short last global batch.
        persistent_workers: None: keep workers between epochs if they are expensive to start (not forked).
        max_tokens: Instead of `global_batch_size`: a limit on a global batch's number of samples times its longest
            sample.
        lengths: With `max_tokens`: tokens of each sample.
        sample_seed: Key python's, torch's and numpy's random numbers in `__getitem__` by (seed, epoch, sample), so that
            augmentation is the same for any number of ranks and workers. None: in reproducible mode.
        seed: The seed of the order and of random numbers; None: the world's, or 0. Loaders after the first that have a
            random order and no seed derive one from it and their number, so that no two have the same order.
            `load_state_dict` restores the order of the saved run.
        world: The ranks that share the data; None: the current world.
        sampler: Instead of `shuffle`: gives the indices of an epoch, for all ranks together. If it has `state_dict` and
            `load_state_dict`, its state is saved with each global batch, and a resume loads that state and draws
            nothing again. `DistributedSampler` is refused, because it gives one rank's part.
        batch_size: Refused, because torch counts it per rank. The message says what to write.
        batch_sampler: Instead of `global_batch_size`, `shuffle`, `sampler` and `drop_last`: gives the global batches.
        generator: Refused, and so are `pin_memory_device` and `in_order=False`.
        pin_memory_device: Must be empty.
        in_order: Must be True.
        resume_streams: How a resumed run finds its position in a stream. "replay": it reads the consumed records again
            and drops them; this is exact. "state": it loads the state from the stream's own `state_dict`. This is
            faster, and needs the same number of ranks and workers; records in shuffle buffers are lost. The loader's
            `state_dict` is collective then.
        queue: `ps.queue()` of `evenstep.parameter_server`: each worker takes whole global batches from the queue, at
            its own speed, as CPU tensors; with `num_workers` some are taken ahead. Excludes streams, `state_dict` and
            `gather`.

    Raises:
        ConfigurationError: An argument is wrong. Raised on all ranks if it is wrong on one.
        MismatchError: The data set's length, the batch size, the seed or another argument that the order depends on
            differs between ranks. Raised on all ranks. From the iteration: a stream or a sampler differs between
            processes.
        UsageError: From the iteration: a resumed sampler gives other samples than before.
    """

    @excepthook.for_users
    def __init__(
        self,
        dataset: Any,
        global_batch_size: int | None = None,
        shuffle: bool | None = None,
        *,
        num_workers: int | str = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        max_tokens: int | None = None,
        lengths: Any = None,
        sample_seed: bool | None = None,
        seed: int | None = None,
        world: World | None = None,
        sampler: Any = None,
        batch_size: int | None = None,
        batch_sampler: Any = None,
        generator: Any = None,
        pin_memory_device: str = "",
        in_order: bool = True,
        resume_streams: str = "replay",
        queue: BatchesToTake | None = None,
    ) -> None:
        # Workers of parameter servers share no world: each has its own loader, and the queue divides the batches.
        everybody = evenstep.world.chosen(world if queue is None else World.alone(device="cpu"), "DataLoader")
        self.world = everybody.data_parallel
        self._queue = queue
        self.pin_memory = self.world.device.type == "cuda" and pin_memory is not False
        self._progress = Progress()
        self._epochs = EpochCounter(self._progress)
        self._iterated: tuple[Mark, Mark] | None = None  # the latest iteration, for `gather`
        self._num_iterations = self._num_samples = 0
        self._has_warned_of_iterations = False

        def prepare() -> dict[str, Any]:
            try:
                _validate_refused(batch_size, generator, pin_memory_device, in_order)
                for name, value, otherwise in (
                    ("shuffle", shuffle, "None for the data set's order, or the sampler's"),
                    ("drop_last", drop_last, ""),
                    ("sample_seed", sample_seed, "None to follow reproducible mode"),
                    ("pin_memory", pin_memory, "None to pin where batches go to a GPU"),
                    ("persistent_workers", persistent_workers, "None to keep those that are expensive to start"),
                ):
                    checks.switches("", otherwise, **{name: value})
                _validate_workers(collate_fn, worker_init_fn, timeout, prefetch_factor)
                if dataset is None:
                    raise ConfigurationError("there is nothing to load: dataset is None.")
                self.dataset, self.sampler, self.batch_sampler = dataset, sampler, batch_sampler
                self.drop_last, self.shuffle = bool(drop_last), bool(shuffle)
                own_seed = self._seed_of_world() if seed is None else seed
                self.seed = checks.whole("seed", own_seed, least=0, most=LARGEST_SEED, otherwise="None for the world's")
                self.num_workers = workers.choose_workers(num_workers, self.world)
                _validate_queue(queue, self.dataset, world)
                _validate_order(sampler, batch_sampler, queue, self.shuffle, global_batch_size, max_tokens)
                self._source_settings: dict[str, Any] = {
                    "collate_fn": collate_fn,
                    "sample_seed": _choose_sample_seed(sample_seed, self.dataset, self.world),
                    "resume_streams": checks.choice("resume_streams", resume_streams, ("replay", "state")),
                    "lengths": lengths,
                    **_sizes(global_batch_size, max_tokens),
                }
                self._loader_settings: dict[str, Any] = {
                    "num_workers": self.num_workers,
                    "pin_memory": self.pin_memory,
                    "timeout": timeout,
                    "worker_init_fn": worker_init_fn,
                    "multiprocessing_context": multiprocessing_context,
                    "prefetch_factor": prefetch_factor,
                    "persistent_workers": persistent_workers,
                }
                self._make_source()
            except EvenstepError as error:
                raise ConfigurationError(str(error)) from error.__cause__
            # Compare the facts that a resume depends on, and those that would make the ranks' samples, or their number,
            # differ.
            names = digest_of_names(self.dataset) if isinstance(self._source, SampleSource) else ""
            own = {"sample_seed": bool(sample_seed), "the digest of its file names": names}
            return in_words(self._source.facts()) | own

        validate_on_all_ranks(everybody, "DataLoader", prepare, advice=_ADVICE)
        self._has_own_seed = seed is not None
        if seed is None and self._is_drawn:
            self.world.num_orders += 1  # not earlier: now all ranks have agreed that the loader exists
        self._source.connect()
        self._users_epochs = Epochs(self.dataset, sampler, batch_sampler, listener=self)

    def _make_source(self) -> None:
        """Make the source for the present seed, and torch's loader of it. Raises `ConfigurationError`."""
        self._source = self._choose_source(**self._source_settings)
        self._torch_loader = workers.torch_loader(self._source.fetcher, **self._loader_settings)

    @property
    def _is_drawn(self) -> bool:
        """Whether the order is random."""
        has_sampler = self.sampler is not None or self.batch_sampler is not None
        return self.shuffle or has_sampler or isinstance(self.dataset, IterableDataset)

    def _seed_of_world(self) -> int:
        """The world's seed; for the second and later loaders with a random order, a seed derived from it.

        With the same seed, two loaders over equally many samples would have the same order: `zip(photos, paintings)`
        would always give the same pairs, and a loader that is made anew for each epoch would repeat the first.
        """
        return self._seed_of_number(self.world.num_orders if self._is_drawn else 0)

    def _seed_of_number(self, number: int) -> int:
        seed = self.world.seed or 0
        return mix(_LOADER_TAG, seed, number) >> 1 if number else seed

    def _choose_source(
        self,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        sample_seed: bool,
        resume_streams: str,
        global_batch_size: int | None,
        max_tokens: int | None,
        lengths: Any,
    ) -> Source:
        """Make the source of numbered samples, or of a stream. Raises `ConfigurationError`."""
        order: dict[str, Any] = {"shuffle": self.shuffle, "sampler": self.sampler, "batch_sampler": self.batch_sampler}
        order |= {"max_tokens": max_tokens, "lengths": lengths}
        common: dict[str, Any] = {"num_workers": self.num_workers, "world": self.world}
        is_stream = isinstance(self.dataset, IterableDataset)
        if is_stream:
            _validate_stream(self.dataset, order | {"sample_seed": sample_seed})
        plan = plan_batches(  # for a stream: to check the size of a step
            self.world.world_size if is_stream else _number_of_samples(self.dataset),
            global_batch_size=global_batch_size,
            drop_last=self.drop_last and not is_stream,
            seed=self.seed,
            world_size=self.world.world_size,
            **order,
        )
        if is_stream:
            assert global_batch_size is not None
            return StreamSource(
                self.dataset,
                collate_fn,
                global_batch_size=global_batch_size,
                drop_last=self.drop_last,
                seed=self.seed,
                by_state=resume_streams == "state",
                **common,
            )
        if resume_streams == "state":
            raise ConfigurationError(
                "resume_streams='state' is for streams; numbered samples resume by their position."
            )
        return SampleSource(self.dataset, plan, collate_fn, sample_seed=sample_seed, queue=self._queue, **common)

    @property
    def global_batch_size(self) -> int | None:
        """Samples of one step, on all ranks together; None with `max_tokens` or the script's own batches."""
        return self._source.global_batch_size

    def __len__(self) -> int:
        """Steps of an epoch, on every rank; with `max_tokens` or a sampler, of the present epoch.

        Raises:
            TypeError: The stream or the sampler has no length.
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
        """The epoch being iterated; between two iterations, the next epoch."""
        return self._epochs.epoch

    @property
    def position(self) -> int:
        """Samples of the epoch that all ranks together have consumed, up to the last optimizer step."""
        return self._progress.committed.position

    @property
    def num_samples(self) -> int:
        """This rank's samples in the batch yielded last: the weight of a mean over samples. 0 before the first.

        Correct for any form of batch: dictionaries, lists, graphs, sequences whose first dimension is time.
        """
        return self._num_samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. `epochs` does it for you.

        The epoch in which a resumed run was interrupted continues at its position.
        """
        epoch = checks.whole("DataLoader.set_epoch: epoch", epoch, least=0)
        if self._epochs.waits is not None and self._epochs.waits.epoch != epoch:
            _warn_of_jump(self._epochs.waits, epoch)
        self._progress.jump(self._epochs.set(epoch))

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the next `num_epochs` epochs. The loader is in the yielded epoch while the caller's loop body runs.

        Begins with the first unfinished epoch: 0 in a new loader, even if a first batch was read to inspect it. Inside
        the loop every iteration is of the loop's epoch, also if there are several. In a resumed run, finished epochs
        are counted and left out, and the interrupted epoch continues at its position.

        Raises:
            ConfigurationError: `num_epochs` is negative or not a whole number.
        """
        return self._epochs.loop(checks.whole("DataLoader.epochs: num_epochs", num_epochs, least=0))

    def commit(self) -> None:
        """Count the yielded batches as consumed, without those that were only read ahead.

        The step of any torch optimizer does the same.
        """
        self._progress.commit()

    def state_dict(self) -> dict[str, Any]:
        """The position of training, in JSON types; equal on all ranks, and valid for any number of them.

        For streams divided by shard, and with resume_streams="state", it is valid only for the same number of ranks and
        workers. With resume_streams="state" this is collective: every rank calls it.
        """
        if self._queue is not None:
            raise UsageError("loader.state_dict: with queue= one worker's position isn't the position of the epoch.")
        mark = self._progress.committed
        state = {
            "version": _STATE_VERSION,
            "epoch": mark.epoch,
            "position": mark.position,
            "first_epoch": self._epochs.base,
            "has_looped": self._epochs.has_looped,
            "iterations_before": self._progress.num_before,
            "data": self._source.facts(),
        }
        if mark.drawn is not None:
            state["order"] = mark.drawn
        done = {epoch: steps for epoch, steps in self._source.done.items() if epoch >= mark.epoch}
        if done:
            first = self._source.step_at(mark)
            state["batches"] = {"first": first, "done": {str(epoch): sorted(each) for epoch, each in done.items()}}
        if mark.state is not None:
            state["streams"] = self.world.exchange(mark.state, what="the states of a stream (loader.state_dict)")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a `state_dict`; every rank calls this with the same state.

        A changed `global_batch_size` holds from the next batch on, with a warning.

        Raises:
            ConfigurationError: The state has another data set, seed or version. The message names all differences, and
                nothing is changed.
        """
        is_fixed = isinstance(self._source, StreamSource) or bool(isinstance(state, dict) and state.get("batches"))
        facts, before = self._source.facts(), (self.seed, self._source, self._torch_loader)
        taken = _seed_of_state(state)
        # The loader that made the state may have been made after more loaders, or fewer.
        is_known = not self._has_own_seed and taken in map(self._seed_of_number, range(_MOST_ORDERS))
        mark, base = _read_state(state, facts | {"seed": taken} if is_known else facts, may_resize=not is_fixed)
        if is_known and taken != self.seed:
            self.seed = taken
            self._make_source()
        # Workers of parameter servers take batches in any order. Their state has the position to continue at, and the
        # finished batches after it.
        batches = state.get("batches") or {"first": None, "done": {}}
        if batches["first"] is not None:
            mark = Mark(mark.epoch, self._source.position_of(mark.epoch, int(batches["first"])))
        if self._source.step_at(mark) is None:
            self.seed, self._source, self._torch_loader = before
            raise ConfigurationError(f"DataLoader.load_state_dict: no step begins at position {mark.position}.")
        if self._source is not before[1]:
            self._source.connect()
        if "streams" in state:
            mark = mark._replace(state=state["streams"][self.world.rank])
            if self.world.rank == 0:
                warn(
                    "DataLoader: the stream continues from its own state (resume_streams='state'). The records that "
                    "were in its shuffle buffers are lost; resume_streams='replay' is exact.",
                )
        self._source.done = {int(epoch): frozenset(steps) for epoch, steps in batches["done"].items()}
        num_before = state.get("iterations_before", 0)
        self._epochs.resume(mark, base, num_before=num_before, had_looped=bool(state.get("has_looped")))
        self._progress.jump(mark)
        self._progress.num_before = num_before
        before = state["data"].get("global_batch_size")
        if before != self.global_batch_size and self.world.rank == 0:
            warn(
                f"DataLoader: global_batch_size was {before} and is {self.global_batch_size}, from the next batch on "
                f"(epoch {mark.epoch}, position {mark.position}).",
            )

    # ------------------------------------------------------------------ iterating

    def __iter__(self) -> Iterator[Any]:
        self._source.validate()
        mark = self._epochs.begin()
        self._num_iterations += 1
        # The seed of the workers' streams is drawn from here instead of from the process's own stream.
        key = mix(_WORKERS_TAG, self.seed, mark.epoch, self.world.rank) >> 1
        self._torch_loader.generator = torch.Generator().manual_seed(key)
        torch_loader = self._torch_loader if self.num_workers else None
        batches = self._source.batches(mark, self._num_iterations, torch_loader)
        if self.world.device.type != "cpu":
            are_pinned = self.pin_memory and self.num_workers > 0
            batches = on_device(batches, self.world.device, pin=self.pin_memory, are_pinned=are_pinned)
        return self._yielded(batches, mark, self._num_iterations)

    def _yielded(self, batches: Iterator[tuple[Mark, Loaded]], start: Mark, iteration: int) -> Iterator[Any]:
        progress, epoch, finished = self._progress, start.epoch, False
        if iteration == self._num_iterations:
            self._iterated = (start, start)
            progress.start(self._epochs.num_begun - 1)
        try:
            for end, loaded in batches:
                if iteration == self._num_iterations:
                    self._iterated = (start, end)
                    progress.add(end, loaded.batch)
                if progress.trains:
                    count_batch()
                self._num_samples = loaded.num_own
                yield loaded.batch
                if iteration != self._num_iterations:
                    self._refuse_or_warn_of_older()
            finished = True
        finally:
            self._epochs.end(epoch, finished=finished)
            if finished and iteration == self._num_iterations:
                progress.end(self._source.after(epoch))
            batches.close()  # type: ignore[attr-defined]  # now, and the workers with it

    def _refuse_or_warn_of_older(self) -> None:
        """Warn of, or refuse, an iteration that continues after a newer one has begun.

        Raises:
            UsageError: Both iterations have the same worker processes, which serve the newer iteration.
        """
        told = f"DataLoader on rank {self.world.rank}: an iteration of this loader continues after a newer one began"
        if self.num_workers and self._torch_loader.persistent_workers:
            raise UsageError(
                f"{told}, and persistent workers serve one at a time. Make two loaders, or pass "
                f"persistent_workers=False."
            )
        if self._progress.trains and not self._has_warned_of_iterations:
            self._has_warned_of_iterations = True
            warn(
                f"{told}. The loader's position counts the newer one only, so the run can't be resumed exactly. Make "
                f"two loaders.",
            )

    # ------------------------------------------------------------------ evaluation

    def gather(self, rows: Tensor) -> Tensor:
        """All ranks' rows for the iteration that began last, in the order of the data set. Equal on all ranks.

        Collective: every rank calls this after its loop. Inside the loop use `world.gather`: one global batch gathered
        in order of rank is already in the order of one process.

        Args:
            rows: [n, ...]: one row for each sample that this rank has seen in the iteration, in that order.

        Returns:
            [samples seen by all ranks, ...], by number of the sample, on every rank.

        Raises:
            MismatchError: A rank has more or fewer rows than samples. Raised on all ranks.
            UsageError: There was no iteration, or the stream is divided by shards and so has no order.
        """
        if self._queue is not None:
            raise UsageError(
                "loader.gather: with queue= each worker has an arbitrary part of the samples; evaluate without queue=."
            )
        if self._iterated is None:
            raise UsageError("loader.gather: the loader wasn't iterated yet; call gather after the loop.")
        return self._source.gather(rows, *self._iterated)


def _validate_refused(batch_size: Any, generator: Any, pin_memory_device: Any, in_order: Any) -> None:
    """Raise for arguments of torch's loader that aren't supported here."""
    if batch_size is not None:
        raise ConfigurationError(
            f"batch_size={batch_size!r}: torch counts it per rank, so the result would depend on the number of ranks. "
            f"Write global_batch_size={batch_size!r} for that many samples a step on all ranks together, or "
            f"global_batch_size={batch_size!r} * world.world_size for torch's meaning."
        )
    if generator is not None:
        raise ConfigurationError("generator: order and workers take their random numbers from seed=; pass a number.")
    if pin_memory_device:
        raise ConfigurationError(
            f"pin_memory_device={checks.shown(pin_memory_device)}: batches go to world.device, and memory is pinned "
            f"for that device."
        )
    if in_order is not True:
        raise ConfigurationError(
            f"in_order={in_order!r}: batches must keep their order here, because the result depends on it."
        )


def _validate_queue(queue: Any, dataset: Any, world: World | None) -> None:
    """Raise for arguments that exclude a queue.

    Raises:
        ConfigurationError: `queue` isn't a queue, or another argument needs batches that are known in advance.
    """
    if queue is None:
        return
    if not hasattr(queue, "take"):
        raise checks.refuse("queue", queue, "ps.queue() of evenstep.parameter_server")
    if isinstance(dataset, IterableDataset):
        raise ConfigurationError("queue: a stream's batches have no numbers, which the queue needs to divide them.")
    if world is not None:
        raise ConfigurationError("world and queue exclude each other: each says how batches are divided.")


def _validate_workers(collate_fn: Any, worker_init_fn: Any, timeout: Any, prefetch_factor: Any) -> None:
    """Raise for wrong values that torch's loader would accept.

    Raises:
        ConfigurationError: An argument is wrong.
    """
    for name, value in (("collate_fn", collate_fn), ("worker_init_fn", worker_init_fn)):
        if value is not None:
            checks.function(name, value, otherwise="None")
    checks.number("timeout", timeout, least=0)
    if prefetch_factor is not None:
        checks.whole("prefetch_factor", prefetch_factor, least=1, otherwise="None")


def _validate_order(
    sampler: Any, batch_sampler: Any, queue: Any, shuffle: Any, global_batch_size: Any, max_tokens: Any
) -> None:
    """Raise for a wrong sampler, and for arguments that exclude each other."""
    if queue is not None and max_tokens is not None:
        raise ConfigurationError("max_tokens with queue=: the batches of a queue have a fixed size, global_batch_size.")
    for name, given in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        if given is None:
            continue
        if not hasattr(given, "__iter__"):
            raise checks.refuse(name, given, "an object that yields indices when iterated")
        for each in (given, getattr(given, "sampler", None)):
            if isinstance(each, DistributedSampler):
                raise ConfigurationError(
                    f"{name}={type(each).__name__}: it gives one rank's part of the order. The loader divides every "
                    f"global batch itself, repeats no sample and leaves none out. Pass shuffle=True instead."
                )
        others = {"shuffle": shuffle, "max_tokens": max_tokens}
        if name == "batch_sampler":
            others |= {"global_batch_size": global_batch_size, "sampler": sampler}
        for other, value in others.items():
            if value is not None and value is not False:
                raise ConfigurationError(
                    f"{name} and {other} exclude each other: both decide which samples make a step."
                )
        by_weight = type(given) is WeightedRandomSampler and given.replacement
        if queue is not None and not by_weight:
            raise ConfigurationError(
                f"{name} with queue=: workers take different batches, so they can't compare a sampler's order."
            )


def _sizes(global_batch_size: Any, max_tokens: Any) -> dict[str, int | None]:
    """`global_batch_size` and `max_tokens` from the script, or instead from `evenstep bench`; one may be None."""
    if global_batch_size is not None:
        global_batch_size = checks.whole("global_batch_size", global_batch_size, least=1)
    if max_tokens is not None:
        max_tokens = checks.whole("max_tokens", max_tokens, least=1, most=LARGEST_SEED)
    measured = settings().measurement
    if measured is not None:
        if global_batch_size is not None:
            global_batch_size = measured.global_batch_size or global_batch_size
        if max_tokens is not None:
            max_tokens *= measured.growth
    return {"global_batch_size": global_batch_size, "max_tokens": max_tokens}


def _choose_sample_seed(given: bool | None, dataset: Any, world: World) -> bool:
    """Whether random numbers in `__getitem__` are keyed by sample."""
    if given is False and world.virtual_ranks is not None:
        raise ConfigurationError("sample_seed=False in reproducible mode, which has to key random numbers by sample.")
    if given is None:
        return world.virtual_ranks is not None and not isinstance(dataset, IterableDataset)
    return bool(given)


def _validate_stream(dataset: Any, others: dict[str, Any]) -> None:
    """Raise for arguments that a stream excludes."""
    kind = type(dataset).__name__
    for name, value in others.items():
        if value is not None and value is not False:
            raise ConfigurationError(
                f"{name} doesn't go with {kind}, an IterableDataset: the loader can't reorder its records. Shuffle in "
                f"the data set (its set_epoch is called), or pass a data set with __len__ and __getitem__."
            )


def _number_of_samples(dataset: Any) -> int:
    """The number of samples of a data set that numbers them, at least 1.

    Raises:
        ConfigurationError: The data set doesn't number its samples, or is empty.
    """
    kind = type(dataset).__name__
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"{kind} lacks __len__ or __getitem__, without which the ranks can't divide it. A stream has to derive "
            f"from torch.utils.data.IterableDataset."
        )
    try:
        num_samples = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"len() of the data set ({kind}) fails: {error or type(error).__name__}. The ranks can't divide it."
        ) from error
    if num_samples == 0:
        raise ConfigurationError(f"the data set ({kind}) is empty: it has no samples.")
    if isinstance(dataset, Mapping) and not (0 in dataset and num_samples - 1 in dataset):
        raise ConfigurationError(
            f"the data set ({kind}) has keys such as {checks.shown(next(iter(dataset)))}: a data set with __getitem__ "
            f"numbers its samples, dataset[0] to dataset[{num_samples - 1}]. Pass one of its values if these are data "
            f"sets, or list(dataset.values()) if each is a sample."
        )
    return num_samples


def _seed_of_state(state: Any) -> Any:
    data = state.get("data") if isinstance(state, dict) else None
    return data.get("seed") if isinstance(data, dict) else None


def _read_state(state: Any, facts: dict[str, Any], *, may_resize: bool) -> tuple[Mark, int]:
    """Check a loader's state; returns its position, and the epoch with which the run began.

    Args:
        state: The given state.
        facts: The facts of this loader's source.
        may_resize: Global batches may have another size.

    Raises:
        ConfigurationError: The state isn't one of this loader; the message names all differences.
    """
    where = "DataLoader.load_state_dict"
    if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
        found = state.get("version") if isinstance(state, dict) else type(state).__name__
        raise ConfigurationError(
            f"{where}: version {_STATE_VERSION} of a loader's state is supported, this is {found!r}."
        )
    names = ("epoch", "position", "first_epoch", "iterations_before")
    # States of earlier versions have no `iterations_before`.
    numbers = [state.get(name, 0 if name == names[-1] else None) for name in names]
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise ConfigurationError(f"{where}: {', '.join(names)} are {numbers}; whole numbers, at least 0.")
    saved = state.get("data") or {}
    if not isinstance(saved, dict):
        raise ConfigurationError(f"{where}: data={checks.shown(saved)}; what state_dict() has written.")
    before, now = in_words(saved), in_words(facts)
    differences = [
        f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
        for name in dict.fromkeys((*before, *now))
        if before.get(name) != now.get(name)
        and not (may_resize and name == "global_batch_size" and None not in (before.get(name), now.get(name)))
    ]
    if differences:
        raise ConfigurationError(
            f"{where}: the state belongs to other data: {'; '.join(differences)}. A resume is exact or refused; start "
            f"afresh, or make the loader as it was."
        )
    epoch, position, base = (int(number or 0) for number in numbers[:3])
    return Mark(epoch, position, drawn=state.get("order")), base


def _warn_of_jump(mark: Mark, epoch: int) -> None:
    """Warn that a resumed run doesn't continue at its position."""
    warn(
        f"DataLoader.set_epoch({epoch}): a state at epoch {mark.epoch}, position {mark.position}, was loaded and is "
        f"dropped. Begin with epoch {mark.epoch}, or use `for epoch in loader.epochs(n)`, which does.",
    )
