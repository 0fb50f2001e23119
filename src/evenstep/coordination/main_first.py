"""Rank 0 first, the others behind it: in turns, through the store in which the ranks have met."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from torch._C._distributed_c10d import Store

from evenstep.errors import MainFailedError
from evenstep.health import page


@contextlib.contextmanager
def main_first(store: Store | None, number: int, *, is_main: bool) -> Iterator[bool]:
    """Around a block that rank 0 runs first; the others wait for it, as long as it takes.

    Collective. Yields whether this is rank 0.

    Args:
        store: Where rank 0 says that it is done; None in a world of one.
        number: How many such blocks there were before, the same on all ranks.
        is_main: Whether this is rank 0.

    Raises:
        MainFailedError: On the other ranks, when the block raised on rank 0.
    """
    page.mark(page.Phase.MAIN_FIRST)
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
        # Polled, and not a barrier: a barrier's deadline would take a long download for a hang.
        pause_s = 0.01
        while not store.check([key]):
            time.sleep(pause_s)
            pause_s = min(0.25, pause_s * 1.5)
        problem = store.get(key).decode()
        if problem:
            # The witness waits a moment, so that rank 0's own account is the first.
            time.sleep(0.2)
            raise MainFailedError(f"main_first: the block failed on rank 0: {problem}")
        yield False
    page.mark(page.Phase.BETWEEN_STEPS)
