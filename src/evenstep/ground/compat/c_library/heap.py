"""Keeps freed memory in the C library's heap, which makes steps on CPUs faster.

[Note: memory that is given back]

glibc gives large blocks back to the kernel as soon as they are freed. For the next block the kernel fills new pages
with zeros, a microsecond for each 4 KiB. A step frees everything that it has allocated, so every step pays for this
again: a sixth of the time of a small ResNet's step, or of a step with separate sums of gradients. With the thresholds
below, the heap keeps the memory for the next step; blocks of more than 32 MiB are always given back.
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

    Does nothing if the user has configured glibc (`MALLOC_TRIM_THRESHOLD_` and others), or with another C library. The
    setting can't be undone: glibc adapts both thresholds itself until they are set.

    Returns:
        Whether the C library has accepted the setting.
    """
    if any(map(is_set, _VARIABLES)):
        return False
    mallopt = libc.function("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES))


def give_back_freed_memory() -> None:
    """Give unused memory back to the kernel, once. Call it after freeing a large object that isn't needed again.

    This frees memory in all parts of the heap, and takes some tens of milliseconds at most. With another C library
    nothing happens.
    """
    trim = libc.function("malloc_trim")
    if trim is not None:
        trim(0)
