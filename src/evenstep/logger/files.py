"""The files of a logger: a line per call of `log`, each written whole or not at all, and cut back when a run resumes.

A process may be killed at any instant. A line goes to the file in one write, so at most the last line can be torn, by a
full disk or a power cut; whoever opens the file next cuts that off. A run that resumes at step s makes step s again and
all that follow: lines of those steps, which the run before had written after its last checkpoint, go when the first
line is written.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from evenstep.errors import ConfigurationError

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
        """Let go of the file. Twice is once."""


class JsonLines:
    """{"step": 7, "time": 1790000000.1, "loss": 0.5}, a line each. Numbers that JSON doesn't have are texts: "NaN",
    "Infinity", "-Infinity".

    Args:
        path: The file; made when there is something to write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """See `Writer.write`."""
        if self._file is None:
            kept = [line for line in whole_lines(self.path) if (of := _json_step(line)) is not None and of < step]
            self._file = reopen(self.path, kept)
        told = {"step": step, "time": round(seconds, 3), **{name: _jsonable(value) for name, value in values.items()}}
        write_whole(self._file, json.dumps(told, ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        """See `Writer.close`."""
        file, self._file = self._file, None
        if file is not None:
            os.fsync(file)
            os.close(file)


class Csv:
    """A column per name, in the order in which they came; empty where a call had no such value.

    A name that is new is a new column: the file is written anew, and takes the old one's place in one move.

    Args:
        path: The file; made when there is something to write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._columns: list[str] = []

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """See `Writer.write`."""
        if self._file is None:
            self._columns, rows = self._read()
            self._begin(row for row in rows if int(row[0]) < step)
        new = [name for name in values if name not in self._columns]
        if new:
            _, rows = self._read()
            self._columns += new
            self._begin(rows)
        assert self._file is not None
        row = [step, f"{seconds:.3f}", *(values.get(name, "") for name in self._columns[2:])]
        write_whole(self._file, _csv_lines([row]))

    def close(self) -> None:
        """See `Writer.close`."""
        file, self._file = self._file, None
        if file is not None:
            os.fsync(file)
            os.close(file)

    def _read(self) -> tuple[list[str], list[list[str]]]:
        """(columns, rows) that are there; rows that aren't whole are left out."""
        lines = list(csv.reader(whole_lines(self.path)))
        if not lines:
            return ["step", "time"], []
        if lines[0][:2] != ["step", "time"]:
            raise ConfigurationError(
                f"{self.path} begins with {','.join(lines[0])[:60]!r}: it is no file of a Logger. Name another "
                f"directory, or move the file away."
            )
        return lines[0], [row for row in lines[1:] if row and row[0].isdigit()]

    def _begin(self, rows: Iterable[Sequence[object]]) -> None:
        if self._file is not None:
            os.close(self._file)
        wide = ([*row, *[""] * (len(self._columns) - len(row))] for row in rows)
        self._file = reopen(self.path, [_csv_lines([self._columns]), *(_csv_lines([row]) for row in wide)])


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
    """What is missing; None if events can be written."""
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


def reopen(path: Path, lines: Sequence[str]) -> int:
    """Make a file hold these lines, in one move, and open it for more at its end."""
    text = "".join(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != text.encode():
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with beside.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND)


def write_whole(file: int, text: str) -> None:
    """Append in one write.

    Raises:
        OSError: It didn't fit; what was written of it has been taken back.
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
