"""Torch's loaders and evenstep's, observed: when the script waits for data, and how large batches are.

Neither has a hook for it, so the iterators of both classes are wrapped. A loader inside a loader (evenstep's stands on
torch's), or one that is read by another thread, is passed through: the script doesn't wait there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loader import DataLoader
from evenstep.tools.observing.models import num_rows
from evenstep.tools.observing.patching import Patches


class LoaderWatch:
    """Notes when the script waits for data, and what it reads.

    Args:
        waited: Called with the beginning and the end of every wait, on the clock of `time.perf_counter_ns`.
        num_steps: Returns how many optimizer steps were made so far.

    Attributes:
        num_rows: Samples handed out so far.
        last_rows: And in the newest batch.
        num_workers: Of the loader that was read last.
        was_seen: Whether anything was read.
        is_over: The script's loops may end: before, a loop that trains gets another epoch.
    """

    def __init__(self, waited: Callable[[int, int], object], num_steps: Callable[[], int]) -> None:
        self.waited = waited
        self.num_steps = num_steps
        self.num_rows = self.last_rows = 0
        self.num_workers = 0
        self.was_seen = False
        self.is_over = False
        self.thread = threading.get_ident()
        self.is_inside = False

    def install(self, patches: Patches) -> None:
        """Watch all loaders of this process, until the patches are undone."""
        for kind in (TorchDataLoader, DataLoader):
            patches.replace(kind, "__iter__", self._wrapped)

    def began(self, iteration: WatchedIteration) -> None:
        """A loop over a loader begins; for subclasses."""

    def is_cut(self, iteration: WatchedIteration) -> bool:
        """Whether a loop ends before its next batch; for subclasses."""
        return False

    def read(self, iteration: WatchedIteration, item: Any) -> None:
        """A loop has got a batch; for subclasses."""

    def ended(self, iteration: WatchedIteration, *, is_cut: bool) -> None:
        """A loop is over; for subclasses."""

    def goes_on(self, iteration: WatchedIteration) -> bool:
        """Whether a loop whose loader has no more gets another epoch: one that trains does, until the run is over."""
        return not self.is_over and self.num_steps() != iteration.steps_before

    def _wrapped(self, original: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
        def __iter__(loader: Any) -> Iterator[Any]:
            if self.is_inside or threading.get_ident() != self.thread:
                return original(loader)
            return WatchedIteration(self, loader, original)

        return __iter__


def replace_batch_sizes(patches: Patches, choose: Callable[[int], int]) -> None:
    """Have torch's loaders load batches of other sizes; those with a batch sampler have none.

    Args:
        patches: Undoes it.
        choose: Given the size that the script passes, returns the one to use.
    """

    def made(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
            has_batches = kwargs.get("batch_sampler") is not None or (len(args) > 2 and args[2] is not None)
            if isinstance(batch_size, int) and not has_batches:
                batch_size = choose(batch_size)
            original(self, dataset, batch_size, *args, **kwargs)

        return init

    patches.replace(TorchDataLoader, "__init__", made)


class WatchedIteration:
    """One iteration of a loader.

    Attributes:
        loader: What is iterated.
        steps_before: Optimizer steps that were made before it, or before its newest epoch.
        num_batches: Handed out so far.
    """

    def __init__(self, watch: LoaderWatch, loader: Any, begin: Callable[[Any], Iterator[Any]]) -> None:
        self._watch, self.loader, self._begin = watch, loader, begin
        self.steps_before = watch.num_steps()
        self.num_batches = 0
        watch.began(self)
        self._items = self._begun()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        watch = self._watch
        if watch.is_inside or threading.get_ident() != watch.thread:
            return next(self._items)
        if watch.is_cut(self):
            watch.ended(self, is_cut=True)
            raise StopIteration
        began_ns = perf_counter_ns()
        watch.is_inside = True
        try:
            try:
                item = next(self._items)
            except StopIteration:
                if not watch.goes_on(self):
                    watch.ended(self, is_cut=False)
                    raise
                self.steps_before = watch.num_steps()
                self._items = self._begin(self.loader)
                item = next(self._items)
        finally:
            watch.is_inside = False
            watch.waited(began_ns, perf_counter_ns())
        watch.was_seen = True
        watch.num_workers = self.loader.num_workers
        watch.last_rows = num_rows(item)
        watch.num_rows += watch.last_rows
        self.num_batches += 1
        watch.read(self, item)
        return item

    def _begun(self) -> Iterator[Any]:
        # torch's loader starts its workers here.
        watch, began_ns = self._watch, perf_counter_ns()
        watch.is_inside = True
        try:
            return self._begin(self.loader)
        finally:
            watch.is_inside = False
            watch.waited(began_ns, perf_counter_ns())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)
