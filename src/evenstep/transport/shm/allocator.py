"""Bucket memory: a rank's own zone of the shared segment, and views of the zones of others."""

from __future__ import annotations

import bisect
import collections
import os
import weakref

import torch
from torch import Tensor

from evenstep.transport.core.reduction import round_up
from evenstep.transport.shm.segment import PAGE_BYTES, Mapping, Segment, allocate_range, release_range

_MAX_CACHED_VIEWS = 4096


class FreeList:
    """The free stretches of a zone. Pure: numbers in, numbers out.

    Args:
        num_bytes: Length of the zone.
    """

    def __init__(self, num_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, num_bytes)]  # (start, end), in order, never touching

    def take(self, num_bytes: int) -> int | None:
        """Take the first stretch that is long enough. Returns its start; None if there is none."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                if end - start == num_bytes:
                    del self._free[index]
                else:
                    self._free[index] = (start + num_bytes, end)
                return start
        return None

    def give(self, start: int, num_bytes: int) -> None:
        """Take a stretch back."""
        index = bisect.bisect(self._free, (start,))
        end = start + num_bytes
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            start = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (start, end))

    @property
    def free_bytes(self) -> int:
        """Bytes that are free."""
        return sum(end - start for start, end in self._free)


class Arena:
    """A rank's own zone. Memory returns to it when the last tensor that uses it has gone.

    Each rank allocates for itself: the header of a call has the place of its tensor for the others.
    """

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment = segment
        self._zone = segment.layout.zone(rank)
        self._free = FreeList(segment.layout.zone_bytes)
        self._starts: list[int] = []  # addresses of the stretches in use, in order
        self._stretches: dict[int, tuple[int, int]] = {}  # address: (offset in the zone, bytes)
        # Tensors end at any moment, in any thread, also in the middle of the methods below.
        self._ended: collections.deque[tuple[int, int, int]] = collections.deque()  # address, offset, bytes

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel], zeroed.

        Raises:
            ConfigurationError: There isn't enough memory.
        """
        self._collect()
        num_bytes = round_up(numel * dtype.itemsize, PAGE_BYTES)
        offset = self._free.take(num_bytes)
        assert offset is not None, "a zone is as long as the node's memory"
        try:
            allocate_range(self._segment.fd, self._zone + offset, num_bytes, what=f"bucket of {numel:,} {dtype}")
            mapping = Mapping(self._segment.fd, offset=self._zone + offset, num_bytes=num_bytes, populate=True)
        except BaseException:
            self._free.give(offset, num_bytes)
            raise
        # The address may be one whose tensor has ended since the look above, and which is still in the list.
        if mapping.address not in self._stretches:
            bisect.insort(self._starts, mapping.address)
        self._stretches[mapping.address] = (offset, num_bytes)
        ended = (mapping.address, offset, num_bytes)
        weakref.finalize(mapping.raw, _end, self._segment, self._zone, ended, self._ended, os.getpid()).atexit = False
        return mapping.tensor(0, dtype, numel)

    def locate(self, address: int, num_bytes: int) -> int | None:
        """The offset in the zone of memory of this process; None if it lies elsewhere."""
        if self._ended:  # their addresses may belong to other memory by now
            self._collect()
        index = bisect.bisect(self._starts, address) - 1
        if index < 0:
            return None
        start = self._starts[index]
        offset, length = self._stretches[start]
        if address + num_bytes > start + length:
            return None
        return offset + address - start

    @property
    def used_bytes(self) -> int:
        """Bytes that are in use."""
        self._collect()
        return sum(length for _, length in self._stretches.values())

    def _collect(self) -> None:
        while self._ended:
            address, offset, num_bytes = self._ended.popleft()
            self._free.give(offset, num_bytes)
            if self._stretches.get(address) == (offset, num_bytes):  # else the address is a younger tensor's
                self._starts.remove(address)
                del self._stretches[address]


def _end(
    segment: Segment,
    zone: int,
    stretch: tuple[int, int, int],
    ended: collections.deque[tuple[int, int, int]],
    owner_pid: int,
) -> None:
    if os.getpid() != owner_pid:  # a forked child drops its copy: the memory is the parent's, and may be in use
        return
    _, offset, num_bytes = stretch
    release_range(segment.fd, zone + offset, num_bytes)
    ended.append(stretch)


class Views:
    """Tensors over the memory of other ranks, made once and kept: making one costs as much as adding."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._windows: dict[int, Mapping] = {}
        self._cache: dict[tuple[object, ...], Tensor] = {}

    def common(self, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        """[numel], in the common part."""
        key = (offset, dtype, numel)
        view = self._cache.get(key)
        if view is None:
            view = self._remember(key, self._segment.common.tensor(offset, dtype, numel))
        return view

    def zone(self, rank: int, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        """[numel], in a rank's zone."""
        key = (rank, offset, dtype, numel)
        view = self._cache.get(key)
        if view is None:
            window = self._window(rank, offset + numel * dtype.itemsize)
            view = self._remember(key, window.tensor(offset, dtype, numel))
        return view

    def _window(self, rank: int, needed_bytes: int) -> Mapping:
        """Map the beginning of a zone, as far as needed. Only address space: unused parts cost nothing."""
        window = self._windows.get(rank)
        if window is None or window.num_bytes < needed_bytes:
            layout = self._segment.layout
            before = 0 if window is None else window.num_bytes
            length = min(layout.zone_bytes, round_up(max(needed_bytes, 2 * before), PAGE_BYTES))
            window = Mapping(self._segment.fd, offset=layout.zone(rank), num_bytes=length)
            self._windows[rank] = window
            self._cache.clear()  # views of the shorter window, which ends with them
        return window

    def _remember(self, key: tuple[object, ...], view: Tensor) -> Tensor:
        if len(self._cache) >= _MAX_CACHED_VIEWS:
            self._cache.clear()
        self._cache[key] = view
        return view
