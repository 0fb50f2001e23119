"""One save, from the objects to the manifest: stage, write, collect receipts, commit."""

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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore

from evenstep.checkpoint.directory import remove_checkpoint
from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.manifest import FileEntry, Manifest, ObjectEntry, Part, TensorEntry
from evenstep.checkpoint.format.payload import Entry, Layout, entry_of, plan_layout
from evenstep.checkpoint.format.plan import FilePlan, plan_files, shard_file
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.format.random_streams import capture_streams
from evenstep.checkpoint.format.regions import Shape
from evenstep.checkpoint.lock import LockedError, Place
from evenstep.checkpoint.save.snapshot import Captured, Files, Staging, capture, capture_one, shard_key
from evenstep.checkpoint.save.writer import Job, Receipt, Writer, is_secondary
from evenstep.checkpoint.store import Storage
from evenstep.errors import CheckpointError, ConfigurationError
from evenstep.transport.core.codec import decode, encode
from evenstep.world import World


class Saver:
    """Saves the state of some objects, one save after the other.

    Args:
        storage: Holds the checkpoints.
        world: The ranks that take part.
        objects: Objects to save, by name; the same names on all ranks.
        commit: Called on rank 0, in the writer's thread, with a folder whose files are written, and its manifest:
            makes it the checkpoint of its step.

    Attributes:
        folder: Of the last save.
        blocked_s: Seconds that the last `start` took.
    """

    def __init__(
        self,
        storage: Storage,
        world: World,
        objects: Mapping[str, Any],
        commit: Callable[[str, Manifest], None],
    ) -> None:
        self._storage, self._world, self._objects = storage, world, objects
        self._make_checkpoint = commit
        store = HashStore() if world.store is None else world.store
        self.writer = Writer(storage, store, world.rank, world.world_size, timeout_s=world.timeout_s)
        self.blocked_s = 0.0
        self._staging = Staging()
        self.folder = ""
        self._run = ""
        self._lock_number = 0
        self._num_saves = 0

    def open(self, lock_number: int) -> None:
        """Collective: agree on a name for this run's receipts.

        Args:
            lock_number: Of this job's lock, which its folders are named after.
        """
        self._lock_number = lock_number
        self._run = self._world.broadcast_object(secrets.token_hex(4) if self._world.is_main else None)

    def abandon(self) -> None:
        """This rank ends with an error: peers stop waiting for it, and it for them."""
        self.writer.abandon(self._run)

    def start(self, step: int, metrics: Mapping[str, float]) -> None:
        """Copy the state to memory and begin to write it.

        Every rank calls this, at the same step; no rank waits for another. `finish` returns the errors.

        Args:
            step: Optimizer steps so far.
            metrics: Numbers to store with it.
        """
        began = time.perf_counter()
        self._num_saves += 1
        key = f"{self._run}-{self._num_saves}"
        self.folder = folder = Place(step, self._lock_number, self._num_saves).folder
        try:
            plan = _Plan(self._objects, self._world)
            staged = self._staging.stage(plan.files_of_this_rank())
        except ConfigurationError as error:
            self.writer.start(Job(folder, key, [], {}, None, CheckpointError(str(error))))
            return
        facts = {"fingerprint": plan.fingerprint, "shards": plan.describe_shards(), "streams": _packed(plan.streams)}
        began_at = time.time()

        def commit(receipts: Sequence[Receipt]) -> None:
            self._commit(folder, step, dict(metrics), plan, receipts, began_at)

        self.writer.start(Job(folder, key, staged, facts, commit if self._world.is_main else None))
        self.blocked_s = time.perf_counter() - began

    # ------------------------------------------------------------------ the end of a save

    def finish(self) -> str | None:
        """Collective: wait for the pending save on all ranks; returns its error, equal on all of them."""
        if not self.writer.is_pending:
            return None
        error = self.writer.finish()
        mine = None if error is None else [is_secondary(error), self._describe(error)]
        seen = self._world.exchange(mine)
        failures = [each for each in seen if each is not None]
        if not failures:
            return None
        self._remove_partial(error)
        return str(next((text for secondary, text in failures if not secondary), failures[0][1]))

    def finish_alone(self) -> tuple[str | None, bool]:
        """Like `finish`, at the end of the run: without the other ranks, but for rank 0's commit.

        Returns:
            This rank's error, and whether it is only what another rank's failure has led to.
        """
        error = self.writer.finish_with_commit()
        if error is None:
            return None, False
        self._remove_partial(error)
        return self._describe(error), is_secondary(error)

    def _describe(self, error: BaseException) -> str:
        if is_secondary(error):
            return str(error)
        what = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return f"rank {self._world.rank}: {what}"

    def _remove_partial(self, error: BaseException | None) -> None:
        # Another job that has the lock may have counted this checkpoint as one.
        if self._world.is_main and not isinstance(error, LockedError):
            with contextlib.suppress(OSError):  # leftovers are swept when the next job begins
                remove_checkpoint(self._storage, self.folder)

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
        """Check that all ranks saved the same tensors; write the random streams; make the checkpoint."""
        for rank, receipt in enumerate(receipts):
            if receipt.facts["fingerprint"] != plan.fingerprint:
                raise CheckpointError(
                    f"the objects of rank {rank} have other tensors than those of rank 0. What is saved must have the "
                    f"same names, shapes and dtypes on all ranks."
                )
        of_ranks = [_unpacked(receipt.facts["streams"]) for receipt in receipts]
        streams = capture_one(RANDOM, {"ranks": of_ranks})
        random_plan = FilePlan(f"{RANDOM}.safetensors", RANDOM, 0, tuple(streams.entries))
        random_layout = plan_layout(streams.entries)
        [staged] = Staging().stage([(random_plan.name, random_layout, streams.tensors)])
        random_receipt = self.writer.write_file(folder, staged)
        builder = _ManifestBuilder()
        for file, layout in plan.layouts.items():
            receipt = receipts[plan.files[file].rank]
            builder.add_file(plan.files[file].owner, file, layout, receipt)
        builder.add_file(RANDOM, random_plan.name, random_layout, random_receipt)
        for rank, receipt in enumerate(receipts):
            builder.add_shards(receipt.facts["shards"], receipt, rank, self._world.world_size)
        captured = {**plan.captured, RANDOM: streams}
        manifest = Manifest(
            step=step,
            world_size=self._world.world_size,
            time=began_at,
            versions=_versions(),
            metrics=metrics,
            objects={name: builder.object_entry(name, item) for name, item in captured.items()},
            files=builder.files,
        )
        try:
            manifests.validate(manifest)
        except ValueError as error:
            raise CheckpointError(
                f"{error}. Each of them must be held once by the ranks of this world: make one mesh of all ranks, and "
                f"slice that."
            ) from None
        self._look_at(folder, manifest)
        self._make_checkpoint(folder, manifest)

    def _look_at(self, folder: str, manifest: Manifest) -> None:
        """Raise where a file isn't there for rank 0 as its rank has written it."""
        for name, entry in manifest.files.items():
            try:
                with self._storage.open(f"{folder}/{name}") as file:
                    found = f"has {file.num_bytes:,} bytes for rank 0" if file.num_bytes != entry.bytes else ""
            except OSError as error:
                found = f"can't be opened by rank 0: {error.strerror or error}"
            if found:
                raise CheckpointError(
                    f"{name} was written, {entry.bytes:,} bytes, and {found}. Do all ranks see the same directory?"
                )


