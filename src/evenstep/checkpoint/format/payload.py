"""The bytes of a safetensors file: header and offsets. Pure.

    8 bytes   length of the header, little-endian
    JSON      {"name": {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ..., "__metadata__": {...}}
    rest      the tensors, one after the other without gaps

The safetensors package would join everything into one `bytes` object; this module plans the file so that a save copies
each tensor only once, to its place in the file. The package reads these files (Hugging Face, safetensors format 0.4).
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100_000_000  # the same limit as in the safetensors package

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    # Complex numbers are stored as pairs: not every reader supports complex dtypes.
    torch.complex64: "F32",
    torch.complex128: "F64",
}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _NAMES}


@dataclass(frozen=True)
class Entry:
    """One tensor in a file.

    Attributes:
        key: The tensor's name in the file.
        dtype: The dtype in memory: "float32", "complex64".
        shape: The shape in memory.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the tensor takes in the file."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Layout:
    """The place of each tensor in a file.

    Attributes:
        header: Everything before the first tensor.
        entries: The entries in file order.
        offsets: Offset of each entry, from the end of the header.
        payload_bytes: Total length of the entries.
    """

    header: bytes
    entries: tuple[Entry, ...]
    offsets: tuple[int, ...]
    payload_bytes: int

    @property
    def file_bytes(self) -> int:
        """Length of the file."""
        return len(self.header) + self.payload_bytes


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype with this name.

    Raises:
        ValueError: torch or safetensors has no such dtype.
    """
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one that a checkpoint can hold")
    return _DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str | None:
    """The name of a dtype; None if a file can't hold it."""
    return str(dtype).removeprefix("torch.") if dtype in _NAMES else None


def entry_of(key: str, tensor: Tensor) -> Entry:
    """A tensor as an entry of a file."""
    return Entry(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def plan_layout(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> Layout:
    """Plan the places of tensors in one file. Wide dtypes come first, so that all are aligned."""
    ordered = sorted(entries, key=lambda e: (-torch_dtype(e.dtype).itemsize, e.key))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets, end = [], 0
    for entry in ordered:
        offsets.append(end)
        end += entry.num_bytes
        header[entry.key] = {"data_offsets": [offsets[-1], end], **_stored_as(entry)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, tuple(ordered), tuple(offsets), end)


def parse_header(text: bytes, entries: Sequence[Entry], payload_bytes: int) -> dict[str, int]:
    """Check a file's header; returns the offset of each expected entry.

    Args:
        text: The JSON part of the header.
        entries: Tensors that the file must contain. It may contain others: copies that differ between nodes aren't in a
            manifest.
        payload_bytes: Bytes after the header.

    Raises:
        ValueError: The header doesn't match the expected entries.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("its header isn't JSON") from None
    if not isinstance(found, dict):
        raise ValueError("its header isn't a JSON object")
    found.pop("__metadata__", None)
    expected = {entry.key: entry for entry in entries}
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"its header lacks tensors that the manifest lists: {', '.join(missing[:3])}")
    offsets = {}
    for key, entry in expected.items():
        begin, end = _span(found[key])
        if not 0 <= begin <= end <= payload_bytes or end - begin != entry.num_bytes:
            raise ValueError(f"its header puts {key} at bytes {begin} to {end} of {payload_bytes}")
        if found[key] != {"data_offsets": [begin, end], **_stored_as(entry)}:
            raise ValueError(f"its header and the manifest don't agree about {key}")
        offsets[key] = begin
    return offsets


def _span(item: object) -> tuple[int, int]:
    span = item.get("data_offsets") if isinstance(item, dict) else None
    if not isinstance(span, list) or len(span) != 2 or not all(type(number) is int for number in span):
        raise ValueError("its header has an entry without data_offsets")
    return span[0], span[1]


def _stored_as(entry: Entry) -> dict[str, object]:
    dtype = torch_dtype(entry.dtype)
    shape = [*entry.shape, 2] if dtype.is_complex else list(entry.shape)
    return {"dtype": _NAMES[dtype], "shape": shape}


def bytes_of(tensor: Tensor) -> memoryview:
    """A view of a contiguous CPU tensor's memory, which keeps the tensor alive. Needs no numpy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # `memory` doesn't own its bytes, so it must keep the tensor
    return memoryview(memory).cast("B")
