"""One save, from the objects to the manifest: stage, write, collect receipts, commit."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
import secrets
import sys
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from evenstep.checkpoint.directory import remove_checkpoint
from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.manifest import FileEntry, Manifest, ObjectEntry, Part, TensorEntry
from evenstep.checkpoint.format.payload import entry_of, plan_layout
from evenstep.checkpoint.format.plan import plan_files, shard_file
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.format.random_streams import capture_streams
from evenstep.checkpoint.lock import LockedError, Place, process_namespace
from evenstep.checkpoint.save.snapshot import Captured, File, Staging, capture, capture_one
from evenstep.checkpoint.save.writer import Job, Receipt, Writer, describe, is_secondary
from evenstep.checkpoint.store import Storage
from evenstep.errors import CheckpointError, ConfigurationError
from evenstep.ground.environment import node_identity
from evenstep.ground.health import heartbeat
from evenstep.transport.core.codec import decode, encode
from evenstep.world import World


class Saver:
    """Saves the state of some objects, one save after the other.

    Args:
        storage: Holds the checkpoints.
        world: The ranks that take part.
        objects: Objects to save, by name; the same names on all ranks.
        commit: Called on rank 0, in the writer's thread, with a folder of written files and its manifest: makes the
            folder the checkpoint of its step. None: each node has its own storage, and its ranks write everything that
            they hold there, once.

    Attributes:
        folder: The last save's folder.
        error: This rank's error of the last finished save, or None.
        is_leader: Whether this rank makes and removes checkpoints, for the run or for its node.
        blocked_s: Seconds that the last `start` took.
        num_saves: Number of saves that were started.
    """

    def __init__(
        self,
        storage: Storage,
        world: World,
        objects: Mapping[str, Any],
        commit: Callable[[str, Manifest], None] | None,
    ) -> None:
        self._storage, self._world, self._objects = storage, world, objects
        self._make_checkpoint = commit
        self.error: BaseException | None = None
        self.is_leader = world.is_main if commit is not None else world.local_rank == 0
        self._nodes: list[int | None] = [None] * world.world_size  # by rank
        self._leaders: list[int] = []
        self._among: set[int] | None = None
        store = HashStore() if world.store is None else world.store
        self.writer = Writer(storage, store, world.rank, world.world_size, timeout_s=world.timeout_s)
        self.blocked_s = 0.0
        self._staging = Staging()
        self.folder = ""
        self._run = ""
        self._lock_number = 0
        self.num_saves = 0

    def open(self, lock_number: int) -> None:
        """Collective: agree on a name for this run's receipts, and determine which ranks are on which node.

        Args:
            lock_number: Number of this job's lock, which is part of its folders' names.
        """
        self._lock_number = lock_number
        self._run = self._world.broadcast_object(secrets.token_hex(4) if self._world.is_main else None)
        # Ranks in a mesh are those of the default process group.
        mesh_rank = dist.get_rank() if dist.is_initialized() else self._world.rank
        host = f"{node_identity()} {process_namespace()}"  # processes with the same text can see each other's pids
        where = [self._world.node_rank, self._world.local_rank, mesh_rank]
        seen = self._world.exchange([host, os.getpid(), *where])
        self.writer.pids = {rank: pid for rank, (of, pid, *_) in enumerate(seen) if of == host}
        if self._make_checkpoint is None:
            self._nodes = [node for *_, node, _, _ in seen]
            self._leaders = [rank for rank, (*_, local_rank, _) in enumerate(seen) if local_rank == 0]
            self._among = {each for *_, node, _, each in seen if node == self._world.node_rank}

    def abandon(self) -> None:
        """Called if this rank ends with an error: this rank and its peers stop waiting for each other."""
        self.writer.abandon(self._run)

    def start(self, step: int, metrics: Mapping[str, float]) -> None:
        """Copy the state to memory and begin to write it.

        Every rank calls this, at the same step; no rank waits for another. `finish` returns the errors.

        Args:
            step: Optimizer steps so far.
            metrics: Numbers to store with it.
        """
        began = time.perf_counter()
        self.num_saves += 1
        key = f"{self._run}-{self.num_saves}"
        self.folder = folder = Place(step, self._lock_number, self.num_saves).folder
        try:
            plan = _Plan(self._objects, self._world, self._among)
            staged = self._staging.stage(plan.files_of_this_rank())
        except ConfigurationError as error:
            self.writer.start(Job(folder, key, [], {}, None, problem=CheckpointError(str(error))))
            return
        facts = {
            "fingerprint": plan.fingerprint,
            "placed": plan.placed(),
            "streams": base64.b64encode(encode(plan.streams)).decode(),
        }
        began_at = time.time()

        def commit(receipts: Sequence[Receipt]) -> bytes | None:
            return self._commit(folder, step, dict(metrics), plan, receipts, began_at)

        def hold(made: bytes) -> None:
            self._hold(folder, made)

        is_held = self._make_checkpoint is None and self.is_leader
        job = Job(
            folder,
            key,
            staged,
            facts,
            commit if self._world.is_main else None,
            hold if is_held else None,
            self._leaders,
        )
        self.writer.start(job)
        self.blocked_s = time.perf_counter() - began

    # ------------------------------------------------------------------ the end of a save

    def finish(self) -> str | None:
        """Collective: wait for the pending save on all ranks. Returns its error, equal on all ranks."""
        if not self.writer.is_pending:
            return None
        error = self.error = self.writer.finish()
        mine = None if error is None else [is_secondary(error), self._describe(error)]
        seen = self._world.exchange(mine)
        failures = [each for each in seen if each is not None]
        if not failures:
            return None
        self._remove_partial(error)
        if self._world.is_main:
            self.writer.forget()
        return str(next((text for secondary, text in failures if not secondary), failures[0][1]))

    def finish_alone(self) -> tuple[str | None, bool]:
        """Like `finish`, at the end of the run: waits only for rank 0's commit, not for other ranks.

        Returns:
            This rank's error, and whether it is only a consequence of another rank's failure.
        """
        error = self.error = self.writer.finish_with_commit()
        if error is None:
            return None, False
        self._remove_partial(error)
        return self._describe(error), is_secondary(error)

    def _describe(self, error: BaseException) -> str:
        return str(error) if is_secondary(error) else f"rank {self._world.rank}: {describe(error)}"

    def _remove_partial(self, error: BaseException | None) -> None:
        # Another job that has the lock now may already rely on this checkpoint.
        if self.is_leader and not isinstance(error, LockedError):
            with contextlib.suppress(OSError):  # the next job removes leftovers
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
    ) -> bytes | None:
        """Check that all ranks saved the same tensors; write the random streams; make the checkpoint.

        If each node makes its own checkpoint, return the data for it: the length of the manifest, the manifest, and the
        file of the random streams, which every node stores.
        """
        for rank, receipt in enumerate(receipts):
            if receipt.facts["fingerprint"] != plan.fingerprint:
                raise CheckpointError(
                    f"the objects of rank {rank} have other tensors than those of rank 0. Saved objects must have the "
                    f"same names, shapes and dtypes on all ranks."
                )
        of_ranks = [decode(base64.b64decode(receipt.facts["streams"])) for receipt in receipts]
        streams = capture_one(RANDOM, {"ranks": of_ranks})
        file = File(f"{RANDOM}.safetensors", RANDOM, plan_layout(streams.entries), streams.tensors)
        written = self.writer.write(Job(folder, "", Staging().stage([file]), {"placed": []}, None))
        files: dict[str, FileEntry] = {}
        parts: dict[tuple[str, str], list[Part]] = {}
        placed: dict[str, dict[str, list[Any]]] = {}
        for node, receipt in zip((*self._nodes, None), (*receipts, written), strict=True):
            files |= {name: replace(FileEntry(*numbers), node=node) for name, numbers in receipt.files.items()}
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
            objects={name: _entry(name, item, parts, files, placed.get(name, {})) for name, item in captured.items()},
            files=files,
        )
        try:
            manifests.validate(manifest)
        except ValueError as error:
            raise CheckpointError(
                f"{error}. The ranks of this world must hold each of them once: make one mesh of all ranks, and slice "
                f"it."
            ) from None
        if self._make_checkpoint is None:
            content = manifests.encode(manifest)
            of_streams = self._storage.read(f"{folder}/{file.name}", most_bytes=file.layout.file_bytes)
            return len(content).to_bytes(8, "little") + content + of_streams
        self._look_at(folder, manifest)
        self._make_checkpoint(folder, manifest)
        return None

    def _hold(self, folder: str, made: bytes) -> None:
        """Make the checkpoint on this node. Called on the node's leader."""
        end = 8 + int.from_bytes(made[:8], "little")
        if not self._world.is_main:
            self._storage.put(f"{folder}/{RANDOM}.safetensors", [made[end:]])
        manifest = manifests.decode(made[8:end])
        self._look_at(folder, manifest)
        self._storage.put(f"{folder}/{manifests.NAME}", [made[8:end]])
        if self._world.is_main:
            heartbeat.mark_commit(manifest.step)

    def _look_at(self, folder: str, manifest: Manifest) -> None:
        """Raise if this rank sees a file in another length than was written. Other nodes' files aren't checked."""
        me = f"rank {self._world.rank}"
        for name, entry in manifest.files.items():
            if entry.node not in (None, self._world.node_rank):
                continue
            try:
                with self._storage.open(f"{folder}/{name}") as file:
                    found = f"has {file.num_bytes:,} bytes on {me}" if file.num_bytes != entry.bytes else ""
            except OSError as error:
                found = f"can't be opened by {me}: {error.strerror or error}"
            if found:
                raise CheckpointError(
                    f"{name} was written with {entry.bytes:,} bytes, but {found}. Do all ranks see the same directory?"
                )