class _Plan:
    """The tensors that are saved at one step, and the rank that writes each of them."""

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
        divided = [[name, item.divided] for name, item in self.captured.items()]
        text = json.dumps([divided, [[n, [(e.key, e.dtype, e.shape) for e in es]] for n, es in replicated.items()]])
        self.fingerprint = zlib.crc32(text.encode())

    def files_of_this_rank(self) -> Files:
        """What this rank writes."""
        mine: list[tuple[str, Layout, Mapping[str, Tensor]]] = [
            (
                name,
                self.layouts[name],
                {entry.key: self.captured[file.owner].tensors[entry.key] for entry in file.entries},
            )
            for name, file in self.files.items()
            if file.rank == self._world.rank
        ]
        for owner, item in self.captured.items():
            shards = {shard.key: shard.stored for shard in item.shards if shard.values.numel()}
            if shards:
                layout = plan_layout([entry_of(key, tensor) for key, tensor in shards.items()])
                mine.append((shard_file(owner, self._world.rank, self._world.world_size), layout, shards))
        return mine

    def describe_shards(self) -> dict[str, list[Any]]:
        """This rank's shards of each object, in JSON types for its receipt."""
        return {
            owner: [
                [s.name, s.path, list(s.shape), entry_of("", s.values).dtype, s.start, s.values.numel(), s.sizes]
                for s in item.shards
            ]
            for owner, item in self.captured.items()
            if item.shards
        }


