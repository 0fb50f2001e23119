"""One save, from the objects to the manifest: stage, write, collect receipts, commit."""

from __future__ import annotations

import base64
import contextlib
import json
import platform
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import HashStore

from evenstep.checkpoint.directory import remove_checkpoint
from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.manifest import FileEntry, Manifest, ObjectEntry, Part, TensorEntry
from evenstep.checkpoint.format.payload import entry_of, plan_layout
from evenstep.checkpoint.format.plan import plan_files, shard_file
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.format.random_streams import capture_streams
from evenstep.checkpoint.lock import LockedError, Place
from evenstep.checkpoint.save.snapshot import Captured, File, Staging, capture, capture_one
from evenstep.checkpoint.save.writer import Job, Receipt, Writer, describe, is_secondary
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
        facts = {
            "fingerprint": plan.fingerprint,
            "placed": plan.placed(),
            "streams": base64.b64encode(encode(plan.streams)).decode(),
        }
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
        return str(error) if is_secondary(error) else f"rank {self._world.rank}: {describe(error)}"

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
        of_ranks = [decode(base64.b64decode(receipt.facts["streams"])) for receipt in receipts]
        streams = capture_one(RANDOM, {"ranks": of_ranks})
        file = File(f"{RANDOM}.safetensors", RANDOM, plan_layout(streams.entries), streams.tensors)
        written = self.writer.write(Job(folder, "", Staging().stage([file]), {"placed": []}, None))
        files: dict[str, FileEntry] = {}
        parts: dict[tuple[str, str], list[Part]] = {}
        placed: dict[str, dict[str, list[Any]]] = {}
        for receipt in (*receipts, written):
            files |= {name: FileEntry(*numbers) for name, numbers in receipt.files.items()}
            for owner, name, path, key, start, numel, crc, sizes in receipt.parts:
                part = Part(path, key, start, numel, crc, None if sizes is None else tuple(sizes))
                parts.setdefault((owner, name), []).append(part)
            for owner, name, *what in receipt.facts["placed"]:
                placed.setdefault(owner, {})[name] = what
        captured = {**plan.captured, RANDOM: streams}
        manifest = Manifest(
            step=step,
            world_size=self._world.world_size,
            time=began_at,
            versions=_versions(),
            metrics=metrics,
            objects={name: _entry(name, item, parts, placed.get(name, {})) for name, item in captured.items()},
            files=files,
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
        self._world = world
        replicated = {name: item.entries for name, item in self.captured.items()}
        self.files = plan_files(replicated, world.world_size)
        divided = [[name, item.divided] for name, item in self.captured.items()]
        text = json.dumps([divided, [[n, [(e.key, e.dtype, e.shape) for e in es]] for n, es in replicated.items()]])
        self.fingerprint = zlib.crc32(text.encode())

    def files_of_this_rank(self) -> list[File]:
        """What this rank writes."""
        rank, world_size = self._world.rank, self._world.world_size
        mine = []
        for file in self.files:
            if file.rank == rank:
                item = self.captured[file.owner]
                keys = [entry.key for entry in file.entries]
                # Tied parameters, as the safetensors package itself notes them.
                tied = {alias: key for alias, key in item.aliases.items() if key in keys}
                layout = plan_layout(file.entries, {"format": "pt", **tied})
                mine.append(File(file.name, file.owner, layout, {key: item.tensors[key] for key in keys}))
        for owner, item in self.captured.items():
            shards = {shard.key: shard for shard in item.shards if shard.values.numel()}
            if shards:
                stored = {key: shard.stored for key, shard in shards.items()}
                layout = plan_layout([entry_of(key, tensor) for key, tensor in stored.items()])
                mine.append(File(shard_file(owner, rank, world_size), owner, layout, stored, shards))
        return mine

    def placed(self) -> list[list[Any]]:
        """Of this rank's shards that are in no structure: owner, name, path, shape and dtype, in JSON types."""
        return [
            [owner, s.name, s.path, list(s.shape), entry_of("", s.values).dtype]
            for owner, item in self.captured.items()
            for s in item.shards
            if s.path is not None
        ]


def _entry(
    owner: str, item: Captured, parts: Mapping[tuple[str, str], list[Part]], placed: Mapping[str, list[Any]]
) -> ObjectEntry:
    """The manifest's entry of an object.

    Args:
        owner: Its name.
        item: What rank 0 has of it.
        parts: Of all tensors, by owner and name.
        placed: Path, shape and dtype of tensors that are in no structure, by name.
    """
    known = {key: (entry_of(key, tensor).dtype, tuple(tensor.shape)) for key, tensor in item.tensors.items()}
    known |= item.divided
    known |= {name: (dtype, tuple(shape)) for name, (_, shape, dtype) in placed.items()}
    tensors = {}
    for name, (dtype, shape) in known.items():
        in_order = sorted(parts.get((owner, name), []), key=lambda part: part.start)
        tensors[name] = TensorEntry(dtype, shape, tuple(in_order))
    paths = [(path, name) for name, (path, _, _) in placed.items()]
    return ObjectEntry(item.kind, item.structure, tensors, item.aliases, paths)


def _versions() -> dict[str, str]:
    package = sys.modules["evenstep"]
    return {
        "evenstep": str(getattr(package, "__version__", "")),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
