"""Files in this process's memory. Python's mmap would keep a descriptor for each mapping, and a model has hundreds."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from evenstep.ground.compat.c_library.libc import c_library

_PROT_READ_WRITE = 3
_MAP_SHARED, _MAP_POPULATE = 1, 0x8000
_MAP_FAILED = (1 << (8 * ctypes.sizeof(ctypes.c_void_p))) - 1

_libc = c_library(use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_file(fd: int, *, num_bytes: int, offset: int = 0, populate: bool = False) -> Any:
    """Map a range of a file, shared with other processes. Returns bytes (ctypes), mapped until nothing refers to them.

    Args:
        fd: The file's descriptor; it may be closed afterwards.
        num_bytes: The length of the range.
        offset: The beginning of the range, a multiple of the page size.
        populate: Load the whole range into memory now.

    Raises:
        OSError: The system refuses the mapping.
    """
    flags = _MAP_SHARED | (_MAP_POPULATE if populate else 0)
    address = _mmap(None, num_bytes, _PROT_READ_WRITE, flags, fd, offset)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {num_bytes} bytes at {offset}: {os.strerror(code)}")
    memory: Any = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(memory, _munmap, address, num_bytes).atexit = False
    return memory