class _ManifestBuilder:
    """Collects the files and tensors of all ranks for the manifest."""

    def __init__(self) -> None:
        self.files: dict[str, FileEntry] = {}
        self._parts: dict[str, dict[str, list[Part]]] = {}
        self._placed: dict[str, dict[str, tuple[list[Any], list[int], str]]] = {}

    def add_file(self, owner: str, file: str, layout: Layout, receipt: Receipt) -> None:
        """Add a file with whole tensors."""
        self._add_entry(file, layout, receipt)
        parts = self._parts.setdefault(owner, {})
        for entry, crc in zip(layout.entries, receipt.tensor_crc32[file], strict=True):
            parts[entry.key] = [Part(file, entry.key, 0, math.prod(entry.shape), crc)]

    def add_shards(self, described: Mapping[str, list[Any]], receipt: Receipt, rank: int, world_size: int) -> None:
        """Add a rank's shards of tensors that are divided over the ranks."""
        for owner, shards in described.items():
            file = shard_file(owner, rank, world_size)
            entries: list[Entry] = []
            where: dict[str, tuple[str, Part]] = {}
            for name, path, shape, dtype, start, numel, listed in shards:
                if path is not None:
                    self._placed.setdefault(owner, {})[name] = (path, shape, dtype)
                if numel:
                    sizes: Shape | None = None if listed is None else tuple(listed)
                    part = Part(file, shard_key(name, start, numel, sizes), start, numel, 0, sizes)
                    entries.append(Entry(part.key, dtype, part.stored_shape(tuple(shape))))
                    where[part.key] = name, part
            if not entries:
                continue
            layout = plan_layout(entries)
            self._add_entry(file, layout, receipt)
            for entry, crc in zip(layout.entries, receipt.tensor_crc32[file], strict=True):
                name, part = where[entry.key]
                self._parts.setdefault(owner, {}).setdefault(name, []).append(replace(part, crc32=crc))

    def object_entry(self, owner: str, item: Captured) -> ObjectEntry:
        """The manifest's entry of an object."""
        parts = self._parts.get(owner, {})
        tensors = {
            key: TensorEntry(entry_of(key, tensor).dtype, tuple(tensor.shape), tuple(parts[key]))
            for key, tensor in item.tensors.items()
        }
        in_order = {name: tuple(sorted(found, key=lambda part: part.start)) for name, found in parts.items()}
        tensors |= {
            name: TensorEntry(dtype, shape, in_order.get(name, ())) for name, (dtype, shape) in item.divided.items()
        }
        placed = []
        for name, (path, shape, dtype) in self._placed.get(owner, {}).items():
            tensors[name] = TensorEntry(dtype, tuple(shape), in_order.get(name, ()))
            placed.append((path, name))
        return ObjectEntry(item.kind, item.structure, tensors, item.aliases, placed)

    def _add_entry(self, file: str, layout: Layout, receipt: Receipt) -> None:
        self.files[file] = FileEntry(layout.file_bytes, len(layout.header), receipt.header_crc32[file])


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
