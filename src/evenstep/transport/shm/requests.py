"""A request that any rank sends to all others, whatever these are doing: each has a thread asleep that serves it.

The only one so far: make Gloo, which carries messages between two ranks. A rank that waits elsewhere, or computes, has
to take part in that, although it calls nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from evenstep.transport.shm.sync import sem_post, take

_AT_MOST_ASLEEP_S = 3600.0  # then it goes to sleep again


class Requests:
    """This rank's side. The thread starts at once, and ends with the first request.

    Args:
        semaphores: The address of every rank's.
        rank: This rank.
        serve: Called in the thread when a rank requests it. Never raises.
        keep: Held as long as the thread may sleep: the memory in which the semaphores lie.
    """

    def __init__(self, semaphores: Sequence[int], rank: int, serve: Callable[[], object], keep: object) -> None:
        self._semaphores = semaphores
        self._rank = rank
        self._serve = serve
        self._keep = keep
        self._is_stopped = False
        threading.Thread(target=self._run, name="evenstep requests", daemon=True).start()

    def send(self) -> None:
        """Request it of all other ranks. Waits for none."""
        for rank, semaphore in enumerate(self._semaphores):
            if rank != self._rank:
                sem_post(semaphore)

    def stop(self) -> None:
        """End the thread. Doesn't wait for it."""
        self._is_stopped = True
        sem_post(self._semaphores[self._rank])

    def _run(self) -> None:
        while not take(self._semaphores[self._rank], _AT_MOST_ASLEEP_S):
            pass
        if not self._is_stopped:
            self._serve()
        self._keep = None
