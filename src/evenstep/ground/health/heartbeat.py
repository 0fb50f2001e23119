"""The heartbeat page: what a rank is doing, written with a few stores to memory and read from outside the process.

A page is a file of 4 KiB in the run's private directory, mapped by its rank. It can be read
while the rank is stopped, holds the interpreter lock, or is dead. Every field is a machine word of its own, so a
reader sees each of them whole; between fields it may see a moment in between, and judges nothing by one look.

    word  0     mark: a page, of this layout
          1     pid
          2     phase
          3     optimizer steps finished
          4     number of the last collective
          5     whether it waits for other ranks now: since when, nanoseconds (monotonic), or 0
          6     when the page last changed, nanoseconds (monotonic)
          7     the bucket that was last sent
          8     how long it has waited for other ranks in all, nanoseconds
          9     the step of the newest checkpoint that this rank has committed, and 1; 0: none yet
         10     when the last step was finished, nanoseconds (monotonic)
         11     whether python's exit handlers have run: only the interpreter's own end is left
         16 ... four texts in turn: where in its script this rank is, written when ranks disagree. A length comes last
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096
CELL_BYTES = 128
_NUM_SITES = 4  # a rank may disagree again before others have read where it stood at first
_SITE_BYTES = (PAGE_BYTES - CELL_BYTES) // _NUM_SITES
_TEXT = struct.Struct("=H")
_MARK = 0x34474150_534E5645  # changes with the layout
_FORMAT = "=16Q"
_NO_BUCKET = (1 << 64) - 1


class Phase(enum.IntEnum):
    """Where in its loop a rank is."""

    STARTING = 0
    BETWEEN_STEPS = 1  # loads data, evaluates, or whatever the script does
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    MAIN_FIRST = 5  # rank 0 runs the block of `world.main_first()`, however long that takes; the others wait for it
    SAVING = 6
    ENDED = 7  # left its world as it should
    EVALUATING = 8  # a forward pass without gradients, and what follows it
    COMPILING = 9  # torch.compile is at work


WORDS = {
    Phase.STARTING: "at its start",
    Phase.BETWEEN_STEPS: "between steps",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.OPTIMIZER: "in the optimizer's step",
    Phase.MAIN_FIRST: "in main_first",
    Phase.SAVING: "saving",
    Phase.ENDED: "at its end",
    Phase.EVALUATING: "in an evaluation",
    Phase.COMPILING: "compiling",
}


@dataclass(frozen=True)
class Heartbeat:
    """What a heartbeat page said at one look.

    Attributes:
        step: Optimizer steps finished or, if nothing counts them, 0.
        collective: Collectives begun on the transport that was used last.
        is_waiting: It waits for other ranks right now.
        time_ns: Monotonic time of this host at the last change.
        bucket: What it last sent; None: no bucket.
        waiting_since_ns: When the present wait began; None: it doesn't wait.
        waited_ns: How long it has waited for others in all, apart from the present wait.
        saved_step: Of the newest checkpoint that it has committed; None: none yet.
        stepped_ns: When the last step was finished; 0: none yet.
        is_done: Its exit handlers have run.
    """

    pid: int
    phase: Phase
    step: int
    collective: int
    is_waiting: bool
    time_ns: int
    bucket: int | None = None
    waiting_since_ns: int | None = None
    waited_ns: int = 0
    saved_step: int | None = None
    stepped_ns: int = 0
    is_done: bool = False

    def __str__(self) -> str:
        parts = [WORDS[self.phase]]
        parts += [f"step {self.step}"] if self.step else []
        parts += [f"collective {self.collective}"] if self.collective else []
        return ", ".join(parts)


class HeartbeatPage:
    """This rank's own page, open for writing."""

    __slots__ = ("_cells", "_map", "_num_sites", "path")

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, PAGE_BYTES)
            self._map = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self._cells = memoryview(self._map).cast("B").cast("Q")
        self._num_sites = 0
        self.path = path
        self._cells[5] = 0
        self._cells[1], self._cells[7] = os.getpid(), _NO_BUCKET
        self._cells[6] = time.monotonic_ns()
        self._cells[0] = _MARK

    def write_site(self, text: str) -> None:
        """Leave a text for other ranks beside the last three; what is too long is cut off."""
        data = text.encode(errors="replace")[: _SITE_BYTES - _TEXT.size]
        place = CELL_BYTES + self._num_sites % _NUM_SITES * _SITE_BYTES
        self._num_sites += 1
        begin = place + _TEXT.size
        self._map[place:begin] = _TEXT.pack(0)
        self._map[begin : begin + len(data)] = data
        self._map[place:begin] = _TEXT.pack(len(data))

    def close(self) -> None:
        """Unmap it. What was written stays to be read."""
        self._cells.release()
        self._map.close()


