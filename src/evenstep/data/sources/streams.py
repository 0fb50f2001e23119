"""`StreamSource`: an `IterableDataset` divided over ranks and workers.

[Note: streams]
*By record.* Every worker of every rank reads the whole stream and loads its own records, so all of them know every
global batch and the end of the stream:

    record     0 1 2 3 | 4 5 6 7 | 8 9        global_batch_size 4, 2 ranks with 2 workers each
    rank 0     a a     | b b     | a          a, b: its workers, which take turns in steps
    rank 1         a a |     b b |   a

Global batches, steps and the short last batch are those of a data set with a length; a run resumes on any number of
ranks and workers, by reading the consumed records again. Every process must get the same records from the stream: its
random numbers are keyed by (seed, epoch), and `same_stream` compares the records between processes.

*By shard.* For records that are expensive to produce: a data set that has `num_shards` and `shard(num_shards=, index=)`
(as Hugging Face's), or is webdataset's, is divided by shards if it has enough of them. Then each worker reads its own
part only. Parts end at different times, unknown in advance: in every step the ranks agree whether any rank has a batch
left, and the others take part with an empty batch. Up to a part's first record, random numbers are keyed by (seed,
epoch), so that all parts divide the same order of shards. From there on they are keyed by the part as well, so that
parts don't shuffle or augment in the same way. The order depends on the number of ranks and of workers, so a resume
needs the same numbers.

Data sets that divide themselves by `get_worker_info()` would divide twice, so it returns None while they run.

[Note: a stream's own state]
With resume_streams="state" a resumed run doesn't read the consumed records again: it loads the stream's own state. The
process that iterates a part calls `state_dict()` with each batch. The rank stores the number of the next request and
the latest state of each of its workers, as `Mark.state` of the batch. For a stream divided by record, all workers begin
with the state of the last batch, so that they continue at the same record.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loading.digests import digest_of
from evenstep.data.loading.fetch import Fetcher, Loaded
from evenstep.data.loading.nested import emptied
from evenstep.data.order.batch_plan import ComputedEpoch, Request
from evenstep.data.order.epochs import Epochs
from evenstep.data.order.permutation import EpochOrder
from evenstep.data.position import Mark
from evenstep.data.sources.same_stream import same_everywhere
from evenstep.data.sources.source import Source
from evenstep.data.sources.webdataset import count_shards, is_pipeline, part_of
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.torch_data import without_worker_info
from evenstep.ground.computing.randomness import OwnStreams, mix, seed_streams
from evenstep.transport.core.transport import Transport
from evenstep.world import World

_STREAM_TAG = 0x73747265616D  # "stream": makes the keys differ from those of other streams
_UNDIVIDED = {"num_parts": 1, "num_workers": 1}  # facts of a stream that isn't divided by shards


def num_shards_of(dataset: Any) -> int | None:
    """The number of shards by which a stream can be divided; None if it has no shards."""
    if is_pipeline(dataset):
        return count_shards(dataset)
    num_shards = getattr(dataset, "num_shards", None)
    return num_shards if isinstance(num_shards, int) and callable(getattr(dataset, "shard", None)) else None


class Start(NamedTuple):
    """The beginning of a part of a stream.

    Attributes:
        iteration: The iteration to which the part belongs.
        state: The stream's own state from which to continue; None: begin at the stream's beginning.
        step: The step at which `state` was saved.
    """

    iteration: int
    state: Any = None
    step: int = 0


class StreamSource(Source):
    """The batches of an `IterableDataset`, divided over ranks and workers: see [Note: streams].

    Args:
        dataset: The stream.
        collate_fn: Makes a batch of a list of records; None: torch's function.
        global_batch_size: Records of a step on all ranks together.
        drop_last: Leave out a last global batch that is short.
        seed: The seed of the stream's random numbers.
        num_workers: Workers of each rank.
        world: The ranks.
        by_state: A resume loads the stream's own state: see [Note: a stream's own state].

    Raises:
        ConfigurationError: The stream doesn't support an argument.
    """

    fetcher: StreamFetcher
    global_batch_size: int

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        global_batch_size: int,
        drop_last: bool,
        seed: int,
        num_workers: int,
        world: World,
        by_state: bool,
    ) -> None:
        self._num_shards = num_shards_of(dataset)
        fetcher = StreamFetcher(
            dataset,
            collate_fn,
            seed=seed,
            num_workers=num_workers,
            world=world,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
            num_shards=self._num_shards or 0,
            by_state=by_state,
        )
        super().__init__(dataset, world, global_batch_size, fetcher)
        self._num_workers, self._num_parts, self.by_shard = fetcher.num_workers, fetcher.num_parts, fetcher.by_shard
        kind = type(dataset).__name__
        if by_state and not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
            raise ConfigurationError(
                f"resume_streams='state': {kind} has no state_dict and load_state_dict. Leave resume_streams out: "
                f"'replay' resumes any stream, and exactly."
            )
        if is_pipeline(dataset):
            part_of(dataset, seed, 0, 1, 0)  # refuses pipelines that the loader can't divide
        if self.by_shard and world.virtual_ranks is not None:
            raise ConfigurationError(
                f"{kind} is a stream that is divided by shards, whose order depends on the number of ranks and "
                f"workers; reproducible mode can't have that. Hide its num_shards, so that it is divided by record, or "
                f"number its records (Arrow files)."
            )
        if self.by_shard and drop_last:
            raise ConfigurationError(
                f"drop_last=True: {kind} is a stream that is divided by shards, whose parts end at different times: "
                f"there is no last global batch that could be left out, but steps at the end in which some ranks have "
                f"fewer samples or none. Leave drop_last out and weight steps by their samples (model.backward(loss, "
                f"weight=len(x))), or hide its num_shards, so that it is divided by record."
            )

    def facts(self) -> dict[str, Any]:
        """See `Source.facts`."""
        facts: dict[str, Any] = {
            "global_batch_size": self.global_batch_size,
            "seed": self.fetcher.seed,
            "drop_last": self.fetcher.drop_last,
        }
        by_state = self.fetcher.by_state
        if by_state:
            facts["resume_streams"] = "state"
        if by_state or self._num_shards is not None:  # the order may depend on the number of parts
            matters = by_state or self.by_shard
            facts |= {"num_parts": self._num_parts, "num_workers": self._num_workers} if matters else _UNDIVIDED
        return facts

    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch.

        Raises:
            TypeError: The stream has no length.
        """
        if self.by_shard:
            raise TypeError("a stream that is divided by shards has no length before it ends")
        full, rest = divmod(len(self.dataset), self.global_batch_size)
        return full + (rest > 0 and not self.fetcher.drop_last)

    def describe(self, epoch: int) -> str:
        """See `Source.describe`."""
        return f"a stream in global batches of {self.global_batch_size}"

    def batches(
        self, start: Mark, iteration: int, torch_loader: TorchDataLoader[Any] | None
    ) -> Iterator[tuple[Mark, Loaded]]:
        """See `Source.batches`. A position counts records, or steps if the stream is divided by shards."""
        first, states = 0 if self.by_shard else -(-start.position // self.global_batch_size), []
        if start.state is not None:
            first, states = start.state
        wanted = stream_requests(start.epoch, iteration, first, states)
        with self.loading(wanted, torch_loader, lambda _, step, __: f"its part of step {step} of a stream") as batches:
            for position, loaded in self._measured(self._with_states(batches, first, states), start):
                yield Mark(start.epoch, position, loaded.state), loaded

    def _with_states(self, batches: Iterator[Loaded], first: int, states: list[Any]) -> Iterator[Loaded]:
        """Add to each batch the state for a resume after it: see [Note: a stream's own state]."""
        if not self.fetcher.by_state:
            yield from batches
            return
        latest = states or [None] * self._num_workers
        for number, loaded in enumerate(batches, first):
            latest = [
                loaded.state if not self.by_shard or place == number % self._num_workers else state
                for place, state in enumerate(latest)
            ]
            yield loaded._replace(state=[number + 1, latest])

    def _measured(self, batches: Iterator[Loaded], start: Mark) -> Iterator[tuple[int, Loaded]]:
        if self.by_shard:
            # How many records each part gave to a step is known only after reading: so read and drop the finished
            # steps.
            own = until_all_end(until_the_end(batches, self._num_workers), self.transport)
            first_step = 1 if start.state is None else start.position + 1
            yield from ((step, loaded) for step, loaded in enumerate(own, first_step) if step > start.position)
            return
        if self.fetcher.is_compared:
            first_step = -(-start.position // self.global_batch_size)
            batches = same_everywhere(batches, self.transport, start.epoch, first_step, self._num_workers)
        position = start.position
        for loaded in batches:
            if not loaded.num_samples:
                return
            position += loaded.num_samples
            yield position, loaded

    def gather(self, rows: Tensor, start: Mark, end: Mark) -> Tensor:
        """All ranks' rows in the order of the stream. Collective."""
        if self.by_shard:
            raise UsageError("loader.gather: a stream divided by shards has no order to restore.")
        epoch = ComputedEpoch(EpochOrder(end.position, shuffle=False), self.global_batch_size)
        return self._gathered(rows, epoch, start.position, end.position)


class StreamFetcher(Fetcher):
    """The `Fetcher` of `IterableDataset`s: loads this rank's shares of a stream's global batches, one after the other.

    A request's `samples` is a `Start`. The `Start` of another iteration restarts the stream.

    Args:
        global_batch_size: See `StreamSource`.
        drop_last: See `StreamSource`; not with `by_shard`.
        num_shards: The number of shards by which the stream can be divided.
        by_state: Return the stream's state with each batch.
        arguments: Arguments of `Fetcher`.

    Attributes:
        by_shard: Whether the stream is divided by shard: see [Note: streams].
        is_compared: Whether digests of records are compared, because several processes read the same records.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        seed: int,
        num_workers: int,
        world: World,
        global_batch_size: int,
        drop_last: bool,
        num_shards: int,
        by_state: bool,
    ) -> None:
        super().__init__(dataset, collate_fn, seed=seed, num_workers=num_workers, world=world)
        self.drop_last, self.by_state = drop_last, by_state
        self.num_workers = max(1, num_workers)
        self.num_parts = world.world_size * self.num_workers
        self.by_shard = num_shards >= self.num_parts > 1
        self.is_compared = not self.by_shard and self.num_parts > 1
        self._size = global_batch_size
        self._iteration: int | None = None
        self._epoch = 0
        self._stream: Any = None
        self._records: Iterator[Any] = iter(())
        self._step = 0
        self._first: Any = None
        self._streams = OwnStreams(0)

    def load(self, request: Request) -> Loaded:
        """Load a batch; `num_samples` is 0 at the end of the stream, or of this worker's part of it."""
        with without_worker_info():
            if self._iteration != request.samples.iteration:
                self._begin(request)
            digests: list[int] = []
            with self._streams.in_use():
                if self.by_shard:
                    start, stop = self.share(0, self._size)
                    mine = records = self._take(stop - start)
                else:
                    records = self._run_on(request.step, digests)
                    start, stop = self.share(0, len(records))
                    mine = records[start:stop]
            state = self._stream.state_dict() if self.by_state else None
            if not records or (self.drop_last and len(records) < self._size):
                batch = self._nothing() if self.by_shard else None
                return Loaded(batch, num_samples=0, digests=tuple(digests), state=state)
        batch = self._collated(mine) if mine else self._nothing()
        return Loaded(batch, len(records), len(mine), digests=tuple(digests), state=state)

    def _begin(self, request: Request) -> None:
        """Begin the whole stream, or a part of it. Workers take turns, so the request's number determines the part."""
        self._epoch, start = request.epoch, request.samples
        self._iteration, self._step = start.iteration, start.step
        key = mix(_STREAM_TAG, self.seed, self._epoch)
        # After a loaded state, the random numbers from the epoch's beginning aren't drawn again.
        self._streams = OwnStreams(mix(key, start.step) if start.step else key)
        index = self._rank * self.num_workers + request.step % self.num_workers
        with self._streams.in_use():
            self._stream = self._part(self.num_parts, index) if self.by_shard else self._part()
            if start.state is not None:
                if not self.by_shard:
                    self._stream = copy.deepcopy(self._stream)  # the script's own copy must keep its beginning
                self._stream.load_state_dict(start.state)
            self._records = iter(self._stream)
            if self.by_shard:
                self._records = _drawing_otherwise(self._records, mix(key, start.step, index))

    def _part(self, num_parts: int = 1, index: int = 0) -> Any:
        """The stream or a part of it, with its epoch set."""
        if is_pipeline(self.dataset):
            return part_of(self.dataset, self.seed, self._epoch, num_parts, index)
        Epochs(self.dataset).tell(self._epoch, again=True)
        if num_parts == 1:
            return self.dataset
        part = self.dataset.shard(num_shards=num_parts, index=index)
        Epochs(part).tell(self._epoch, again=True)
        return part

    def _run_on(self, step: int, digests: list[int]) -> list[Any]:
        """Records of a step. The step's digest is appended to `digests`, after those of other workers' steps."""
        others = min(step - self._step, self.num_workers - 1) if self.is_compared else 0
        deque(islice(self._records, (step - self._step - others) * self._size), maxlen=0)
        self._step = step + 1
        digests += [digest_of(self._take(self._size)) for _ in range(others)]
        records = self._take(self._size)
        if self.is_compared:
            digests.append(digest_of(records))
        return records

    def _take(self, number: int) -> list[Any]:
        records = list(islice(self._records, number))
        if records and self._first is None:
            self._first = records[0]
        return records

    def _nothing(self) -> Any:
        """A batch without records.

        To build it, a part that is empty from the beginning reads the first record of the whole stream.
        """
        if self._first is None:
            with without_worker_info(), self._streams.in_use():
                self._first = next(iter(self._part()), None)
            if self._first is None:
                return None
        return emptied(self.collate([self._first]), self.collate([self._first, self._first]))


def _drawing_otherwise(records: Iterator[Any], key: int) -> Iterator[Any]:
    """Yield the same records, and seed the random streams anew after the first."""
    yield from islice(records, 1)
    seed_streams(key)
    yield from records


def stream_requests(epoch: int, iteration: int, first_step: int, states: Sequence[Any] = ()) -> Iterator[Request]:
    """Endless requests; the loaded batches show the stream's end. Pure.

    Args:
        epoch: The epoch of all requests.
        iteration: The iteration to which they belong.
        first_step: The number of the first step.
        states: The state with which each worker's part continues; empty: at its beginning.
    """
    for step in count(first_step):
        is_first = step - first_step < len(states)
        yield Request(
            epoch, step, Start(iteration, states[step % len(states)], first_step) if is_first else Start(iteration)
        )


def until_the_end(batches: Iterator[Loaded], num_parts: int) -> Iterator[Loaded]:
    """Yield batches until one empty batch per part has come in a row: then all parts have ended."""
    num_ended = 0
    for loaded in batches:
        num_ended = 0 if loaded.num_samples else num_ended + 1
        if loaded.num_samples:
            yield loaded
        elif num_ended == num_parts:
            yield loaded  # a batch without samples, for `until_all_end`
            return


def until_all_end(batches: Iterator[Loaded], transport: Transport) -> Iterator[Loaded]:
    """Yield batches as long as any rank has one; after this rank's last batch, empty batches.

    Collective: every rank iterates, in step.

    Raises:
        UsageError: The stream has no record, and an empty batch is made from a record. Raised on all ranks.
    """
    for loaded in batches:
        has_batch = bool(loaded.num_samples)
        while _any(transport, has_batch):
            if loaded.batch is None and not has_batch:
                raise UsageError(
                    "DataLoader: this rank's part of the stream is empty, and so is the whole stream here."
                )
            yield loaded
            if has_batch:
                break
        else:
            return


def _any(transport: Transport, own: bool) -> bool:
    flag = torch.tensor([int(own)], device="cpu")
    transport.all_reduce(flag, "max").wait()
    return bool(flag)
