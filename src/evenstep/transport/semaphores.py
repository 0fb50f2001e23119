"""Counting semaphores in memory that several processes share.

[Note: memory ordering]

Data in the segment is written with plain stores and announced with `sem_post`; it is read after `sem_trywait` or
`sem_clockwait` has taken that announcement. POSIX makes these calls synchronise memory on every architecture, so
nothing here leans on the strong ordering of x86: arm64 needs no other code. No flag is ever read with a plain load
to decide that data is there.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

# glibc's and musl's sem_t has 32 bytes; a cache line each keeps two ranks from pulling at one.
SEMAPHORE_BYTES = 64

_CLOCK_MONOTONIC = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


# What can't block keeps the interpreter lock: giving it up and taking it again costs more than the call itself.
_quick = ctypes.PyDLL(None)
_slow = ctypes.CDLL(None)

sem_post = _quick.sem_post
sem_post.argtypes = [ctypes.c_void_p]
sem_trywait = _quick.sem_trywait
sem_trywait.argtypes = [ctypes.c_void_p]
_sem_init = _quick.sem_init
_sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
# A wait by the clock on the wall would last as long as somebody sets that clock back.
_HAS_CLOCKWAIT = hasattr(_slow, "sem_clockwait")
if _HAS_CLOCKWAIT:
    _sem_clockwait = _slow.sem_clockwait
    _sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_TimeSpec)]
else:
    _sem_timedwait = _slow.sem_timedwait
    _sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_TimeSpec)]


def make_semaphores(address: int, count: int) -> None:
    """Initialise `count` semaphores of value 0, one after the other from `address` on. One process does it."""
    for each in semaphore_addresses(address, count):
        if _sem_init(each, 1, 0) != 0:
            raise OSError(f"sem_init refused a semaphore shared between processes at address {each:#x}")


def semaphore_addresses(address: int, count: int) -> Iterator[int]:
    """Where each of `count` semaphores lies. Pure."""
    return iter(range(address, address + count * SEMAPHORE_BYTES, SEMAPHORE_BYTES))


def take(address: int, timeout_s: float) -> bool:
    """Take one count, sleeping up to `timeout_s` for it; whether there was one. May return early without one."""
    now = time.monotonic() if _HAS_CLOCKWAIT else time.time()
    end_ns = int((now + timeout_s) * 1e9)
    until = _TimeSpec(end_ns // 1_000_000_000, end_ns % 1_000_000_000)
    if _HAS_CLOCKWAIT:
        return bool(_sem_clockwait(address, _CLOCK_MONOTONIC, ctypes.byref(until)) == 0)
    return bool(_sem_timedwait(address, ctypes.byref(until)) == 0)
