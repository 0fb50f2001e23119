"""Full-duplex exchange over Gloo: both directions of a connection at once.

[Note: receive before send]

Gloo sends a vector when the other rank has announced its receive. The announcement uses the same connection as the
data:

    torch's all-to-all               A  receive ·····························  sends ▇▇▇▇▇▇▇
                                     B  ·········  sends ▇▇▇▇▇▇▇ receive ····
    here                             A  receive ·········  sends ▇▇▇▇▇▇▇
                                     B  ········· receive  sends ▇▇▇▇▇▇▇

torch's all-to-all, and its all-gather of two ranks, post the send before the receive. The second rank that calls
already has the first rank's announcement, so it sends its vector at once, and its own announcement waits behind the
vector. So the first rank sends only after it has received everything, and a full-duplex wire is used in one direction
at a time. Here every rank posts its receives first.

Each call's messages have their own tag. So a message without a receive, which occurs if ranks call with different
sizes, is never mistaken for a later call's message: its sender waits until the deadline, and names the call.
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

_FIRST_TAG = 0x65760000  # other messages over the group have other tags
_NUM_TAGS = 1 << 16


class FullDuplex:
    """An exchange in which all ranks of a group send each other parts (see `transport.base.Work`).

    Collective: every rank of the group makes one, in the same order. Gloo drops a receive together with the last
    reference to its work, so a thread waits if no caller does.

    Args:
        group: A group over Gloo.
        received: For each rank, memory for the part from that rank: one dimension, contiguous.
        sent: For each rank, the part for that rank, of the length that it expects. Don't write to it before `wait` has
            returned.
        number: The call's number; the same on all ranks.
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
        """Return when all parts have arrived.

        Raises:
            RuntimeError: A part didn't arrive in time, or can't arrive any more.
        """
        self._parts.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Gloo can't be queried, so a thread waits from the first query on."""
        self._parts.wait_in_thread()
        return not self._parts.works or self._parts.error is not None


class _Parts:
    """The works of the parts in flight."""

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
                while self.works:  # wait for each only once: a second wait would wait for another message
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
        with contextlib.suppress(RuntimeError):  # `wait` raises the error
            self.wait()


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def join_threads() -> None:
    """Join the waiting threads after the end of their calls: a thread inside Gloo must not run longer than python."""
    for thread in list(_threads):
        thread.join(LONGEST_END_S)
