"""The directory of a run: which of its folders are checkpoints, and the renames by which these come and go.

step-0000090                  a checkpoint, whole
.saving-step-0000090-...      being written: removed when the next job begins
.replaced-step-0000090        the former one of that step, while a new one takes its place: put back, or removed
.removing-step-0000060        no checkpoint any more
damaged-step-0000090          set aside by a resume that fell back to an earlier one; kept for a person to look at
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.manifest import Manifest
from evenstep.checkpoint.format.plan import Policy, best_step, plan_removals
from evenstep.checkpoint.storage.lease import EXPIRES_AFTER_S
from evenstep.checkpoint.storage.storage import Lock, Storage
from evenstep.console import say
from evenstep.errors import CheckpointError, EvenstepError, UsageError
from evenstep.ground.health import heartbeat
from evenstep.world import World

_PROBE = ".saving-probe"  # swept, where a job was killed meanwhile
_SEEN_WITHIN_S = 10.0  # by ranks of other nodes, whose file system may look seldom
_LOOK_EVERY_S = 0.1
_STEP = re.compile(r"step-(\d{7,})")
_WAIT_FOR_LOCK_S = EXPIRES_AFTER_S + 5.0
# Something else lies where a file was; or the file is shorter than it was.
_OTHER_FILE = (0, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
_ASIDE = re.compile(r"damaged-step-(\d{7,})(-\d+)?")


def folder_of(step: int) -> str:
    """The name of a step's checkpoint folder."""
    return f"step-{step:07d}"


def steps_in(storage: Storage) -> list[int]:
    """The steps that have a checkpoint, good or damaged, in ascending order."""
    found = (_STEP.fullmatch(name) for name in storage.list())
    return sorted(int(match[1]) for match in found if match is not None)


def set_aside_in(storage: Storage) -> list[str]:
    """The folders of damaged checkpoints that `set_aside` has renamed."""
    return [name for name in storage.list() if _ASIDE.fullmatch(name)]


def saving_folder(step: int, key: str) -> str:
    """The temporary folder of a save, until it is committed.

    Args:
        step: Of the save.
        key: Tells it from every other attempt.
    """
    return f".saving-{folder_of(step)}-{key}"


def put_in_place(storage: Storage, temporary: str, step: int) -> None:
    """Turn a written folder into the checkpoint of its step, and remove a former one."""
    final = folder_of(step)
    former = f".replaced-{final}"
    if final in storage.list():
        storage.remove(former)
        storage.rename(final, former)
    storage.rename(temporary, final)
    with contextlib.suppress(OSError):  # leftovers are swept when the next job begins
        storage.remove(former)


def remove_step(storage: Storage, step: int) -> None:
    """Remove a checkpoint; a rename first, so that no part of it ever looks like one."""
    going = f".removing-{folder_of(step)}"
    storage.remove(going)
    storage.rename(folder_of(step), going)
    storage.remove(going)


def set_aside(storage: Storage, step: int) -> str | None:
    """Rename a damaged checkpoint; returns its new name, or None if it can't be renamed."""
    names = (f"damaged-{folder_of(step)}" + (f"-{number}" if number else "") for number in range(1000))
    with contextlib.suppress(OSError):
        taken = storage.list()
        name = next(name for name in names if name not in taken)
        storage.rename(folder_of(step), name)
        return name
    return None


def sweep(storage: Storage) -> None:
    """Remove the leftovers of killed jobs. Only the holder of the lock may call it."""
    names = storage.list()
    for name in names:
        if name.startswith(".replaced-"):
            final = name.removeprefix(".replaced-")
            if final not in names:
                storage.rename(name, final)
                continue
        if name.startswith((".saving-", ".removing-", ".replaced-")):
            storage.remove(name)


class DamagedError(CheckpointError):
    """A checkpoint differs from what was written; the message names file and tensor."""


class UnreadableError(CheckpointError):
    """A process can't read a checkpoint, which may be good: the storage or the process has failed."""


class MissingError(UnreadableError):
    """A file isn't there. The checkpoint is damaged if no rank finds it, and not if others do."""


