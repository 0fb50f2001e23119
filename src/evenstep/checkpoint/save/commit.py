"""One save, from the objects to the committed folder. What all ranks must know of it travels in the receipts."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evenstep.checkpoint import manifest as manifests
from evenstep.checkpoint.folders import put_in_place, saving_folder
from evenstep.checkpoint.manifest import FileEntry, Manifest, ObjectEntry, Part, TensorEntry
from evenstep.checkpoint.payload import Entry, Layout, plan_layout
from evenstep.checkpoint.plan import FilePlan, plan_files, shard_file
from evenstep.checkpoint.snapshot import Captured, Piece, Staging, capture, capture_one, entry_of
from evenstep.checkpoint.storage import Storage
from evenstep.checkpoint.streams import NAME as RANDOM
from evenstep.checkpoint.streams import capture_streams
from evenstep.checkpoint.writer import Board, Job, LocalBoard, Receipt, StagedFile, StoreBoard, Writer, is_witness
from evenstep.errors import CheckpointError, ConfigurationError
from evenstep.health import page
from evenstep.transport.codec import decode, encode
from evenstep.world import DEFAULT_TIMEOUT_S, World


class Saver:
    """Saves the state of some objects, one save after the other.

    Args:
        storage: Where to.
        world: Whose ranks take part.
        objects: What is saved; the same names on all ranks.
        on_commit: Called on rank 0, in the writer's thread, when a checkpoint has become one.

    Attributes:
        blocked_s: How long the last `start` took.
    """

    def __init__(
        self,
        storage: Storage,
        world: World,
        objects: Mapping[str, Any],
        on_commit: Callable[[Manifest], None],
    ) -> None:
        self._storage, self._world, self._objects = storage, world, objects
        self._on_commit = on_commit
        board: Board = LocalBoard() if world.store is None else StoreBoard(world.store)
        self.writer = Writer(board)
        self.blocked_s = 0.0
        self._staging = Staging()
        self._board = board
        self._run = ""
        self._num_saves = 0
        self._step = -1

    def open(self) -> None:
        """Collective: agree on a name for this run's saves."""
        self._run = self._world.broadcast_object(secrets.token_hex(4) if self._world.is_main else None)

    def abandon(self) -> None:
        """This rank ends badly: let nobody wait for it, and wait for nobody."""
        self.writer.abandon(self._run, self._world.rank)

    def start(self, step: int, metrics: Mapping[str, float]) -> None:
        """Copy the state to memory and begin to write it. Every rank calls this, at the same step; nobody waits.

        What goes wrong is known when the save is finished.
        """
        began = time.perf_counter()
        self._num_saves += 1
        self._step = step
        key = f"{self._run}-{self._num_saves}"
        folder = saving_folder(step, key)
        try:
            plan = _Plan(self._objects, self._world)
            staged = plan.stage(self._staging)
        except ConfigurationError as error:
            self.writer.start(self._job(folder, key, [], {}, None, CheckpointError(str(error))))
            return
        said = {"fingerprint": plan.fingerprint, "pieces": plan.told_pieces(), "streams": _packed(plan.streams)}
        began_at = time.time()

        def commit(receipts: Sequence[Receipt]) -> None:
            self._commit(folder, step, dict(metrics), plan, receipts, began_at)

        self.writer.start(self._job(folder, key, staged, said, commit if self._world.is_main else None))
        self.blocked_s = time.perf_counter() - began

    def _job(
        self,
        folder: str,
        key: str,
        files: Sequence[StagedFile],
        said: dict[str, Any],
        commit: Callable[[Sequence[Receipt]], None] | None,
        problem: CheckpointError | None = None,
    ) -> Job:
        return Job(
            self._storage,
            folder,
            f"evenstep/checkpoint/{key}",
            self._world.rank,
            self._world.world_size,
            files,
            said,
            commit,
            problem,
            DEFAULT_TIMEOUT_S,
        )

    # ------------------------------------------------------------------ the end of a save

    def finish(self) -> str | None:
        """Collective: wait until the pending save has ended everywhere; why it failed, the same on all ranks."""
        if not self.writer.is_pending:
            return None
        error = self.writer.finish()
        mine = None if error is None else [is_witness(error), self._told(error)]
        seen = self._world.exchange(mine)
        failures = [told for told in seen if told is not None]
        if not failures:
            return None
        self._remove_partial()
        return str(next((text for witness, text in failures if not witness), failures[0][1]))

    def finish_alone(self) -> str | None:
        """As `finish`, when the ranks have let go of each other: why it failed here, as far as this rank knows."""
        error = self.writer.finish()
        if error is None:
            return None
        self._remove_partial()
        return self._told(error)

    def _told(self, error: BaseException) -> str:
        if is_witness(error):
            return str(error)
        what = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return f"rank {self._world.rank}: {what}"

    def _remove_partial(self) -> None:
        if self._world.is_main:
            with contextlib.suppress(OSError):  # what stays is swept when the next job begins
                self._storage.remove(saving_folder(self._step, f"{self._run}-{self._num_saves}"))

    # ------------------------------------------------------------------ the commit, on rank 0

    def _commit(
        self,
        folder: str,
        step: int,
        metrics: dict[str, float],
        plan: _Plan,
        receipts: Sequence[Receipt],
        began_at: float,
    ) -> None:
        """Check that all ranks have saved the same thing, write random streams and manifest, and rename."""
        for rank, receipt in enumerate(receipts):
            if receipt.said["fingerprint"] != plan.fingerprint:
                raise CheckpointError(
                    f"the objects of rank {rank} have other tensors than those of rank 0. What is saved must have the "
                    f"same names, shapes and dtypes on all ranks."
                )
        streams = capture_one(RANDOM, {"ranks": [_unpacked(receipt.said["streams"]) for receipt in receipts]})
        random_plan = FilePlan(f"{RANDOM}.safetensors", RANDOM, 0, tuple(streams.entries))
        random_layout = plan_layout(streams.entries)
        payload = Staging().copy([(random_plan.name, random_layout, streams.tensors)])[random_plan.name]
        random_receipt = self.writer.write_file(
            folder, StagedFile(random_plan.name, random_layout, payload), self._storage
        )
        book = _Book()
        for file, layout in plan.layouts.items():
            receipt = receipts[plan.files[file].rank]
            book.enter(plan.files[file].owner, file, layout, receipt)
        book.enter(RANDOM, random_plan.name, random_layout, random_receipt)
        for rank, receipt in enumerate(receipts):
            book.enter_pieces(receipt.said["pieces"], receipt, rank, self._world.world_size)
        captured = {**plan.captured, RANDOM: streams}
        manifest = Manifest(
            step=step,
            world_size=self._world.world_size,
            time=began_at,
            versions=_versions(),
            metrics=metrics,
            objects={name: book.object_entry(name, item) for name, item in captured.items()},
            files=book.files,
        )
        self._storage.write(f"{folder}/{manifests.NAME}", [manifests.encode(manifest)])
        put_in_place(self._storage, folder, step)
        page.mark_commit(step)
        self._on_commit(manifest)


