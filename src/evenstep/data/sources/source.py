"""`Source`: the data of a loader, and rows of all ranks gathered in the order of the data."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loading import workers
from evenstep.data.loading.fetch import Fetcher, Loaded
from evenstep.data.order.batch_plan import Epoch, Request
from evenstep.data.position import Mark
from evenstep.errors import MismatchError
from evenstep.replica.channels import channel_of
from evenstep.transport.core.object_collectives import check_rows
from evenstep.transport.core.transport import Transport
from evenstep.transport.local import LocalTransport
from evenstep.world import World


class Source(ABC):
    """The data of a loader.

    Args:
        dataset: The script's data set.
        world: The ranks that share the data set.
        global_batch_size: Samples of one step, on all ranks together; None if steps have another measure.
        fetcher: Loads one batch.

    Attributes:
        done: Steps that a resumed run leaves out, by epoch: workers of parameter servers have finished them.
        transport: Carries only the ranks' messages about these data. A thread other than the loop's may read the
            loader, and the world's own transports carry the loop's calls.
    """

    def __init__(self, dataset: Any, world: World, global_batch_size: int | None, fetcher: Fetcher) -> None:
        self.dataset, self.world, self.global_batch_size, self.fetcher = dataset, world, global_batch_size, fetcher
        self.done: dict[int, frozenset[int]] = {}
        self.transport: Transport = LocalTransport()

    def connect(self) -> None:
        """Collective: open `transport`."""
        if self.world.transport.world_size > 1:
            self.transport = channel_of(self, self.world, "data", torch.device("cpu"))

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Values that must be equal on all ranks, and in a resumed run. Checkpoints hold them: keys never change."""

    @abstractmethod
    def num_steps(self, epoch: int) -> int:
        """Steps of an epoch; `TypeError` if it is unknown."""

    @abstractmethod
    def describe(self, epoch: int) -> str:
        """The data and its global batches, for messages."""

    @abstractmethod
    def batches(
        self, start: Mark, iteration: int, torch_loader: TorchDataLoader[Any] | None
    ) -> Iterator[tuple[Mark, Loaded]]:
        """This rank's batches, each with the position at its end; loaded here, or by the workers of `torch_loader`."""

    @abstractmethod
    def gather(self, rows: Tensor, start: Mark, end: Mark) -> Tensor:
        """All ranks' rows in the order of the data set. Collective."""

    def _gathered(self, rows: Tensor, epoch: Epoch, start: int, stop: int) -> Tensor:
        """All ranks' rows of the steps from one position to another, by number of the sample. Collective."""
        first, last = epoch.step_at(start) or 0, epoch.step_at(stop)
        steps = range(first, epoch.num_batches if last is None else last)
        spans = [self.fetcher.share(*epoch.global_batch(step)) for step in steps]
        positions = [torch.arange(*span, device="cpu") for span in spans]
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return gather_in_order(self.world, rows, epoch.at(torch.cat([none, *positions])))

    def step_at(self, mark: Mark) -> int | None:
        """The step that begins at a position, or None. 0 if this is known only after drawing up to the position."""
        return 0

    def position_of(self, epoch: int, step: int) -> int:
        """The position at which a step begins, if steps have numbers; for the step after the last, the end."""
        return 0

    def after(self, epoch: int) -> Mark:
        """The position at which training continues after the latest iteration, which was of this epoch."""
        return Mark(epoch + 1)

    def validate(self) -> None:  # noqa: B027 - a stream can't be checked
        """Raise if the data have changed since the loader was made, if that can be checked."""

    def loading(
        self,
        wanted: Iterator[Request],
        torch_loader: TorchDataLoader[Any] | None,
        doing: Callable[[int, int, int], str],
    ) -> contextlib.AbstractContextManager[Iterator[Loaded]]:
        """Context that yields the batches of some requests; for `doing` see `workers.working`."""
        if torch_loader is not None:
            return workers.working(torch_loader, wanted, doing)
        # A copy, because a fetcher may hold a position in a stream: two simultaneous iterations have two positions.
        return contextlib.nullcontext(map(self.load_with(copy.copy(self.fetcher)), wanted))

    def load_with(self, fetcher: Fetcher) -> Callable[[Request], Loaded]:
        """Return the function that loads a batch in this process."""
        return fetcher.__getitem__


def gather_in_order(world: World, rows: Tensor, own: Tensor) -> Tensor:
    """Gather all ranks' rows by number of the sample. Collective.

    Args:
        world: The ranks.
        rows: [n, ...], this rank's rows.
        own: [samples], int64: the samples that this rank has seen, in that order.

    Raises:
        MismatchError: A rank's numbers of rows and samples differ. Raised on all ranks.
        ConfigurationError: `rows` isn't a dense tensor.
    """
    check_rows(rows, rank=world.rank, what="loader.gather")
    counts = [len(rows) if rows.dim() else 1, len(own)]
    for rank, (num_rows, num_samples) in enumerate(world.exchange(counts) if world.world_size > 1 else [counts]):
        if num_rows != num_samples:
            raise MismatchError(
                f"loader.gather: rank {rank} has {num_rows} rows and has seen {num_samples} samples in the latest "
                f"iteration. Pass one row for each sample of all batches, in the order of the batches (torch.cat of a "
                f"list)."
            )
    samples, gathered = world.gather(own), world.gather(rows)
    return gathered[torch.argsort(samples, stable=True).to(gathered.device)]
