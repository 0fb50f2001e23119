"""The directory of a run: which of its folders are checkpoints, and how they are made and removed.

step-0000090-00007-3    written by save 3 of the job that had lock 7: a checkpoint once its manifest is there
lock-00007.json         which job writes here, and which manifests of earlier jobs count: see `lock`

No folder is renamed. A manifest is written last, and removed first. A folder without a manifest is the leftover of a
killed job, and the next job removes it. A damaged checkpoint stays for inspection, and resumes skip it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Protocol

from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.manifest import Manifest
from evenstep.checkpoint.format.plan import Policy, best_step, plan_removals
from evenstep.checkpoint.lock import EXPIRES_AFTER_S, Lock, place_of, read_top, step_of, take_lock
from evenstep.checkpoint.store import Storage
from evenstep.console import say
from evenstep.errors import CheckpointError, EvenstepError, UsageError
from evenstep.ground.health import heartbeat
from evenstep.world import World

_SEEN_WITHIN_S = 10.0  # time in which ranks of other nodes see a file: their file system may refresh rarely
_POLL_EVERY_S = 0.1
_WAIT_FOR_LOCK_S = EXPIRES_AFTER_S + 5.0
# Errors that mean damage: something else is in a file's place, or the file is shorter than it was.
_OTHER_FILE = (0, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)


def checkpoints_in(storage: Storage) -> dict[int, str]:
    """The folder of each step that has a checkpoint, good or damaged, in ascending order. Needs no lock."""
    return _by_step(read_top(storage).manifests(storage))


def _by_step(folders: list[str]) -> dict[int, str]:
    """Folders of checkpoints by step; if several have the same step, the folder that was written last."""
    return {step_of(folder): folder for folder in folders}


def remove_checkpoint(storage: Storage, folder: str) -> None:
    """Remove a checkpoint, its manifest first: if this is interrupted, the rest isn't a checkpoint."""
    storage.remove(f"{folder}/{manifests.NAME}")
    storage.remove(folder)


def sweep(storage: Storage, lock: Lock) -> None:
    """Remove leftovers of killed jobs, and checkpoints that a later save of the same step has replaced.

    Raises:
        LockedError: Another job now has the lock. That job's files must not be removed.
    """
    newest = _by_step(lock.manifests)
    for folder in storage.list():
        place = place_of(folder)
        if place is None or folder == newest.get(place.step):
            continue
        if folder not in lock.manifests or _is_replaced(storage, lock, folder, newest[place.step]):
            lock.confirm()
            remove_checkpoint(storage, folder)
    storage.sweep()


def _is_replaced(storage: Storage, lock: Lock, folder: str, by: str) -> bool:
    """Whether two checkpoints of one step are both good, as far as is known. Damaged checkpoints are kept."""
    try:
        return not lock.record["damaged"].keys() & {folder, by} and all(
            read_manifest(storage, each) for each in (folder, by)
        )
    except (DamagedError, UnreadableError):
        return False


class DamagedError(CheckpointError):
    """A checkpoint differs from the written content; the message names file and tensor."""


class UnreadableError(CheckpointError):
    """A process can't read a checkpoint, which may be good: the storage or the process has failed."""


class MissingError(UnreadableError):
    """A file doesn't exist. The checkpoint is damaged if no rank finds the file, but not if other ranks do."""


def why_unread(path: str, error: OSError) -> DamagedError | UnreadableError:
    """The error for a file that can't be read. It is damage only if the file was read and its content differs."""
    if error.errno == errno.ENOENT:
        return MissingError(f"{path}: {error.strerror}")
    if error.errno in _OTHER_FILE:
        return DamagedError(f"{path}: {error.strerror or error}")
    return UnreadableError(f"{path} can't be read: {error.strerror or error}")


def read_manifest(storage: Storage, folder: str) -> Manifest:
    """Read the manifest of a checkpoint, and check its checksum.

    Raises:
        DamagedError: The manifest is damaged.
        UnreadableError: This process can't read the manifest; a MissingError if it doesn't exist.
    """
    path = f"{folder}/{manifests.NAME}"
    try:
        content = storage.read(path, most_bytes=manifests.MAX_BYTES)
        if len(content) > manifests.MAX_BYTES:
            raise DamagedError(f"{path}: more than {manifests.MAX_BYTES:,} bytes are too many for a manifest")
        return manifests.decode(content)
    except ValueError as error:
        raise DamagedError(f"{path}: {error}") from None
    except OSError as error:
        raise why_unread(path, error) from None


