"""`LocalTier`: copies of the newest step on each node's own disk, beside the checkpoints that all nodes share.

    LOCAL/1000/5c0f.../step-0001040-00003-26     a generation, save 26 of the job that had lock 3 of the directory:
          user run                               everything that this node's ranks hold, and the whole manifest
                       reached                   the lock, and the number of steps made, for a line at a resume

No lock is needed: only the holder of the shared directory's lock knows the run's key. If a job that has lost the lock
still writes, its folder's name has the old lock's number.

[Note: guarantees of local generations]

1. A manifest names bytes that were durable on their nodes before it was posted.
2. A resume from a generation gives all ranks the same bits: if nodes differ, one node's bits are used (see
   `save.commit`).
3. Nothing durable depends on the nodes' generations, because they may be lost at any time.
4. A node keeps the newest complete generation until a newer one is complete, or its disk is full.
5. Ranks wait for a local save only when the next local save begins, and a failed local save never ends a run.
6. If a later attempt has resumed from a step, later steps of earlier attempts don't count (see [Note: what a lock
   remembers of the run]).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evenstep.checkpoint.directory import checkpoints_in, remove_checkpoint
from evenstep.checkpoint.lock import place_of, step_of
from evenstep.checkpoint.save.commit import Saver
from evenstep.checkpoint.store import LocalDirectory
from evenstep.console import say
from evenstep.errors import ConfigurationError
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.optim.local_sgd.local_sgd import LocalSGD
from evenstep.world import World

_UNUSED_AFTER_S = 7 * 86400.0
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_REACHED = "reached"


def validate_local(local: LocalDirectory) -> None:
    """Refuse a directory in which this user can't have a private folder.

    Raises:
        ConfigurationError: The path isn't a directory, or can't be reached; or another user may write to this user's
            folder in it.
    """
    path, user = _folder_of_user(local.root), os.geteuid()
    try:
        with contextlib.suppress(FileNotFoundError):  # made by the first save
            if not stat.S_ISDIR(os.stat(local.root).st_mode):
                raise ConfigurationError(f"local={local.where!r} isn't a directory.")
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
                raise ConfigurationError(
                    f"local={local.where!r}: {path} must be a directory of user {user}, to which only that user may "
                    f"write. Remove it, or use another directory."
                )
    except OSError as error:
        raise ConfigurationError(f"local={local.where!r} can't be used: {error.strerror}.") from None


def refuse_inside(local: LocalDirectory, durable: LocalDirectory) -> None:
    """Refuse the directory of the checkpoints, and directories inside it.

    Raises:
        ConfigurationError: `local` is the directory of the checkpoints, or lies inside it.
    """
    path, outer = Path(os.path.realpath(local.root)), Path(os.path.realpath(durable.root))
    if path == outer or outer in path.parents:
        raise ConfigurationError(
            f"local={local.where!r} is the directory of the checkpoints, or inside it. Pass a directory on each node's "
            f"own disk."
        )


def _folder_of_user(root: Path) -> Path:
    return root / str(os.geteuid())


def _try_to_write(storage: LocalDirectory, name: str) -> None:
    """Refuse a directory that can't be written to. A full disk is accepted, because it may have room later.

    Raises:
        ConfigurationError: The directory can't be written to.
    """
    try:
        storage.put(name, [])
        storage.remove(name)
    except OSError as error:
        if error.errno not in _IS_FULL:
            raise ConfigurationError(
                f"local: {storage.where} can't be written to: {error.strerror}. Pass a directory on each node's own "
                f"disk, or leave local out."
            ) from None


class LocalTier:
    """A run's generations on the nodes' disks.

    Collective: every rank makes it, and calls its methods in the same order.

    Args:
        local: The Checkpointer's argument `local`, on this rank's node.
        every_steps: Steps between two generations.
        world: The ranks that take part.
        objects: Objects to save, by name.
        lock_number: Number of the durable directory's lock.
        run: The run's unique key; rank 0's is used.

    Attributes:
        storage: The generations of this node.
        kept: Folder of the newest complete generation, or of the generation that was resumed from; None: there is none.
        reached: Number of steps that the last attempt made, if it is known.
    """

    def __init__(
        self,
        local: LocalDirectory,
        every_steps: int,
        world: World,
        objects: Mapping[str, Any],
        lock_number: int,
        run: str,
    ) -> None:
        self._every_steps, self._world, self._objects = every_steps, world, objects
        key = world.broadcast_object(hashlib.sha256(run.encode()).hexdigest()[:32])
        user = _folder_of_user(local.root)
        self.storage = local.inside(user / key)
        paths = world.exchange([world.node_rank, os.path.realpath(self.storage.root)])
        here = {path: rank for rank, (node, path) in enumerate(paths) if node == world.node_rank}

        def validate() -> dict[str, Any]:
            if len(here) > 1:
                given = ", ".join(f"{local.where!r} leads to {path!r} on rank {rank}" for path, rank in here.items())
                raise ConfigurationError(f"local: the ranks of a node must share one directory. {given}.")
            _try_to_write(self.storage, f"probe-{world.rank}")
            return {}

        validate_on_all_ranks(world, "Checkpointer: local", validate)
        self._saver = Saver(self.storage, world, objects, None)
        self._saver.open(lock_number)
        self.kept: str | None = None
        self._lock_number = lock_number
        self.reached = self._read_reached()
        self._saved_step: int | None = None
        self._num_failed = 0
        self._tells = world.is_main
        if self._saver.is_leader:
            with contextlib.suppress(OSError):  # there is none yet
                _remove_unused(user, key)

    def newest(self) -> int:
        """Collective: the step of the newest generation on any node, complete or not; 0: there is none."""
        newest = 0
        with contextlib.suppress(OSError):
            newest = max(checkpoints_in(self.storage), default=0)
        return int(max(self._world.exchange(newest)))

    def begin(self) -> None:
        """Called before the first step: remove generations from which this run doesn't continue."""
        # Another rank may already be writing.
        self.remove(lambda folder: folder == self.kept or _order_of(folder)[0] == self._lock_number)
        if self._saver.is_leader:
            with contextlib.suppress(OSError):
                self.storage.put(_REACHED, [])  # makes the folder

    def step(self, step: int, before: int, metrics: Mapping[str, float], *, waits: bool = False) -> None:
        """Collective: begin a save if one is due.

        Args:
            step: Optimizer steps so far.
            before: Optimizer steps at the previous call.
            metrics: Numbers to store with the generation.
            waits: Return only when the save has ended.
        """
        if self._saver.is_leader:
            self._note_reached(step)
        is_due = step // self._every_steps > before // self._every_steps
        if is_due:
            self.finish()
        writer = self._saver.writer
        if self._tells and self._saved_step is not None and not (writer.is_busy or writer.has_failed):
            self._tells = False
            took = step - self._saved_step
            most = f"{self._between_saves()} + {took} steps"
            say(f"evenstep: local copies are kept: a lost process costs at most {most}, as long as local saves succeed")
        if is_due:
            self._saver.start(step, metrics)
            self._saved_step = step
            if waits:
                self.finish()

    def _between_saves(self) -> int:
        """The most steps from one save to the next: with `LocalSGD` a save that is due waits for an exchange."""
        locals_ = [each for each in self._objects.values() if isinstance(each, LocalSGD) and each.is_open]
        between = max((each.every for each in locals_), default=1)
        return -(-self._every_steps // between) * between

    def finish(self) -> None:
        """Collective: wait for the pending save, and remove the generations that it replaces. A failure is printed."""
        if self._saver.writer.is_pending:
            self._end(self._saver.finish())

    def close(self, *, removes: bool) -> None:
        """Wait for this rank's part of the pending save. Not collective.

        Args:
            removes: Remove all generations, because a durable checkpoint is newer.
        """
        if self._saver.writer.is_pending:
            self._end(self._saver.finish_alone()[0])
        if removes:
            self.remove()
            if self._saver.is_leader:
                with contextlib.suppress(OSError):  # the folder isn't empty
                    self.storage.remove(_REACHED)
                    self.storage.root.rmdir()

    def abandon(self) -> None:
        """Called if this rank ends with an error."""
        self._saver.abandon()

    def remove(self, keeps: Callable[[str], bool] = lambda _: False) -> None:
        """Remove this node's generations, complete or not, except those to keep.

        Args:
            keeps: Returns whether a folder stays.
        """
        if self._saver.is_leader:
            self._remove(keeps)

    def _end(self, failure: str | None) -> None:
        """Called after a save: keep the generation if it is complete; otherwise print the error."""
        if failure is None:
            kept = self.kept = self._saver.folder
            # Another rank may already be writing the next generation.
            self.remove(lambda folder: _order_of(folder) >= _order_of(kept))
            return
        self._num_failed += 1
        tells = self._num_failed & (self._num_failed - 1) == 0  # the 1st, 2nd, 4th, 8th ...: saves may fail for days
        if tells and self._world.is_main:
            say(
                f"evenstep: training continues, but {self._num_failed} of {self._saver.num_saves} local saves have "
                f"failed: the local copies of step {self._saved_step} could not be written: {failure}"
            )
        self._saved_step = None
        error, old = self._saver.error, self.kept
        if isinstance(error, OSError) and error.errno in _IS_FULL and old is not None:
            if tells:
                say(
                    f"evenstep: {self.storage.where} is full on rank {self._world.rank}: the copies of step "
                    f"{step_of(old)} are removed, so that the next local save has room. Local saves need room for two "
                    f"copies"
                )
            self.kept = None
            self._remove(lambda folder: folder != old)

    def _read_reached(self) -> int:
        """Collective: the last attempt's number of steps, from the nodes' notes; 0: it had no local copies."""
        mine = [0, 0]
        with contextlib.suppress(OSError, ValueError):  # there is none yet, or a kill has cut it short
            lock, step = self.storage.read(_REACHED, most_bytes=100).split()
            mine = [int(lock), int(step)]
        lock, step = max(self._world.exchange(mine))
        return int(step) if lock == self._lock_number - 1 else 0

    def _note_reached(self, step: int) -> None:
        """Record the number of steps, at every step. The note survives this process, and needn't survive the node."""
        with contextlib.suppress(OSError):  # the note is only used in a message
            descriptor = os.open(self.storage.root / _REACHED, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.write(descriptor, f"{self._lock_number:9} {step:12}\n".encode())
            finally:
                os.close(descriptor)

    def _remove(self, keeps: Callable[[str], bool] = lambda _: False) -> None:
        with contextlib.suppress(OSError):  # tried again after the next save
            for folder in self.storage.list():
                place = place_of(folder)
                # A job that has lost the lock must not touch its successor's generations.
                if place is not None and place.lock <= self._lock_number and not keeps(folder):
                    with contextlib.suppress(OSError):
                        remove_checkpoint(self.storage, folder)


def _order_of(folder: str) -> tuple[int, int]:
    """A sort key by which later generations are larger, although their step may be smaller."""
    place = place_of(folder)
    assert place is not None, folder
    return place.lock, place.save


def _remove_unused(user: Path, key: str) -> None:
    """Remove the generations of this user's runs that haven't saved for a long time."""
    for path in user.iterdir():
        unused_s = time.time() - os.lstat(path).st_mtime
        if path.name != key and path.is_dir() and not path.is_symlink() and unused_s > _UNUSED_AFTER_S:
            say(f"evenstep: removed {path}: local copies of a run that has not saved for {unused_s / 86400:.0f} days")
            shutil.rmtree(path, ignore_errors=True)
