"""A thread that runs the calls of one transport, one after the other, and the works that their callers hold."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from evenstep.errors import CollectiveTimeoutError, EvenstepError, PeerLostError


class QueuedWork:
    """A call that a `CallThread` runs.

    Args:
        what: The call, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: EvenstepError | None = None
        self._told: list[Callable[[EvenstepError | None], object]] = []

    def wait(self, timeout_s: float | None = None) -> None:
        """See `base.Work.wait`; no longer than `timeout_s`."""
        if not self._ended.wait(timeout_s):
            raise CollectiveTimeoutError(f"{self._what} did not end within {timeout_s:.1f} s.")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """See `base.Work.is_completed`."""
        return self._ended.is_set()

    def when_done(self, told: Callable[[EvenstepError | None], object]) -> None:
        """Call `told` once, with the error if there was one: at once, or in the thread."""
        with self._lock:
            if not self._ended.is_set():
                self._told.append(told)
                return
        told(self._error)

    def end(self, error: EvenstepError | None) -> None:
        """The call is over."""
        with self._lock:
            self._error = error
            self._ended.set()
        for told in self._told:
            told(error)

    def __repr__(self) -> str:
        return f"<Work {self._what} {'done' if self._ended.is_set() else 'queued'}>"


class CallThread:
    """Runs calls in the order in which they were submitted. After one has failed, the others fail in the same way.

    Args:
        name: Of the thread.
        let_go: Called when a call has failed, in the thread, and when this is closed.
    """

    def __init__(self, name: str, let_go: Callable[[], object]) -> None:
        self.failure: EvenstepError | None = None
        self.is_closed = False
        self.num_calls = 0
        self._name = name
        self._let_go = let_go
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
            EvenstepError: A call has failed before, or the thread has been closed.
        """
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

    def close(self, error: EvenstepError, *, timeout_s: float = 5.0) -> None:
        """Accept nothing any more, end what is queued with this error, let go, and wait for the thread. Once."""
        if self.is_closed:
            return
        self.is_closed = True
        with self._lock:
            self.failure = self.failure or error
            self._calls.put(None)
        self._let_go()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            self._run_one(*item)
            del item  # and so the tensors of a call that is over

    def _run_one(self, run: Callable[[], object], work: QueuedWork) -> None:
        error = self.failure
        if error is None:
            try:
                # In no other mode may it write to tensors that a caller has made in this one. What callers hang on
                # the end of a call (futures) runs outside: what it makes is to be trained with.
                with torch.inference_mode():
                    run()
            except EvenstepError as raised:
                error = raised
            except Exception as raised:  # whatever it is, whoever waits has to be told
                error = PeerLostError(f"{work!r} failed: {raised}")
            if error is not None:
                self.failure = self.failure or error
                self._let_go()
        work.end(error)
