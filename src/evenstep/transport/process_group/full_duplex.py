"""Full-duplex exchange over Gloo: both directions of a connection at once.

[Note: receive before send]

Gloo sends a vector when the other rank has announced its receive, on the connection that carries everything else:

    torch's all-to-all               A  receive ·····························  sends ▇▇▇▇▇▇▇
                                     B  ·········  sends ▇▇▇▇▇▇▇ receive ····
    here                             A  receive ·········  sends ▇▇▇▇▇▇▇
                                     B  ········· receive  sends ▇▇▇▇▇▇▇

torch's all-to-all, and its all-gather of two ranks, post the send before the receive. The second rank to call already
has the first one's announcement, so it puts its vector on the wire; its own announcement queues after that. So the
first rank sends only after it has received all, and a wire that carries as much in either direction is used in one
direction at a time. Here every rank posts its receives first.

A call's messages have a tag of their own. A message without a receive, because ranks call with different sizes, is
never taken for a later call's: its sender waits until the deadline, and names the call.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from evenstep.transport.core.worker_thread import LONGEST_END_S

_FIRST_TAG = 0x65760000  # what else is sent over the group has another
_NUM_TAGS = 1 << 16


class FullDuplex:
    """Parts that all ranks of a group send each other (see `transport.base.Work`).

    Collective: every rank of the group makes one, in the same order. Gloo drops a receive with the last
    reference to its work; so where no caller waits for it, a thread does.

    Args:
        group: Over Gloo.
        received: By rank, what comes from it: one dimension, contiguous.
        sent: By rank, what goes to it; as long as what it receives. Not written to before `wait` has returned.
        number: Of the call; the same on all ranks.
        timeout_s: Deadline of each part.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        received: Sequence[Tensor],
        sent: Sequence[Tensor],
        *,
        number: int,
        timeout_s: float,
    ) -> None:
        me, size = group.rank(), group.size()
        steps = range(1, size)
        tag = _FIRST_TAG + number % _NUM_TAGS
        works: list[Any] = [
            group.recv([received[peer]], peer, tag) for peer in ((me - step) % size for step in steps)
            if received[peer].numel()
        ]  # fmt: skip
        works += [
            group.send([sent[peer]], peer, tag) for peer in ((me + step) % size for step in steps)
            if sent[peer].numel()
        ]  # fmt: skip
        received[me].copy_(sent[me])
        self._parts = _Parts(works, timedelta(seconds=timeout_s))
        weakref.finalize(self, self._parts.wait_in_thread).atexit = False

    def wait(self) -> None:
        """Return when all have arrived.

        Raises:
            RuntimeError: A part didn't come in time, or will never come.
        """
        self._parts.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Gloo can't say: from the first query on, a thread waits."""
        self._parts.wait_in_thread()
        return not self._parts.works or self._parts.error is not None


class _Parts:
    """The works of the parts under way."""

    def __init__(self, works: list[Any], timeout: timedelta) -> None:
        self.works = works
        self.error: RuntimeError | None = None
        self._timeout = timeout
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wait(self) -> None:
        with self._lock:
            if self.error is not None:
                raise self.error
            try:
                while self.works:  # each is waited for once: Gloo would wait for another message
                    self.works[0].wait(self._timeout)
                    del self.works[0]
            except RuntimeError as error:
                self.error = error
                raise

    def wait_in_thread(self) -> None:
        if self._thread is None and self.works and self.error is None:
            self._thread = threading.Thread(target=self._wait_quietly, name="evenstep full duplex", daemon=True)
            _threads.add(self._thread)
            self._thread.start()

    def _wait_quietly(self) -> None:
        with contextlib.suppress(RuntimeError):  # kept for `wait`
            self.wait()


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def join_threads() -> None:
    """Wait for the threads that wait, when their calls have been ended: one inside Gloo must not outlast python."""
    for thread in list(_threads):
        thread.join(LONGEST_END_S)
