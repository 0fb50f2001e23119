"""Reading a checkpoint, and confirming the checksum of every byte."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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

_SMALL_BYTES = 8 << 20  # read by one thread
_NUM_THREADS = 2

# By object and tensor name: the memory into which a tensor is read.
Targets = Mapping[str, Mapping[str, Tensor]]
# By object and tensor name: where this rank has its part of a DTensor.
Layouts = Mapping[str, Mapping[str, Layout]]


@dataclass(frozen=True)
class _Wanted:
    """A part of a tensor that is read.

    Attributes:
        name: Of the tensor, in messages.
        part: Its place in the files.
        num_bytes: Its length.
        out: Memory to read into; None: only confirm the checksum.
        copies: If not all of it goes to one place: read it to other memory, and copy this ...
        memory: ... to here.
        confirms: Whether this rank confirms the checksum, whatever its share is.
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
    targets: Targets = MappingProxyType({}),
    layouts: Layouts = MappingProxyType({}),
) -> dict[str, Any]:
    """Read the states of some objects, on the CPU.

    Args:
        storage: Where the checkpoint lies.
        folder: Its folder.
        manifest: What is in it.
        names: Of the objects.
        share: (i, n): ranks of one node read the same bytes, so each of n confirms every n-th checksum, from the i-th
            on. All are confirmed when all these ranks have returned.
        targets: In-place targets. They appear in the states as they are: `fill` writes to them later; here their
            checksums are only confirmed.
        layouts: Of DTensors, this rank's part alone is read. Every rank confirms all that it reads of them, so that
            each part has been confirmed where each is some rank's.

    Raises:
        DamagedError: A file or a tensor isn't what was saved.
        UnreadableError: This process can't read a file.
    """
    check = _Check(storage, folder, manifest, share)
    wanted = {name: manifest.objects[name] for name in names}
    tensors = check.read(wanted, targets, layouts)
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


def fill(
    storage: Storage, folder: str, manifest: Manifest, name: str, targets: Targets, *, share: tuple[int, int] = (0, 1)
) -> None:
    """Read one object's in-place targets, once all ranks know that the checkpoint is good.

    The share is confirmed again: a file may have changed since, and a disk may return other bytes the second time.

    Raises:
        DamagedError: A checksum differs now. The former values of `targets` are lost.
    """
    if targets.get(name):
        _Check(storage, folder, manifest, share).fill({name: manifest.objects[name]}, targets)


def check_checkpoint(storage: Storage, folder: str) -> list[str]:
    """Read everything; returns a line for each problem. Unlisted files are problems too."""
    try:
        manifest = read_manifest(storage, folder)
    except (DamagedError, UnreadableError) as error:
        return [str(error)]
    findings: list[str] = []
    check = _Check(storage, folder, manifest, (0, 1), findings.append)
    for name, item in manifest.objects.items():
        check.read({name: item}, {})
    findings += [f"{folder}/{name}: isn't listed in the manifest" for name in unlisted_files(storage, folder, manifest)]
    return sorted(set(findings))


def unlisted_files(storage: Storage, folder: str, manifest: Manifest) -> list[str]:
    """Files in a checkpoint's folder that its manifest doesn't list, without hidden ones."""
    known = {manifests.NAME, *manifest.files}
    try:
        names = storage.list(folder)
    except OSError:
        return []  # a user who may open files by name need not have the right to list them
    return [name for name in names if name not in known]


