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
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

_FIRST_TAG = 0x65760000  # what else is sent over the group has another
_NUM_TAGS = 1 << 16
_LONGEST_END_S = 5.0


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
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._waiter: threading.Thread | None = None
        self._error: BaseException | None = None
        self._works: list[Any] = [
            group.recv([received[peer]], peer, tag) for peer in ((me - step) % size for step in steps)
            if received[peer].numel()
        ]  # fmt: skip
        self._works += [
            group.send([sent[peer]], peer, tag) for peer in ((me + step) % size for step in steps)
            if sent[peer].numel()
        ]  # fmt: skip
        received[me].copy_(sent[me])
        weakref.finalize(self, _wait_for_dropped, self._works, self._timeout).atexit = False

    def wait(self) -> None:
        """Return when all have arrived.

        Raises:
            RuntimeError: A part didn't come in time, or will never come.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                while self._works:  # each is waited for once: Gloo would wait for another message
                    self._works[0].wait(self._timeout)
                    del self._works[0]
            except RuntimeError as error:
                self._error = error
                raise

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. Gloo can't say: from the first query on, a thread waits."""
        if self._waiter is None and self._works:
            self._waiter = _start_thread(self._wait_quietly)
        return not self._works or self._error is not None

    def _wait_quietly(self) -> None:
        with contextlib.suppress(RuntimeError):  # kept for `wait`
            self.wait()


def _wait_for_dropped(works: list[Any], timeout: timedelta) -> None:
    if works:
        _start_thread(_wait_in_turn, works, timeout)


def _wait_in_turn(works: list[Any], timeout: timedelta) -> None:
    with contextlib.suppress(RuntimeError):
        for work in works:
            work.wait(timeout)


def _start_thread(target: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name="evenstep full duplex", daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def join_threads() -> None:
    """Wait for the threads that wait, when their calls have been ended: inside Gloo they would outlast python."""
    for thread in list(_threads):
        thread.join(_LONGEST_END_S)
