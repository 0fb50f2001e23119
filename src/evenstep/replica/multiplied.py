"""What `model.backward` multiplies the loss by, for other wrapped models that the loss goes through.

[Note: a loss that goes through several models]

In `decoder.backward(loss, weight=w)` the gradient that reaches an encoder which is wrapped too has been multiplied by
w, although nobody called the encoder's `backward`. Its pass is WEIGHTED, with the same weight (`multiplied`);
divided by the number of ranks it would be about w times too large. The others are told when such a `backward`
begins: gradients of parameters that the loss uses directly may come before any output is reached, or without one, and
what an earlier reduction left in `p.grad` has to be told from them.

Per thread, because a process may train two models in two threads. Autograd has threads of its own for accelerators,
where no such call was made: what runs there belongs to the last call of all.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from torch import Tensor, nn

Weight = tuple[float | Tensor, float, bool]  # the scale that it was divided by, and whether a GradScaler scales, too

by_thread: dict[int, list[Weight]] = {}  # innermost last; empty while no `model.backward` runs
# Those that are told, in the order of wrapping, which is the same on all ranks: what they do may be collective.
models: weakref.WeakKeyDictionary[Reached, None] = weakref.WeakKeyDictionary()


class Reached(Protocol):
    """A wrapped model that somebody else's loss may go through.

    Attributes:
        parameters: Those that are trained.
    """

    parameters: list[nn.Parameter]

    def expect_pass(self, weight: Weight) -> None:
        """`backward` of another model begins."""

    def expect_no_more(self, *, has_failed: bool) -> None:
        """It is over, or has raised an exception."""


def enter(model: Reached) -> None:
    """From now on tell a model, and no longer one of the same parameters, which the collector may not have seen."""
    mine = set(map(id, model.parameters))
    for each in _alive():
        if not mine.isdisjoint(map(id, each.parameters)):
            models.pop(each, None)
    models[model] = None


def are_several() -> bool:
    """Whether a loss may go through more than one wrapped model."""
    return len(models) > 1


def _alive() -> list[Reached]:
    """Those that are told; another thread may wrap one meanwhile."""
    return [model for reference in models.keyrefs() if (model := reference()) is not None]


def begin(weight: float | Tensor, scale: float, *, is_scaled: bool, by: Reached) -> None:
    """`model.backward` multiplies by this in the calling thread, until `end`.

    Args:
        weight: See `Weight`.
        scale: See `Weight`.
        is_scaled: See `Weight`.
        by: Whose `backward` it is; the others are told.
    """
    by_thread.setdefault(threading.get_ident(), []).append((weight, scale, is_scaled))
    if are_several():
        for each in _alive():
            if each is not by:
                each.expect_pass((weight, scale, is_scaled))


def end(*, by: Reached, has_failed: bool) -> None:
    """The last `begin` of this thread is over, or has raised an exception."""
    try:
        if are_several():
            for each in _alive():
                if each is not by:
                    each.expect_no_more(has_failed=has_failed)
    finally:
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