class _Check:
    def __init__(
        self,
        storage: Storage,
        folder: str,
        manifest: Manifest,
        share: tuple[int, int],
        report: Callable[[str], object] | None = None,
    ) -> None:
        self._storage, self._folder, self._manifest, self._share = storage, folder, manifest, share
        self._report = report
        self._scratch = threading.local()

    def read(
        self, objects: Mapping[str, ObjectEntry], targets: Targets, layouts: Layouts = MappingProxyType({})
    ) -> dict[str, dict[str, Tensor]]:
        """Read all tensors of some objects; unreadable ones hold anything if problems are only reported.

        Those with an in-place target are only confirmed.
        """
        into: dict[str, dict[str, Tensor]] = {}
        if not self._sizes_are_right(objects):
            return {owner: {} for owner in objects}
        for owner, item in objects.items():
            known, own = targets.get(owner, {}), layouts.get(owner, {})
            into[owner] = {
                name: known[name]
                if name in known
                else torch.empty(
                    own[name].shape if name in own else tensor.shape,
                    dtype=payload.torch_dtype(tensor.dtype),
                    device="cpu",
                )
                for name, tensor in item.tensors.items()
            }
        self._read_parts(
            objects, lambda owner, name: None if name in targets.get(owner, {}) else into[owner][name], layouts
        )
        return {
            owner: {
                name: layouts[owner][name].finished(memory, objects[owner].tensors[name].shape)
                if name in layouts.get(owner, {})
                else memory
                for name, memory in tensors.items()
            }
            for owner, tensors in into.items()
        }

    def fill(self, objects: Mapping[str, ObjectEntry], targets: Targets) -> None:
        """Read the tensors that have an in-place target, and no other."""
        if self._sizes_are_right(objects):
            wanted = {
                owner: replace(item, tensors={key: item.tensors[key] for key in targets[owner]})
                for owner, item in objects.items()
            }
            self._read_parts(wanted, lambda owner, name: targets[owner][name])

    def _read_parts(
        self,
        objects: Mapping[str, ObjectEntry],
        memory_of: Callable[[str, str], Tensor | None],
        layouts: Layouts = MappingProxyType({}),
    ) -> None:
        parts: dict[str, list[_Wanted]] = {}
        for owner, item in objects.items():
            for name, tensor in item.tensors.items():
                memory = memory_of(owner, name)
                layout = layouts.get(owner, {}).get(name)
                for part in tensor.parts:
                    want = _wanted(f"{owner}/{name}", part, tensor, memory, layout)
                    if want is not None:
                        parts.setdefault(part.file, []).append(want)
        for file, listed in parts.items():
            self._read_file(file, listed)

    def _sizes_are_right(self, objects: Mapping[str, ObjectEntry]) -> bool:
        """Whether files have the lengths of the manifest, and of their tensors; before memory is allocated."""
        needed: dict[str, int] = {}
        for item in objects.values():
            for tensor in item.tensors.values():
                for part in tensor.parts:
                    num_bytes = part.numel * payload.torch_dtype(tensor.dtype).itemsize
                    needed[part.file] = needed.get(part.file, 0) + num_bytes
        all_right = True
        for file, num_bytes in needed.items():
            path, known = f"{self._folder}/{file}", self._manifest.files[file]
            try:
                problem = None
                with self._storage.open(path) as source:
                    if source.num_bytes != known.bytes:
                        problem = f"has {source.num_bytes:,} bytes, and {known.bytes:,} were saved"
                    elif num_bytes != known.bytes - known.header_bytes:
                        problem = f"its tensors would have {num_bytes:,} bytes"
            except OSError as error:
                self._unread(path, error)
                all_right = False
                continue
            if problem is not None:
                self._problem(f"{path}: {problem}")
                all_right = False
        return all_right

    def _read_file(self, file: str, listed: list[_Wanted]) -> None:
        path = f"{self._folder}/{file}"
        try:
            with self._storage.open(path) as source:
                offsets, first = self._header(source, path, file, list(_entries(self._manifest, file)))
                if offsets is None:
                    return

                def read_one(job: tuple[int, _Wanted]) -> str | None:
                    index, want = job
                    confirms = want.confirms or index % self._share[1] == self._share[0]
                    found = self._read_part(source, first + offsets[want.part.key], want, confirms=confirms)
                    if found is None or found == want.part.crc32:
                        return None
                    saved = f"{want.part.crc32:08x} was saved"
                    return f"{path}: tensor {want.name}: its checksum is {found:08x}, and {saved}"

                jobs = list(enumerate(listed))
                if sum(want.num_bytes for want in listed) < _SMALL_BYTES:
                    problems = [read_one(job) for job in jobs]
                else:
                    with ThreadPoolExecutor(_NUM_THREADS) as pool:
                        problems = list(pool.map(read_one, jobs))
            for problem in problems:
                if problem is not None:
                    self._problem(problem)
        except OSError as error:
            self._unread(path, error)

    def _read_part(self, source: Reader, offset: int, want: _Wanted, *, confirms: bool) -> int | None:
        """Read a part; returns its CRC-32 if `confirms`. In chunks that are still in the cache for the checksum."""
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
                raise OSError(0, f"ends after {offset + begin + got:,} bytes, while it is read")
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

    def _header(self, source: Reader, path: str, file: str, entries: list[Entry]) -> tuple[dict[str, int] | None, int]:
        """Offset of each tensor (None after a reported problem), and length of the header."""
        known = self._manifest.files[file]
        if not 8 <= known.header_bytes <= min(known.bytes, payload.MAX_HEADER_BYTES):
            self._problem(f"{path}: a header of {known.header_bytes:,} bytes can't be")
            return None, 0
        header = bytearray(known.header_bytes)
        source.read_into(0, memoryview(header))
        if zlib.crc32(header) != known.header_crc32:
            self._problem(f"{path}: the checksum of its header is not the one that was saved")
            return None, 0
        try:
            if int.from_bytes(header[:8], "little") != known.header_bytes - 8:
                raise ValueError("its header has another length")
            return payload.parse_header(bytes(header[8:]), entries, known.bytes - known.header_bytes), len(header)
        except ValueError as error:
            self._problem(f"{path}: {error}")
            return None, 0

    def _unread(self, path: str, error: OSError) -> None:
        why = why_unread(path, error)
        if self._report is None:
            raise why from None
        self._report(str(why))

    def _problem(self, problem: str) -> None:
        if self._report is None:
            raise DamagedError(problem)
        self._report(problem)


def _wanted(name: str, part: Part, tensor: TensorEntry, memory: Tensor | None, layout: Layout | None) -> _Wanted | None:
    """How a part is read; None if nothing of it is this rank's."""
    num_bytes = part.numel * payload.torch_dtype(tensor.dtype).itemsize
    if memory is None:
        return _Wanted(name, part, num_bytes, None)
    memory = memory.detach()
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
    """The tensors that the manifest puts into a file."""
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
