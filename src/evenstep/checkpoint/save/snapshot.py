"""The state of all objects at one step: taken apart, and copied to memory where the writer can take its time."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.checkpoint.payload import Entry, Layout, dtype_name
from evenstep.checkpoint.tree import dotted, flatten, shown
from evenstep.errors import ConfigurationError


@dataclass(frozen=True)
class Piece:
    """What this rank has of a tensor that is divided over the ranks.

    Attributes:
        path: Where the whole belongs in the state dictionary.
        shape: Of the whole.
        start: Of the flattened whole, the first element that is here.
        values: [numel], contiguous.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    start: int
    values: Tensor

    @property
    def name(self) -> str:
        """Of the whole."""
        return dotted(self.path)

    @property
    def key(self) -> str:
        """Of the piece, in its file."""
        return f"{self.name}[{self.start}:{self.start + self.values.numel()}]"


@dataclass(frozen=True)
class Captured:
    """One object's state, not copied yet.

    Attributes:
        kind: Its class.
        structure: JSON; see `tree.flatten`.
        tensors: By name, each memory once; the object's own.
        aliases: Names whose tensor is another one of these.
        pieces: Of tensors that are divided over the ranks.
    """

    kind: str
    structure: Any
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    pieces: list[Piece] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        """What a file needs to know of the tensors."""
        return [entry_of(name, tensor) for name, tensor in self.tensors.items()]


def entry_of(key: str, tensor: Tensor) -> Entry:
    """What a file needs to know of a tensor."""
    return Entry(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def unwrapped(value: Any) -> Any:
    """The object whose state is saved: of a model that is wrapped for replication or compiled, the model itself."""
    while isinstance(value, nn.Module):
        if isinstance(value, nn.parallel.DistributedDataParallel | nn.DataParallel):
            value = value.module
        elif isinstance(getattr(value, "_orig_mod", None), nn.Module):
            value = value._orig_mod
        else:
            break
    return value


def capture(objects: Mapping[str, Any]) -> dict[str, Captured]:
    """Take the state of all objects, without copying it.

    Raises:
        ConfigurationError: Something in it can't be saved; the message has its path and type.
    """
    return {name: capture_one(name, value) for name, value in objects.items()}


def capture_one(name: str, value: Any) -> Captured:
    """As `capture`, of one object. A dictionary is its own state."""
    target = unwrapped(value)
    pieces: list[Piece] = []
    if hasattr(target, "state_shards"):
        state, shards = target.state_shards()
        pieces = [Piece(tuple(s.path), tuple(s.shape), s.offset_numel, s.values.detach()) for s in shards]
    else:
        state = target if isinstance(target, dict) else target.state_dict()
    structure, tensors = flatten(state, name)
    for key, tensor in [*tensors.items(), *((piece.name, piece.values) for piece in pieces)]:
        if dtype_name(tensor.dtype) is None:
            raise ConfigurationError(f"{shown((name, key))} has dtype {tensor.dtype}, which no checkpoint can hold.")
    distinct, aliases = _without_twins(tensors)
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    return Captured(kind, structure, distinct, aliases, pieces)


def _without_twins(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tied parameters are one tensor under two names, and are written once."""
    distinct: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        # A conjugate is a view with a flag: the same memory, and other numbers.
        flags = tensor.is_conj(), tensor.is_neg()
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device), flags)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            distinct[name] = tensor
    return distinct, aliases


class Staging:
    """Memory for copies of files, kept from one save to the next: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """What is held."""
        return sum(memory.numel() for memory in self._memory.values())

    def copy(self, files: Sequence[tuple[str, Layout, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
        """Copy tensors to where they stand in their files; done when this returns.

        Args:
            files: Name, layout, and tensors by key.

        Returns:
            Of each file the bytes behind its header: [payload_bytes], uint8.
        """
        wanted = {name: layout.payload_bytes for name, layout, _ in files}
        self._memory = {n: memory for n, memory in self._memory.items() if wanted.get(n) == memory.numel()}
        devices = set()
        for name, layout, tensors in files:
            if name not in self._memory:
                pin = any(tensor.device.type == "cuda" for tensor in tensors.values())
                self._memory[name] = torch.empty(layout.payload_bytes, dtype=torch.uint8, pin_memory=pin, device="cpu")
            payload = self._memory[name]
            for entry, offset in zip(layout.entries, layout.offsets, strict=True):
                source = tensors[entry.key]
                target = payload[offset : offset + entry.num_bytes].view(source.dtype).view(source.shape)
                target.copy_(source, non_blocking=True)
                devices.add(source.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return {name: self._memory[name] for name in wanted}


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which lives as long as this. Not `numpy()`: numpy may be missing."""
    if tensor.numel() == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # `memory` doesn't own what it shows, and must keep it
    return memoryview(memory).cast("B")
