"""`Records`: lines, JSON lines or records of fixed size in many files that need not fit into memory."""

from __future__ import annotations

import glob
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from evenstep import checks
from evenstep.data.sources.files import FixedFile, LineFile, MappedFile
from evenstep.data.sources.readahead import will_need
from evenstep.errors import ConfigurationError, DataError
from evenstep.ground.health import excepthook

_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines", ".csv": "lines", ".tsv": "lines"}


class Records(Dataset[Any]):
    """The records of some files, numbered through: a data set like any other, for any loader.

    Files are mapped into memory and not copied; a process keeps a number for each 16 KiB of a file of lines, and
    nothing for records of fixed size. `DataLoader(..., shuffle=True, locality=...)` shuffles without reading all over
    the disk.

    A sample is, before `decode`: a str without its line break ("lines"), the value of the line in JSON ("jsonl"), uint8
    [record_bytes] ("fixed").

    Args:
        shards: Paths, or a pattern such as ``data/*.jsonl``, whose matches are taken in order of name.
        record_bytes: Size of a record, which makes the format "fixed".
        format: "lines", "jsonl" or "fixed"; None: by record_bytes, or by the files' suffix.
        decode: Called with each sample; returns the sample to use. A `ValueError` from it means that the record is
            damaged.
        header_bytes: Bytes to leave out at the beginning of each file.
        on_error: "raise", or "skip": a loader leaves out damaged records, and warns; an incomplete record
            at the end of a file isn't counted at all.

    Raises:
        ConfigurationError: There is no such file, or arguments contradict each other.
        DataError: A file ends inside of a record; file, record and byte are named. Later: a record can't be decoded, or
            a file has changed since it was opened.
    """

    @excepthook.for_users
    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        record_bytes: int | None = None,
        format: str | None = None,
        decode: Callable[[Any], Any] | None = None,
        header_bytes: int = 0,
        on_error: str = "raise",
    ) -> None:
        paths = find_files(shards)
        self.format = choose_format(paths, format, record_bytes)
        header_bytes = checks.whole("Records: header_bytes", header_bytes, least=0)
        if decode is not None:
            checks.function("Records: decode", decode, otherwise="None to take samples as they are")
        self.on_error = checks.choice("Records: on_error", on_error, ("raise", "skip"))
        self.num_incomplete = 0  # files whose last record is cut off, with on_error="skip"
        self._decode = decode
        self.files: list[MappedFile] = []
        for path in paths:
            if record_bytes is None:
                self.files.append(LineFile(path, header_bytes))
                continue
            file = FixedFile(path, record_bytes, header_bytes)
            if file.rest:
                if on_error == "raise":
                    raise DataError(file.end_of_incomplete())
                self.num_incomplete += 1
            self.files.append(file)
        self._ends = list(accumulate(len(file) for file in self.files))

    @property
    def gives_batches(self) -> bool:
        """Whether `batch_of` equals torch's collate function on the samples."""
        return self.format == "fixed" and self._decode is None

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        number, file, record = self.locate(index)
        file.validate_unchanged()
        return self._decoded(number, file, record)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Several at once; files are looked at once each."""
        places = [self.locate(index) for index in indices]
        for number in {number for number, _, _ in places}:
            self.files[number].validate_unchanged()
        return [self._decoded(*place) for place in places]

    def batch_of(self, indices: Tensor) -> Tensor:
        """Records [n, record_bytes], uint8, of [n] int64."""
        self._validate_bounds(indices)
        if len(self.files) == 1:
            return self._rows(0, indices)
        numbers = torch.searchsorted(torch.tensor(self._ends, device="cpu"), indices, right=True)
        out: Tensor | None = None
        for number in sorted(set(numbers.tolist())):
            inside = numbers == number
            rows = self._rows(number, indices[inside] - self._start(number))
            out = rows.new_empty((len(indices), rows.shape[1])) if out is None else out
            out[inside] = rows
        assert out is not None
        return out

    @property
    def bytes_of_sample(self) -> int:
        """On average, at least 1."""
        return max(1, sum(file.size for file in self.files) // max(1, len(self)))

    def will_need(self, first: int, last: int) -> None:
        """Advise the system to read the records from `first` to `last` (excluded). Never an error."""
        while first < last:
            number, file, record = self.locate(first)
            stop = min(last, self._ends[number])
            try:
                begin, end = file.bytes_around(record, record + stop - first)
                will_need(file.content, begin, end, may_look=file.is_writable)
            except (OSError, RuntimeError):
                return  # it is gone: a read of it raises
            first = stop

    def _rows(self, number: int, records: Tensor) -> Tensor:
        file = self.files[number]
        assert isinstance(file, FixedFile)
        file.validate_unchanged()
        return file.rows(records)

    def _start(self, number: int) -> int:
        return self._ends[number - 1] if number else 0

    def locate(self, index: int) -> tuple[int, MappedFile, int]:
        """Number of the file, the file, and the record in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        return number, self.files[number], index - self._start(number)

    def _validate_bounds(self, indices: Tensor) -> None:
        low, high = (int(end) for end in indices.aminmax())
        if low < 0 or high >= len(self):
            raise IndexError(f"records {low} to {high} of {len(self)}")

    def _decoded(self, number: int, file: MappedFile, record: int) -> Any:
        sample: Any = file.read(record)
        try:
            if self.format != "fixed":
                sample = sample.decode()
                if self.format == "jsonl":
                    sample = json.loads(sample)
            return sample if self._decode is None else self._decode(sample)
        except ValueError as error:
            what = "no JSON" if isinstance(error, json.JSONDecodeError) else "damaged"
            start = file.start_of(record)
            at = 0
            if isinstance(error, json.JSONDecodeError):
                at = len(error.doc[: error.pos].encode())  # it counts characters
            elif isinstance(error, UnicodeDecodeError):
                at = error.start
            raise DataError(f"{file.path}, record {record}, byte {start + at}: {what}: {error}") from error

    def validate_unchanged(self) -> None:
        """Raise if a file has changed since it was opened.

        Raises:
            DataError: The first file that has, with the change.
        """
        for file in self.files:
            file.validate_unchanged()

    def __repr__(self) -> str:
        return f"<Records {len(self)} of format {self.format} in {len(self.files)} files>"


