"""A thread that ends the calls of one transport as soon as that is possible, for callers who don't wait themselves.

torch's DDP, for one, launches an all-reduce in the backward pass, takes its future, and waits for that in C++, where
nothing of ours runs. The thread starts when somebody first wants to be told of a call's end (`when_done`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from evenstep.transport.semaphores import sem_post, take

LOOK_AGAIN = 0  # no semaphore lies at address 0


class Progress:
    """Sleeps until another rank has come further, or until it is woken.

    Args:
        go_on: Does what can be done, and returns the semaphore to sleep on, `LOOK_AGAIN`, or None: nobody waits to be
            told of a call. Never raises.
        look_every_s: Asleep, how often to look all the same.
        keep: Held as long as the thread may sleep on a semaphore: the memory in which they lie.
    """

    def __init__(self, go_on: Callable[[], int | None], look_every_s: float, keep: object) -> None:
        self._go_on = go_on
        self._look_every_s = look_every_s
        self._keep = keep
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def wake(self) -> None:
        """There is something to be done."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="evenstep progress", daemon=True)
            self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """End within some hundredths of a second. Doesn't wait for it: the last word may be said in this thread."""
        self._is_stopped = True
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            if self._is_stopped:
                break
            self._wake.clear()
            while not self._is_stopped and (semaphore := self._go_on()) is not None:
                # Only to sleep: what has been announced is put back, for whoever counts announcements. A rank that
                # sleeps on the same semaphore meanwhile is woken by that.
                if semaphore != LOOK_AGAIN and take(semaphore, self._look_every_s):
                    sem_post(semaphore)
        self._keep = None


class Waiting:
    """For how long the same thing has been waited for, by who comes again and again to look."""

    def __init__(self) -> None:
        self._what: object = None
        self._since = 0.0

    def seconds_for(self, what: object) -> float:
        """0 where this is asked for the first time after something else."""
        now = time.monotonic()
        if self._what != what:
            self._what, self._since = what, now
        return now - self._since
