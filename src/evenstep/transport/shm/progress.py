"""Two threads that advance calls which no thread of this rank waits for.

`Progress`, one for each transport, ends calls that have a callback as soon as that is possible. For
example, torch's DDP launches an all-reduce in the backward pass, takes its future, and waits for that in C++, where no
code of ours runs. The thread starts with the first callback.

`Helper`, one for each process, advances calls whose rank is busy elsewhere. Nothing needs it as long as ranks wait
for the calls that they launch. But a rank may launch a call and then wait for something that another rank does only
after that call: without the helper both would wait for ever. It checks twenty times a second while calls are in flight,
and sleeps otherwise.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from evenstep.transport.shm.sync import sem_post, take

RETRY_LATER = 0  # no semaphore lies at address 0


class Progress:
    """The thread of one transport that ends calls which have a callback.

    Args:
        advance: Does what can be done, and returns the semaphore to sleep on, `RETRY_LATER`, or None: no call has a
            callback. Never raises.
        check_every_s: Asleep, how often to advance all the same.
        keep: Held as long as the thread may sleep on a semaphore: the memory in which they lie.
    """

    def __init__(self, advance: Callable[[], int | None], check_every_s: float, keep: object) -> None:
        self._advance = advance
        self._check_every_s = check_every_s
        self._keep = keep
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def wake(self) -> None:
        """Wake the thread: there is something to do."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evenstep progress", daemon=True)
            self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """End within some hundredths of a second. Doesn't wait: the last callback may run in this thread."""
        self._is_stopped = True
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if self._is_stopped:
                break
            self._wake.clear()
            while not self._is_stopped and (semaphore := self._advance()) is not None:
                # Only to sleep: the signal is put back, for the thread that counts signals. A rank that
                # sleeps on the same semaphore meanwhile is woken by that.
                if semaphore != RETRY_LATER and take(semaphore, self._check_every_s):
                    sem_post(semaphore)
        self._keep = None


class WaitTimer:
    """Measures how long the same thing has been waited for."""

    def __init__(self) -> None:
        self._what: object = None
        self._since = 0.0

    def seconds_for(self, what: object) -> float:
        """Seconds since `what` was first given here after something else."""
        now = time.monotonic()
        if self._what != what:
            self._what, self._since = what, now
        return now - self._since


_ADVANCE_EVERY_S = 0.05
_NUM_IDLE_ROUNDS = 20


class Helped(Protocol):
    """A transport, as the helper sees it."""

    def help(self) -> tuple[bool, bool]:
        """Advance without waiting: (whether calls are in flight, whether anything could be done). Never raises."""

    def disown(self) -> None:
        """Note in a forked child that the transport is its parent's."""


class Helper:
    """The one thread of a process, started with the first call and ended with the last transport.

    Attributes:
        is_asleep: A new call has to wake it.
    """

    def __init__(self) -> None:
        self.is_asleep = True
        self._helped: weakref.WeakSet[Helped] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._end = threading.Event()

    def register(self, transport: Helped) -> None:
        """Advance the calls of a transport from now on. Thread-safe."""
        with self._lock:
            self._helped.add(transport)

    def forget(self, transport: Helped) -> None:
        """Stop advancing the calls of a transport, which is being closed."""
        with self._lock:
            self._helped.discard(transport)
            thread = self._thread
            if self._helped or thread is None or thread is threading.current_thread():
                return
            self._thread = None
            self._end.set()
            self._wake.set()
        thread.join(timeout=1.0)

    def wake(self) -> None:
        """Wake the thread: a call is in flight."""
        with self._lock:
            self.is_asleep = False
            self._wake.set()
            if self._thread is None or not self._thread.is_alive():
                self._end = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._end,), name="evenstep helper", daemon=True
                )
                self._thread.start()

    def disown(self) -> None:
        """Start afresh in a forked child: the transports are the parent's, and its threads aren't here."""
        helped = list(self._helped)
        self.__init__()  # type: ignore[misc]
        for transport in helped:
            transport.disown()

    def _run(self, end: threading.Event) -> None:
        idle_rounds = 1
        while not end.wait(_ADVANCE_EVERY_S if idle_rounds else 0.0002):
            in_flight, moved = self._advance_all()
            idle_rounds = 0 if moved else idle_rounds + 1
            if not in_flight and idle_rounds > _NUM_IDLE_ROUNDS:
                self._wake.clear()
                self.is_asleep = True
                # Once more: a call launched in between has found the helper awake, and hasn't woken it.
                if not self._advance_all()[0]:
                    self._wake.wait()
                self.is_asleep = False
                idle_rounds = 1
        self.is_asleep = True

    def _advance_all(self) -> tuple[bool, bool]:
        with self._lock:
            helped = list(self._helped)
        states = [transport.help() for transport in helped]
        return any(in_flight for in_flight, _ in states), any(moved for _, moved in states)


helper = Helper()
os.register_at_fork(after_in_child=helper.disown)
