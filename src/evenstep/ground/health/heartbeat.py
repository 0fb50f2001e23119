"""The heartbeat page: a rank's phase, step and waits, written with a few stores to memory and read by other processes.

A page is a file without a name (memfd), filled with zeros by its maker: the launcher before the rank starts, or else
`init`. Ranks map it, and need neither a name nor a descriptor afterwards. It can be read while the rank is stopped,
holds the interpreter lock, or is dead. Every field is a separate machine word, so a reader sees each field whole. Two
fields may be from different moments, so a reader never judges by a single read.

    word  0     mark: shows that this is a page, with this layout
          1     pid; 0: no rank writes to it yet
          2     phase
          3     optimizer steps finished
          4     number of the last collective
          5     whether it waits for other ranks now: since when, nanoseconds (monotonic), or 0
          6     when the page last changed, nanoseconds (monotonic)
          7     how long it has waited for other ranks in all, nanoseconds
          8     the step of the newest checkpoint that this rank has committed, and 1; 0: none yet
          9     when the last step was finished, nanoseconds (monotonic)
         10     its rank
         11 ... notes, 1 if they hold: see `Note`
         16 ... four texts in turn: this rank's position in its script, written when ranks disagree. Length last
    byte  4096  the report of the error that ends the rank: its length, written last, and JSON
    byte 65536  the stacks that the rank writes on request, one after the other, to the end of the file
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from evenstep.ground.compat.c_library.mapping import map_file

PAGE_BYTES = 1 << 16  # a multiple of the page size of every machine
_SITES, _REPORT = 128, 4096  # offsets of the texts and of the report, in bytes
_SITE_BYTES = (_REPORT - _SITES) // 4  # four: ranks may disagree again before others have read the first text
REPORT_BYTES = PAGE_BYTES - _REPORT - 8
_MARK = b"EVNSPAG6"  # changes with the layout


class Phase(enum.IntEnum):
    """A rank's activity."""

    STARTING = 0
    BETWEEN_STEPS = 1  # loads data, evaluates, or runs other code of the script
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    MAIN_FIRST = 5  # rank 0 runs the block of `world.main_first()`, however long that takes; the others wait for it
    SAVING = 6
    ENDED = 7  # left its world in good order
    EVALUATING = 8  # a forward pass without gradients, and the code after it
    COMPILING = 9  # torch.compile runs


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
    """The content of a heartbeat page at one read.

    Attributes:
        step: Optimizer steps finished or, if nothing counts them, 0.
        collective: Collectives begun on the transport that was used last.
        is_waiting: Whether the rank waits for other ranks now.
        time_ns: Monotonic time of this host at the last change.
        waiting_since_ns: When the present wait began; None: the rank doesn't wait.
        waited_ns: Total time for which the rank has waited for others, without the present wait.
        saved_step: The step of the newest checkpoint that the rank has committed; None: none yet.
        stepped_ns: When the last step was finished; 0: none yet.
        is_done: Whether the rank's exit handlers have run.
        rank: The rank's number.
    """

    pid: int
    phase: Phase
    step: int
    collective: int
    is_waiting: bool
    time_ns: int
    waiting_since_ns: int | None = None
    waited_ns: int = 0
    saved_step: int | None = None
    stepped_ns: int = 0
    is_done: bool = False
    rank: int = 0

    def __str__(self) -> str:
        parts = [WORDS[self.phase]]
        parts += [f"step {self.step} of this attempt"] if self.step else []
        parts += [f"collective {self.collective}"] if self.collective else []
        return ", ".join(parts)


class Note(enum.IntEnum):
    """A rank's notes on its page, besides the phase. The value is the number of the word."""

    IS_DONE = 11  # the rank's exit handlers have run: only the interpreter's shutdown is left
    IS_READY = 12  # the rank ends quietly when interrupted; earlier it would print a traceback of its imports
    SAVES = 13  # the rank saves on a stop signal, so it gets more time to end
    STOPS = 15  # ranks have agreed to save and stop
    WRITES_STACKS = 14  # the rank handles the signal by which the launcher requests its stacks


