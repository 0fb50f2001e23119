"""The files of a logger: a line per call of `log`, cut back when a run makes steps again.

A process may be killed at any instant. A line goes to the file in one write, so at most the last line can be torn, by a
full disk or a power cut; the next opening of the file cuts that off. A run whose first line is of step s makes step s
and all that follow: lines of those steps by an earlier run, from after its last checkpoint or of all its steps, move to
a file beside (`metrics.replaced.jsonl`) before the first line is written. No whole line is ever removed.

One process at a time has a file open: it holds the file's lock. Loggers of one process share it (`acquire`).
"""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import io
import json
import math
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from evenstep.checks import counted
from evenstep.console import say
from evenstep.errors import ConfigurationError

_WAIT_S = 5.0
_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Writer(Protocol):
    """The seam between a logger and a kind of file."""

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Add the values of a step, durable against the death of this process.

        Args:
            step: Of the run; never less than in the call before.
            seconds: Since 1970.
            values: By name.
        """

    def close(self) -> None:
        """Close the file. May be called twice."""


class _TextFile:
    """A file of lines, which this process alone has open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = open_alone(path)
        self._has_begun = False
        _open_files.add(self)

    @property
    def replaced_path(self) -> Path:
        """The file for lines of steps that a later run makes again."""
        return self.path.with_suffix(f".replaced{self.path.suffix}")

    def close(self) -> None:
        """See `Writer.close`."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            if os.fstat(file).st_size == 0:  # nothing to write has come
                self.path.unlink(missing_ok=True)
            os.fsync(file)
        finally:
            _close(file)

    def disown(self) -> None:
        """Leave the file to the process that this one is a fork of."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _number(self) -> int:
        if self._file is None:
            raise OSError(errno.EBADF, f"{self.path} is closed here")
        return self._file

    def _replace(self, lines: Sequence[str]) -> None:
        """Make these the content of the file, atomically."""
        self._file = replace_content(self.path, self._number(), lines)

    def _say_what_moved(self, num_lines: int, step: int) -> None:
        if num_lines:
            say(
                f"evenstep: this run makes step {step} and later ones, of which {self.path} had "
                f"{counted(num_lines, 'line')} by an earlier run. They are in {self.replaced_path.name} now"
            )


