"""Reading a checkpoint, and checking the checksum of every byte."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from evenstep.checkpoint.directory import DamagedError, UnreadableError, read_manifest, why_unread
from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format import payload
from evenstep.checkpoint.format.manifest import Manifest, ObjectEntry, Part, TensorEntry
from evenstep.checkpoint.format.payload import Entry, bytes_of
from evenstep.checkpoint.format.tree import unflatten
from evenstep.checkpoint.load.layouts import Copy, Layout, plain, plan_copies
from evenstep.checkpoint.store import Reader, Storage

_SMALL_BYTES = 8 << 20  # up to this size a single thread reads
_NUM_THREADS = 2

# By object and tensor name: the layout of this rank's part of a DTensor.
Layouts = Mapping[str, Mapping[str, Layout]]


@dataclass(frozen=True)
class _Wanted:
    """A part of a tensor to read.

    Attributes:
        name: The tensor's name for messages.
        part: The part's place in the files.
        num_bytes: The part's length.
        out: Memory to read into; None: only confirm the checksum.
        copies: If only some elements of the part are wanted, or they go to several places: the part is read to other
            memory, and these copies are made from there.
        memory: Target of `copies`.
        confirms: Whether this rank checks the checksum, independently of `share`.
    """

    name: str
    part: Part
    num_bytes: int
    out: memoryview | None
    copies: Sequence[Copy] = ()
    memory: Tensor | None = None
    confirms: bool = False


def read_objects(
    storage: Storage,
    folder: str,
    manifest: Manifest,
    names: Collection[str],
    *,
    share: tuple[int, int] = (0, 1),
    layouts: Layouts = MappingProxyType({}),
) -> dict[str, Any]:
    """Read the states of some objects, on the CPU.

    Args:
        storage: Where the checkpoint is stored.
        folder: The checkpoint's folder.
        manifest: The checkpoint's manifest.
        names: Names of the objects.
        share: (i, n): n ranks of one node read the same bytes, so rank i of them checks only the parts whose checksum
            is i modulo n. Which rank checks a part doesn't depend on the other parts that the rank reads. When all n
            ranks have returned, all parts have been checked.
        layouts: This rank's parts of DTensors: only these are read. Every rank checks all parts of DTensors that it
            reads, so that the ranks together check everything.

    Raises:
        DamagedError: A file or a tensor differs from the saved content.
        UnreadableError: This process can't read a file.
    """
    check = _Check(storage, folder, manifest, share)
    wanted = {name: manifest.objects[name] for name in names}
    tensors = check.read(wanted, layouts)
    states = {}
    for name, item in wanted.items():
        known = tensors[name] | {alias: tensors[name][target] for alias, target in item.aliases.items()}
        try:
            states[name] = unflatten(item.structure, known)
            for path, tensor in item.placed:
                _put_at(states[name], path, known[tensor])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedError(f"{folder}/{manifests.NAME}: {name}: {error}") from None
    return states


def check_checkpoint(storage: Storage, folder: str) -> list[str]:
    """Read a whole checkpoint. Returns a line for each problem. Unlisted files are problems, too."""
    findings: list[str] = []
    try:
        manifest = read_manifest(storage, folder)
        findings += [
            f"{folder}/{name}: isn't listed in the manifest" for name in unlisted_files(storage, folder, manifest)
        ]
        for problem in damaged_files(storage, folder, manifest).values():
            findings += problem.splitlines()
    except (DamagedError, UnreadableError) as error:
        findings.append(str(error))
    return sorted(findings)


def damaged_files(
    storage: Storage, folder: str, manifest: Manifest, only: Collection[str] | None = None
) -> dict[str, str]:
    """Read a whole checkpoint. Returns a problem (damaged, missing or unreadable) for each file that has one.

    Args:
        storage: Where the checkpoint is stored.
        folder: The checkpoint's folder.
        manifest: The checkpoint's manifest.
        only: Names of the files to read; None: all that contain a part.
    """
    check, found = _Check(storage, folder, manifest, (0, 1)), {}
    for file, listed in check.by_file(manifest.objects).items():
        if only is None or file in only:
            try:
                check.read_file(file, [_wanted(*each, None, None) for each in listed])
            except (DamagedError, UnreadableError) as error:
                found[file] = str(error)
    return found


def unlisted_files(storage: Storage, folder: str, manifest: Manifest) -> list[str]:
    """Files in a checkpoint's folder that its manifest doesn't list, without hidden ones."""
    known = {manifests.NAME, *manifest.files}
    try:
        names = storage.list(folder)
    except OSError:
        return []  # a user may have the right to open files, but not to list them
    return [name for name in names if name not in known]


class _Check:
    def __init__(self, storage: Storage, folder: str, manifest: Manifest, share: tuple[int, int]) -> None:
        self._storage, self._folder, self._manifest, self._share = storage, folder, manifest, share
        self._scratch = threading.local()

    def read(self, objects: Mapping[str, ObjectEntry], layouts: Layouts) -> dict[str, dict[str, Tensor]]:
        """Read all tensors of some objects."""
        by_file = self.by_file(objects)
        for file, listed in by_file.items():  # before memory is allocated
            with self._opened(file, sum(_num_bytes(part, tensor) for _, _, part, tensor in listed)):
                pass
        memory: dict[str, dict[str, Tensor]] = {}
        for owner, item in objects.items():
            own = layouts.get(owner, {})
            memory[owner] = {
                name: torch.empty(
                    own[name].shape if name in own else tensor.shape,
                    dtype=payload.torch_dtype(tensor.dtype),
                    device="cpu",
                )
                for name, tensor in item.tensors.items()
            }
        for file, listed in by_file.items():
            wanted = [
                _wanted(owner, name, part, tensor, memory[owner][name], layouts.get(owner, {}).get(name))
                for owner, name, part, tensor in listed
            ]
            self.read_file(file, wanted)
        for owner, own in layouts.items():
            for name in own.keys() & memory.get(owner, {}).keys():
                whole = objects[owner].tensors[name].shape
                memory[owner][name] = own[name].finished(memory[owner][name], whole)
        return memory

    def by_file(self, objects: Mapping[str, ObjectEntry]) -> dict[str, list[tuple[str, str, Part, TensorEntry]]]:
        """The parts of all tensors, with owner and name, by file."""
        found: dict[str, list[tuple[str, str, Part, TensorEntry]]] = {}
        for owner, item in objects.items():
            for name, tensor in item.tensors.items():
                for part in tensor.parts:
                    found.setdefault(part.file, []).append((owner, name, part, tensor))
        return found

    @contextlib.contextmanager
    def _opened(self, file: str, num_bytes: int = 0) -> Iterator[tuple[str, Reader]]:
        """Open a file, after checking its length against the manifest and against the bytes of its tensors."""
        path, known = f"{self._folder}/{file}", self._manifest.files[file]
        try:
            with self._storage.open(path) as source:
                if source.num_bytes != known.bytes:
                    raise DamagedError(f"{path}: has {source.num_bytes:,} bytes, and {known.bytes:,} were saved")
                if num_bytes > known.bytes - known.header_bytes:
                    raise DamagedError(f"{path}: its tensors would have {num_bytes:,} bytes")
                yield path, source
        except OSError as error:
            raise why_unread(path, error) from None

    def read_file(self, file: str, wanted: Iterable[_Wanted | None]) -> None:
        """Read the wanted parts of a file.

        Raises:
            DamagedError: A checksum differs; a line for each tensor.
        """
        with self._opened(file) as (path, source):
            offsets, first = self._header(source, path, file), self._manifest.files[file].header_bytes
            jobs = [want for want in wanted if want is not None]

            def read_one(want: _Wanted) -> str | None:
                confirms = want.confirms or want.part.crc32 % self._share[1] == self._share[0]
                found = self._read_part(source, first + offsets[want.part.key], want, confirms=confirms)
                if found is None or found == want.part.crc32:
                    return None
                saved = f"{want.part.crc32:08x} was saved"
                return f"{path}: tensor {want.name}: its checksum is {found:08x}, and {saved}"

            if sum(want.num_bytes for want in jobs) < _SMALL_BYTES:
                found = [read_one(want) for want in jobs]
            else:
                with ThreadPoolExecutor(_NUM_THREADS) as pool:
                    found = list(pool.map(read_one, jobs))
        if problems := [problem for problem in found if problem is not None]:
            raise DamagedError("\n".join(problems))

    def _read_part(self, source: Reader, offset: int, want: _Wanted, *, confirms: bool) -> int | None:
        """Read a part; returns its CRC-32 if `confirms`.

        Reads in chunks that are still in the cache for the checksum.
        """
        if want.out is None and not want.copies and not confirms:
            return None
        checksum = 0
        out, values = want.out, None
        if want.copies:
            assert want.memory is not None
            values = torch.empty(want.part.numel, dtype=want.memory.dtype, device="cpu")
            out = bytes_of(values)
        for begin in range(0, want.num_bytes, source.chunk_bytes):
            end = min(begin + source.chunk_bytes, want.num_bytes)
            chunk = self._chunk_memory(source.chunk_bytes)[: end - begin] if out is None else out[begin:end]
            got = source.read_into(offset + begin, chunk)
            if got != len(chunk):
                raise OSError(0, f"ends after {offset + begin + got:,} bytes while it is being read")
            if confirms:
                checksum = zlib.crc32(chunk, checksum)
        if values is not None and want.memory is not None:
            for copy in want.copies:
                copy.target(want.memory).copy_(copy.source(values))
        return checksum if confirms else None

    def _chunk_memory(self, num_bytes: int) -> memoryview:
        """This thread's memory for bytes that are checksummed and dropped."""
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = memoryview(bytearray(num_bytes))
        memory: memoryview = self._scratch.memory
        return memory

    def _header(self, source: Reader, path: str, file: str) -> dict[str, int]:
        """Offset of each tensor, from the end of the header."""
        known = self._manifest.files[file]
        try:
            if not 8 <= known.header_bytes <= min(known.bytes, payload.MAX_HEADER_BYTES):
                raise ValueError(f"a header of {known.header_bytes:,} bytes is impossible")
            header = bytearray(known.header_bytes)
            source.read_into(0, memoryview(header))
            if zlib.crc32(header) != known.header_crc32:
                raise ValueError("the checksum of its header is not the one that was saved")
            if int.from_bytes(header[:8], "little") != known.header_bytes - 8:
                raise ValueError("its header has another length")
            entries = list(_entries(self._manifest, file))
            return payload.parse_header(bytes(header[8:]), entries, known.bytes - known.header_bytes)
        except ValueError as error:
            raise DamagedError(f"{path}: {error}") from None