class _Plan:
    """What is saved at one step, and by whom."""

    def __init__(self, objects: Mapping[str, Any], world: World) -> None:
        self.captured = capture(objects)
        self.streams = capture_streams(world)
        self.files: dict[str, FilePlan] = {}
        self.layouts: dict[str, Layout] = {}
        self._world = world
        replicated = {name: item.entries for name, item in self.captured.items()}
        for file in plan_files(replicated, world.world_size):
            self.files[file.name] = file
            aliases = self.captured[file.owner].aliases
            keys = {entry.key for entry in file.entries}
            # Tied parameters, as the safetensors package itself notes them.
            metadata = {alias: key for alias, key in aliases.items() if key in keys}
            self.layouts[file.name] = plan_layout(file.entries, {"format": "pt", **metadata})
        text = json.dumps([[n, [(e.key, e.dtype, e.shape) for e in es]] for n, es in replicated.items()])
        self.fingerprint = zlib.crc32(text.encode())

    def stage(self, staging: Staging) -> list[StagedFile]:
        """Copy what this rank writes."""
        mine = [
            (
                name,
                self.layouts[name],
                {entry.key: self.captured[file.owner].tensors[entry.key] for entry in file.entries},
            )
            for name, file in self.files.items()
            if file.rank == self._world.rank
        ]
        for owner, item in self.captured.items():
            pieces = {piece.key: _shaped(piece) for piece in item.pieces if piece.values.numel()}
            if pieces:
                layout = plan_layout([entry_of(key, tensor) for key, tensor in pieces.items()])
                mine.append((shard_file(owner, self._world.rank, self._world.world_size), layout, pieces))
        payloads = staging.copy(mine)
        return [StagedFile(name, layout, payloads[name]) for name, layout, _ in mine]

    def told_pieces(self) -> dict[str, list[Any]]:
        """Of each object the pieces that this rank has, in words that travel."""
        return {
            owner: [
                [list(p.path), list(p.shape), entry_of("", p.values).dtype, p.start, p.values.numel()]
                for p in item.pieces
            ]
            for owner, item in self.captured.items()
            if item.pieces
        }


