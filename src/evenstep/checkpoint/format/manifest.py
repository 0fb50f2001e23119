"""`manifest.json`: the contents of a checkpoint, with checksums of every part. Pure.

The first line has the format's version and a CRC-32 of everything after that line: it shows a flipped bit or a missing
byte in the manifest itself. The whole file is plain JSON.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from evenstep.checkpoint.format.payload import torch_dtype
from evenstep.checkpoint.format.regions import Shape, boxes_of_elements, is_consecutive, is_tiled, offsets_of

NAME = "manifest.json"
VERSION = 1
MAX_BYTES = 1 << 28

_FIRST_LINE = '{"evenstep_checkpoint": %d, "crc32": "%08x",\n'
_FIRST_PATTERN = re.compile(rb'\{"evenstep_checkpoint": (\d{1,9}), "crc32": "([0-9a-f]{8})",\n')
# Default values, which aren't written: most parts aren't boxes, and only the local tier has copies and nodes.
_LEFT_OUT: Mapping[str, object] = {"sizes": None, "copies": (), "node": None}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")
_OBJECT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")  # becomes part of file names


@dataclass(frozen=True)
class Part:
    """Consecutive elements of a tensor, or a box of it, in one file.

    Attributes:
        file: The file's name.
        key: The part's name in that file.
        start: First element of this part in the flattened tensor.
        numel: Number of elements in this part.
        crc32: Checksum of the part's bytes.
        sizes: Lengths of the box, if its elements aren't consecutive in the flattened tensor; None: they are.
    """

    file: str
    key: str
    start: int
    numel: int
    crc32: int
    sizes: Shape | None = None

    @property
    def place(self) -> tuple[int, int, Shape | None, int]:
        """The part's elements and their checksum: equal for a part and its copies."""
        return self.start, self.numel, self.sizes, self.crc32

    def boxes(self, shape: Shape) -> list[tuple[Shape, Shape, int]]:
        """This part of a tensor of `shape` as boxes: (offsets, sizes, place among the part's elements)."""
        if self.sizes is None:
            return boxes_of_elements(shape, self.start, self.numel)
        return [(offsets_of(shape, self.start), self.sizes, 0)]

    def stored_shape(self, shape: Shape) -> Shape:
        """The shape in the file of this part of a tensor of `shape`."""
        if self.sizes is not None:
            return self.sizes
        return shape if self.numel == math.prod(shape) else (self.numel,)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of an object's state.

    Attributes:
        dtype: The dtype's name, without "torch.".
        shape: Shape of the whole tensor.
        parts: Cover the tensor once, in order of their first elements; a single part unless it is divided over the
            ranks.
        copies: Parts with the same bytes as some of `parts`, in files of other nodes.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    copies: tuple[Part, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ObjectEntry:
    """One object that was saved.

    Attributes:
        kind: The object's class, for messages.
        structure: Argument of `tree.unflatten`.
        tensors: The object's tensors by name; `structure` refers to these names.
        aliases: Names of tensors that are the same as another tensor of this object (tied parameters).
        placed: (path, name) of tensors that were divided over the ranks; they aren't in `structure`.
    """

    kind: str
    structure: Any
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str] = field(default_factory=dict)
    placed: list[tuple[list[str | int], str]] = field(default_factory=list)


@dataclass(frozen=True)
class FileEntry:
    """One payload file.

    Attributes:
        bytes: The file's length.
        header_bytes: Length of everything before the first tensor.
        header_crc32: Checksum of the first `header_bytes` bytes.
        node: The node whose local tier has the file; None: all ranks share it.
    """

    bytes: int
    header_bytes: int
    header_crc32: int
    node: int | None = None


@dataclass(frozen=True)
class Manifest:
    """The description of one checkpoint.

    Attributes:
        step: Number of optimizer steps.
        world_size: Number of ranks that saved it.
        time: When the save began, in seconds since 1970.
        versions: Versions of evenstep, torch and python.
        metrics: The latest value of each metric given to `step` and `save`.
        objects: The objects, by the names given to the `Checkpointer`; the random streams are one of them.
        files: The files by name.
    """

    step: int
    world_size: int
    time: float
    versions: dict[str, str]
    metrics: dict[str, float]
    objects: dict[str, ObjectEntry]
    files: dict[str, FileEntry]

    @property
    def payload_bytes(self) -> int:
        """Length of all files but the manifest."""
        return sum(file.bytes for file in self.files.values())

    def choose(self, *present: Collection[str]) -> Manifest | None:
        """This manifest with readable parts; None if a part and all its copies are missing.

        Args:
            present: Names of existing files. Files in an earlier argument are preferred to those in a later one, and
                parts to their copies.
        """
        objects = {}
        for owner, item in self.objects.items():
            tensors = {}
            for name, tensor in item.tensors.items():
                worst_first = [*reversed(tensor.copies), *tensor.parts]
                there = {each.place: each for files in reversed(present) for each in worst_first if each.file in files}
                if any(part.place not in there for part in tensor.parts):
                    return None
                tensors[name] = replace(tensor, parts=tuple(there[part.place] for part in tensor.parts))
            objects[owner] = replace(item, tensors=tensors)
        return replace(self, objects=objects)