def _num_bytes(part: Part, tensor: TensorEntry) -> int:
    return part.numel * payload.torch_dtype(tensor.dtype).itemsize


def _wanted(
    owner: str, tensor_name: str, part: Part, tensor: TensorEntry, memory: Tensor | None, layout: Layout | None
) -> _Wanted | None:
    """How to read a part; None if this rank wants no element of it."""
    name, num_bytes = f"{owner}/{tensor_name}", _num_bytes(part, tensor)
    if memory is None:
        return _Wanted(name, part, num_bytes, None)
    if layout is None and part.sizes is None:
        begin = part.start * memory.itemsize
        return _Wanted(name, part, num_bytes, bytes_of(memory)[begin : begin + num_bytes])
    copies = plan_copies(part, tensor.shape, layout or plain(tensor.shape))
    confirms = layout is not None
    if not copies:
        return None if confirms else _Wanted(name, part, num_bytes, None)
    if len(copies) == 1 and copies[0].sizes == part.boxes(tensor.shape)[0][1]:
        target = copies[0].target(memory)
        if target.numel() == part.numel and target.is_contiguous():
            return _Wanted(name, part, num_bytes, bytes_of(target), confirms=confirms)
    return _Wanted(name, part, num_bytes, None, copies, memory, confirms)


def _entries(manifest: Manifest, file: str) -> Iterator[Entry]:
    """The tensors that a file has according to the manifest."""
    for item in manifest.objects.values():
        for tensor in item.tensors.values():
            for part in tensor.parts:
                if part.file == file:
                    yield Entry(part.key, tensor.dtype, part.stored_shape(tensor.shape))


def _put_at(state: Any, path: list[Any], tensor: Tensor) -> None:
    *parents, last = path
    for key in parents:
        state = state.setdefault(key, {}) if isinstance(state, dict) else state[key]
    state[last] = tensor
