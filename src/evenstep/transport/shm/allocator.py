"""Bucket memory: a rank's own zone of the shared segment, and views of other ranks' zones."""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import os
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, PeerLostError
from evenstep.transport.core.reduction import round_up
from evenstep.transport.shm.segment import PAGE_BYTES, Mapping, Segment, allocate_range, release_range


class FreeList:
    """The free ranges of a zone. Pure: numbers in, numbers out.

    Args:
        num_bytes: Length of the zone.
    """

    def __init__(self, num_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, num_bytes)]  # (start, end) of free ranges, in order, never adjacent

    def take(self, num_bytes: int) -> int | None:
        """Allocate in the first range that is long enough. Returns the start; None if there is no such range."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                if end - start == num_bytes:
                    del self._free[index]
                else:
                    self._free[index] = (start + num_bytes, end)
                return start
        return None

    def give(self, start: int, num_bytes: int) -> None:
        """Free a range."""
        index = bisect.bisect(self._free, (start,))
        end = start + num_bytes
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (start, end))


class Arena:
    """A rank's own zone. Memory is freed when the last tensor that uses it has been collected.

    Each rank allocates for itself: a call header has the offset of its tensor for the other ranks.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment = segment
        self._zone = segment.layout.zone(rank)
        self._free = FreeList(segment.layout.zone_bytes)
        self._starts: list[int] = []  # addresses of the ranges in use, in order
        self._stretches: dict[int, tuple[int, int]] = {}  # address: (offset in the zone, bytes)
        # Ranges of collected tensors. These may be collected at any moment, in any thread, even in the middle of the
        # methods below.
        self._ended: collections.deque[tuple[int, int, int]] = collections.deque()  # address, offset, bytes

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeroed memory in the zone: [numel].

        Raises:
            ConfigurationError: There isn't enough memory.
        """
        self._collect()
        num_bytes = round_up(numel * dtype.itemsize, PAGE_BYTES)
        offset = self._free.take(num_bytes)
        if offset is None:  # the zone is full: a zone is as long as the node's memory
            raise ConfigurationError(f"no {num_bytes:,} bytes in one piece are free for {numel:,} {dtype}.")
        try:
            allocate_range(self._segment.fd, self._zone + offset, num_bytes, what=f"bucket of {numel:,} {dtype}")
            mapping = Mapping(self._segment.fd, offset=self._zone + offset, num_bytes=num_bytes, populate=True)
        except BaseException:
            self._free.give(offset, num_bytes)
            raise
        # The list may still have the same address: its earlier tensor was collected after `_ended` was read above.
        if mapping.address not in self._stretches:
            bisect.insort(self._starts, mapping.address)
        self._stretches[mapping.address] = (offset, num_bytes)
        ended = (mapping.address, offset, num_bytes)
        weakref.finalize(mapping.raw, _end, self._segment, self._zone, ended, self._ended, os.getpid()).atexit = False
        return mapping.tensor(0, dtype, numel)

    def locate(self, address: int, num_bytes: int) -> int | None:
        """The offset of memory at an address in this process's zone; None if it is elsewhere."""
        if self._ended:  # the addresses of collected tensors may belong to other memory by now
            self._collect()
        index = bisect.bisect(self._starts, address) - 1
        if index < 0:
            return None
        start = self._starts[index]
        offset, length = self._stretches[start]
        if address + num_bytes > start + length:
            return None
        return offset + address - start

    def _collect(self) -> None:
        while self._ended:
            address, offset, num_bytes = self._ended.popleft()
            self._free.give(offset, num_bytes)
            if self._stretches.get(address) == (offset, num_bytes):  # else a newer tensor has this address
                self._starts.remove(address)
                del self._stretches[address]


def _end(
    segment: Segment,
    zone: int,
    stretch: tuple[int, int, int],
    ended: collections.deque[tuple[int, int, int]],
    owner_pid: int,
) -> None:
    if os.getpid() != owner_pid:  # a forked child drops its copy: the parent may still use the memory
        return
    _, offset, num_bytes = stretch
    with contextlib.suppress(PeerLostError):  # the descriptor may belong to another file by now
        release_range(segment.fd, zone + offset, num_bytes)
    ended.append(stretch)


class Views:
    """Tensors over shared memory, cached: making a tensor costs as much as adding one.

    The least recently used views are dropped once there are 512 per rank. A model of 65 buckets on 64 ranks needs 4,160
    views in every step.

    Attributes:
        common: (offset, dtype, numel) -> [numel], in the common part.
        zone: (rank, offset, dtype, numel) -> [numel], in a rank's zone.
        eager: (slot, dtype, numel) -> a view [numel] for every rank, in this slot for eager data.
        beside: Like `eager`, for the numbers beside a call in this slot.
    """

    def __init__(self, segment: Segment) -> None:
        layout = segment.layout
        windows: dict[int, Mapping] = {}
        # Use functions, not methods: a bound method in the cache would keep this object and its memory alive until the
        # next garbage collection.
        kept = functools.lru_cache(max(4096, 512 * layout.world_size))

        def in_zone(rank: int, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
            needed_bytes = offset + numel * dtype.itemsize
            window = windows.get(rank)
            if window is None or window.num_bytes < needed_bytes:
                # Map a zone from its beginning, as far as needed. This uses only address space: unused parts cost
                # nothing.
                before = 0 if window is None else window.num_bytes
                length = min(layout.zone_bytes, round_up(max(needed_bytes, 2 * before), PAGE_BYTES))
                window = windows[rank] = Mapping(segment.fd, offset=layout.zone(rank), num_bytes=length)
            return window.tensor(offset, dtype, numel)

        def of_all(offset_of: Callable[[int, int], int]) -> Callable[[int, torch.dtype, int], list[Tensor]]:
            def views(slot: int, dtype: torch.dtype, numel: int) -> list[Tensor]:
                return [common(offset_of(rank, slot), dtype, numel) for rank in range(layout.world_size)]

            return functools.lru_cache(1024)(views)

        self.common: Callable[[int, torch.dtype, int], Tensor] = kept(segment.common.tensor)
        self.zone: Callable[[int, int, torch.dtype, int], Tensor] = kept(in_zone)
        common = self.common
        self.eager = of_all(layout.eager_slot)
        self.beside = of_all(layout.beside)
