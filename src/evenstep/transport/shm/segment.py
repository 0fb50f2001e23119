"""The memory that the ranks of one node share: its layout, creation and mapping.

The segment is a file without a name (memfd, mode 0600). The system frees it when the last process that holds it ends,
however that happens, so there is nothing to clean up. Its first part, a megabyte per rank, is allocated at start. The
other parts cost nothing before they are used: a rank's slots for chunks, its *zone*, in which it allocates bucket
memory, and a *lane* for each ordered pair of ranks.

    greeting      a nonce, by which ranks check that they hold the same segment
    notes         one cache line per rank: its own copy of the nonce, and whether it has left
    semaphores    see `sync`
    headers       per rank, `NUM_SLOTS` call headers: the rank's call, and its tensor's place
    eager         per rank, `NUM_SLOTS` slots for the data of eager calls
    chunks        per rank, `NUM_CHUNKS` slots for tensors that are copied in chunks
    zones         per rank, its bucket memory
    lanes         per ordered pair of ranks, a ring of `NUM_RECORDS` records: messages, see `lanes`
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, PeerLostError
from evenstep.ground.compat.c_library.libc import c_library
from evenstep.ground.compat.c_library.mapping import map_file
from evenstep.ground.compat.torch_autograd import outside_inference_mode
from evenstep.ground.host import control_groups
from evenstep.transport.core.reduction import round_up
from evenstep.transport.shm.sync import SEMAPHORE_BYTES, make_semaphores, num_semaphores

PAGE_BYTES = 1 << 16  # the largest page size in use, so that offsets fit every machine
NUM_SLOTS = 16
HEADER_BYTES = 192  # a call header (`core.header`), then the rank's row
ROW_OFFSET = 128
EAGER_BYTES = 64 << 10
MAX_BESIDE_BYTES = 16 << 10  # part of an eager slot, for numbers beside a tensor of any size
NUM_CHUNKS = 3  # see [Note: three chunks] in `collectives`
CHUNK_BYTES = 1 << 20
NUM_RECORDS = 16
RECORD_BYTES = 4096
LANE_BYTES = PAGE_BYTES
assert NUM_RECORDS * RECORD_BYTES <= LANE_BYTES
NOTE_BYTES = 64
NONCE_BYTES = 16


@dataclass(frozen=True)
class SegmentLayout:
    """Offsets of all parts, in bytes from the start of the segment. Pure data, the same on all ranks."""

    world_size: int
    notes: int
    semaphores: int
    headers: int
    eager: int
    chunks: int
    common_bytes: int
    zone_bytes: int

    def note(self, rank: int) -> int:
        """Offset of a rank's note: [0:16] the nonce as the rank reads it, [16] whether the rank has left."""
        return self.notes + rank * NOTE_BYTES

    def header(self, rank: int, slot: int) -> int:
        """Offset of a call header of a rank, one of `NUM_SLOTS`."""
        return self.headers + (rank * NUM_SLOTS + slot) * HEADER_BYTES

    def eager_slot(self, rank: int, slot: int) -> int:
        """Offset of a rank's slot for eager data, one of `NUM_SLOTS`."""
        return self.eager + (rank * NUM_SLOTS + slot) * EAGER_BYTES

    def beside(self, rank: int, slot: int) -> int:
        """Offset of the end part of an eager slot, for the numbers beside a call."""
        return self.eager_slot(rank, slot) + EAGER_BYTES - MAX_BESIDE_BYTES

    def chunk(self, rank: int, slot: int) -> int:
        """Offset of a rank's slot for a chunk, one of `NUM_CHUNKS`."""
        return self.chunks + (rank * NUM_CHUNKS + slot) * CHUNK_BYTES

    def zone(self, rank: int) -> int:
        """Offset of a rank's zone."""
        return self.common_bytes + rank * self.zone_bytes

    def lane(self, sender: int, receiver: int) -> int:
        """Offset of the ring of records from one rank to another."""
        return self.zone(self.world_size) + (sender * self.world_size + receiver) * LANE_BYTES

    @property
    def total_bytes(self) -> int:
        """Length of the file, nearly all of which is a hole."""
        return self.lane(self.world_size, 0)


