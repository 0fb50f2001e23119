"""Changing attributes of other modules for a while, in a process that exists to be watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_NOTHING = object()


class Patches:
    """Attributes that were replaced, and what they were."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(what is there)` in the place of an attribute; one that isn't there is left alone."""
        original = getattr(owner, name, None)
        if original is None:
            return
        before = vars(owner).get(name, _NOTHING)
        setattr(owner, name, make(original))
        if before is _NOTHING:
            self.later(lambda: delattr(owner, name))
        else:
            self.later(lambda: setattr(owner, name, before))

    def later(self, undo: Callable[[], object]) -> None:
        """Also do this when all is put back."""
        self._undo.append(undo)

    def put_back(self) -> None:
        """As it was before, last things first."""
        while self._undo:
            self._undo.pop()()
