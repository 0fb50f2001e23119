"""Functions of the C library, and of other loaded libraries, that python doesn't offer."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def c_library(*, keeps_gil: bool = False, use_errno: bool = False) -> ctypes.CDLL:
    """All symbols of the libraries that this process has loaded.

    The result is shared: only one module may call a function of it and set the function's `argtypes`.

    Args:
        keeps_gil: Calls keep the interpreter lock. For functions that can't block, because releasing the lock costs
            more than the call.
        use_errno: Calls leave `errno` for `ctypes.get_errno`.

    Raises:
        OSError, TypeError: The system has no list of all symbols.
    """
    return ctypes.PyDLL(None) if keeps_gil else ctypes.CDLL(None, use_errno=use_errno)


def function(name: str) -> Callable[..., Any] | None:
    """A function by name; None if this system's library lacks it."""
    try:
        found: Callable[..., Any] = getattr(c_library(), name)
    except (AttributeError, OSError, TypeError):
        return None
    return found
