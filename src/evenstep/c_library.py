"""Functions of the libraries that this process has loaded, which python doesn't know by name."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def function(name: str) -> Callable[..., Any] | None:
    """A function by name, of the C library for example; None where there is none: another library, another system."""
    try:
        found: Callable[..., Any] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # TypeError: a system without a list of all symbols
        return None
    return found
