"""Worker processes: torch's own, started for a `Fetcher`, and what is said when one of them dies."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import get_worker_info

from evenstep.data.fetch import Loaded
from evenstep.data.packing import unpack
from evenstep.errors import ConfigurationError, DataError
from evenstep.world import World

_LOOK_S = 0.5  # how often the processes of overdue workers are looked at
_MOST_WORKERS = 8  # with "auto"
_MANY_WORKERS = 4096  # more were never meant, and the memory for what they note would stop the machine


def suitable_workers(*, num_cores: int, local_world_size: int, device_type: str) -> int:
    """How many workers suit a rank. Pure.

    With a GPU the cores are there to feed it: all of the rank's but one, at most 8. Without, they compute: one worker
    where the rank has more than one core, else none.
    """
    spare = num_cores // local_world_size - 1
    if device_type == "cpu":
        return 1 if spare >= 1 else 0
    return max(1, min(_MOST_WORKERS, spare))


def choose_workers(given: Any, world: World) -> int:
    """`num_workers` as a number.

    Raises:
        ConfigurationError: It is none.
    """
    if given == "auto":
        return suitable_workers(
            num_cores=len(os.sched_getaffinity(0)),
            local_world_size=world.local_world_size,
            device_type=world.device.type,
        )
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given <= _MANY_WORKERS:
        bounds = f"at least 0{f' and at most {_MANY_WORKERS}' if isinstance(given, int) and given > 0 else ''}"
        raise ConfigurationError(f"num_workers={given!r}: a whole number, {bounds}, or 'auto'.")
    return given


def new_page(num_workers: int) -> Any:
    """Where workers note what they are at; readable when they are dead. None without workers."""
    return RawArray("q", 2 * num_workers) if num_workers > 0 else None


def starts_slowly(context: Any) -> bool:
    """Whether a worker starts as a new interpreter (seconds), and isn't forked (milliseconds)."""
    if context is None:
        return multiprocessing.get_start_method() != "fork"
    ask = getattr(context, "get_start_method", None)  # torch says what it is where it is no context
    method = ask() if callable(ask) else context
    return bool(method != "fork")


class _Requests:
    """The sampler that torch's loader gets: the requests of the iteration that begins next."""

    def __init__(self) -> None:
        self.coming: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.coming


def torch_loader(
    fetcher: Any,
    *,
    num_workers: int,
    worker_init_fn: Callable[[int], None] | None,
    multiprocessing_context: Any,
    persistent_workers: bool | None,
    **arguments: Any,
) -> TorchDataLoader[Any]:
    """torch's loader, which hands requests to workers and their batches back, in order.

    Raises:
        TypeError, ValueError: As torch's, for arguments that it refuses.
    """
    if persistent_workers is None:
        # Forking a worker costs milliseconds, importing torch in a new one seconds.
        persistent_workers = num_workers > 0 and starts_slowly(multiprocessing_context)
    return TorchDataLoader(
        fetcher,
        batch_size=None,
        sampler=_Requests(),
        collate_fn=_as_it_is,
        num_workers=num_workers,
        worker_init_fn=_WorkerInit(fetcher, worker_init_fn),
        multiprocessing_context=multiprocessing_context,
        persistent_workers=persistent_workers,
        **arguments,
    )


def _as_it_is(loaded: Any) -> Any:
    return loaded


class _WorkerInit:
    """Shows the user's data set to whoever asks `get_worker_info`, and calls the user's function."""

    def __init__(self, fetcher: Any, users: Callable[[int], None] | None) -> None:
        self._fetcher, self._users = fetcher, users
        self._collects = gc.isenabled()

    def __call__(self, worker: int) -> None:
        gc.freeze()  # what came with the fork is never collected here, nor are its pages copied for the collector
        if self._collects:
            gc.enable()
        object.__setattr__(get_worker_info(), "dataset", self._fetcher.dataset)
        if self._users is not None:
            self._users(worker)


@contextlib.contextmanager
def working(
    batches: TorchDataLoader[Any], requests: Iterator[Any], doing: Callable[[int, int], str]
) -> Iterator[Iterator[Loaded]]:
    """The batches of one iteration; workers that aren't to stay end with the block.

    Args:
        batches: Made by `torch_loader`.
        requests: What is to be loaded.
        doing: Says what a worker was at, from what it noted (step, number of the sample in the share).

    Raises:
        DataError: From the iterator: a worker died, or took longer than `timeout`, or met one itself.
    """
    sampler: Any = batches.sampler
    sampler.coming = requests
    with _no_collection():
        iterator = iter(batches)
    try:
        _watch(iterator)
        yield _named(iterator, batches, doing)
    finally:
        if not batches.persistent_workers and hasattr(iterator, "_shutdown_workers"):
            # Now, and not when the garbage collector finds time: a loop left by `break` leaves no process.
            iterator._shutdown_workers()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """While workers are forked, so that none of them collects what it has from its parent: `_WorkerInit` sees to it.

    Garbage of the parent may be a process group, whose end waits for threads that a forked child doesn't have.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _watch(iterator: Any) -> None:
    """Notice a dead worker here and soon.

    torch's signal handler would raise wherever the main thread happens to be, which may be the user's forward pass,
    without a word on the sample; and its own look at overdue workers comes every 5 s only.
    """
    if getattr(iterator, "_worker_pids_set", False):
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        itself = weakref.ref(iterator)

        def try_get_data(timeout: float = _LOOK_S) -> Any:
            living: Any = itself()
            return type(living)._try_get_data(living, timeout)

        iterator._try_get_data = try_get_data


def _named(iterator: Iterator[Any], batches: TorchDataLoader[Any], doing: Callable[[int, int], str]) -> Iterator[Any]:
    while True:
        try:
            loaded = next(iterator)
        except StopIteration:
            return
        except RuntimeError as error:
            processes = list(getattr(iterator, "_workers", ()))
            if "exited unexpectedly" in str(error):
                raise DataError(_obituary(processes, batches.dataset, doing)) from None
            if "timed out after" in str(error):
                raise DataError(_overdue(processes, batches.dataset, doing, batches.timeout)) from None
            raise
        if loaded.failure is not None:
            raise DataError(loaded.failure)
        yield loaded if loaded.packed is None else loaded._replace(batch=unpack(loaded.packed), packed=None)


def _obituary(processes: list[Any], fetcher: Any, doing: Callable[[int, int], str]) -> str:
    told = []
    for number, process in enumerate(processes):
        if process.is_alive() or process.exitcode in (None, 0):
            continue
        code = process.exitcode
        end = f"exited with status {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        told.append(f"worker {number} (pid {process.pid}) {end} while loading {_noted(fetcher, number, doing)}")
    advice = ""
    if any(process.exitcode == -signal.SIGKILL for process in processes):
        advice = " SIGKILL is often the system's answer to too little memory: use fewer workers, or prefetch less."
    return f"{'; '.join(told) or 'a worker ended'}.{advice}"


def _overdue(processes: list[Any], fetcher: Any, doing: Callable[[int, int], str], timeout: float) -> str:
    told = [f"worker {n} (pid {p.pid}) is at {_noted(fetcher, n, doing)}" for n, p in enumerate(processes)]
    return f"no batch came within timeout={timeout:g} s: {'; '.join(told)}."


def _noted(fetcher: Any, worker: int, doing: Callable[[int, int], str]) -> str:
    page = getattr(fetcher, "_page", None)
    return "its share" if page is None else doing(page[2 * worker], page[2 * worker + 1])
