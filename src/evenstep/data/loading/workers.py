"""Worker processes of torch's loader that run a `Fetcher`, and messages about a worker's death."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import get_worker_info

from evenstep import checks
from evenstep.data.loading.fetch import Loaded, unpack
from evenstep.errors import ConfigurationError, DataError
from evenstep.ground.compat.torch_data import WorkerLoader, shut_down_workers, worker_processes
from evenstep.ground.host.control_groups import count_cpus
from evenstep.ground.host.processes import STOP_SIGNALS, stays_ignored
from evenstep.world import World

_MOST_WORKERS = 8  # with "auto"
_MANY_WORKERS = 4096  # more workers are a mistake, and the memory for their notes would be too large


def suitable_workers(*, num_cores: int, local_world_size: int, device_type: str) -> int:
    """How many workers suit a rank. Pure.

    With a GPU, all of the rank's cores but one load data, at most 8. Without a GPU the cores compute, so there is one
    worker if the rank has more than one core, else none.
    """
    spare = num_cores // local_world_size - 1
    if device_type == "cpu":
        return 1 if spare >= 1 else 0
    return max(1, min(_MOST_WORKERS, spare))


def choose_workers(given: Any, world: World) -> int:
    """`num_workers` as a number.

    Raises:
        ConfigurationError: `given` isn't "auto" or a number of workers.
    """
    if isinstance(given, str) and given == "auto":
        num_cores, local_world_size = count_cpus(), world.local_world_size
        return suitable_workers(num_cores=num_cores, local_world_size=local_world_size, device_type=world.device.type)
    return checks.whole("num_workers", given, least=0, most=_MANY_WORKERS, otherwise="'auto'")


def starts_slowly(context: Any) -> bool:
    """Whether a worker starts as a new interpreter (seconds) instead of a fork (milliseconds)."""
    if context is None:
        return multiprocessing.get_start_method() != "fork"
    get_start_method = getattr(context, "get_start_method", None)  # torch refuses other objects
    return bool((get_start_method() if callable(get_start_method) else context) != "fork")


class _Requests:
    """The sampler of torch's loader: yields the requests of the next iteration."""

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
    """torch's loader, which sends requests to workers and returns their batches in order.

    Raises:
        ConfigurationError: torch refuses the arguments; the message is torch's.
    """
    if persistent_workers is None:
        # Forking a worker costs milliseconds, importing torch in a new one seconds.
        persistent_workers = num_workers > 0 and starts_slowly(multiprocessing_context)
    try:
        return WorkerLoader(
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
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(str(error)) from None


def _as_it_is(loaded: Any) -> Any:
    return loaded


class _WorkerInit:
    """Puts the user's data set into `get_worker_info`, and calls the user's `worker_init_fn`.

    A worker survives the signals that ask a run to save and stop. Schedulers send them to every process, but the rank
    needs batches until all ranks have saved at the same step; then the rank ends its workers.
    """

    def __init__(self, fetcher: Any, users: Callable[[int], None] | None) -> None:
        self._fetcher, self._users = fetcher, users
        self._collects = gc.isenabled()

    def __call__(self, worker: int) -> None:
        gc.freeze()  # objects from before the fork are never collected here, so their pages aren't copied
        if self._collects:
            gc.enable()
        object.__setattr__(get_worker_info(), "dataset", self._fetcher.dataset)
        parent_pid = os.getppid()

        def end_with_rank(number: int, frame: object) -> None:
            if os.getppid() != parent_pid:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        for which in STOP_SIGNALS:
            if not stays_ignored(which):
                signal.signal(which, end_with_rank)  # a handler: its children would inherit SIG_IGN
        if self._users is not None:
            self._users(worker)


class working:
    """The batches of one iteration; workers that don't persist end with the block.

    This is a class, because `contextlib.contextmanager` of python 3.10 leaves a block's exception in a reference cycle
    with its own frame. A loop that is left by `break` ends with an exception, and persistent workers would then outlive
    `del loader`.

    Args:
        batches: Made by `torch_loader`.
        requests: The requests of the iteration.
        doing: Returns a description of a worker's place, from its notes (epoch, step, number of the sample in the
            share).

    Raises:
        DataError: From the iterator: a worker died, took longer than `timeout`, or raised a DataError itself.
    """

    def __init__(
        self, batches: TorchDataLoader[Any], requests: Iterator[Any], doing: Callable[[int, int, int], str]
    ) -> None:
        self._batches, self._requests, self._doing = batches, requests, doing
        self._iterator: Iterator[Any] = iter(())

    def __enter__(self) -> Iterator[Loaded]:
        sampler: Any = self._batches.sampler
        sampler.coming = self._requests
        with _no_collection():
            self._iterator = iter(self._batches)
        return _named(self._iterator, self._batches, self._doing)

    def __exit__(self, *_: object) -> None:
        if not self._batches.persistent_workers:
            # Now, not at the next garbage collection, so that no process outlives a loop that is left by `break`.
            shut_down_workers(self._iterator)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection while workers are forked; `_WorkerInit` enables it in them after a freeze.

    The parent's garbage may include a process group, whose destructor waits for threads that a forked child doesn't
    have.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _named(
    iterator: Iterator[Any], batches: TorchDataLoader[Any], doing: Callable[[int, int, int], str]
) -> Iterator[Any]:
    while True:
        try:
            loaded = next(iterator)
        except StopIteration:
            return
        except RuntimeError as error:
            processes = worker_processes(iterator)
            if str(error).startswith("DataLoader worker (pid"):  # torch's own text, not a worker's exception's
                raise DataError(_obituary(processes, batches.dataset, doing)) from None
            if str(error).startswith("DataLoader timed out after"):
                raise DataError(_overdue(processes, batches.dataset, doing, batches.timeout)) from None
            raise
        if loaded.failure is not None:
            raise loaded.failure
        yield loaded if loaded.packed is None else loaded._replace(batch=unpack(loaded.packed), packed=None)


def _obituary(processes: list[Any], fetcher: Any, doing: Callable[[int, int, int], str]) -> str:
    ends = []
    for number, process in enumerate(processes):
        if process.is_alive() or process.exitcode in (None, 0):
            continue
        code = process.exitcode
        end = f"exited with status {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        ends.append(f"worker {number} (pid {process.pid}) {end} while loading {_noted(fetcher, number, doing)}")
    advice = ""
    if any(process.exitcode == -signal.SIGKILL for process in processes):
        advice = " SIGKILL is often the system's answer to too little memory: use fewer workers, or prefetch less."
    return f"{'; '.join(ends) or 'a worker ended'}.{advice}"


def _overdue(processes: list[Any], fetcher: Any, doing: Callable[[int, int, int], str], timeout: float) -> str:
    places = [f"worker {n} (pid {p.pid}) is at {_noted(fetcher, n, doing)}" for n, p in enumerate(processes)]
    return f"no batch came within timeout={timeout:g} s: {'; '.join(places)}."


def _noted(fetcher: Any, worker: int, doing: Callable[[int, int, int], str]) -> str:
    return doing(*fetcher.page[3 * worker : 3 * worker + 3])
