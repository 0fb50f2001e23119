"""`TokenDataset`: windows of a long row of tokens, for language models."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from evenstep import checks
from evenstep.errors import ConfigurationError, DataError
from evenstep.ground.health import excepthook

Array = np.ndarray[Any, Any]
PADDING = -100  # a target that torch's cross_entropy ignores


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pairs (x, y) of `context` tokens and the tokens that follow each of them, int64 [context].

    Files are mapped (`numpy.memmap`), not copied to memory, so they may be of any size. Loaders read a whole batch of
    windows at once.

    Several files are joined to one text: a window may begin in one file and end in the next. Without `documents`, a
    rest at the text's end that is shorter than a window is not used. With `documents`, no window crosses the end of a
    document: the last window of each document is short, and filled up with 0 in x and with `padding` in y. So every
    token except each document's first is predicted once (with `stride` equal to `context`).

    Args:
        tokens: A file of numbers, or a list of files in the order of the text, or a tensor or array, [num_tokens].
        context: Tokens in a window.
        dtype: The dtype of a file's numbers: torch's or numpy's, of whole numbers. ">u2" is big-endian.
        header_bytes: Bytes at the beginning of each file, before its tokens.
        stride: Tokens from the beginning of a window to the beginning of the next; None: `context`.
        documents: The number of tokens of each document; their sum is the number of all tokens. Needs 16 bytes of
            memory per document.
        padding: Value of y after a document's end.

    Raises:
        ConfigurationError: A file is missing, the tokens are too few for a window, or the documents don't add up.
        DataError: A file ends inside of its header or of a token. At a later read: the file has changed since the data
            set was made.
    """

    gives_batches = True

    @excepthook.for_users
    def __init__(
        self,
        tokens: Any,
        context: int,
        *,
        dtype: Any = torch.uint16,
        header_bytes: int = 0,
        stride: int | None = None,
        documents: Sequence[int] | Tensor | None = None,
        padding: int = PADDING,
    ) -> None:
        self.context = checks.whole("TokenDataset: context", context, least=1)
        self.stride = self.context if stride is None else checks.whole("TokenDataset: stride", stride, least=1)
        self.padding = checks.whole("TokenDataset: padding", padding, least=-(1 << 63), most=(1 << 63) - 1)
        header_bytes = checks.whole("TokenDataset: header_bytes", header_bytes, least=0)
        numbers = _dtype_of(dtype)
        paths = _paths_of(tokens)
        self._shards: list[_File | Array] = (
            [_row_of(tokens)] if paths is None else [_opened(path, numbers, header_bytes) for path in paths]
        )
        self._ends = np.cumsum([len(shard) for shard in self._shards])  # [shards], int64: tokens to the end of each
        self.num_tokens = int(self._ends[-1])
        self._first_window: Array | None = None  # [documents + 1], int64: windows before each document
        if documents is None:
            self._num_windows = max(0, (self.num_tokens - self.context - 1) // self.stride + 1)
            if self._num_windows < 1:
                raise ConfigurationError(
                    f"TokenDataset: {self.num_tokens} tokens are too few for a window of {self.context} and the token "
                    f"after."
                )
        else:
            self._divide(_as_array("documents", documents, "numbers of tokens, one for each document"))

    def _divide(self, documents: Array) -> None:
        if documents.ndim != 1 or documents.dtype.kind not in "iu" or (documents < 0).any():
            raise ConfigurationError("TokenDataset: documents are numbers of tokens, one for each document.")
        self._document_begins = np.concatenate(([0], documents.astype(np.int64).cumsum()))  # [documents + 1], tokens
        if self._document_begins[-1] != self.num_tokens:
            raise ConfigurationError(
                f"TokenDataset: the documents have {self._document_begins[-1]} tokens together, but there are "
                f"{self.num_tokens}."
            )
        windows = np.maximum(np.diff(self._document_begins) + self.stride - 2, 0) // self.stride
        self._first_window = np.concatenate(([0], windows.cumsum()))
        self._num_windows = int(self._first_window[-1])
        if self._num_windows == 0:
            raise ConfigurationError("TokenDataset: no document has two tokens, so there is nothing to predict.")

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.batch_of(torch.tensor([index], device="cpu"))
        return x[0], y[0]

    def batch_of(self, indices: Tensor) -> list[Tensor]:
        """Return [x, y] of several windows, each [n, context] int64. `indices`: [n], int64, n at least 1."""
        windows = indices.numpy()
        if windows.min() < 0 or windows.max() >= len(self):
            raise IndexError(f"windows {windows.min()} to {windows.max()} of {len(self)}")
        if self._first_window is None:
            found = self._at(windows * self.stride)
            return [torch.from_numpy(part.copy()) for part in (found[:, :-1], found[:, 1:])]
        document = np.searchsorted(self._first_window, windows, side="right") - 1
        first = self._document_begins[document] + (windows - self._first_window[document]) * self.stride
        found = self._at(first)
        size = self._document_begins[document + 1] - first
        # A token without a successor is hidden, too: nothing is predicted from it.
        beyond = np.arange(1, self.context + 1) >= size[:, None]
        x, y = np.where(beyond, 0, found[:, :-1]), np.where(beyond, self.padding, found[:, 1:])
        return [torch.from_numpy(x), torch.from_numpy(y)]

    def _at(self, first: Array) -> Array:
        """Tokens from the positions `first` [n] on: [n, context + 1]; arbitrary after the text's end."""
        found = np.empty((len(first), self.context + 1), np.int64)
        shards = np.searchsorted(self._ends, first, side="right")
        for number in np.unique(shards).tolist():
            rows, tokens = np.flatnonzero(shards == number), _tokens_of(self._shards[number])
            places = first[rows] - (self._ends[number] - len(tokens))
            found[rows] = tokens.take(places[:, None] + np.arange(self.context + 1), mode="clip")
        for row in np.flatnonzero(first + self.context >= self._ends[shards]).tolist():  # continued in the next shard
            number, done = shards[row] + 1, self._ends[shards[row]] - first[row]
            while done <= self.context and number < len(self._shards):
                tokens = _tokens_of(self._shards[number])[: self.context + 1 - done]
                found[row, done : done + len(tokens)] = tokens
                number, done = number + 1, done + len(tokens)
        return found

    def __repr__(self) -> str:
        return f"<TokenDataset {len(self)} windows of {self.context} in {self.num_tokens} tokens>"


@dataclass(frozen=True)
class _File:
    """A file of tokens as it was when the data set was made."""

    path: str
    dtype: np.dtype[Any]
    header_bytes: int
    size: int
    modified_ns: int

    def __len__(self) -> int:
        return (self.size - self.header_bytes) // self.dtype.itemsize


def _file_at(path: str, dtype: np.dtype[Any], header_bytes: int) -> _File:
    state = os.stat(path)
    return _File(path, dtype, header_bytes, state.st_size, state.st_mtime_ns)


def _opened(path: str, dtype: np.dtype[Any], header_bytes: int) -> _File:
    """Check a file and record its present state.

    Raises:
        ConfigurationError: There is no such file.
        DataError: The file ends inside of its header, or of a token.
    """
    if not os.path.isfile(path):
        raise ConfigurationError(f"TokenDataset: {path} is {'no file' if os.path.exists(path) else 'not there'}.")
    file = _file_at(path, dtype, header_bytes)
    if file.size < header_bytes:
        raise DataError(f"{path}, byte {file.size}: the file ends inside of its header of {header_bytes} bytes.")
    rest = (file.size - header_bytes) % dtype.itemsize
    if rest:
        raise DataError(
            f"{path}, token {len(file)}, byte {file.size - rest}: the file ends after {rest} of the token's "
            f"{dtype.itemsize} bytes. It was cut off, or dtype={dtype} or header_bytes={header_bytes} is wrong."
        )
    return file


def _tokens_of(shard: _File | Array) -> Array:
    """The tokens of a shard; those of a file are read on access.

    Raises:
        DataError: The file has changed. A read after its end would kill the process (SIGBUS).
    """
    if not isinstance(shard, _File):
        return shard
    try:
        now = _file_at(shard.path, shard.dtype, shard.header_bytes)
    except OSError as error:
        raise DataError(f"{shard.path} can't be read any more: {error.strerror}.") from None
    if now != shard:
        raise DataError(
            f"{shard.path} was changed since the data set was made: {shard.size} bytes then, {now.size} bytes now. "
            f"Make the data set anew."
        )
    return _mapped(shard)


@functools.lru_cache(maxsize=256)  # each entry keeps a descriptor open, and there may be thousands of shards
def _mapped(file: _File) -> Array:
    # An empty file can't be mapped.
    return np.asarray(np.memmap(file.path, file.dtype, "r", file.header_bytes)) if len(file) else np.empty(0, np.int64)


def _paths_of(tokens: Any) -> list[str] | None:
    """The paths of the files; None if `tokens` are the tokens themselves."""
    given = [tokens] if isinstance(tokens, str | os.PathLike) else tokens
    if isinstance(given, list | tuple) and given and all(isinstance(each, str | os.PathLike) for each in given):
        return [str(os.fspath(each)) for each in given]
    return None


def _dtype_of(given: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(str(given).removeprefix("torch.") if isinstance(given, torch.dtype) else given)
    except Exception:  # numpy raises errors of several kinds
        dtype = np.dtype(object)
    if dtype.kind not in "iu":
        raise checks.refuse("TokenDataset: dtype", given, "a dtype of whole numbers, such as torch.uint16")
    return dtype


def _as_array(name: str, given: Any, wanted: str) -> Array:
    try:
        array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if array.ndim == 0 or array.dtype.kind in "OSU":
        raise checks.refuse(f"TokenDataset: {name}", given, wanted)
    return array


def _row_of(tokens: Any) -> Array:
    row = _as_array("tokens", tokens, "a file of numbers, a list of such files, or a tensor or array, [num_tokens]")
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise ConfigurationError(
            f"TokenDataset: tokens of shape {list(row.shape)} and {row.dtype}; whole numbers in a row."
        )
    return row