def is_object_name(name: str) -> bool:
    """Whether a saved object may have this name."""
    return _OBJECT_NAME.fullmatch(name) is not None


def encode(manifest: Manifest) -> bytes:
    """The file's content."""
    # Standard JSON has no infinity. Python reads and writes it, which is enough for metrics.
    content = asdict(
        manifest, dict_factory=lambda fields: {k: v for k, v in fields if k not in _LEFT_OUT or v != _LEFT_OUT[k]}
    )
    rest = json.dumps(content, separators=(",", ":"))[1:].encode() + b"\n"
    return (_FIRST_LINE % (VERSION, zlib.crc32(rest))).encode() + rest


def decode(content: bytes) -> Manifest:
    """The inverse of `encode`.

    Raises:
        ValueError: The manifest is damaged, was written by a newer version, or names a file outside of its own folder.
    """
    first, newline, rest = content.partition(b"\n")
    found = _FIRST_PATTERN.fullmatch(first + newline)
    if found is None:
        raise ValueError("its first line is not that of a checkpoint")
    if int(found[2], 16) != zlib.crc32(rest):
        raise ValueError(f"its checksum is {zlib.crc32(rest):08x}, but {found[2].decode()} is written in it")
    if int(found[1]) != VERSION:
        raise ValueError(f"it has version {int(found[1])} of the format; this evenstep reads version {VERSION}")
    try:
        manifest = _build(json.loads(b"{" + rest))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it lacks something ({type(error).__name__}: {error})") from None
    validate(manifest)
    return manifest


def _build(found: Mapping[str, Any]) -> Manifest:
    objects = {}
    for name, item in found["objects"].items():
        tensors = {
            key: TensorEntry(
                dtype=str(tensor["dtype"]),
                shape=tuple(tensor["shape"]),
                parts=tuple(map(_part, tensor["parts"])),
                copies=tuple(map(_part, tensor.get("copies", ()))),
            )
            for key, tensor in item["tensors"].items()
        }
        placed = [(list(path), str(tensor)) for path, tensor in item["placed"]]
        objects[name] = ObjectEntry(str(item["kind"]), item["structure"], tensors, dict(item["aliases"]), placed)
    return Manifest(
        step=found["step"],
        world_size=found["world_size"],
        time=found["time"],
        versions=dict(found["versions"]),
        metrics=dict(found["metrics"]),
        objects=objects,
        files={name: FileEntry(**file) for name, file in found["files"].items()},
    )


def _part(found: Mapping[str, Any]) -> Part:
    sizes = found.get("sizes")
    return Part(**{**found, "sizes": None if sizes is None else tuple(sizes)})


def validate(manifest: Manifest) -> None:
    """Raise ValueError if a manifest is inconsistent: a valid checksum doesn't show that evenstep wrote it."""
    counts: list[object] = [manifest.step, manifest.world_size]
    for name, file in manifest.files.items():
        if not _SAFE_NAME.fullmatch(name) or name == NAME:
            raise ValueError(f"it names the file {name[:80]!r}, which isn't a plain name inside its folder")
        counts += [file.bytes, file.header_bytes, file.header_crc32, 0 if file.node is None else file.node]
    for owner, item in manifest.objects.items():
        for name, target in item.aliases.items():
            if target not in item.tensors:
                raise ValueError(f"it says that {owner}/{name} is {target!r}, which isn't listed")
        for name, tensor in item.tensors.items():
            counts += [*tensor.shape]
            itemsize = torch_dtype(tensor.dtype).itemsize
            for part in (*tensor.parts, *tensor.copies):
                counts += [part.start, part.numel, part.crc32]
                if part.file not in manifest.files:
                    raise ValueError(f"{owner}/{name} lies in {part.file[:80]!r}, which isn't listed")
                if type(part.numel) is int and part.numel * itemsize > manifest.files[part.file].bytes:
                    raise ValueError(f"{owner}/{name} is larger than its file")
                counts += part.sizes or ()
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError("it has a count that isn't a whole number of at least 0")
    for owner, item in manifest.objects.items():
        for name, tensor in item.tensors.items():
            if not _is_covered(tensor):
                raise ValueError(f"the parts of {owner}/{name} don't make up its {tensor.numel} elements")
            if {copy.place for copy in tensor.copies} - {part.place for part in tensor.parts}:
                raise ValueError(f"a copy of {owner}/{name} matches none of its parts")


def _is_covered(tensor: TensorEntry) -> bool:
    """Whether the parts contain each element of a tensor once."""
    boxes: list[tuple[Shape, Shape]] = []
    for part in tensor.parts:
        if part.sizes is not None and (
            len(part.sizes) != len(tensor.shape)
            or math.prod(part.sizes) != part.numel
            or part.start >= tensor.numel
            or is_consecutive(tensor.shape, part.sizes)
        ):
            return False
        if part.start + part.numel > tensor.numel:
            return False
        boxes += [(offsets, sizes) for offsets, sizes, _ in part.boxes(tensor.shape)]
    return is_tiled(tensor.shape, boxes) if tensor.numel else not boxes