class _Book:
    """Collects what all ranks have written, for the manifest."""

    def __init__(self) -> None:
        self.files: dict[str, FileEntry] = {}
        self._parts: dict[str, dict[str, list[Part]]] = {}
        self._wholes: dict[str, dict[str, tuple[list[Any], list[int], str]]] = {}

    def enter(self, owner: str, file: str, layout: Layout, receipt: Receipt) -> None:
        """A file with whole tensors."""
        self._enter_file(file, layout, receipt)
        parts = self._parts.setdefault(owner, {})
        for entry, crc in zip(layout.entries, receipt.tensor_crc32[file], strict=True):
            parts[entry.key] = [Part(file, entry.key, 0, math.prod(entry.shape), crc)]

    def enter_pieces(self, told: Mapping[str, list[Any]], receipt: Receipt, rank: int, world_size: int) -> None:
        """What a rank has of tensors that are divided over the ranks."""
        for owner, pieces in told.items():
            file = shard_file(owner, rank, world_size)
            entries, where = [], {}
            for path, shape, dtype, start, numel in pieces:
                name = ".".join(map(str, path))
                self._wholes.setdefault(owner, {})[name] = (path, shape, dtype)
                if numel:
                    whole = numel == math.prod(shape)
                    entry = Entry(f"{name}[{start}:{start + numel}]", dtype, tuple(shape) if whole else (numel,))
                    entries.append(entry)
                    where[entry.key] = name, start, numel
            if not entries:
                continue
            layout = plan_layout(entries)
            self._enter_file(file, layout, receipt)
            for entry, crc in zip(layout.entries, receipt.tensor_crc32[file], strict=True):
                name, start, numel = where[entry.key]
                part = Part(file, entry.key, start, numel, crc)
                self._parts.setdefault(owner, {}).setdefault(name, []).append(part)

    def object_entry(self, owner: str, item: Captured) -> ObjectEntry:
        """An object's part of the manifest."""
        parts = self._parts.get(owner, {})
        tensors = {
            key: TensorEntry(entry_of(key, tensor).dtype, tuple(tensor.shape), tuple(parts[key]))
            for key, tensor in item.tensors.items()
        }
        placed = []
        for name, (path, shape, dtype) in self._wholes.get(owner, {}).items():
            found = tuple(sorted(parts.get(name, []), key=lambda part: part.start))
            tensors[name] = TensorEntry(dtype, tuple(shape), found)
            placed.append((path, name))
        return ObjectEntry(item.kind, item.structure, tensors, item.aliases, placed)

    def _enter_file(self, file: str, layout: Layout, receipt: Receipt) -> None:
        self.files[file] = FileEntry(layout.file_bytes, len(layout.header), receipt.header_crc32[file])


def _shaped(piece: Piece) -> torch.Tensor:
    """A piece that is the whole keeps its shape."""
    return piece.values.view(piece.shape) if piece.values.numel() == math.prod(piece.shape) else piece.values


def _packed(streams: dict[str, Any]) -> str:
    return encode(streams).hex()


def _unpacked(text: str) -> Any:
    return decode(bytes.fromhex(text))


def _versions() -> dict[str, str]:
    package = sys.modules["evenstep"]
    return {
        "evenstep": str(getattr(package, "__version__", "")),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
