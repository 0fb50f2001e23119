"""Keeps freed memory in the C library's heap: on CPUs that decides how fast a step is.

[Note: memory that is given back]

glibc gives large blocks back to the kernel as soon as they are freed, and the kernel hands out the next ones page by
page, filled with zeros, a microsecond for each 4 KiB. A step frees what it has allocated, so every step pays again: a
sixth of its time where it is a small ResNet's, or one that keeps sums of gradients aside. The thresholds below let the
heap keep what the next step will need; blocks of more than 32 MiB always go back to the kernel.
"""

from __future__ import annotations

import functools

from evenstep.ground.compat.c_library import libc
from evenstep.ground.environment import is_set

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_MMAP_BYTES = 32 << 20  # the most that glibc accepts
_TRIM_BYTES = 256 << 20
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Have this process keep up to 256 MiB at the end of a heap that is unused at the moment.

    Not where the user has configured glibc (`MALLOC_TRIM_THRESHOLD_` and others), and not with another C library.
    It can't be undone: glibc has a rule of its own for both thresholds, which ends when they are set.

    Returns:
        Whether the C library has accepted it.
    """
    if any(map(is_set, _VARIABLES)):
        return False
    mallopt = libc.function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))


def give_back_freed_memory() -> None:
    """Give unused memory back to the kernel, once: after something large has gone that won't come again.

    Wherever in the heap it is; some tens of milliseconds at most. With another C library nothing happens.
    """
    trim = libc.function("malloc_trim")
    if trim is not None:
        trim(0)
