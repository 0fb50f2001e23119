"""`IterableDataset`s divided over ranks and workers, without the data set's doing.

[Note: streams]
*By record.* Every worker of every rank runs through the whole stream and takes what is its own, so all of them know
every global batch and where the stream ends:

    record     0 1 2 3 | 4 5 6 7 | 8 9        global_batch_size 4, 2 ranks with 2 workers each
    rank 0     a a     | b b     | a          a, b: its workers, who take turns in steps
    rank 1         a a |     b b |   a

Global batches, steps and the short last batch are those of a data set with a length; a run resumes on any number of
ranks and workers, by running over what is done. It needs a stream that gives every process the same records.

*By shard.* Producing a record may be what costs. A data set that has `num_shards` and `shard(num_shards=, index=)`
(Hugging Face's do), and enough of them, is divided by these: each worker runs through its own part only. Parts end at
different times, and nobody knows when before they do: the ranks agree in every step whether anybody has something
left, and whoever has not takes part with an empty batch.

Data sets that divide themselves by `get_worker_info()` would divide twice; while they run, there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import default_collate

from evenstep.data.fetch import Loaded, as_if_alone, packed
from evenstep.data.nested import emptied
from evenstep.data.plan import divide
from evenstep.data.requests import Request
from evenstep.errors import UsageError
from evenstep.world import World


def is_sharded(dataset: Any, num_parts: int) -> bool:
    """Whether a stream offers enough shards to be divided by them."""
    num_shards = getattr(dataset, "num_shards", None)
    return isinstance(num_shards, int) and callable(getattr(dataset, "shard", None)) and num_shards >= num_parts > 1


class StreamFetcher:
    """Loads this rank's share of the next global batches of a stream; the `Fetcher` of `IterableDataset`s.

    A request's `samples` is the number of the iteration that it belongs to: another one starts the stream anew.

    Args:
        dataset: The stream.
        collate_fn: Makes a batch of a list of records; None: torch's.
        global_batch_size: Records of a step on all ranks together.
        drop_last: Leave out a last global batch that is short; not with `by_shard`.
        rank: This rank.
        world_size: Number of ranks.
        lanes: Of each rank; see `divide`.
        num_workers: Of this rank, as of every other.
        by_shard: See [Note: streams].
        packs: Have workers send small batches as bytes.
    """

    wants_tensors = False

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        *,
        global_batch_size: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        lanes: int = 1,
        num_workers: int,
        by_shard: bool,
        packs: bool = False,
    ) -> None:
        self.dataset = dataset
        self.collate = default_collate if collate_fn is None else collate_fn
        self._size, self._drop_last = global_batch_size, drop_last
        self._rank, self._world_size, self._num_workers = rank, world_size, max(1, num_workers)
        self._share = partial(divide, rank=rank, world_size=world_size, lanes=lanes)
        self._by_shard = by_shard
        self._packs = packs and num_workers > 0
        self._iteration: int | None = None
        self._records: Iterator[Any] = iter(())
        self._step = 0
        self._first: Any = None

    def __getitem__(self, request: Request) -> Loaded:
        """Load a batch; `num_samples` is 0 at the end of the stream, or of this worker's part of it."""
        with as_if_alone() as worker:
            if self._iteration != request.samples:
                self._begin(request, 0 if worker is None else worker.id)
            if self._by_shard:
                start, stop = self._share(0, self._size)
                mine = records = self._take(stop - start)
            else:
                deque(islice(self._records, (request.step - self._step) * self._size), maxlen=0)
                self._step = request.step + 1
                records = self._take(self._size)
                start, stop = self._share(0, len(records))
                mine = records[start:stop]
            if not records or (self._drop_last and len(records) < self._size):
                return Loaded(self._nothing() if self._by_shard else None, num_samples=0)
        loaded = Loaded(self.collate(mine) if mine else self._nothing(), num_samples=len(records))
        return packed(loaded) if self._packs else loaded

    def _begin(self, request: Request, worker: int) -> None:
        self._iteration, self._step = request.samples, 0
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(request.epoch)
        part = self.dataset
        if self._by_shard:
            num_parts = self._world_size * self._num_workers
            part = self.dataset.shard(num_shards=num_parts, index=self._rank * self._num_workers + worker)
        self._records = iter(part)

    def _take(self, number: int) -> list[Any]:
        records = list(islice(self._records, number))
        if records and self._first is None:
            self._first = records[0]
        return records

    def _nothing(self) -> Any:
        """The batch of no records. A part that is empty from the beginning looks at the whole stream's first record."""
        if self._first is None:
            with as_if_alone():
                self._first = next(iter(self.dataset), None)
            if self._first is None:
                return None
        return emptied(self.collate([self._first]), self.collate([self._first, self._first]))


def stream_requests(epoch: int, iteration: int, first_step: int) -> Iterator[Request]:
    """Without end; the stream's end shows in what is loaded. Pure."""
    return (Request(epoch, step, iteration) for step in count(first_step))


def until_the_end(batches: Iterator[Loaded], num_parts: int) -> Iterator[Loaded]:
    """What there is, until as many workers in a row as there are have come to the end of their parts."""
    num_ended = 0
    for loaded in batches:
        num_ended = 0 if loaded.num_samples else num_ended + 1
        if loaded.num_samples:
            yield loaded
        elif num_ended == num_parts:
            yield loaded  # what a batch of none looks like
            return


def until_all_end(batches: Iterator[Loaded], world: World) -> Iterator[Loaded]:
    """Batches as long as any rank has one; empty ones after this rank's own last.

    Collective: every rank iterates, in step.

    Raises:
        UsageError: The stream has no record from which an empty batch could be made. Raised on all ranks.
    """
    for loaded in batches:
        has_batch = bool(loaded.num_samples)
        while _any(world, has_batch):
            if loaded.batch is None and not has_batch:
                raise UsageError("DataLoader: this rank's part of the stream is empty, and so is the stream here.")
            yield loaded
            if has_batch:
                break
        else:
            return


def _any(world: World, own: bool) -> bool:
    if world.world_size == 1:
        return own
    flag = torch.tensor([int(own)], device="cpu")
    world.control.all_reduce(flag, "max").wait()
    return bool(flag)