class JsonLines(_TextFile):
    """A line of JSON per step: {"step": 7, "time": 1790000000.1, "loss": 0.5}.

    Numbers that JSON lacks are strings: "NaN", "Infinity", "-Infinity".

    Args:
        path: The file; made when there is something to write.
    """

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """See `Writer.write`."""
        if not self._has_begun:
            lines = whole_lines(self.path)
            kept = [line for line in lines if (of := _json_step(line)) is not None and of < step]
            moved = [line for line in lines if (of := _json_step(line)) is None or of >= step]
            if moved:
                with self.replaced_path.open("a", encoding="utf-8", newline="") as file:
                    file.write("".join(moved))
                    file.flush()
                    os.fsync(file.fileno())  # before they are gone here
            self._replace(kept)
            self._say_what_moved(len(moved), step)
            self._has_begun = True
        line = {"step": step, "time": round(seconds, 3), **{name: _jsonable(value) for name, value in values.items()}}
        write_whole(self._number(), json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")


class Csv(_TextFile):
    """A column per name, in the order in which they came; empty where a call had no such value.

    A name that is new is a new column: the file is written anew and replaces the old one atomically.

    Args:
        path: The file; made when there is something to write.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._columns = _read_csv(path)[0]
        except BaseException:
            self.close()
            raise

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """See `Writer.write`."""
        if not self._has_begun:
            self._columns, rows = _read_csv(self.path)
            moved = [row for row in rows if int(row[0]) >= step]
            if moved:
                self._move(moved)
            self._replace(_csv_content(self._columns, [row for row in rows if int(row[0]) < step]))
            self._say_what_moved(len(moved), step)
            self._has_begun = True
        new = [name for name in values if name not in self._columns]
        if new:
            _, rows = _read_csv(self.path)
            self._columns += new
            self._replace(_csv_content(self._columns, rows))
        row = [step, f"{seconds:.3f}", *(values.get(name, "") for name in self._columns[2:])]
        write_whole(self._number(), _csv_lines([row]))

    def _move(self, rows: Sequence[Sequence[str]]) -> None:
        """Add rows of this file to the one for replaced lines, which may have other columns."""
        file = open_alone(self.replaced_path)
        try:
            columns, before = _read_csv(self.replaced_path)
            columns += [name for name in self._columns if name not in columns]
            named = [dict(zip(self._columns, row, strict=False)) for row in rows]
            after = [[row.get(name, "") for name in columns] for row in named]
            file = replace_content(self.replaced_path, file, _csv_content(columns, [*before, *after]))
        finally:
            _close(file)


class TensorBoard:
    """Scalars for TensorBoard, through torch's writer.

    Args:
        directory: Of the event files.
        make: Makes a `SummaryWriter` from (directory, step from which older events are ignored).
    """

    def __init__(self, directory: Path, make: Any = None) -> None:
        self.directory = directory
        self._make = make or _summary_writer
        self._writer: Any = None

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """See `Writer.write`."""
        if self._writer is None:
            # TensorBoard itself leaves out what an interrupted run had written from this step on.
            self._writer = self._make(str(self.directory), step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=seconds)
        self._writer.flush()

    def close(self) -> None:
        """See `Writer.close`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def why_no_tensorboard() -> str | None:
    """The reason why TensorBoard can't be used; None if it can."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"{error}"
    return None


def _summary_writer(directory: str, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(directory, purge_step=first_step)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file that end as lines do, with their ends; none if there is no file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]]  # behind the last end of line is nothing, or a torn line


_open_files: weakref.WeakSet[_TextFile] = weakref.WeakSet()


def _disown() -> None:
    """Close a forked child's copies. A worker of a loader that outlives its rank would keep the rank's locks."""
    for file in list(_open_files):
        file.disown()


os.register_at_fork(after_in_child=_disown)


def open_alone(path: Path) -> int:
    """Open a file for appending, and lock out other processes; made if there is none.

    Raises:
        ConfigurationError: Another process has it, also after a while in which one that is dying ends.
        OSError: It can't be opened.
    """
    deadline = time.monotonic() + _WAIT_S
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
        except OSError:  # a file system without locks
            return file
        else:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    return file
            os.close(file)  # replaced meanwhile, by a process that had it
            continue
        if time.monotonic() >= deadline:
            raise ConfigurationError(
                f"{path} is open in a Logger of another process. Give each job a directory of its own, or let one of "
                f"them log."
            )
        time.sleep(0.05)


def replace_content(path: Path, file: int, lines: Sequence[str]) -> int:
    """Make lines the content of an open file, atomically; returns the file that is open then.

    Args:
        path: Of the file.
        file: As `open_alone` returned it; closed if another one takes its place.
        lines: The content.
    """
    content = "".join(lines).encode()
    if path.read_bytes() == content:
        return file
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    new = open_alone(beside)  # locked before it has the name under which others look for it
    try:
        os.fchmod(new, os.fstat(file).st_mode & 0o7777)
        with os.fdopen(os.dup(new), "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(new)
        beside.replace(path)
    except BaseException:
        _close(new)
        beside.unlink(missing_ok=True)
        raise
    _close(file)
    return new


def _close(file: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)  # also for a copy of the descriptor that a fork has, in the moment of it
    os.close(file)


def write_whole(file: int, text: str) -> None:
    """Append in one write.

    Raises:
        OSError: It didn't fit; a part that was written is removed again.
    """
    data = text.encode()
    before = os.fstat(file).st_size
    try:
        written = os.write(file, data)
        if written < len(data):
            raise OSError(28, "No space left on device")
    except OSError:
        os.ftruncate(file, before)
        raise


def _read_csv(path: Path) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of a file, without incomplete rows."""
    lines = list(csv.reader(whole_lines(path)))
    if not lines:
        return ["step", "time"], []
    if lines[0][:2] != ["step", "time"]:
        raise ConfigurationError(
            f"{path} begins with {','.join(lines[0])[:60]!r}: it is no file of a Logger. Name another directory, or "
            f"move the file away."
        )
    return lines[0], [row for row in lines[1:] if row and row[0].isdigit()]


def _csv_content(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A file's lines; rows from before the last columns came are filled up."""
    wide = ([*row, *[""] * (len(columns) - len(row))] for row in rows)
    return [_csv_lines([columns]), *(_csv_lines([row]) for row in wide)]


def _csv_lines(rows: Iterable[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _json_step(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _jsonable(value: float) -> float | str:
    return value if math.isfinite(value) else _NAMES[str(value)]
