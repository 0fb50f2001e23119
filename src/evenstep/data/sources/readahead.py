"""Asking the system for the next part of files before it is read: it fetches while the present part is worked on.

The system reads ahead where it sees a file read in order. Where records are shuffled with `locality` it can't see what
comes next, but the order says: the blocks of the next window, in long runs. Nothing is copied, nothing of it counts as
this process's memory, and what is asked for by one process is there for all of the host.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from evenstep.data.locality import LocalOrder
from evenstep.data.plan import Epoch
from evenstep.data.requests import Request

_LARGEST_BYTES = 256 << 20  # a window larger than this might push the present one out of memory
_PIECE_BYTES = 256 << 10  # the system cuts a wish short at what it would read ahead by itself
_WILL_NEED = 3  # MADV_WILLNEED

_system = ctypes.CDLL(None)
_system.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_system.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def will_need(content: Tensor, start: int, stop: int, *, may_look: bool = True) -> bool:
    """Ask for bytes of a mapped file; returns at once, and is only a wish.

    Nothing is asked if the first page is in the page cache: of a file that is there the system would look at every
    page, which costs a tenth of reading it.

    Args:
        content: The mapped file, uint8 [size].
        start: First byte.
        stop: The one after the last.
        may_look: The file is this user's to write. Of others' files the kernel doesn't tell what is in the page cache.

    Returns:
        Whether the bytes were asked for.
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
    """The same requests; before those of a window are given, the files of the next one are asked for.

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
    num_asked: int | None = None  # windows, from the beginning of the epoch
    begins_at = 0  # the next window that hasn't been entered
    for request in requests:
        start, stop = epoch.plan.global_batch(request.step)
        if num_asked is None:
            num_asked = start // span
        if stop > begins_at:
            last = (stop - 1) // span
            for number in range(num_asked, last + 2):
                for run in order.runs(number):
                    dataset.will_need(*run)
            num_asked, begins_at = last + 2, (last + 1) * span
        yield request
