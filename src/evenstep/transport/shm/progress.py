"""The one thread of a process that advances calls for which no other thread waits.

A rank may start a call and then wait for something that another rank does only after that call: without this thread
both would wait for ever. The thread checks twenty times a second while calls are in flight, and sleeps otherwise. It
completes calls with a callback as soon as possible. For example, torch's DDP starts an all-reduce in the backward pass,
takes its future, and waits for the future in C++, where no evenstep code runs.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from typing import Protocol

_POLL_EVERY_S = 0.05
_TURN_S = 0.0005  # turn of a transport with callbacks, if several transports have callbacks
_NUM_IDLE_ROUNDS = 20


class Attended(Protocol):
    """The part of a transport's interface that this thread uses."""

    @property
    def has_callbacks(self) -> bool:
        """Whether a call or message has a callback."""

    def help(self, seconds: float) -> tuple[bool, bool]:
        """Advance calls, and wait up to `seconds`.

        Returns (whether calls are in flight, whether anything was done). Never raises.
        """

    def disown(self) -> None:
        """Mark the transport in a forked child as its parent's."""


class Background:
    """The thread that advances calls. It is started with the first call and ended with the last transport.

    A callback may start calls and wait for them in C++. So when a callback in this thread starts a call, another thread
    takes over; this thread ends after the callback.

    Attributes:
        is_asleep: Whether the thread sleeps, so that a new call has to wake it.
        ident: The thread's identifier.
    """

    def __init__(self) -> None:
        self.is_asleep = True
        self.ident: int | None = None
        self._attended: weakref.WeakSet[Attended] = weakref.WeakSet()
        self._lock = threading.RLock()  # reentrant: a signal handler may close a transport or start a call
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._end = threading.Event()

    def register(self, transport: Attended) -> None:
        """Advance the calls of a transport from now on. Thread-safe."""
        with self._lock:
            self._attended.add(transport)

    def forget(self, transport: Attended) -> None:
        """Stop advancing the calls of a transport, which is being closed."""
        with self._lock:
            self._attended.discard(transport)
            if self._attended:
                return
        self.stop()

    def stop(self) -> None:
        """End the thread after its current work.

        Also called when the process ends: a thread inside C++ would make python abort.
        """
        with self._lock:
            thread, self._thread = self._thread, None
            self._end.set()
            self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def wake(self) -> None:
        """Make the thread check at once: a call is in flight, or has a callback."""
        with self._lock:
            self.is_asleep = False
            is_in_callback = self.ident == threading.get_ident()
            if is_in_callback:
                self._end.set()
            if is_in_callback or self._thread is None or not self._thread.is_alive():
                self._end, self._wake = threading.Event(), threading.Event()
                self._thread = thread = threading.Thread(
                    target=self._run, args=(self._end, self._wake), name="evenstep progress", daemon=True
                )
                thread.start()
                self.ident = thread.ident
            self._wake.set()

    def disown(self) -> None:
        """Reset this in a forked child: the transports are the parent's, and its threads don't run in the child."""
        attended = list(self._attended)
        self.__init__()  # type: ignore[misc]
        for transport in attended:
            transport.disown()

    def _run(self, end: threading.Event, wake: threading.Event) -> None:
        idle_rounds = 1
        looked_at = 0.0
        while not end.is_set():
            with self._lock:
                attended = list(self._attended)
            called_back = [each for each in attended if each.has_callbacks]
            for each in called_back:
                each.help(_POLL_EVERY_S / 2 if len(called_back) == 1 else _TURN_S)
            now = time.monotonic()
            if called_back and now < looked_at + _POLL_EVERY_S:
                continue
            looked_at = now
            states = [each.help(0.0) for each in attended]
            idle_rounds = 0 if any(moved for _, moved in states) else idle_rounds + 1
            if called_back:
                continue
            if idle_rounds > _NUM_IDLE_ROUNDS and not any(is_in_flight for is_in_flight, _ in states):
                self._sleep(attended, wake)
                idle_rounds = 1
            else:
                wake.wait(_POLL_EVERY_S if idle_rounds else _TURN_S)
                wake.clear()
        if self._end is end:
            self.is_asleep = True

    def _sleep(self, attended: list[Attended], wake: threading.Event) -> None:
        wake.clear()
        self.is_asleep = True
        # Check once more: a call that was started meanwhile found this thread awake, so it hasn't woken it.
        states = [each.help(0.0) for each in attended]
        if not any(is_in_flight for is_in_flight, _ in states):
            wake.wait()
        self.is_asleep = False


background = Background()
atexit.register(lambda: background.stop())
os.register_at_fork(after_in_child=background.disown)
