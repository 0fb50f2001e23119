"""Private parts of `torch.utils.data` (torch 2.11 and later): who is a worker, and how torch watches workers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import _utils, get_worker_info

from evenstep.ground.compat.private_names import PrivateName

MapDatasetFetcher = _utils.fetch._MapDatasetFetcher


@contextlib.contextmanager
def without_worker_info() -> Iterator[Any]:
    """Make `get_worker_info` return None inside the block; yields what it returned before."""
    worker = get_worker_info()
    _utils.worker._worker_info = None
    try:
        yield worker
    finally:
        _utils.worker._worker_info = worker


def replace_worker_watch(iterator: Any, poll_s: float) -> None:
    """Notice dead workers of a loader's iterator in `next` alone, and every `poll_s`.

    torch's signal handler would raise wherever the main thread happens to be, which may be the user's forward pass,
    without a word on the sample; and its own look at overdue workers comes every 5 s only.
    """
    if getattr(iterator, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        itself = weakref.ref(iterator)

        def try_get_data(timeout: float = poll_s) -> Any:
            living: Any = itself()
            return type(living)._try_get_data(living, timeout)

        iterator._try_get_data = try_get_data


def worker_processes(iterator: Any) -> list[Any]:
    """The worker processes of a loader's iterator; none in a loader without workers."""
    return list(getattr(iterator, "_workers", ()))


def shut_down_workers(iterator: Any) -> None:
    """End the workers of a loader's iterator now."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


# What isn't looked for when evenstep is imported.
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
            f"{_LOADER}._try_get_data",
            "torch._C:_remove_worker_pids",
        )
    ),
    PrivateName(
        f"{_LOADER}.__init__~_workers", "a loader's worker processes", "messages on dead workers don't name processes"
    ),
    PrivateName(f"{_LOADER}._shutdown_workers", "ends a loader's workers", "they end with the garbage collector"),
)