def why_unread(path: str, error: OSError) -> DamagedError | UnreadableError:
    """What follows from a file that could not be read: only what was read can differ from what was written."""
    if error.errno == errno.ENOENT:
        return MissingError(f"{path}: {error.strerror}")
    if error.errno in _OTHER_FILE:
        return DamagedError(f"{path}: {error.strerror or error}")
    return UnreadableError(f"{path} can't be read: {error.strerror or error}")


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Read the manifest of a checkpoint, and confirm its checksum.

    Raises:
        DamagedError: It is damaged.
        UnreadableError: This process can't read it; a MissingError if it isn't there.
    """
    path = f"{folder}/{manifests.NAME}"
    try:
        with storage.open(path) as file:
            if file.num_bytes > manifests.MAX_BYTES:
                raise DamagedError(f"{path}: {file.num_bytes:,} bytes are too many for a manifest")
            content = bytearray(file.num_bytes)
            got = file.read_into(0, memoryview(content))
        return manifests.decode(bytes(content[:got]))
    except ValueError as error:
        raise DamagedError(f"{path}: {error}") from None
    except OSError as error:
        raise why_unread(path, error) from None


class Pending(Protocol):
    """Writes here.

    Attributes:
        thread: Of the save that is pending; None: none is.
    """

    thread: threading.Thread | None


_open_here: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


class RunDirectory:
    """The checkpoints of a run, known to all its ranks; only rank 0 changes files.

    Attributes:
        writer: Writes here; set by who makes it.
        steps: Metrics by step of each checkpoint. On other ranks than 0 some may have been removed since.
        is_open: Whether this job has the lock.
    """

    def __init__(self, storage: Storage, world: World, policy: Policy) -> None:
        self.storage, self._world, self._policy = storage, world, policy
        self.steps: dict[int, Mapping[str, float]] = {}
        self.is_open = False
        self.writer: Pending | None = None
        self._lock: Lock | None = None

    @property
    def newest(self) -> int | None:
        """The newest step; None if there is none."""
        return max(self.steps, default=None)

    @property
    def best(self) -> float | None:
        """The best metric of the saved steps; None if there is none."""
        step = best_step(self.steps, self._policy) if self._policy.best is not None else None
        return None if step is None else self.steps[step][self._policy.best or ""]

    def open(self) -> None:
        """Collective: take the lock, remove a killed job's leftovers, and list the checkpoints.

        Raises:
            CheckpointError: Another job has the lock, nothing can be written here, or ranks see other directories.
        """
        found: dict[int, Mapping[str, float]] = {}
        key = self._world.broadcast_object(secrets.token_hex(8))

        def lock_and_list() -> None:
            self._succeed_others()
            # Less than the timeout after which the other ranks give up on this one.
            wait_s = min(_WAIT_FOR_LOCK_S, self._world.timeout_s / 2)
            self._lock = self.storage.lock({"world_size": self._world.world_size}, wait_s=wait_s)
            sweep(self.storage)
            if self._world.world_size > 1:
                self.storage.write(f"{_PROBE}/{key}", [key.encode()])
            for step in steps_in(self.storage):
                found[step] = {}
                try:
                    found[step] = read_manifest(self.storage, folder_of(step)).metrics
                except (DamagedError, UnreadableError):
                    continue  # reported by the load of it

        self._on_main(lock_and_list)
        self._refuse_unshared(key)
        self.steps = dict(self._world.broadcast_object([[step, dict(metrics)] for step, metrics in found.items()]))
        self.is_open = True
        _open_here.add(self)

    def _refuse_unshared(self, key: str) -> None:
        """Collective: raise where a rank doesn't see what rank 0 has just written here."""
        if self._world.world_size == 1:
            return
        problem, until = None, time.monotonic() + _SEEN_WITHIN_S
        while problem is None or time.monotonic() < until:
            try:
                with self.storage.open(f"{_PROBE}/{key}"):
                    problem = None
                    break
            except OSError as error:
                problem = f"rank {self._world.rank} on {socket.gethostname()} doesn't see it: {error.strerror or error}"
                time.sleep(_LOOK_EVERY_S)
        problems = [each for each in self._world.exchange(problem) if each is not None]
        if self._world.is_main:
            with contextlib.suppress(OSError):  # leftovers are swept when the next job begins
                self.storage.remove(_PROBE)
        if problems:
            self.close()
            raise CheckpointError(
                f"{self.storage.where} is no directory that all ranks share: rank 0 has written a file, and "
                f"{problems[0]}. Each node would keep a part of every checkpoint. Use a file system that all nodes "
                f"mount."
            )

    def _succeed_others(self) -> None:
        """Wait for what another Checkpointer of this process is saving here, such as that of a cell that ran before."""
        for other in list(_open_here):
            if other is not self and other._lock is not None and other.storage.where == self.storage.where:
                say(f"evenstep: a second Checkpointer on {self.storage.where}: the first one saves nothing more there")
                if other.writer is not None and other.writer.thread is not None:
                    other.writer.thread.join()

    def list_steps(self) -> list[int]:
        """Collective: the steps that have a checkpoint now, ascending; needs no lock.

        Raises:
            CheckpointError: The directory can't be read.
        """
        found: list[int] = []
        self._on_main(lambda: found.extend(steps_in(self.storage)), cannot="be read")
        steps: list[int] = self._world.broadcast_object(found)
        return steps

    def close(self, after: threading.Thread | None = None) -> None:
        """Release the lock, at once or when a thread has ended that still writes here."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        if after is None or not after.is_alive():
            lock.release()
            return

        def release() -> None:
            after.join()
            lock.release()

        threading.Thread(target=release, name=f"{after.name}, end").start()

    def commit(self, temporary: str, manifest: Manifest) -> None:
        """Make a written folder the checkpoint of its step, and remove old ones. On rank 0, in the writer's thread.

        Raises:
            LockedError: Another job has taken this one for dead, and has the directory.
        """
        if self._lock is not None:
            self._lock.confirm()
        put_in_place(self.storage, temporary, manifest.step)
        heartbeat.mark_commit(manifest.step)
        self._add_committed(manifest)

    def _add_committed(self, manifest: Manifest) -> None:
        steps = {**self.steps, manifest.step: manifest.metrics}
        for step in plan_removals(steps, self._policy):
            if step != manifest.step:
                with contextlib.suppress(OSError):  # one too many is kept; the save has succeeded
                    if self._lock is not None:
                        self._lock.confirm()
                    remove_step(self.storage, step)
                del steps[step]
        self.steps = steps  # a new dictionary: the loop may be reading the old

    def add_step(self, step: int) -> None:
        """Add the step of a committed checkpoint; rank 0 has its metrics already."""
        self.steps = {step: {}, **self.steps}

    def discard(self, after: int) -> None:
        """Collective: remove the checkpoints of later steps."""
        later = [step for step in self.steps if step > after]

        def remove() -> None:
            if self._lock is not None:
                self._lock.confirm()
            for step in later:
                remove_step(self.storage, step)

        self._on_main(remove)
        self.steps = {step: metrics for step, metrics in self.steps.items() if step <= after}

    def set_aside(self, step: int) -> str | None:
        """Collective: rename a damaged checkpoint; returns its new name, on rank 0."""
        self.steps = {other: metrics for other, metrics in self.steps.items() if other != step}
        return set_aside(self.storage, step) if self._world.is_main else None

    def refuse_later_than(self, step: int) -> None:
        """Raise a UsageError if there are later checkpoints: the next start would be ambiguous."""
        if self.newest is not None and self.newest > step:
            raise UsageError(
                f"{self.storage.where} has checkpoints up to step {self.newest}, and this run is at step {step}: the "
                f"next start could not tell which to take. Call checkpoint.resume() before the loop, or "
                f"checkpoint.discard(after={step}) to remove the later ones, or use another directory."
            )

    def _on_main(self, work: Callable[[], None], cannot: str = "be written") -> None:
        """Collective: call `work` on rank 0, and raise its error on all ranks."""
        problem: list[object] | None = None
        if self._world.is_main:
            try:
                work()
            except (OSError, EvenstepError) as error:
                problem = [isinstance(error, EvenstepError), str(error)]
        problem = self._world.broadcast_object(problem)
        if problem is not None:
            is_ours, text = problem
            where = self.storage.where
            raise CheckpointError(str(text) if is_ours else f"{where} can't {cannot}: {text} (on rank 0).")
