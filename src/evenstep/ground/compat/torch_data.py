"""Private parts of `torch.utils.data` (torch 2.11 and later): how torch names, watches and ends workers."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, _utils, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _MultiProcessingDataLoaderIter

from evenstep.ground.compat.private_names import PrivateName

_POLL_S = 0.5  # seconds between two checks of overdue workers' processes
_END_WITHIN_S = 2.0

MapDatasetFetcher = _utils.fetch._MapDatasetFetcher


@contextlib.contextmanager
def without_worker_info() -> Iterator[Any]:
    """Context in which `get_worker_info` returns None; yields its former result."""
    worker = get_worker_info()
    _utils.worker._worker_info = None
    try:
        yield worker
    finally:
        _utils.worker._worker_info = worker


class WorkerLoader(DataLoader[Any]):
    """torch's loader, which watches and ends its workers as `_Workers` does."""

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return _Workers(self)


class _Workers(_MultiProcessingDataLoaderIter):
    """An iterator of torch's loader over its workers.

    Dead workers are noticed only in `next`, and within `_POLL_S`. torch's signal handler would raise at any place in
    the main thread, such as the user's forward pass, and wouldn't name the sample; and torch checks overdue workers
    every 5 s only.

    Workers that are still in a sample are killed, all together, `_END_WITHIN_S` after the request to end; torch waits 5
    s for each. Workers that still run when this process ends are killed at once: multiprocessing would send SIGTERM,
    which they survive, and wait without a limit.
    """

    def __init__(self, loader: WorkerLoader) -> None:
        self.owner_pid = os.getpid()
        super().__init__(loader)
        if self._worker_pids_set:
            torch._C._remove_worker_pids(id(self))
            self._worker_pids_set = False
        _with_workers.add(self)
        atexit.unregister(_kill_all)
        atexit.register(_kill_all)  # runs before multiprocessing's function, which was registered earlier

    def _try_get_data(self, timeout: float = _POLL_S) -> Any:
        return super()._try_get_data(timeout)  # type: ignore[no-untyped-call]

    def _shutdown_workers(self) -> None:
        if getattr(self, "_shutdown", True) or getattr(_utils, "python_exit_status", True):
            return  # all have ended; or the interpreter ends, and no thread can be started
        late = threading.Timer(_END_WITHIN_S, self.kill)
        late.daemon = True
        late.start()
        try:
            super()._shutdown_workers()
        finally:
            late.cancel()

    def kill(self) -> None:
        """Kill the remaining workers; not in a forked child."""
        if os.getpid() == self.owner_pid:
            for process in worker_processes(self):
                process.kill()


_with_workers: weakref.WeakSet[_Workers] = weakref.WeakSet()


def _kill_all() -> None:
    for each in list(_with_workers):
        each.kill()


def worker_processes(iterator: Any) -> list[Any]:
    """The worker processes of a loader's iterator; none in a loader without workers."""
    return list(getattr(iterator, "_workers", ()))


def shut_down_workers(iterator: Any) -> None:
    """End the workers of a loader's iterator now."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def draws_from_whole_data_set() -> bool:
    """Whether an iterator of torch's own loader is running that loads the whole data set on every rank.

    Such a loader has numbered samples and torch's sampler for one process: in order, or random. All objects are
    searched, which takes tens of milliseconds in a large program.
    """
    for each in gc.get_objects():
        if issubclass(type(each), _BaseDataLoaderIter) and getattr(each, "_num_yielded", False):
            batches = getattr(each, "_index_sampler", None)
            is_plain = type(getattr(batches, "sampler", batches)) in (RandomSampler, SequentialSampler)
            if is_plain and getattr(each, "_dataset_kind", None) == _DatasetKind.Map:
                return True
    return False


# Names that aren't looked up when evenstep is imported.
_LOADER = "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter"
NAMES = (
    PrivateName(
        "torch.utils.data._utils.worker:_worker_info",
        "what get_worker_info returns",
        "a data set in a worker divides its stream twice",
    ),
    *(
        PrivateName(where, "how torch watches over a loader's workers", "torch's signal handler reports dead workers")
        for where in (
            f"{_LOADER}.__init__~_worker_pids_set",
            f"{_LOADER}.__init__~_shutdown",
            f"{_LOADER}._try_get_data",
            "torch.utils.data:DataLoader._get_iterator",
            "torch._C:_remove_worker_pids",
        )
    ),
    PrivateName(
        f"{_LOADER}.__init__~_workers", "a loader's worker processes", "messages on dead workers don't name processes"
    ),
    *(
        PrivateName(f"torch.utils.data.dataloader:_BaseDataLoaderIter.__init__~{name}", what, "a warning doesn't come")
        for name, what in (
            ("_num_yielded", "whether a loader's iterator is under way"),
            ("_index_sampler", "by which sampler a loader's iterator draws"),
            ("_dataset_kind", "whether a loader's samples have numbers"),
        )
    ),
    PrivateName(f"{_LOADER}._shutdown_workers", "ends a loader's workers", "they end with the garbage collector"),
)