class _Plan:
    """The tensors that are saved at one step, and the rank that writes each of them.

    Args:
        objects: The objects by name.
        world: The ranks.
        among: The ranks of this node, if each node writes everything that it holds; None: all ranks together write it
            once.
    """

    def __init__(self, objects: Mapping[str, Any], world: World, among: Collection[int] | None = None) -> None:
        self.captured = capture(objects, among)
        self.streams = capture_streams(world)
        self._world = world
        replicated = {name: item.entries for name, item in self.captured.items()}
        if among is None:
            self._number, self.files = world.rank, plan_files(replicated, world.world_size)
        else:
            self._number = world.local_rank
            self.files = plan_files(replicated, world.local_world_size, f"-n{world.node_rank}")
        divided = [[name, item.divided] for name, item in self.captured.items()]
        text = json.dumps([divided, [[n, [(e.key, e.dtype, e.shape) for e in es]] for n, es in replicated.items()]])
        self.fingerprint = zlib.crc32(text.encode())

    def files_of_this_rank(self) -> list[File]:
        """The files that this rank writes."""
        rank, world_size = self._world.rank, self._world.world_size
        mine = []
        for file in self.files:
            if file.rank == self._number:
                item = self.captured[file.owner]
                keys = [entry.key for entry in file.entries]
                # Tied parameters, recorded as by the safetensors package.
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
        """Owner, name, path, shape and dtype of this rank's shards that are in no structure, in JSON types."""
        return [
            [owner, s.name, s.path, list(s.shape), entry_of("", s.values).dtype]
            for owner, item in self.captured.items()
            for s in item.shards
            if s.path is not None
        ]


