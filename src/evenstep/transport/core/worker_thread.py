"""A thread that runs the calls of one transport in order, and the handles that their callers hold."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

import torch

from evenstep.errors import CollectiveTimeoutError, EvenstepError, PeerLostError
from evenstep.transport.core.validation import forked_error

_LONGEST_END_S = 5.0  # of a thread that is in a call when its transport closes


class QueuedWork:
    """A call that a `WorkerThread` runs.

    Args:
        what: The call, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: EvenstepError | None = None
        self._callbacks: list[Callable[[EvenstepError | None], object]] = []

    def wait(self, timeout_s: float | None = None) -> None:
        """See `base.Work.wait`; no longer than `timeout_s`."""
        if not self._ended.wait(timeout_s):
            raise CollectiveTimeoutError(f"{self._what} did not end within {timeout_s:.1f} s.")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """See `base.Work.is_completed`."""
        return self._ended.is_set()

    def add_done_callback(self, callback: Callable[[EvenstepError | None], object]) -> None:
        """Call `callback` once, with the error if there was one: at once, or in the thread."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self._error)

    def end(self, error: EvenstepError | None) -> None:
        """Mark the call as ended, and run the callbacks."""
        with self._lock:
            self._error = error
            self._ended.set()
        for callback in self._callbacks:
            callback(error)

    def __repr__(self) -> str:
        return f"<Work {self._what} {'done' if self._ended.is_set() else 'queued'}>"


class WorkerThread:
    """Runs calls in the order in which they were submitted. After one has failed, the others fail in the same way.

    The thread starts with the first call.

    Args:
        name: Of the thread.
        on_close: Called when a call has failed, in the thread, and when this is closed.
    """

    def __init__(self, name: str, on_close: Callable[[], object]) -> None:
        self.failure: EvenstepError | None = None
        self.is_closed = False
        self.num_calls = 0
        self._name = name
        self._on_close = on_close
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], QueuedWork] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, what: str, prepare: Callable[[int], Callable[[], object]]) -> QueuedWork:
        """Queue a call.

        Args:
            what: For messages.
            prepare: Given the call's number, counted from 1, returns what the thread is to run; called at once, in the
                caller's thread, in the order of the calls.

        Raises:
            EvenstepError: A call has failed before, or the thread has been closed, or is a forked child's parent's.
        """
        if os.getpid() != self._pid:
            raise forked_error()
        with self._lock:
            if self.failure is not None:
                raise self.failure
            run = prepare(self.num_calls + 1)
            self.num_calls += 1
            work = QueuedWork(f"{what} number {self.num_calls}")
            self._calls.put((run, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        return work

    def close(self, error: EvenstepError) -> None:
        """Refuse new calls, end the queued ones with this error, call `on_close`, and wait for the thread. Once."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        with self._lock:
            self.failure = self.failure or error
            self._calls.put(None)
        self._on_close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_END_S)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            self._run_one(*item)
            del item  # and so the tensors of a call that is over

    def _run_one(self, run: Callable[[], object], work: QueuedWork) -> None:
        error = self.failure
        if error is None:
            try:
                # Tensors that a caller made in inference mode can be written in that mode only. Callbacks (futures) run
                # outside of it: tensors that they make may be trained with.
                with torch.inference_mode():
                    run()
            except EvenstepError as raised:
                error = raised
            except Exception as raised:  # the caller waits for the end of the call, whatever has happened
                error = PeerLostError(f"{work!r} failed: {raised}")
            if error is not None:
                self.failure = self.failure or error
                self._on_close()
        work.end(error)
