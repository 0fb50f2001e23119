"""The state of all objects at one step: flattened to tensors, and copied to memory for the writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from evenstep.checkpoint.format.payload import Entry, Layout, dtype_name, entry_of
from evenstep.checkpoint.format.tree import dotted, flatten, shown, unwrapped
from evenstep.errors import ConfigurationError


@dataclass(frozen=True)
class Shard:
    """This rank's elements of a tensor that is divided over the ranks.

    Attributes:
        path: Path of the whole tensor in the state dictionary.
        shape: Of the whole tensor.
        start: First element of the shard in the flattened tensor.
        values: [numel], contiguous.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    start: int
    values: Tensor

    @property
    def name(self) -> str:
        """Of the whole tensor."""
        return dotted(self.path)

    @property
    def key(self) -> str:
        """Of the shard, in its file."""
        return f"{self.name}[{self.start}:{self.start + self.values.numel()}]"


@dataclass(frozen=True)
class Captured:
    """One object's state, not copied yet.

    Attributes:
        kind: Its class.
        structure: JSON; see `tree.flatten`.
        tensors: By name, each memory once; the object's own.
        aliases: Names whose tensor is another one of these.
        shards: Of tensors that are divided over the ranks.
    """

    kind: str
    structure: Any
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    shards: list[Shard] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        """The tensors as entries of a file."""
        return [entry_of(name, tensor) for name, tensor in self.tensors.items()]


def capture(objects: Mapping[str, Any]) -> dict[str, Captured]:
    """Flatten the state of all objects, without copying it.

    Raises:
        ConfigurationError: Something in it can't be saved; the message has its path and type.
    """
    return {name: capture_one(name, value) for name, value in objects.items()}


def capture_one(name: str, value: Any) -> Captured:
    """Like `capture`, for one object. A dictionary is its own state."""
    target = unwrapped(value)
    shards: list[Shard] = []
    if hasattr(target, "state_shards"):
        state, own = target.state_shards()
        shards = [Shard(tuple(s.path), tuple(s.shape), s.offset_numel, s.values.detach()) for s in own]
    else:
        state = target if isinstance(target, dict) else target.state_dict()
    structure, tensors = flatten(state, name)
    for key, tensor in [*tensors.items(), *((shard.name, shard.values) for shard in shards)]:
        if dtype_name(tensor.dtype) is None:
            raise ConfigurationError(f"{shown((name, key))} has dtype {tensor.dtype}, which no checkpoint can hold.")
    distinct, aliases = _without_aliases(tensors)
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    return Captured(kind, structure, distinct, aliases, shards)


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep one of the tensors with the same memory (tied parameters); the others become aliases."""
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
    """Memory for copies of files, reused by the next save: fresh memory costs more than the copy."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(memory.numel() for memory in self._memory.values())

    def copy(self, files: Sequence[tuple[str, Layout, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
        """Copy tensors to their places in their files; complete on return.

        Args:
            files: Name, layout, and tensors by key.

        Returns:
            The bytes after the header of each file: [payload_bytes], uint8.
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