def _entry(
    owner: str,
    item: Captured,
    parts: Mapping[tuple[str, str], list[Part]],
    files: Mapping[str, FileEntry],
    placed: Mapping[str, list[Any]],
) -> ObjectEntry:
    """The manifest's entry of an object.

    Args:
        owner: The object's name.
        item: The object's captured state on rank 0.
        parts: The parts of all tensors, by owner and name, in order of their ranks.
        files: The files by name. If nodes have their own files, the first of several equal parts is used, and the
            others become its copies. Parts of another node that differ from the first are left out, because a resume
            gives all ranks the same bits.
        placed: Path, shape and dtype of tensors that are in no structure, by name.
    """
    known = {key: (entry_of(key, tensor).dtype, tuple(tensor.shape)) for key, tensor in item.tensors.items()}
    known |= item.divided
    known |= {name: (dtype, tuple(shape)) for name, (_, shape, dtype) in placed.items()}
    tensors = {}
    for name, (dtype, shape) in known.items():
        first: dict[object, Part] = {}
        copies = []
        for part in parts.get((owner, name), []):
            what = part.place[:-1] if files[part.file].node is not None else part
            if first.setdefault(what, part) is not part and part.place == first[what].place:
                copies.append(part)
        in_order = sorted(first.values(), key=lambda part: part.start)
        tensors[name] = TensorEntry(dtype, shape, tuple(in_order), tuple(copies))
    paths = [(path, name) for name, (path, _, _) in placed.items()]
    return ObjectEntry(item.kind, item.structure, tensors, item.aliases, paths)


def _versions() -> dict[str, str]:
    package = sys.modules["evenstep"]
    return {
        "evenstep": str(getattr(package, "__version__", "")),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
