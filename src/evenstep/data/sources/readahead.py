"""Read-ahead: the system fetches the next part of files while the present part is in use.

The system reads ahead where it sees a file read in order. With `locality` records are shuffled, and it can't
see what comes next; but the order knows: the blocks of the next window, in long runs. Nothing is copied or counted as
this process's memory, and all processes of the node profit.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from evenstep.data.order.batch_plan import Epoch, Request
from evenstep.data.order.locality import LocalOrder
from evenstep.ground.compat.c_library.libc import c_library

_LARGEST_BYTES = 256 << 20  # a window larger than this might push the present one out of memory
_PIECE_BYTES = 256 << 10  # the system truncates a request to its own read-ahead size
_WILL_NEED = 3  # MADV_WILLNEED

_system = c_library()
_system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_system.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def will_need(content: Tensor, start: int, stop: int, *, may_look: bool = True) -> bool:
    """Advise the system to read bytes of a mapped file; returns at once.

    Does nothing if the first page is in the page cache: for a cached file the system would check every page, which
    costs a tenth of reading it.

    Args:
        content: The mapped file, uint8 [size].
        start: First byte.
        stop: The one after the last.
        may_look: This user may write the file. For other files the kernel hides which pages are cached.

    Returns:
        Whether the bytes were requested.
    """
    first = content.data_ptr() + start
    first -= first % mmap.PAGESIZE
    end = content.data_ptr() + min(stop, len(content))
    is_there = ctypes.c_ubyte()
    if first >= end:
        return False
    if may_look and (_system.mincore(first, 1, ctypes.byref(is_there)) != 0 or is_there.value & 1):
        return False
    for piece in range(first, end, _PIECE_BYTES):
        _system.madvise(piece, min(_PIECE_BYTES, end - piece), _WILL_NEED)
    return True


def reading_ahead(dataset: Any, epoch: Epoch, requests: Iterator[Request]) -> Iterator[Request]:
    """Yield the same requests, and read ahead the files of a window one window early.

    Args:
        dataset: Has `will_need(first, last)`, for neighbouring samples, and `bytes_of_sample`, or is left alone.
        epoch: Of the requests; left alone unless its order has windows. (In order the system sees it by itself, and was
            measured to be faster without us.)
        requests: In order of their steps.
    """
    order = epoch.order
    if (
        not isinstance(order, LocalOrder)
        or not callable(getattr(dataset, "will_need", None))
        or order.span * getattr(dataset, "bytes_of_sample", math.inf) > _LARGEST_BYTES
    ):
        yield from requests
        return
    span = order.span
    num_requested: int | None = None  # windows, from the beginning of the epoch
    begins_at = 0  # the next window that hasn't been entered
    for request in requests:
        start, stop = epoch.batches.global_batch(request.step)
        if num_requested is None:
            num_requested = start // span
        if stop > begins_at:
            last = (stop - 1) // span
            for number in range(num_requested, last + 2):
                for run in order.runs(number):
                    dataset.will_need(*run)
            num_requested, begins_at = last + 2, (last + 1) * span
        yield request