def find_files(shards: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files of `shards`: a path, a pattern, or a list of paths.

    Raises:
        ConfigurationError: There are no such files.
    """
    if isinstance(shards, str | os.PathLike):
        pattern = os.fspath(shards)
        # A file of that very name is meant before a pattern: "part[1].jsonl" matches "part1.jsonl" alone.
        if isinstance(pattern, str) and glob.has_magic(pattern) and not os.path.lexists(pattern):
            found = sorted(glob.glob(pattern, recursive=True))
            if not found:
                raise ConfigurationError(f"Records: shards={pattern!r}: no file matches, seen from {os.getcwd()}.")
            return [Path(each) for each in found]
        shards = [shards]
    if isinstance(shards, bytes | bytearray) or not isinstance(shards, Iterable):
        raise checks.refuse("Records: shards", shards, "a path, a pattern such as 'data/*.jsonl', or a list of paths")
    paths = [_path_of(number, each) for number, each in enumerate(shards)]
    if not paths:
        raise ConfigurationError("Records: shards is empty: there is nothing to read.")
    for path in paths:
        if not path.is_file():
            raise ConfigurationError(f"Records: shards: {path} is {'no file' if path.exists() else 'not there'}.")
    return paths


def _path_of(number: int, given: Any) -> Path:
    if isinstance(given, str | os.PathLike) and isinstance(os.fspath(given), str) and "\0" not in os.fspath(given):
        return Path(given)
    raise checks.refuse(f"Records: shards[{number}]", given, "a path")


def choose_format(paths: list[Path], given: str | None, record_bytes: int | None) -> str:
    """The format of the files. Pure.

    Raises:
        ConfigurationError: It isn't known, or contradicts `record_bytes`.
    """
    if record_bytes is not None:
        checks.whole("Records: record_bytes", record_bytes, least=1)
    if given is not None:
        checks.choice("Records: format", given, ("lines", "jsonl", "fixed"), otherwise="None to choose by the suffix")
    if (record_bytes is not None) != (given == "fixed") and not (given is None and record_bytes is not None):
        raise ConfigurationError(
            f"Records: format={given!r} with record_bytes={record_bytes!r}: the two belong together."
        )
    if record_bytes is not None:
        return "fixed"
    if given is not None:
        return given
    formats = {_FORMATS.get(path.suffix) for path in paths}
    if len(formats) != 1 or None in formats:
        raise ConfigurationError(
            f"Records: what is in {paths[0].name} isn't clear from its name: pass format='lines' or 'jsonl', or "
            f"record_bytes= for records of fixed size."
        )
    return str(formats.pop())