_cells: memoryview | None = None
current: HeartbeatPage | None = None  # this process's


def page_file(directory: Path, rank: int, attempt: int) -> Path:
    """Where a rank's page lies."""
    return directory / f"page-{attempt}-{rank}"


def open_page(path: Path) -> None:
    """From now on this process writes what it does to that page."""
    global current, _cells
    close_page()
    current = HeartbeatPage(path)
    _cells = current._cells


def own_path() -> Path | None:
    """Where this process's page lies; None if it has none."""
    return None if current is None else current.path


def write_site(text: str) -> None:
    """See `HeartbeatPage.write_site`; nothing without a page."""
    if current is not None:
        current.write_site(text)


def close_page() -> None:
    """Stop writing; harmless without a page."""
    global current, _cells
    _cells = None
    if current is not None:
        current.close()
        current = None


def mark(phase: Phase, step: int | None = None) -> None:
    """This rank enters a phase; costs a tenth of a microsecond, and nothing without a page.

    Args:
        phase: What begins.
        step: Optimizer steps finished by now; None: as before.
    """
    cells = _cells
    if cells is not None:
        cells[2] = phase
        now = time.monotonic_ns()
        if step is not None:
            cells[3] = step
            cells[10] = now
        cells[6] = now


def mark_collective(number: int, bucket: int | None = None) -> None:
    """This rank begins a collective."""
    cells = _cells
    if cells is not None:
        cells[4] = number
        cells[7] = _NO_BUCKET if bucket is None else bucket
        cells[6] = time.monotonic_ns()


def mark_waiting(is_waiting: bool) -> None:
    """This rank begins to wait for other ranks, or has ended it."""
    cells = _cells
    if cells is not None:
        now = time.monotonic_ns()
        if is_waiting:
            cells[5] = now
        elif cells[5]:
            cells[8] += now - cells[5]
            cells[5] = 0
        cells[6] = now


def mark_commit(step: int) -> None:
    """This rank has made a checkpoint out of what all have written."""
    cells = _cells
    if cells is not None:
        cells[9] = step + 1


def mark_done() -> None:
    """Note that this rank's exit handlers have run: its report and its files are written."""
    cells = _cells
    if cells is not None:
        cells[11] = 1


def phase_now() -> Phase | None:
    """What this rank's page says of its phase; None without a page."""
    return None if _cells is None else Phase(_cells[2])


def finished_steps() -> int:
    """What this rank's page says of its optimizer steps; 0 without a page."""
    return 0 if _cells is None else int(_cells[3])


def read_page(path: Path) -> Heartbeat | None:
    """What a page says now; None if there is none, or none that can be understood."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return parse_page(data[:CELL_BYTES]) if len(data) == PAGE_BYTES else None


def parse_sites(data: bytes | mmap.mmap) -> list[str]:
    """The texts of a page, "" for each that has not been written. Pure."""
    texts = []
    for place in range(CELL_BYTES, CELL_BYTES + _NUM_SITES * _SITE_BYTES, _SITE_BYTES):
        (length,) = _TEXT.unpack_from(data, place)
        begin = place + _TEXT.size
        texts.append(bytes(data[begin : begin + length]).decode(errors="replace"))
    return texts


def parse_page(data: bytes | memoryview) -> Heartbeat | None:
    """The heartbeat in the bytes of a page; None if they aren't a page. Pure."""
    words = struct.unpack(_FORMAT, data)
    found, pid, phase, step, collective, waiting_since_ns, time_ns, bucket, waited_ns, saved, stepped_ns, done, *_ = (
        words
    )
    if found != _MARK or phase not in Phase._value2member_map_:
        return None
    return Heartbeat(
        pid=pid,
        phase=Phase(phase),
        step=step,
        collective=collective,
        is_waiting=waiting_since_ns > 0,
        time_ns=time_ns,
        bucket=None if bucket == _NO_BUCKET else bucket,
        waiting_since_ns=waiting_since_ns or None,
        waited_ns=waited_ns,
        saved_step=saved - 1 if saved else None,
        stepped_ns=stepped_ns,
        is_done=bool(done),
    )


def _forget() -> None:
    """A forked child writes nothing to its parent's page, and leaves the memory to it."""
    global current, _cells
    current = _cells = None


os.register_at_fork(after_in_child=_forget)
