"""Replaces attributes of other modules until a `with` ends, in a process that exists to be observed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_NOTHING = object()


class Patches:
    """A context manager that restores replaced attributes at its end, in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by `make(original)`; does nothing if there is no such attribute."""
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
        """Replace a function by one that calls `instead(original, *arguments, **named)`."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def call(*arguments: Any, **named: Any) -> Any:
                return instead(original, *arguments, **named)

            return call

        self.replace(owner, name, make)

    def later(self, undo: Callable[[], object]) -> None:
        """Call a function when the attributes are restored."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Restore all attributes now."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
