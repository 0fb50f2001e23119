"""The state of all objects at one step: flattened to tensors, and copied to memory for the writer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenstep.checkpoint.format.payload import Entry, Layout, dtype_name, entry_of
from evenstep.checkpoint.format.regions import Shape, first_element, held_regions, is_consecutive
from evenstep.checkpoint.format.tree import dotted, flatten, shown, unwrapped
from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_modules import compiled_module
from evenstep.ground.compat.torch_tensors import is_dtensor, local_part, ranks_of_mesh, root_mesh, split_of
from evenstep.replica.wrapper.distributed import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Shard:
    """Elements of a tensor that is divided over the ranks, which this rank writes.

    Attributes:
        name: Name of the whole tensor.
        shape: Shape of the whole tensor.
        start: First element of the shard in the flattened tensor.
        values: The values of consecutive elements; or of a box, in its shape.
        sizes: The box's sizes; None: the elements are consecutive in the flattened tensor.
        path: Path of the whole tensor in the state dictionary if it is in no structure; else None.
    """

    name: str
    shape: Shape
    start: int
    values: Tensor
    sizes: Shape | None = None
    path: tuple[str | int, ...] | None = None

    @property
    def stored(self) -> Tensor:
        """The values in the shape that they have in the file."""
        if self.sizes is None and self.values.numel() == math.prod(self.shape):
            return self.values.reshape(self.shape)
        return self.values if self.sizes is not None else self.values.reshape(-1)

    @property
    def key(self) -> str:
        """The shard's key in its file."""
        return shard_key(self.name, self.start, self.values.numel(), self.sizes)


@dataclass(frozen=True)
class Captured:
    """One object's state, not copied yet.

    Attributes:
        kind: The object's class.
        structure: The JSON structure that `tree.flatten` returns.
        tensors: Tensors by name that aren't DTensors, without aliases. The names are equal on all ranks.
        aliases: Names whose tensor is another name's in `tensors` or `divided` (tied parameters).
        shards: This rank's parts of tensors that are divided over the ranks.
        divided: Dtype and shape of whole DTensors by name. Equal on all ranks.
    """

    kind: str
    structure: Any
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    shards: list[Shard] = field(default_factory=list)
    divided: dict[str, tuple[str, Shape]] = field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        """The tensors as entries of a file."""
        return [entry_of(name, tensor) for name, tensor in self.tensors.items()]


def capture(objects: Mapping[str, Any], among: Collection[int] | None = None) -> dict[str, Captured]:
    """Flatten the state of all objects, without copying it.

    Args:
        objects: The objects by name.
        among: If several ranks hold the same part of a DTensor, one of these ranks writes it; None: one of all ranks.

    Raises:
        ConfigurationError: A value can't be saved; the message has its path and type.
    """
    return {name: capture_one(name, value, among) for name, value in objects.items()}


def capture_one(name: str, value: Any, among: Collection[int] | None = None) -> Captured:
    """Like `capture`, for one object. If the object is a dictionary, it is the state."""
    target = unwrapped(value)
    shards: list[Shard] = []
    if hasattr(target, "state_shards"):
        state, own = target.state_shards()
        shards = [
            Shard(dotted(s.path), tuple(s.shape), s.offset_numel, s.values.detach(), path=tuple(s.path)) for s in own
        ]
    else:
        state = target if isinstance(target, dict) else target.state_dict()
    structure, tensors = flatten(state, name)
    for key, tensor in [*tensors.items(), *((shard.name, shard.values) for shard in shards)]:
        if dtype_name(tensor.dtype) is None:
            raise ConfigurationError(f"{shown((name, key))} has dtype {tensor.dtype}, which no checkpoint can store.")
    distinct, aliases = _without_aliases(tensors)
    plain = {key: tensor for key, tensor in distinct.items() if not is_dtensor(tensor)}
    parts = {key: tensor for key, tensor in distinct.items() if is_dtensor(tensor)}
    divided = {key: (entry_of(key, tensor).dtype, tuple(tensor.shape)) for key, tensor in parts.items()}
    # The ranks that hold the same part take turns to write, the largest tensors first.
    for turn, key in enumerate(sorted(parts, key=lambda key: (-parts[key].numel() * parts[key].itemsize, key))):
        shards += _shards_of(name, key, parts[key], turn, among)
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    return Captured(kind, structure, plain, aliases, shards, divided)


def shard_key(name: str, start: int, numel: int, sizes: Shape | None) -> str:
    """The name of a shard in its file."""
    box = "" if sizes is None else "," + "x".join(map(str, sizes))
    return f"{name}[{start}:{start + numel}{box}]"


def _shards_of(owner: str, name: str, value: DTensor, turn: int, among: Collection[int] | None) -> list[Shard]:
    """The shards of a DTensor that this rank writes: its regions, if it is this rank's turn.

    Raises:
        ConfigurationError: The elements on this rank, or the ranks with the same elements, can't be determined.
    """
    try:
        regions = held_regions(value)
        rank, holders = _holders(value) if regions else (-1, [])
    except ValueError as error:
        raise ConfigurationError(f"{shown((owner, name))} is a DTensor that can't be saved: {error}.") from None
    writers = [each for each in holders if among is None or each in among]
    if not writers or writers[turn % len(writers)] != rank:
        return []
    shape, local = tuple(value.shape), local_part(value)
    shards = []
    for region in regions:
        values = local[tuple(slice(at, at + size) for at, size in zip(region.at, region.sizes, strict=True))]
        sizes = None if is_consecutive(shape, region.sizes) else region.sizes
        shards.append(Shard(name, shape, first_element(shape, region.offsets), values, sizes))
    return shards