def plan_segment(world_size: int, *, memory_bytes: int) -> SegmentLayout:
    """Lay a segment out. Pure.

    Args:
        world_size: Number of ranks that share it.
        memory_bytes: Memory of the node; no zone can need more.
    """
    notes = NOTE_BYTES
    semaphores = notes + world_size * NOTE_BYTES
    headers = semaphores + num_semaphores(world_size) * SEMAPHORE_BYTES
    eager = round_up(headers + world_size * NUM_SLOTS * HEADER_BYTES, PAGE_BYTES)
    chunks = eager + world_size * NUM_SLOTS * EAGER_BYTES
    common_bytes = round_up(chunks + world_size * NUM_CHUNKS * CHUNK_BYTES, PAGE_BYTES)
    return SegmentLayout(
        world_size=world_size,
        notes=notes,
        semaphores=semaphores,
        headers=headers,
        eager=eager,
        chunks=chunks,
        common_bytes=common_bytes,
        zone_bytes=round_up(memory_bytes, PAGE_BYTES),
    )


class Mapping:
    """A range of a file in this process's memory, unmapped when its last tensor has been collected.

    Attributes:
        address: Address of the first byte.
        num_bytes: Length of the range.
        raw: The bytes of the range.
    """

    def __init__(self, fd: int, *, offset: int, num_bytes: int, populate: bool = False) -> None:
        self.raw = map_file(fd, num_bytes=num_bytes, offset=offset, populate=populate)
        self.address = ctypes.addressof(self.raw)
        self.num_bytes = num_bytes

    def tensor(self, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        """A tensor [numel], `offset` bytes from the start; it keeps the memory mapped."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        # A tensor made in torch's inference mode could not be written outside of that mode.
        with outside_inference_mode():
            return torch.frombuffer(self.raw, dtype=dtype, count=numel, offset=offset)


class Segment:
    """A shared segment, as mapped by this process.

    Attributes:
        layout: The offsets of the segment's parts.
        common: The part that all ranks use, mapped.
        bytes: The common part as bytes.
        words: The common part as unsigned numbers of 8 bytes.
        doubles: The common part as float64.
    """

    def __init__(self, fd: int, layout: SegmentLayout) -> None:
        self.layout = layout
        self._fd, self._file = fd, _file_of(fd)
        weakref.finalize(self, _close, fd, self._file).atexit = False
        self.common = Mapping(fd, offset=0, num_bytes=layout.common_bytes)
        self.bytes = memoryview(self.common.raw).cast("B")
        self.words = self.bytes.cast("Q")
        self.doubles = self.bytes.cast("d")

    @classmethod
    def create(cls, layout: SegmentLayout, nonce: bytes) -> Segment:
        """Make a new segment, to which other ranks attach.

        Raises:
            ConfigurationError: There isn't enough memory; the message has the bytes.
            OSError: The system refuses.
        """
        segment = cls(make_file(layout.total_bytes), layout)
        allocate_range(segment.fd, 0, layout.chunks, what="exchange area")
        make_semaphores(segment.common.address + layout.semaphores, num_semaphores(layout.world_size))
        segment.bytes[:NONCE_BYTES] = nonce
        return segment

    @classmethod
    def attach(cls, pid: int, fd: int, layout: SegmentLayout) -> Segment:
        """Attach to the segment that another process of this node made.

        Raises:
            OSError: The segment can't be reached: the process is in another namespace, another user's, or hides its
                files.
        """
        own = open_file(pid, fd)
        if os.fstat(own).st_size != layout.total_bytes:
            os.close(own)
            raise OSError(errno.ESTALE, f"file {fd} of process {pid} is not the segment")
        return cls(own, layout)

    @property
    def fd(self) -> int:
        """The descriptor, by which other processes attach.

        Raises:
            PeerLostError: The descriptor no longer refers to this file: the program has closed descriptors that it
                hadn't opened.
        """
        if _file_of(self._fd) != self._file:
            raise PeerLostError(
                f"descriptor {self._fd}, of memory that ranks share, was closed by something else in this process, "
                f"such as os.closerange. Close only descriptors that you have opened."
            )
        return self._fd

    @property
    def nonce(self) -> bytes:
        """The nonce that the segment's maker wrote to it."""
        return bytes(self.bytes[:NONCE_BYTES])

    def sign(self, rank: int) -> None:
        """Copy the nonce to this rank's note, to show that it holds the same segment."""
        start = self.layout.note(rank)
        self.bytes[start : start + NONCE_BYTES] = self.nonce

    def has_signed(self, rank: int, nonce: bytes) -> bool:
        """Whether a rank has copied the same nonce to its note."""
        start = self.layout.note(rank)
        return bytes(self.bytes[start : start + NONCE_BYTES]) == nonce

    def leave(self, rank: int) -> None:
        """Mark a rank as gone: it makes no more calls."""
        self.bytes[self.layout.note(rank) + NONCE_BYTES] = 1

    def has_left(self, rank: int) -> bool:
        """Whether a rank makes no more calls."""
        return self.bytes[self.layout.note(rank) + NONCE_BYTES] != 0


def _file_of(fd: int) -> tuple[int, int] | None:
    """Device and inode of a descriptor's file; None if the descriptor is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _close(fd: int, file: tuple[int, int] | None) -> None:
    """Close a descriptor if it still refers to this file: its number may belong to another file by now."""
    if _file_of(fd) == file:
        os.close(fd)


@contextlib.contextmanager
def naming(call: str) -> Iterator[None]:
    """Context that names a refused system call in the error: it is the call that a sandbox (seccomp) has to allow."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{call}: {error.strerror}") from None


