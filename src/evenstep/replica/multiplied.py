"""What `model.backward` multiplies the loss by, for other wrapped models that the loss goes through.

Per thread, because a process may train two models in two threads. Autograd has threads of its own for accelerators,
where no such call was made: what runs there belongs to the last call of all.
"""

from __future__ import annotations

import threading

from torch import Tensor

Weight = tuple[float | Tensor, float, bool]  # the scale that it was divided by, and whether a GradScaler scales, too

by_thread: dict[int, list[Weight]] = {}  # innermost last; empty while no `model.backward` runs


def begin(weight: float | Tensor, scale: float, *, is_scaled: bool) -> None:
    """`model.backward` multiplies by this in the calling thread, until `end`."""
    by_thread.setdefault(threading.get_ident(), []).append((weight, scale, is_scaled))


def end() -> None:
    """The last `begin` of this thread is over."""
    thread = threading.get_ident()
    by_thread[thread].pop()
    if not by_thread[thread]:
        del by_thread[thread]


def by_what() -> Weight | None:
    """The `Weight` that the running pass belongs to; None for a pass of `loss.backward()`."""
    if not by_thread:
        return None
    thread = threading.get_ident()
    mine = by_thread.get(thread)
    if mine is None and not any(each.ident == thread and not _is_foreign(each) for each in threading.enumerate()):
        mine = next(reversed(list(by_thread.values())), None)
    return mine[-1] if mine else None


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether a thread is one that python hasn't started, as autograd's aren't."""
    return isinstance(thread, threading._DummyThread)
