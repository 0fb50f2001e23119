"""Changing attributes of other modules for the length of a `with`, in a process that exists to be observed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_NOTHING = object()


class Patches:
    """Attributes that were replaced; a context manager that restores them at its end, last ones first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in the place of an attribute; one that doesn't exist is left alone."""
        original = getattr(owner, name, None)
        if original is None:
            return
        before = vars(owner).get(name, _NOTHING)
        setattr(owner, name, make(original))
        if before is _NOTHING:
            self.later(lambda: delattr(owner, name))
        else:
            self.later(lambda: setattr(owner, name, before))

    def around(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Have `instead(original, *arguments, **named)` called in the place of a function."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*arguments: Any, **named: Any) -> Any:
                return instead(original, *arguments, **named)

            return call

        self.replace(owner, name, make)

    def later(self, undo: Callable[[], object]) -> None:
        """Call this, too, when everything is restored."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Make everything what it was before."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
