"""`Epochs`: calls `set_epoch` of a script's objects, and notices the script's own calls.

A script that calls `sampler.set_epoch(epoch)` itself means the loader's next iteration; if it doesn't call it, the
loader does. So `set_epoch` of each object is replaced, on the object, by a `_Watched` that informs the loaders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol
from weakref import WeakSet

_INSIDE = ("sampler", "batch_sampler", "dataset")


class Listener(Protocol):
    """A loader."""

    def set_epoch(self, epoch: int) -> None:
        """The script has chosen the epoch of the next iteration."""


class Epochs:
    """Calls `set_epoch` of objects, and of the `.sampler`, `.batch_sampler`, `.dataset` and `.datasets` inside.

    Args:
        roots: The objects.
        listener: Called when the script itself calls `set_epoch` of such an object.
    """

    def __init__(self, *roots: Any, listener: Listener | None = None) -> None:
        self._targets = [each for root in roots for each in _with_set_epoch(root)]
        for target in self._targets if listener is not None else ():
            if (watched := _watched(target)) is not None:
                watched.listeners.add(listener)

    def tell(self, epoch: int, *, again: bool = False) -> None:
        """Call `set_epoch` of objects that aren't in that epoch yet; with `again`, of all."""
        for target in self._targets:
            watched = _watched(target)
            if watched is None:
                target.set_epoch(epoch)
            elif again or watched.epoch != epoch:
                watched.epoch = epoch
                watched.original(epoch)


def _with_set_epoch(root: Any) -> Iterator[Any]:
    seen: list[Any] = []
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if each is None or any(each is other for other in seen):
            continue
        seen.append(each)
        if callable(getattr(each, "set_epoch", None)):
            yield each
        waiting += [getattr(each, name, None) for name in _INSIDE]
        several = getattr(each, "datasets", None)
        waiting += several if isinstance(several, list | tuple) else ()


class _Watched:
    """Replaces an object's `set_epoch`. A copy of the object, or one in a worker, has the original again.

    Attributes:
        epoch: The latest epoch that was set; None: none was set.
        original: The object's own `set_epoch`.
        listeners: Called after the script's calls.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.original = owner.set_epoch
        self.epoch: int | None = None
        self.listeners: WeakSet[Any] = WeakSet()

    def __call__(self, epoch: int, *args: Any, **kwargs: Any) -> Any:
        self.epoch = epoch
        result = self.original(epoch, *args, **kwargs)
        for listener in list(self.listeners):
            listener.set_epoch(epoch)
        return result

    def __reduce__(self) -> Any:
        return getattr, (self._owner, "set_epoch")


def _watched(target: Any) -> _Watched | None:
    """The object's `_Watched`; None if no attribute can be set on the object."""
    found = getattr(target, "set_epoch", None)
    if isinstance(found, _Watched) and found._owner is not target:  # from a shallow copy of another object
        del target.set_epoch
        found = None
    if not isinstance(found, _Watched):
        with contextlib.suppress(AttributeError, TypeError):
            target.set_epoch = found = _Watched(target)
    return found if isinstance(found, _Watched) else None
