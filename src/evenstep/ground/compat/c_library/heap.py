"""Keeps freed memory in the C library's heap, which makes steps on CPUs faster.

[Note: memory that is given back]

glibc gives large blocks back to the kernel as soon as they are freed, and the kernel hands out the next ones page by
page, filled with zeros, a microsecond for each 4 KiB. A step frees all that it has allocated, so every step pays this
again: a sixth of the time for a small ResNet, or for a step with separate sums of gradients. With the thresholds below,
the heap keeps the memory for the next step; blocks of more than 32 MiB are always given back.
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
    """Make this process keep up to 256 MiB of unused memory at the end of a heap.

    Does nothing if the user has configured glibc (`MALLOC_TRIM_THRESHOLD_` and others), or with another C library. It
    can't be undone: glibc adapts both thresholds itself, and stops doing that as soon as they are set.

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
    """Give unused memory back to the kernel, once: after a large object was freed that won't be needed again.

    Memory from all parts of the heap; takes some tens of milliseconds at most. With another C library nothing happens.
    """
    trim = libc.function("malloc_trim")
    if trim is not None:
        trim(0)