class Pending(Protocol):
    """A writer to the directory.

    Attributes:
        thread: The pending save's thread; None: no save is pending.
    """

    thread: threading.Thread | None


_open_here: weakref.WeakSet[RunDirectory] = weakref.WeakSet()


class RunDirectory:
    """The checkpoints of a run, known to all its ranks. Only rank 0 makes changes that others can see.

    Attributes:
        writer: Writes to the directory; set by the code that makes the writer.
        steps: Metrics of each checkpoint, by step. On ranks other than 0 some checkpoints may have been removed since.
        folders: The folders by step.
        is_open: Whether this job has taken the lock.
        is_succeeded: Whether a later Checkpointer of this process saves here.
        run: The run's key, made with the directory; "" until it is open.
        resumes: Resumes of earlier attempts: see [Note: what a lock remembers of the run].
    """

    def __init__(self, storage: Storage, world: World, policy: Policy) -> None:
        self.storage, self._world, self._policy = storage, world, policy
        self.steps: dict[int, Mapping[str, float]] = {}
        self.folders: dict[int, str] = {}
        self.is_open = self.is_succeeded = False
        self.run, self.resumes = "", list[tuple[int, int]]()
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

    def open(self) -> int:
        """Collective: take the lock, remove leftovers of killed jobs, and list the checkpoints.

        Returns:
            The number of the lock.

        Raises:
            CheckpointError: Another job has the lock, the directory can't be written to, or ranks see different
                directories.
        """
        found: dict[int, Mapping[str, float]] = {}

        def lock_and_list() -> None:
            self._succeed_others()
            # Shorter than the timeout after which the other ranks give up waiting for this rank.
            wait_s = min(_WAIT_FOR_LOCK_S, self._world.timeout_s / 2)
            self._lock = take_lock(self.storage, {"world_size": self._world.world_size}, wait_s=wait_s)
            sweep(self.storage, self._lock)
            self.folders = _by_step(self._lock.manifests)
            for step, folder in self.folders.items():
                found[step] = {}
                with contextlib.suppress(DamagedError, UnreadableError):  # reported when it is loaded
                    found[step] = read_manifest(self.storage, folder).metrics

        self._on_main(lock_and_list)
        lock = None if self._lock is None else [self._lock.number, self._lock.record]
        number, record = self._world.broadcast_object(lock)
        self.run, self.resumes = record["run"], [(each, step) for each, step in record["resumes"]]
        self._refuse_unshared(record["key"])
        listed = [[step, self.folders[step], dict(metrics)] for step, metrics in found.items()]
        listed = self._world.broadcast_object(listed)
        self.steps = {step: metrics for step, _, metrics in listed}
        self.folders = {step: folder for step, folder, _ in listed}
        self.is_open = True
        for other in self._others_here():
            other.is_succeeded = True
        _open_here.add(self)
        return int(number)

    def _refuse_unshared(self, key: str) -> None:
        """Collective: raise if a rank doesn't see the lock that rank 0 has just written."""
        if self._world.world_size == 1:
            return
        problem, until = None, time.monotonic() + _SEEN_WITHIN_S
        while problem is None or time.monotonic() < until:
            try:
                if read_top(self.storage).record.get("key") == key:
                    problem = None
                    break
                why = "there is another file of its name, or none"
            except OSError as error:
                why = str(error.strerror or error)
            problem = f"rank {self._world.rank} on {socket.gethostname()} doesn't see it: {why}"
            time.sleep(_POLL_EVERY_S)
        problems = [each for each in self._world.exchange(problem) if each is not None]
        if problems:
            self.close()
            raise CheckpointError(
                f"{self.storage.where} is not a directory that all ranks share: rank 0 has written a file, but "
                f"{problems[0]}. Each node would keep a part of every checkpoint. Use a file system that all nodes "
                f"mount, or an object store."
            )

    def _others_here(self) -> list[RunDirectory]:
        """The same directory as other Checkpointers of this process have opened it."""
        return [each for each in list(_open_here) if each is not self and each.storage.where == self.storage.where]

    def _succeed_others(self) -> None:
        """Wait for another Checkpointer of this process that saves here, such as an earlier notebook cell's."""
        for other in self._others_here():
            if other._lock is not None:
                say(f"evenstep: a second Checkpointer on {self.storage.where}: the first one saves nothing more there")
                if other.writer is not None and other.writer.thread is not None:
                    other.writer.thread.join()

    def list_folders(self) -> dict[int, str]:
        """Collective: the folder of each step that has a checkpoint now, ascending; needs no lock.

        Raises:
            CheckpointError: The directory can't be read.
        """
        found: dict[int, str] = {}
        self._on_main(lambda: found.update(checkpoints_in(self.storage)), cannot="be read")
        return dict(self._world.broadcast_object([*found.items()]))

    def close(self, after: threading.Thread | None = None) -> None:
        """Release the lock: at once, or when a thread that is still writing here has ended."""
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

    def commit(self, folder: str, manifest: Manifest) -> None:
        """Make a checkpoint of a folder's files, and remove old checkpoints. On rank 0, in the writer's thread.

        Raises:
            LockedError: Another job has taken the lock, because this job seemed dead.
        """
        self._confirm()
        self.storage.put(f"{folder}/{manifests.NAME}", [manifests.encode(manifest)])
        self._confirm()  # else a manifest that another job hasn't listed might be reported as saved
        heartbeat.mark_commit(manifest.step)
        steps, folders = {**self.steps, manifest.step: manifest.metrics}, {**self.folders, manifest.step: folder}
        going = {step: folders.pop(step) for step in plan_removals(steps, self._policy) if step != manifest.step}
        for old in (*going.values(), self.folders.get(manifest.step)):
            if old is not None:
                with contextlib.suppress(OSError):  # the save has succeeded, even if an old checkpoint stays
                    self._confirm()
                    remove_checkpoint(self.storage, old)
        # New dictionaries, because the loop may be reading the old ones.
        self.steps, self.folders = {step: steps[step] for step in folders}, folders

    def add_step(self, step: int, folder: str) -> None:
        """Add a committed checkpoint to `steps`; on rank 0 it is there already."""
        self.steps, self.folders = {step: {}, **self.steps}, {**self.folders, step: folder}

    def discard(self, after: int) -> None:
        """Collective: remove the checkpoints of later steps, including damaged ones."""

        def remove() -> None:
            self._confirm()
            for folder in read_top(self.storage).manifests(self.storage):
                if step_of(folder) > after:
                    self._confirm()
                    remove_checkpoint(self.storage, folder)

        self._on_main(remove)
        self._keep({step for step in self.steps if step <= after})

    def pass_over(self, step: int, why: str) -> None:
        """Collective: skip a damaged checkpoint, and record its damage."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the next resume finds it again
                self._lock.note_damaged(self.folders[step], why)
        self._keep(self.steps.keys() - {step})

    def note_resume(self, step: int, *, is_local: bool) -> None:
        """Collective: record the step from which this job continues, if the run has saved on the nodes' disks."""
        if is_local or self.resumes:
            self._on_main(lambda: self._lock.note_resume(step) if self._lock is not None else None)

    def _keep(self, steps: set[int]) -> None:
        self.steps = {step: metrics for step, metrics in self.steps.items() if step in steps}
        self.folders = {step: folder for step, folder in self.folders.items() if step in steps}

    def _confirm(self) -> None:
        if self._lock is not None:
            self._lock.confirm()

    def refuse_later_than(self, step: int, local: int = 0) -> None:
        """Raise a UsageError if there are later checkpoints: the next start would be ambiguous.

        Args:
            step: This run's step.
            local: The newest step that is only on the nodes' disks.
        """
        newest = max(self.newest or 0, local)
        if newest > step:
            raise UsageError(
                f"{self.storage.where} has checkpoints up to step {newest}, but this run is at step {step}, so the "
                f"next start couldn't decide which one to load. Call checkpoint.resume() before the loop, or "
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
