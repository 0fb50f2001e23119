"""`DataLoader`: the same global batches for any number of ranks, and every sample once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

import evenstep.world
from evenstep.data.epochs import EpochCounter
from evenstep.data.nested import emptied, move
from evenstep.data.order import EpochOrder
from evenstep.data.plan import BatchPlan
from evenstep.errors import ConfigurationError, MismatchError, UsageError
from evenstep.randomness import mix
from evenstep.world import World

_BLOCK = 16_384  # positions whose samples are computed at a time
_WORKERS_TAG = 0x776F726B6572  # "worker": other streams from the same seed stay unrelated


class DataLoader:
    """Loads this rank's share of every global batch, onto this rank's device.

    Over all ranks every sample comes once per epoch. The global batches, and the order inside them, are the same for
    any number of ranks; every rank makes `len(loader)` steps. A rank takes a contiguous slice of each global batch;
    sizes differ by at most one. A short last global batch is divided in the same way, so a rank may get no sample of
    it: its batch then has tensors of length 0, with the dtype and the other sizes of the usual ones. (For that the
    rank loads one sample once and twice, compares what `collate_fn` makes of it, and removes what grows.)

    `collate_fn`, `num_workers`, `timeout`, `worker_init_fn`, `multiprocessing_context`, `prefetch_factor` and
    `persistent_workers` are torch's. Random numbers drawn in workers differ between epochs and ranks, are the same
    in every run with the same seed, and take none from this process's streams.

    Epochs. `for epoch in loader.epochs(10): for x, y in loader:` says all there is to say. Without it, every new
    iteration is the next epoch, whether or not the one before was finished; `set_epoch` chooses the next. With
    `shuffle=False` the order is that of the data set in every epoch.

    Collective: with several ranks, every rank makes the loader, with the same arguments. For a loader on one rank
    alone pass `world=World.alone()`.

    Args:
        dataset: Has `__len__` and `__getitem__`, and the same length on every rank.
        global_batch_size: Samples of one step, on all ranks together; at least the number of ranks.
        shuffle: A new order each epoch, computed and not stored.
        pin_memory: None: where batches go to a GPU. Without effect where they don't.
        drop_last: Leave out a last global batch that is short.
        seed: Of the order and of the workers' random numbers; None: the world's, or 0.
        world: The ranks that share the data; None: the current world.
        batch_size: Refused: torch counts it per rank. The message says what to write.
        sampler: Refused, and so are `batch_sampler` and `generator`: the loader makes the order from `seed`.
        batch_sampler: Refused.
        generator: Refused.

    Raises:
        ConfigurationError: An argument is wrong. Raised on all ranks if it is wrong on one.
        MismatchError: Data set's length, batch size, seed, `shuffle` or `drop_last` differ between ranks. Raised on
            all of them.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int | None = None,
        shuffle: bool | None = False,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        seed: int | None = None,
        world: World | None = None,
        batch_size: int | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        generator: Any = None,
    ) -> None:
        self.world = evenstep.world.current() if world is None else world
        self.dataset = dataset
        self.shuffle = bool(shuffle)
        self.seed: int = (self.world.seed or 0) if seed is None else seed
        self.num_workers = num_workers
        self.pin_memory = self.world.device.type == "cuda" and pin_memory is not False
        self._epochs = EpochCounter()
        refused = {"batch_size": batch_size, "sampler": sampler, "batch_sampler": batch_sampler, "generator": generator}
        problem = _refusal(refused) or _problem(dataset, global_batch_size, self.seed, drop_last, self.world.world_size)
        if problem is None:
            self._plan = BatchPlan(len(dataset), global_batch_size or 0, bool(drop_last))
            self._shares = _Shares(self)
            try:
                self._batches: TorchDataLoader[Any] = TorchDataLoader(
                    dataset,
                    batch_sampler=self._shares,
                    num_workers=num_workers,
                    collate_fn=collate_fn,
                    pin_memory=self.pin_memory,
                    timeout=timeout,
                    worker_init_fn=worker_init_fn,
                    multiprocessing_context=multiprocessing_context,
                    prefetch_factor=prefetch_factor,
                    persistent_workers=persistent_workers,
                )
            except (TypeError, ValueError) as error:
                problem = str(error)
        _agree(self, problem)

    @property
    def global_batch_size(self) -> int:
        """Samples of one step, on all ranks together."""
        return self._plan.global_batch_size

    @property
    def drop_last(self) -> bool:
        """Whether a last global batch that is short is left out."""
        return self._plan.drop_last

    @property
    def epoch(self) -> int:
        """The epoch being iterated; between two iterations, the one that comes next."""
        return self._epochs.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. `epochs` does it for you."""
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ConfigurationError(f"DataLoader.set_epoch: epoch={epoch!r}; a whole number, at least 0.")
        self._epochs.set(epoch)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the next `num_epochs` epochs, each of which the loader has while the caller's loop runs.

        Begins with the first epoch that isn't finished: 0 in a new loader, also after a look at a first batch. Inside
        the loop every iteration is of the loop's epoch, however often one iterates.

        Raises:
            ConfigurationError: `num_epochs` is negative or no whole number.
        """
        if not isinstance(num_epochs, int) or isinstance(num_epochs, bool) or num_epochs < 0:
            raise ConfigurationError(f"DataLoader.epochs: num_epochs={num_epochs!r}; a whole number, at least 0.")
        return self._epochs.loop(num_epochs)

    def __len__(self) -> int:
        return self._plan.num_batches

    def __iter__(self) -> Iterator[Any]:
        if len(self.dataset) != self._plan.num_samples:
            raise UsageError(
                f"DataLoader: the data set had {self._plan.num_samples} samples when the loader was made and has "
                f"{len(self.dataset)} now. Make a new loader, on every rank."
            )
        epoch = self._epochs.begin()
        self._shares.epoch = epoch
        # The seed of the workers' streams is drawn from here instead of from the process's own stream.
        self._batches.generator = torch.Generator().manual_seed(
            mix(_WORKERS_TAG, self.seed, epoch, self.world.rank) >> 1
        )
        return self._iterate(iter(self._batches), epoch)

    def _iterate(self, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
        finished = False
        try:
            for step in range(len(self)):
                batch = next(batches)
                if self._shares.is_empty(step):
                    batch = emptied(batch, next(batches))
                if self.world.device.type != "cpu":
                    batch = move(batch, self.world.device, non_blocking=self.pin_memory)
                yield batch
            finished = True
        finally:
            self._epochs.end(epoch, finished=finished)
            if not self._batches.persistent_workers and hasattr(batches, "_shutdown_workers"):
                # Now, and not when the garbage collector finds time: a loop left by `break` leaves no process.
                batches._shutdown_workers()

    def __repr__(self) -> str:
        plan, rest = self._plan, self._plan.num_samples % self._plan.global_batch_size
        last = "" if rest == 0 else f", {rest} left out" if plan.drop_last else f", the last of {rest}"
        order = f"shuffled with seed {self.seed}" if self.shuffle else "in order"
        return (
            f"<DataLoader epoch {self.epoch}: {plan.num_samples} samples {order}, {len(self)} global batches of "
            f"{plan.global_batch_size}{last}; rank {self.world.rank} of {self.world.world_size} on "
            f"{self.world.device}, {self.num_workers} workers>"
        )


class _Shares:
    """The batch sampler that torch's loader gets: for each step, the samples of this rank.

    For a step in which the rank has none there are two entries, the global batch's first sample once and twice, from
    which `emptied` finds out what a batch of none looks like.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.epoch = 0
        self._plan = loader._plan
        self._seed, self._shuffle = loader.seed, loader.shuffle
        self._rank, self._world_size = loader.world.rank, loader.world.world_size

    def is_empty(self, step: int) -> bool:
        start, stop = self._share(step)
        return start == stop

    def __iter__(self) -> Iterator[list[int]]:
        # The epoch is bound here: a second iteration, begun before this one ends, has one of its own.
        return self._lists(EpochOrder(self._plan.num_samples, self._seed, self.epoch, self._shuffle))

    def _share(self, step: int) -> tuple[int, int]:
        return self._plan.share(step, rank=self._rank, world_size=self._world_size)

    def _lists(self, order: EpochOrder) -> Iterator[list[int]]:
        # Several steps at a time: the permutation costs as much for 10 positions as for 1,000.
        share = self._plan.global_batch_size // self._world_size + 1
        num_steps = max(1, _BLOCK // share)
        for first in range(0, self._plan.num_batches, num_steps):
            steps = range(first, min(first + num_steps, self._plan.num_batches))
            spans = [self._share(step) for step in steps]
            samples = order.at(torch.cat([torch.arange(*span) for span in spans])).tolist()
            begin = 0
            for step, (start, stop) in zip(steps, spans, strict=True):
                if start == stop:
                    template = order.slice(*self._plan.global_batch(step))[:1].tolist()
                    yield template
                    yield template * 2
                else:
                    yield samples[begin : begin + stop - start]
                    begin += stop - start


# ---------------------------------------------------------------------- arguments


def _refusal(arguments: dict[str, Any]) -> str | None:
    """What is wrong with torch's arguments that this loader doesn't take."""
    if (size := arguments["batch_size"]) is not None:
        return (
            f"batch_size={size!r}: torch counts it per rank, so the answer would depend on the number of ranks. Write "
            f"global_batch_size={size!r} for that many samples a step on all ranks together, or "
            f"global_batch_size={size!r} * world.world_size for torch's meaning."
        )
    for name in ("sampler", "batch_sampler"):
        if arguments[name] is not None:
            return (
                f"{name}={type(arguments[name]).__name__}: this loader decides itself which rank sees which sample. "
                f"Leave it out (shuffle=True shuffles), or use torch.utils.data.DataLoader, with "
                f"evenstep.DistributedSampler to divide the samples."
            )
    if arguments["generator"] is not None:
        return "generator: order and workers take their random numbers from seed=; pass a number there."
    return None


def _problem(dataset: Any, global_batch_size: Any, seed: Any, drop_last: bool, world_size: int) -> str | None:
    """What is wrong with the arguments, apart from torch's own; None if nothing is."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        return f"{kind} is an IterableDataset, whose samples can't be numbered; pass one with __len__ and __getitem__."
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return f"{kind} lacks __len__ or __getitem__: the ranks can't divide what can't be counted and numbered."
    try:
        num_samples = len(dataset)
    except (TypeError, NotImplementedError) as error:
        return f"len() of the data set ({kind}) fails: {error or type(error).__name__}. The ranks can't divide it."
    if num_samples == 0:
        return f"the data set ({kind}) is empty: it has no samples."
    if global_batch_size is None:
        return "global_batch_size is missing: the samples of one step, on all ranks together."
    if not isinstance(global_batch_size, int) or isinstance(global_batch_size, bool) or global_batch_size < 1:
        return f"global_batch_size={global_batch_size!r}: a whole number, at least 1."
    if global_batch_size < world_size:
        return (
            f"global_batch_size={global_batch_size} is smaller than the number of ranks, {world_size}: some would "
            f"never have a sample. Use at least {world_size}, or fewer ranks."
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 63:
        return f"seed={seed!r}: a whole number from 0 to 2**63 - 1, or None for the world's."
    if drop_last and num_samples < global_batch_size:
        return (
            f"drop_last=True leaves no batch at all: {num_samples} samples are fewer than "
            f"global_batch_size={global_batch_size}."
        )
    return None


def _agree(loader: DataLoader, problem: str | None) -> None:
    """Collective, if there are several ranks: raise on all of them if one has a problem or they differ."""
    own: dict[str, Any] = {"problem": problem, "facts": {} if problem is not None else _facts(loader)}
    seen = loader.world.exchange(own) if loader.world.world_size > 1 else [own]
    problems, facts = [entry["problem"] for entry in seen], [entry["facts"] for entry in seen]
    said = {rank: text for rank, text in enumerate(problems) if text is not None}
    if said:
        rank, text = next(iter(said.items()))
        where = "" if len(said) == len(problems) else f" on rank {rank}"
        raise ConfigurationError(f"DataLoader{where}: {text}")
    for name, value in facts[0].items():
        for rank, other in enumerate(facts):
            if other[name] != value:
                raise MismatchError(
                    f"DataLoader: {name} is {value} on rank 0 and {other[name]} on rank {rank}. Every rank makes its "
                    f"loaders in the same order, from the same data set and with the same arguments."
                )


def _facts(loader: DataLoader) -> dict[str, int]:
    return {
        "the length of the data set": loader._plan.num_samples,
        "global_batch_size": loader.global_batch_size,
        "seed": loader.seed,
        "shuffle": loader.shuffle,
        "drop_last": loader.drop_last,
    }
