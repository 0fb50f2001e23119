"""A thread that goes on with calls whose rank is busy elsewhere.

Nothing needs it as long as ranks wait for the calls that they launch. But a rank may launch a call and then wait for
something that another rank does only after that call: without the helper both would wait for ever. It looks twenty
times a second while calls are in flight, and sleeps otherwise.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

_LOOK_EVERY_S = 0.05
_NUM_IDLE_LOOKS = 20


class Helped(Protocol):
    """What the helper knows of a transport."""

    def help(self) -> tuple[bool, bool]:
        """Go on without waiting: (whether calls are in flight, whether anything could be done). Never raises."""

    def disown(self) -> None:
        """This is a forked child: the transport is its parent's."""


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
        """From now on look at a transport, too."""
        with self._lock:
            self._helped.add(transport)

    def forget(self, transport: Helped) -> None:
        """A transport is being closed."""
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
        """A call is in flight."""
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
        """In a forked child: the transports are the parent's, and threads and the holders of locks aren't here."""
        helped = list(self._helped)
        self.__init__()  # type: ignore[misc]
        for transport in helped:
            transport.disown()

    def _run(self, end: threading.Event) -> None:
        idle_looks = 1
        while not end.wait(_LOOK_EVERY_S if idle_looks else 0.0002):
            in_flight, moved = self._look()
            idle_looks = 0 if moved else idle_looks + 1
            if not in_flight and idle_looks > _NUM_IDLE_LOOKS:
                self._wake.clear()
                self.is_asleep = True
                # Once more: a call launched in between has found the helper awake, and hasn't woken it.
                if not self._look()[0]:
                    self._wake.wait()
                self.is_asleep = False
                idle_looks = 1
        self.is_asleep = True

    def _look(self) -> tuple[bool, bool]:
        with self._lock:
            helped = list(self._helped)
        looks = [transport.help() for transport in helped]
        return any(in_flight for in_flight, _ in looks), any(moved for _, moved in looks)


helper = Helper()
os.register_at_fork(after_in_child=helper.disown)
