"""When the script waits for data: torch's loaders and evenstep's, seen from the loop that iterates them.

Neither has a hook for it, so in a measured process the iterators of both classes are wrapped. A loader inside a loader
(evenstep's stands on torch's), or one that is read by another thread, is passed through: nobody waits there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.bench.records import DATA, DATA_END
from evenstep.data.loader import DataLoader


class LoaderWatch:
    """Marks of waiting, and what was read.

    Args:
        marks: Where they go.
        num_steps: How many optimizer steps were made so far.
        rows_per_rank: Batch size for torch's loaders; None: as the script has it.

    Attributes:
        num_rows: Samples handed out so far.
        last_rows: And in the newest batch.
        num_workers: Of the loader that was read last.
        was_seen: Whether anything was read.
    """

    def __init__(self, marks: list[int], num_steps: Callable[[], int], rows_per_rank: int | None) -> None:
        self.marks = marks
        self.num_steps = num_steps
        self.rows_per_rank = rows_per_rank
        self.num_rows = self.last_rows = 0
        self.num_workers = 0
        self.was_seen = False
        self.is_over = False
        self.thread = threading.get_ident()
        self.is_inside = False

    def install(self) -> None:
        """From now on, for all loaders of this process; for good."""
        for kind in (TorchDataLoader, DataLoader):
            self._wrap_iterators(kind)
        if self.rows_per_rank is not None:
            self._wrap_batch_size(self.rows_per_rank)

    def _wrap_iterators(self, kind: Any) -> None:
        original = kind.__iter__

        def __iter__(loader: Any) -> Iterator[Any]:
            if self.is_inside or threading.get_ident() != self.thread:
                return original(loader)  # type: ignore[no-any-return]
            return _Watched(self, loader, original)

        kind.__iter__ = __iter__

    def _wrap_batch_size(self, rows: int) -> None:
        original = TorchDataLoader.__init__

        def __init__(loader: Any, dataset: Any, batch_size: Any = 1, *arguments: Any, **named: Any) -> None:
            # 1 is torch's default, and what evenstep's own loader stands on has none.
            if isinstance(batch_size, int) and batch_size > 1 and named.get("batch_sampler") is None:
                batch_size = rows
            original(loader, dataset, batch_size, *arguments, **named)

        TorchDataLoader.__init__ = __init__  # type: ignore[method-assign,assignment]


class _Watched:
    """One iteration of a loader."""

    def __init__(self, watch: LoaderWatch, loader: Any, begin: Callable[[Any], Iterator[Any]]) -> None:
        self._watch, self._loader, self._begin = watch, loader, begin
        self._steps_before = watch.num_steps()
        self._items = self._begun()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        watch = self._watch
        if watch.is_inside or threading.get_ident() != watch.thread:
            return next(self._items)
        began_ns = perf_counter_ns()
        watch.is_inside = True
        try:
            try:
                item = next(self._items)
            except StopIteration:
                # The run is as long as it is asked to be: a loop that trains is given another epoch, one that only
                # looks ends as ever.
                if watch.is_over or watch.num_steps() == self._steps_before:
                    raise
                self._steps_before = watch.num_steps()
                self._items = self._begin(self._loader)
                item = next(self._items)
        finally:
            watch.is_inside = False
            watch.marks += (DATA, began_ns, DATA_END, perf_counter_ns())
        watch.was_seen = True
        watch.num_workers = self._loader.num_workers
        watch.last_rows = num_rows(item)
        watch.num_rows += watch.last_rows
        return item

    def _begun(self) -> Iterator[Any]:
        # torch's loader starts its workers here.
        watch, began_ns = self._watch, perf_counter_ns()
        watch.is_inside = True
        try:
            return self._begin(self._loader)
        finally:
            watch.is_inside = False
            watch.marks += (DATA, began_ns, DATA_END, perf_counter_ns())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)


def num_rows(batch: Any, dim: int = 0) -> int:
    """Samples of a batch: the length of its first tensor, however deep in a nest that is; 0 without one."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Tensor) or first.dim() <= dim:
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > dim]
        first = tensors[0] if tensors else None
    return first.shape[dim] if isinstance(first, Tensor) and first.dim() > dim else 0