def make_file(num_bytes: int) -> int:
    """Make a file of mode 0600 without a name in any directory, all of it a hole; returns its descriptor."""
    with naming("memfd_create"):
        fd = os.memfd_create("evenstep", os.MFD_CLOEXEC)
    try:
        with naming("fchmod"):
            os.fchmod(fd, 0o600)
        with naming("ftruncate"):
            os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(pid: int, fd: int) -> int:
    """Open a file that another process of this node has open; returns its descriptor."""
    path = f"/proc/{pid}/fd/{fd}"
    with naming(f"open of {path}"):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def allocate_range(fd: int, offset: int, num_bytes: int, *, what: str) -> None:
    """Allocate the memory of a range of a file, zeroed.

    Without this, the first access to a page that the node can't provide is a SIGBUS in the middle of a step.

    Raises:
        ConfigurationError: There isn't enough memory; the message has the bytes needed and available.
    """
    available = available_bytes()
    if num_bytes <= available:
        try:
            with naming("fallocate"):
                os.posix_fallocate(fd, offset, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
        else:
            return
    raise ConfigurationError(
        f"no room for the {what} in shared memory: {num_bytes:,} bytes are needed, {available:,} are available. "
        f"Give the job more memory, start fewer ranks, or use transport='gloo'."
    )


def release_range(fd: int, offset: int, num_bytes: int) -> None:
    """Free the memory of a range of a file. It reads as zeros afterwards."""
    _fallocate(fd, _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE, offset, num_bytes)


def available_bytes() -> int:
    """Free memory of the node, within the control groups that limit this process."""
    available = _meminfo("MemAvailable")
    allowed = control_groups.free_memory_bytes()
    return available if allowed is None else min(available, allowed)


def host_memory_bytes() -> int:
    """All memory of this node."""
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")


_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

_fallocate = c_library(use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
