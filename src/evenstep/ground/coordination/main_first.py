"""Rank 0 runs a block before the other ranks; the rendezvous store carries the signal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch.distributed import Store

from evenstep.errors import OtherRankFailedError
from evenstep.ground.health import heartbeat


@contextlib.contextmanager
def main_first(store: Store | None, number: int, *, is_main: bool) -> Iterator[bool]:
    """Context in which rank 0 runs the block first; the others wait as long as that takes.

    Collective. Yields whether this is rank 0.

    Args:
        store: The store in which rank 0 reports that it is done; None in a world of one.
        number: The number of earlier blocks, the same on all ranks.
        is_main: Whether this is rank 0.

    Raises:
        OtherRankFailedError: On the other ranks, when the block raised on rank 0.
    """
    heartbeat.mark(heartbeat.Phase.MAIN_FIRST)
    key = f"evenstep/main_first/{number}"
    if store is None:
        yield True
    elif is_main:
        try:
            yield True
        except BaseException as error:
            store.set(key, f"{type(error).__name__}: {error}")
            raise
        store.set(key, "")
    else:
        # Poll the store: a barrier has a deadline, which would treat a long download as a hang.
        pause_s = 0.01
        while not store.check([key]):
            time.sleep(pause_s)
            pause_s = min(0.25, pause_s * 1.5)
        problem = store.get(key).decode()
        if problem:
            # Wait a moment with this secondary failure, so that rank 0 reports the root cause first.
            time.sleep(0.2)
            raise OtherRankFailedError(f"main_first: the block failed on rank 0: {problem}")
        yield False
    heartbeat.mark(heartbeat.Phase.BETWEEN_STEPS)
