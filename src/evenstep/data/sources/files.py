"""A file of records, mapped into memory: the bounds of each record, and a check for changes."""

from __future__ import annotations

import ctypes
import os
from array import array
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import DataError

_PAGE = 16_384  # bytes of a file of lines for which one number is remembered
_MAX_PAGES = 2_048  # pages of which the line breaks are remembered: more than a usual window of `locality`


class MappedFile:
    """A file that is mapped into memory on its first read, in every process separately.

    Attributes:
        path: Of the file.
        size: Bytes, when it was opened.
        is_writable: Whether this process may write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        state = os.stat(path)
        self.size = state.st_size
        self.is_writable = os.access(path, os.W_OK)
        self._modified_ns = state.st_mtime_ns
        self._content: Tensor | None = None

    def _validate_header(self, header_bytes: int) -> None:
        if self.size < header_bytes:
            raise DataError(
                f"{self.path}, byte {self.size}: the file ends inside of its header of {header_bytes} bytes."
            )

    def __getstate__(self) -> dict[str, Any]:
        # A tensor would be copied into shared memory on its way to another process.
        return self.__dict__ | {"_content": None}

    @property
    def content(self) -> Tensor:
        """The file, uint8 [size]; pages are read on access."""
        if self._content is None:
            # Private and without a descriptor that stays open, unlike python's mmap: thousands of shards are usual.
            self._content = (
                torch.from_file(str(self.path), shared=False, size=self.size, dtype=torch.uint8)
                if self.size
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
        return self._content

    def slice(self, start: int, stop: int) -> bytes:
        """A copy of some bytes."""
        return ctypes.string_at(self.content.data_ptr() + start, stop - start)

    def validate_unchanged(self) -> None:
        """Raise if the file has changed: a read behind its end would kill the process (SIGBUS).

        Raises:
            DataError: It has.
        """
        try:
            state = os.stat(self.path)
        except OSError as error:
            raise DataError(f"{self.path} can't be read any more: {error.strerror}.") from None
        if state.st_size < self.size:
            raise DataError(
                f"{self.path}, record {self.record_at(state.st_size)}, byte {state.st_size}: the file ends here and "
                f"had {self.size} bytes when it was opened."
            )
        if state.st_size != self.size or state.st_mtime_ns != self._modified_ns:
            raise DataError(
                f"{self.path} was changed since it was opened: {self.size} bytes then, {state.st_size} bytes now. Make "
                f"the data set anew."
            )

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, record: int) -> Any:
        """A record as stored."""
        raise NotImplementedError

    def start_of(self, record: int) -> int:
        """Its first byte."""
        raise NotImplementedError

    def record_at(self, byte: int) -> int:
        """The record to which a byte belongs."""
        raise NotImplementedError

    def bytes_around(self, first: int, last: int) -> tuple[int, int]:
        """A span of bytes that holds the records from `first` to `last` (excluded), without a read of the file."""
        raise NotImplementedError


class FixedFile(MappedFile):
    """Records of one size.

    Attributes:
        rest: Bytes of an incomplete record at its end.
    """

    def __init__(self, path: Path, record_bytes: int, header_bytes: int) -> None:
        super().__init__(path)
        self.record_bytes, self.header_bytes = record_bytes, header_bytes
        self._validate_header(header_bytes)
        self._num_records, self.rest = divmod(self.size - header_bytes, record_bytes)

    def __len__(self) -> int:
        return self._num_records

    def read(self, record: int) -> Tensor:
        """[record_bytes], uint8."""
        return self.rows(torch.tensor([record], device="cpu"))[0]

    def rows(self, records: Tensor) -> Tensor:
        """[n, record_bytes], uint8, of [n] int64."""
        stop = self.header_bytes + self._num_records * self.record_bytes
        table = self.content[self.header_bytes : stop].view(self._num_records, self.record_bytes)
        return table.index_select(0, records)

    def start_of(self, record: int) -> int:
        """Its first byte."""
        return self.header_bytes + record * self.record_bytes

    def record_at(self, byte: int) -> int:
        """The record to which a byte belongs."""
        return max(0, byte - self.header_bytes) // self.record_bytes

    def bytes_around(self, first: int, last: int) -> tuple[int, int]:
        """Exactly theirs."""
        return self.start_of(first), self.start_of(last)

    def end_of_incomplete(self) -> str:
        """The message for a file that ends inside of a record."""
        return (
            f"{self.path}, record {self._num_records}, byte {self.start_of(self._num_records)}: the file ends after "
            f"{self.rest} of the record's {self.record_bytes} bytes. It was cut off, or record_bytes is wrong; "
            f'on_error="skip" leaves incomplete records out.'
        )


class LineFile(MappedFile):
    r"""Lines that end with \n or \r\n; the last one may lack it.

    One pass when it is opened counts the line breaks before each page. A line is found by its page; the line breaks of
    the pages read last are remembered.
    """

    def __init__(self, path: Path, header_bytes: int) -> None:
        super().__init__(path)
        self.header_bytes = header_bytes
        self._validate_header(header_bytes)
        counts = (
            ctypes.string_at(self.content.data_ptr() + start, min(_PAGE, self.size - start)).count(b"\n")
            for start in range(header_bytes, self.size, _PAGE)
        )
        # [pages + 1]: line breaks before each page. An array: searching a tensor costs ten times as much.
        self._before = array("q", accumulate(counts, initial=0))
        num_breaks = self._before[-1]
        is_open = self.size > header_bytes and self.slice(self.size - 1, self.size) != b"\n"
        self._num_lines = num_breaks + is_open
        self._breaks: dict[int, array[int]] = {}  # by page, in bytes from its beginning

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_breaks": {}}

    def __len__(self) -> int:
        return self._num_lines

    def read(self, record: int) -> bytes:
        """The line without its end."""
        start = self.start_of(record)
        # Line break number `record` (from 0) ends it.
        stop = self._break(record) if record < self._before[-1] else self.size
        return self.slice(start, stop).removesuffix(b"\r")

    def start_of(self, record: int) -> int:
        """Its first byte."""
        return self.header_bytes if record == 0 else self._break(record - 1) + 1

    def record_at(self, byte: int) -> int:
        """The record to which a byte belongs, as of the page."""
        page = max(0, byte - self.header_bytes) // _PAGE
        return self._before[min(page, len(self._before) - 1)]

    def bytes_around(self, first: int, last: int) -> tuple[int, int]:
        """Of the pages that their ends are in."""
        pages = [bisect_right(self._before, max(0, number - 1)) - 1 for number in (first, last)]
        start, stop = (self.header_bytes + page * _PAGE for page in pages)
        return start, min(stop + _PAGE, self.size)

    def _break(self, number: int) -> int:
        """The byte at which line break `number` (from 0) is."""
        page = bisect_right(self._before, number) - 1
        return self.header_bytes + page * _PAGE + self._breaks_of(page)[number - self._before[page]]

    def _breaks_of(self, page: int) -> array[int]:
        found = self._breaks.get(page)
        if found is None:
            start = self.header_bytes + page * _PAGE
            text = self.slice(start, min(start + _PAGE, self.size))
            found, place = array("H"), text.find(b"\n")
            while place >= 0:
                found.append(place)
                place = text.find(b"\n", place + 1)
            if len(self._breaks) >= _MAX_PAGES:
                del self._breaks[next(iter(self._breaks))]
            self._breaks[page] = found
        return found
