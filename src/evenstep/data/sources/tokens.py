"""`TokenDataset`: windows of a long row of tokens, for language models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from evenstep import checks
from evenstep.data.sources.files import FixedFile
from evenstep.errors import ConfigurationError, DataError
from evenstep.ground.health import excepthook

PADDING = -100  # a target that torch's cross_entropy leaves out


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """Pairs (x, y) of `context` tokens and the tokens that follow each of them, int64 [context].

    A file is mapped into memory: no process keeps a copy, and its size doesn't matter.
    Loaders read a whole batch of windows at once.

    Without `documents` the tokens are one text; a rest at its end that is shorter than a window is not used. With
    them no window crosses the end of a document: the last of each is short, filled up with 0 in x and with `padding`
    in y, so that every token but each document's first is predicted once (with `stride` equal to `context`).

    Args:
        tokens: A file of numbers, or a tensor or array, [num_tokens].
        context: Tokens in a window.
        dtype: Of the file's numbers, in this machine's byte order.
        stride: Tokens from the beginning of a window to that of the next; None: `context`.
        documents: Tokens of each document, which add up to all tokens. 16 bytes of memory for each.
        padding: Value of y behind a document's end.

    Raises:
        ConfigurationError: The tokens are too few for a window, or the documents don't add up.
        DataError: The file ends inside of a token. Later: it has changed since it was opened.
    """

    gives_batches = True

    @excepthook.for_users
    def __init__(
        self,
        tokens: Any,
        context: int,
        *,
        dtype: torch.dtype = torch.uint16,
        stride: int | None = None,
        documents: Sequence[int] | Tensor | None = None,
        padding: int = PADDING,
    ) -> None:
        context = checks.whole("TokenDataset: context", context, least=1)
        stride = context if stride is None else checks.whole("TokenDataset: stride", stride, least=1)
        padding = checks.whole("TokenDataset: padding", padding, least=-(1 << 63), most=(1 << 63) - 1)
        if not isinstance(dtype, torch.dtype) or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
            raise checks.refuse("TokenDataset: dtype", dtype, "a torch.dtype of whole numbers, such as torch.uint16")
        self.context, self.stride, self.padding = context, stride, padding
        self._file: FixedFile | None = None
        self._dtype = dtype
        self._held: Tensor | None = None
        if isinstance(tokens, str | os.PathLike):
            self._file = _open(Path(tokens), dtype)
            self.num_tokens = len(self._file)
        else:
            self._held = _as_row(tokens)
            self.num_tokens = len(self._held)
        self._first_window: Tensor | None = None  # [documents + 1], int64: windows before each document
        self._ends: Tensor | None = None  # [documents], int64: tokens up to the end of each
        if documents is None:
            self._num_windows = max(0, (self.num_tokens - context - 1) // stride + 1)
            if self._num_windows < 1:
                raise ConfigurationError(
                    f"TokenDataset: {self.num_tokens} tokens are too few for a window of {context} and the token after."
                )
        else:
            self._divide(_as_tensor("documents", documents, "numbers of tokens, one for each document"))

    def _divide(self, documents: Tensor) -> None:
        is_row = documents.dim() == 1 and not documents.is_floating_point() and not documents.is_complex()
        if not is_row or documents.dtype is torch.bool or bool((documents < 0).any()):
            raise ConfigurationError("TokenDataset: documents are numbers of tokens, one for each document.")
        documents = documents.to(torch.int64)
        if int(documents.sum()) != self.num_tokens:
            raise ConfigurationError(
                f"TokenDataset: the documents have {int(documents.sum())} tokens together, and there are "
                f"{self.num_tokens}."
            )
        self._ends = documents.cumsum(0)
        windows = ((documents - 1).clamp_(min=0) + self.stride - 1) // self.stride
        self._first_window = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), windows.cumsum(0)])
        self._num_windows = int(self._first_window[-1])
        if self._num_windows == 0:
            raise ConfigurationError("TokenDataset: no document has two tokens, so there is nothing to predict.")

    @property
    def tokens(self) -> Tensor:
        """All tokens, [num_tokens]; those of a file are read on access."""
        if self._file is None:
            assert self._held is not None
            return self._held
        return self._file.content[: self.num_tokens * self._dtype.itemsize].view(self._dtype)

    def __len__(self) -> int:
        return self._num_windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        x, y = self.batch_of(torch.tensor([index], device="cpu"))
        return x[0], y[0]

    def batch_of(self, indices: Tensor) -> list[Tensor]:
        """x and y of several windows: [n, context] each, int64, of [n] int64."""
        low, high = (int(end) for end in indices.aminmax())
        if low < 0 or high >= len(self):
            raise IndexError(f"windows {low} to {high} of {len(self)}")
        if self._file is not None:
            self._file.validate_unchanged()
        first, end = self._spans(indices)
        places = first.unsqueeze(1) + torch.arange(self.context + 1, device="cpu")
        if self._ends is None:
            found = self._at(places)
            return [found[:, :-1].contiguous(), found[:, 1:].contiguous()]
        beyond = places >= end.unsqueeze(1)
        found = self._at(places.clamp_(max=self.num_tokens - 1))
        # A token without a successor isn't shown either: nothing is predicted from it.
        x = found[:, :-1].masked_fill(beyond[:, 1:], 0)
        return [x, found[:, 1:].masked_fill(beyond[:, 1:], self.padding)]

    def _at(self, places: Tensor) -> Tensor:
        tokens = self.tokens
        if tokens.dtype in (torch.uint16, torch.uint32, torch.uint64):
            # torch indexes these only under their signed names.
            signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}[tokens.dtype]
            mask = (1 << 8 * tokens.dtype.itemsize) - 1 if signed is not torch.int64 else -1
            return tokens.view(signed)[places].to(torch.int64) & mask
        return tokens[places].to(torch.int64)

    def _spans(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """First token of each window, and the end of its document."""
        if self._ends is None or self._first_window is None:
            return indices * self.stride, torch.full_like(indices, self.num_tokens)
        document = torch.searchsorted(self._first_window, indices, right=True) - 1
        begins = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), self._ends])[document]
        return begins + (indices - self._first_window[document]) * self.stride, self._ends[document]

    def __repr__(self) -> str:
        return f"<TokenDataset {len(self)} windows of {self.context} in {self.num_tokens} tokens>"


def _open(path: Path, dtype: torch.dtype) -> FixedFile:
    if not path.is_file():
        raise ConfigurationError(f"TokenDataset: {path} is {'no file' if path.exists() else 'not there'}.")
    file = FixedFile(path, dtype.itemsize, 0)
    if file.rest:
        raise DataError(
            f"{path}, token {len(file)}, byte {len(file) * dtype.itemsize}: the file ends after {file.rest} of the "
            f"token's {dtype.itemsize} bytes. It was cut off, or dtype={dtype} is wrong."
        )
    return file


def _as_tensor(name: str, given: Any, wanted: str) -> Tensor:
    try:
        return torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise checks.refuse(f"TokenDataset: {name}", given, wanted) from None


def _as_row(tokens: Any) -> Tensor:
    row = _as_tensor("tokens", tokens, "a file of numbers, or a tensor or array, [num_tokens]")
    if row.dim() != 1 or row.is_floating_point() or row.is_complex() or row.dtype is torch.bool:
        raise ConfigurationError(
            f"TokenDataset: tokens of shape {list(row.shape)} and {row.dtype}; whole numbers in a row."
        )
    return row
