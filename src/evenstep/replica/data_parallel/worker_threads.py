"""Threads that drive replicas: one each, which lives as long as its replica."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evenstep.ground.compat.c_library.openmp import rest_team


@dataclass(frozen=True)
class Surroundings:
    """What a thread has set and another one doesn't inherit.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether it is inference mode.
        autocast: (device type, enabled, dtype).
        num_threads: Of CPU operations.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    num_threads: int

    @classmethod
    def here(cls, *, num_threads: int) -> Surroundings:
        """Those of the calling thread, but with this many threads."""
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, num_threads)

    @contextlib.contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Set in the calling thread, and what was before afterwards."""
        with contextlib.ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                torch.cuda.current_stream(device).query()  # a new thread has no context, of which cuBLAS would warn
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield


class WorkerThreads:
    """As many threads as there are replicas; number i does what replica i has to do.

    Made when first needed. They end with this object, or with `close`.

    Args:
        devices: Of the replicas.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self._inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in devices]
        for index, inbox in enumerate(self._inboxes):
            name = f"evenstep-replica-{index}"
            threading.Thread(target=_drive, args=(inbox,), name=name, daemon=True).start()
        self.close: Callable[[], object] = weakref.finalize(self, _dismiss, self._inboxes)

    def run(self, jobs: Sequence[Callable[[], Any]], around: Surroundings, doing: str) -> list[Any]:
        """Do one job per replica, all at the same time, and wait for all of them.

        Args:
            jobs: For the first `len(jobs)` replicas.
            around: What is set in the threads.
            doing: For messages: "forward".

        Returns:
            What each returned.

        Raises:
            Exception: Of the first replica that raised one: the same type where that is possible, with the replica
                and its device in the message.
        """
        if any(device.type == "cpu" for device in self.devices[: len(jobs)]):
            rest_team()
        outbox: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        for index, job in enumerate(jobs):
            self._inboxes[index].put((index, job, around, self.devices[index], outbox))
        results: list[Any] = [None] * len(jobs)
        failures: list[tuple[int, BaseException]] = []
        for _ in jobs:
            index, result, error = outbox.get()
            results[index] = result
            if error is not None:
                failures.append((index, error))
        if torch.get_num_threads() != around.num_threads:
            # A thread that sets its own number also sets that of threads to come.
            torch.set_num_threads(torch.get_num_threads())
        if failures:
            index, error = min(failures, key=lambda failure: failure[0])
            where = f"in the {doing} of replica {index} of {len(self.devices)}, on {self.devices[index]}"
            try:
                raise _located(error, where) from error
            finally:
                # This frame is in the exception's traceback: together they would live until the garbage collector
                # comes, and with them the model and its threads.
                del failures, error
        return results


def _drive(inbox: queue.SimpleQueue[Any]) -> None:
    while True:
        call = inbox.get()
        if call is None:
            return
        index, job, around, device, outbox = call
        result, error = None, None
        try:
            if torch.get_num_threads() != around.num_threads:
                torch.set_num_threads(around.num_threads)
            with around.entered(device):
                result = job()
        except BaseException as raised:
            error = raised
        outbox.put((index, result, error))
        # Nothing of a call may outlive it in here: its graph holds all activations.
        del call, job, result, error, outbox


def _dismiss(inboxes: Sequence[queue.SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def _located(error: BaseException, where: str) -> BaseException:
    """An exception of the same type whose text also names the place where it was raised."""
    message = f"{error} ({where})"
    try:
        located = type(error)(message)
    except Exception:  # a type whose constructor takes something else
        return RuntimeError(f"{type(error).__name__}: {message}")
    return located
