"""Memory that CPU ranks of one host have in common: the same pages, wherever each of them has mapped these.

Unlike a zone of the segment, where a rank's memory ends with the rank's last tensor, it ends with the last rank's: it
is a file without a name of its own (memfd), and nobody keeps a descriptor once all have mapped it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from evenstep.errors import ConfigurationError
from evenstep.transport.base import Transport
from evenstep.transport.segment import PAGE_BYTES, Mapping, allocate_range, make_file, open_file, round_up

NAME = "evenstep common"  # as /proc/PID/smaps shows it, behind "/memfd:"

_ranges: dict[int, int] = {}  # of what this process has mapped: bytes, by address


def ranks_in_reach(transport: Transport) -> Sequence[int]:
    """The ranks whose memory this one can map, itself included; empty where the transport knows of none."""
    return getattr(transport, "memory_ranks", ())


def map_in_common(
    exchange: Callable[[Any], list[Any]], ranks: Sequence[int], rank: int, num_bytes: int, *, what: str
) -> Mapping:
    """Memory of a host's ranks, zeroed.

    Collective: every rank of the world calls this, those of one host with the same length.

    Args:
        exchange: Gives every rank's value, in order of rank, on every rank.
        ranks: Those that this rank shares memory with, itself included; the first of them makes it.
        rank: This rank.
        num_bytes: How much.
        what: What it is for, in messages.

    Raises:
        ConfigurationError: It couldn't be made or mapped on some rank. Raised on all of them.
    """
    length = round_up(max(num_bytes, 1), PAGE_BYTES)
    fd, problem = -1, None
    if rank == ranks[0]:
        fd, problem = _make(length, what)
    try:
        offers = exchange({"problem": problem, "pid": os.getpid(), "fd": fd})
        _raise_first([offer["problem"] for offer in offers])
        mapping, problem = None, None
        try:
            mapping = _map(fd, offers[ranks[0]], length)
        except OSError as error:
            problem = f"the {what} of rank {ranks[0]} can't be reached: {error}"
        _raise_first(exchange(problem))
    finally:
        if fd >= 0:
            os.close(fd)
    assert mapping is not None
    _ranges[mapping.address] = length
    weakref.finalize(mapping.raw, _ranges.pop, mapping.address, None).atexit = False
    return mapping


def is_in_common(tensor: Tensor) -> bool:
    """Whether a tensor's memory is other ranks' as well, so that what one of them writes is written for all."""
    if not _ranges or tensor.device.type != "cpu":
        return False
    address = tensor.data_ptr()
    return any(start <= address < start + length for start, length in _ranges.items())


def _make(length: int, what: str) -> tuple[int, str | None]:
    fd = -1
    try:
        fd = make_file(NAME, length)
        allocate_range(fd, 0, length, what=what)
    except (OSError, ConfigurationError) as error:
        if fd >= 0:
            os.close(fd)
        return -1, str(error)
    return fd, None


def _map(own_fd: int, offer: dict[str, Any], length: int) -> Mapping:
    if own_fd >= 0:
        return Mapping(own_fd, offset=0, num_bytes=length, populate=True)
    fd = open_file(offer["pid"], offer["fd"])
    try:
        if os.fstat(fd).st_size != length:
            raise OSError(f"file {offer['fd']} of process {offer['pid']} is not it")
        return Mapping(fd, offset=0, num_bytes=length, populate=True)
    finally:
        os.close(fd)


def _raise_first(problems: Sequence[str | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ConfigurationError(f"on rank {rank}: {problem}")
