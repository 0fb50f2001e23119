"""A thread that runs the calls of one transport in order, and the handles that callers hold.

It isn't an executor of `concurrent.futures`, because python waits for an executor's threads before it calls exit hooks.
A thread that waits for other ranks would then keep the process alive until its deadline. And a thread that still waits
inside Gloo when python ends aborts the process (std::terminate). So an exit hook closes the threads, and ends the calls
that they wait for.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable

import torch

from evenstep.errors import CollectiveTimeoutError, EvenstepError, PeerLostError
from evenstep.transport.core.validation import forked_error

LONGEST_END_S = 5.0  # how long `close` waits for a thread that is in a call


class QueuedWork:
    """A call that a `WorkerThread` runs.

    Args:
        what: The call, for messages.
        waits: Called by each thread that waits, before it waits.

    Attributes:
        ended: Has the call's error, or None, when the call has ended.
    """

    def __init__(self, what: str, waits: Callable[[], object]) -> None:
        self._what, self._waits = what, waits
        self.ended: concurrent.futures.Future[EvenstepError | None] = concurrent.futures.Future()

    def wait(self, timeout_s: float | None = None) -> None:
        """See `base.Work.wait`; at most `timeout_s`."""
        if not self.ended.done():
            self._waits()
        try:
            error = self.ended.result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise CollectiveTimeoutError(f"{self._what} did not end within {timeout_s:.1f} s.") from None
        if error is not None:
            raise error

    def is_completed(self) -> bool:
        """See `base.Work.is_completed`."""
        return self.ended.done()

    def add_done_callback(self, callback: Callable[[EvenstepError | None], object]) -> None:
        """Call `callback` once, with the error if there was one: at once, or in the thread."""
        self.ended.add_done_callback(lambda ended: callback(ended.result()))

    def __repr__(self) -> str:
        return f"<Work {self._what} {'done' if self.is_completed() else 'queued'}>"


class WorkerThread:
    """Runs calls in the order in which they were submitted. After a call has failed, later calls fail in the same way.

    The thread starts with the first call. Callbacks run in it, and may start calls and wait for them. When a callback
    does so, another thread takes over, and this thread ends after the callback.

    Args:
        name: The thread's name.
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
        _threads.add(self)

    def submit(self, what: str, run: Callable[[int], object]) -> QueuedWork:
        """Queue a call.

        Args:
            what: The call, for messages.
            run: The function that the thread runs, called with the call's number, counted from 1.

        Raises:
            EvenstepError: A call has failed before, the thread has been closed, or this process is a forked child.
        """
        if os.getpid() != self._pid:
            raise forked_error()
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self.num_calls += 1
            work = QueuedWork(f"{what} number {self.num_calls}", self.step_aside)
            self._calls.put((functools.partial(run, self.num_calls), work))
            if self._thread in (None, threading.current_thread()):
                self._start()
        return work

    def step_aside(self) -> None:
        """Make another thread run the calls from now on, if this is the thread that runs them: a callback blocks it."""
        with self._lock:
            if self._thread is threading.current_thread():
                self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def close(self, error: EvenstepError) -> None:
        """Refuse new calls, end queued calls with this error, call `on_close`, and wait for the thread. Once."""
        if self.is_closed or os.getpid() != self._pid:
            return
        self.is_closed = True
        with self._lock:
            self.failure = self.failure or error
            self._calls.put(None)
        self._on_close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LONGEST_END_S)

    def _run(self) -> None:
        while self._thread is threading.current_thread() and (item := self._calls.get()) is not None:
            self._run_one(*item)
            del item  # frees the tensors of a finished call

    def _run_one(self, run: Callable[[], object], work: QueuedWork) -> None:
        error = self.failure
        if error is None:
            try:
                # Tensors that a caller made in inference mode can only be written in that mode. Callbacks (futures) run
                # outside of it, because the tensors that they make may be used in training.
                with torch.inference_mode():
                    run()
            except EvenstepError as raised:
                error = raised
            except BaseException as raised:  # any exception: the caller waits for the end of the call
                error = PeerLostError(f"{work!r} failed: {type(raised).__name__}: {raised}")
            if error is not None:
                self.failure = error = self.failure or error  # closing may have failed this call
                try:
                    self._on_close()
                except Exception as raised:
                    error.args = (f"{error} Closing failed, too: {raised}",)
        work.ended.set_result(error)


_threads: weakref.WeakSet[WorkerThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for thread in list(_threads):
        thread.close(PeerLostError("this process ends."))