def _holders(value: DTensor) -> tuple[int, list[int]]:
    """This rank, and all ranks that hold the same regions, in ascending order and including this rank.

    Ranks hold the same regions if their coordinates differ only along dimensions that don't divide the tensor:
    dimensions of its own mesh, or of the mesh from which that was sliced.

    Raises:
        ValueError: The tensor's mesh isn't a slice of the mesh from which it was made.
    """
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh holds nothing"
    ranks, all_ranks = ranks_of_mesh(mesh), root_mesh(mesh).mesh
    me = int(ranks[tuple(coordinate)])  # the process group may have ended
    places = zip(coordinate, value.placements, strict=True)
    inside = ranks[tuple(slice(None) if split_of(each) == (None, 1) else at for at, each in places)]
    left_out = _left_out(ranks, all_ranks, me)
    found: set[int] = set()
    for rank in inside.flatten().tolist():
        here = (all_ranks == rank).nonzero()[0].tolist()
        index = tuple(slice(None) if dim in left_out else at for dim, at in enumerate(here))
        found |= set(all_ranks[index].flatten().tolist())
    return me, sorted(found)


def _left_out(ranks: Tensor, all_ranks: Tensor, rank: int) -> tuple[int, ...]:
    """The dimensions of a mesh that a slice of it leaves out.

    Raises:
        ValueError: `ranks` isn't a slice of `all_ranks`.
    """
    if ranks.numel() == all_ranks.numel():
        return ()
    here = (all_ranks == rank).nonzero()[0].tolist()
    dims = range(all_ranks.ndim)
    wanted = sorted(ranks.flatten().tolist())
    for count in range(1, all_ranks.ndim + 1):
        for left_out in itertools.combinations(dims, count):
            inside = all_ranks[tuple(here[dim] if dim in left_out else slice(None) for dim in dims)]
            if sorted(inside.flatten().tolist()) == wanted:
                return left_out
    raise ValueError(f"its mesh of the ranks {wanted} is no slice of the mesh {all_ranks.tolist()}")


def models_among(objects: Mapping[str, Any]) -> Iterator[DistributedDataParallel]:
    """The replicated models among the objects, including those inside `torch.compile`."""
    for model in objects.values():
        while not isinstance(model, DistributedDataParallel) and isinstance(model, nn.Module):
            model = compiled_module(model)
        if isinstance(model, DistributedDataParallel):
            yield model


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep one of the tensors with the same memory (tied parameters); the others become aliases."""
    distinct: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        # A conjugate is a view with a flag: the same memory, but other numbers.
        flags = tensor.is_conj(), tensor.is_neg()
        memory: Any = tensor.data_ptr() if not is_dtensor(tensor) else _memory_of(tensor)
        place = (memory, tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device), flags)
        if tensor.numel() and place in seen:
            aliases[name] = seen[place]
        else:
            seen[place] = name
            distinct[name] = tensor
    return distinct, aliases


def _memory_of(value: DTensor) -> tuple[Any, ...]:
    """The memory of this rank's part of a DTensor.

    All ranks must find the same aliases, even a rank with an empty part.
    """
    local = local_part(value)
    return local.untyped_storage(), local.storage_offset(), value.placements


@dataclass(frozen=True, eq=False)
class File:
    """A file that this rank writes.

    Attributes:
        name: Inside the checkpoint's folder.
        owner: The object whose tensors these are.
        layout: The tensors' places.
        tensors: The tensors by key. After staging: contiguous, on the CPU, and unchanged until the save is finished.
        shards: The shards by key; the file's other tensors aren't divided.
    """

    name: str
    owner: str
    layout: Layout
    tensors: Mapping[str, Tensor]
    shards: Mapping[str, Shard] = field(default_factory=dict)


class Staging:
    """Memory for copies of files, reused by the next save, because new memory costs more than the copy."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Number of bytes of memory held."""
        return sum(memory.numel() for memory in self._memory.values())

    def stage(self, files: Sequence[File]) -> list[File]:
        """Copy tensors to their places in their files; complete on return."""
        wanted = {file.name: file.layout.payload_bytes for file in files}
        self._memory = {n: memory for n, memory in self._memory.items() if wanted.get(n) == memory.numel()}
        staged, devices = [], set()
        for file in files:
            name, layout, tensors = file.name, file.layout, file.tensors
            if name not in self._memory:
                pin = any(tensor.device.type == "cuda" for tensor in tensors.values())
                self._memory[name] = torch.empty(layout.payload_bytes, dtype=torch.uint8, pin_memory=pin, device="cpu")
            copies = {}
            for entry, offset in zip(layout.entries, layout.offsets, strict=True):
                source = tensors[entry.key]
                place = self._memory[name][offset : offset + entry.num_bytes]
                copies[entry.key] = place.view(source.dtype).view(source.shape)
                copies[entry.key].copy_(source, non_blocking=True)
                devices.add(source.device)
            staged.append(replace(file, tensors=copies))
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return staged