class Page:
    """A rank's page, mapped into this process until nothing refers to it any more.

    Args:
        fd: The descriptor of the page's file; it may be closed afterwards.

    Attributes:
        words: The whole page, as unsigned numbers of 8 bytes.

    Raises:
        OSError: The file isn't a page, or can't be mapped.
    """

    __slots__ = ("_bytes", "_next_site", "words")

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size < PAGE_BYTES or os.pread(fd, len(_MARK), 0) != _MARK:
            raise OSError("no heartbeat page")
        self._bytes = memoryview(map_file(fd, num_bytes=PAGE_BYTES)).cast("B")
        self.words = self._bytes.cast("Q")
        self._next_site = _SITES

    @classmethod
    def at(cls, path: str) -> Page | None:
        """The page of another process of this host, at `/proc/PID/fd/N`; None if it can't be reached."""
        with contextlib.suppress(OSError):  # the process is in another container, or hides its files
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                return cls(fd)
            finally:
                os.close(fd)
        return None

    def begin(self, rank: int) -> None:
        """Begin to write this process's state to the page; notes stay."""
        for word in range(1, Note.IS_READY):
            self.words[word] = 0
        self.words[10], self.words[6], self.words[1] = rank, time.monotonic_ns(), os.getpid()

    def read(self) -> Heartbeat | None:
        """The page's present content; None if no rank writes to it."""
        words = self.words[1 : Note.IS_READY].tolist()
        pid, phase, step, collective, waiting_since_ns, time_ns, waited_ns, saved, stepped_ns, rank, done = words
        if pid == 0 or phase not in Phase._value2member_map_:
            return None
        return Heartbeat(
            pid=pid,
            phase=Phase(phase),
            step=step,
            collective=collective,
            is_waiting=waiting_since_ns > 0,
            time_ns=time_ns,
            waiting_since_ns=waiting_since_ns or None,
            waited_ns=waited_ns,
            saved_step=saved - 1 if saved else None,
            stepped_ns=stepped_ns,
            is_done=bool(done),
            rank=rank,
        )

    def write_site(self, text: str) -> None:
        """Write a text for other ranks, in place of the oldest of four; a long text is cut off."""
        self._write(self._next_site, text.encode(errors="replace")[: _SITE_BYTES - 8])
        self._next_site += _SITE_BYTES
        if self._next_site == _REPORT:
            self._next_site = _SITES

    def sites(self) -> list[str]:
        """The four texts; "" for a text that was never written."""
        return [self._read(place).decode(errors="replace") for place in range(_SITES, _REPORT, _SITE_BYTES)]

    def write_report(self, data: bytes) -> None:
        """Write a report of at most `REPORT_BYTES`, in place of an earlier one."""
        self._write(_REPORT, data)

    def report(self) -> bytes:
        """The report; b"" if there is none."""
        return self._read(_REPORT)

    def _write(self, place: int, data: bytes) -> None:
        self.words[place >> 3] = 0
        self._bytes[place + 8 : place + 8 + len(data)] = data
        self.words[place >> 3] = len(data)

    def _read(self, place: int) -> bytes:
        return bytes(self._bytes[place + 8 : place + 8 + self.words[place >> 3]])


def make_page() -> int:
    """Make a page; returns the descriptor of its file.

    Raises:
        OSError: There is no memory for it. (Without this check, the first access would be a SIGBUS.)
    """
    fd = os.memfd_create("evenstep-page", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, _MARK.ljust(PAGE_BYTES, b"\0"))
    except BaseException:
        os.close(fd)
        raise
    return fd


_words: memoryview | None = None
current: Page | None = None  # this process's page


def write_to(page: Page | None, *, rank: int = 0) -> None:
    """Make this process write its state to `page` from now on; None: to no page."""
    global current, _words
    if page is not None:
        page.begin(rank)
    current, _words = page, None if page is None else page.words


def mark(phase: Phase, step: int | None = None) -> None:
    """Record that this rank enters a phase. Costs a tenth of a microsecond, and nothing without a page.

    Args:
        phase: The new phase.
        step: Number of finished optimizer steps; None: unchanged.
    """
    words = _words
    if words is not None:
        words[2] = phase
        now = time.monotonic_ns()
        if step is not None:
            words[3] = step
            words[9] = now
        words[6] = now


def mark_collective(number: int) -> None:
    """Record that this rank begins a collective."""
    words = _words
    if words is not None:
        words[4] = number
        words[6] = time.monotonic_ns()


def mark_waiting(is_waiting: bool) -> None:
    """Record that this rank begins to wait for other ranks, or has stopped waiting."""
    words = _words
    if words is not None:
        now = time.monotonic_ns()
        if is_waiting:
            words[5] = now
        elif words[5]:
            words[7] += now - words[5]
            words[5] = 0
        words[6] = now


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Context in which this rank waits for other ranks."""
    mark_waiting(True)
    try:
        yield
    finally:
        mark_waiting(False)


def mark_commit(step: int) -> None:
    """Record that this rank has committed a checkpoint, or local copies of all ranks; steps may come in any order."""
    if _words is not None:
        _words[8] = max(_words[8], step + 1)


def note(what: Note) -> None:
    """Set a note on this rank's page: see `Note`."""
    if _words is not None:
        _words[what] = 1


def phase_now() -> Phase | None:
    """The phase on this rank's page; None without a page."""
    return None if _words is None else Phase(_words[2])


def finished_steps() -> int:
    """The number of optimizer steps on this rank's page; 0 without a page."""
    return 0 if _words is None else int(_words[3])


def _forget() -> None:
    """Stop writing to the parent's page, in a forked child."""
    global current, _words
    current = _words = None


os.register_at_fork(after_in_child=_forget)
