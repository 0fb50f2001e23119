"""`LocalTier`: copies of the newest step on each node's own disk, beside the checkpoints that all nodes share.

    LOCAL/1000/5c0f.../step-0001040-00003-26     a generation, save 26 of the job that had lock 3 of the directory: all
          user run                               that the ranks of this node hold, and the whole manifest
                       reached                   that lock, and how many steps have been made: for a line at a resume

No lock is needed: only who has the lock of the shared directory knows the run's key, and what a zombie still writes has
its lock's number in the folder's name.

[Note: what holds of local generations]

1. A manifest names bytes that were durable on their nodes before it was posted.
2. A resume from one gives all ranks the same bits: where nodes differ, one node's count (see `save.commit`).
3. Nothing durable is decided by what nodes hold: that may be lost at any time.
4. A node keeps the newest complete generation until a newer one is complete, or its disk is full.
5. No rank waits for a local save but where the next one begins, and no failure of one ends a run.
6. What a later attempt didn't go on from doesn't count (see [Note: what a lock remembers of the run]).
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
from evenstep.world import World

_UNUSED_AFTER_S = 7 * 86400.0
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_REACHED = "reached"


def validate_local(local: LocalDirectory) -> None:
    """Refuse a directory in which this user can't have a folder for itself.

    Raises:
        ConfigurationError: It is no directory, or can't be reached; or somebody else may write to the folder there.
    """
    path, user = _folder_of_user(local.root), os.geteuid()
    try:
        with contextlib.suppress(FileNotFoundError):  # made by the first save
            if not stat.S_ISDIR(os.stat(local.root).st_mode):
                raise ConfigurationError(f"local={local.where!r} is no directory.")
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
                raise ConfigurationError(
                    f"local={local.where!r}: {path} is not a directory of user {user} to which nobody else may write. "
                    f"Remove it, or use another directory."
                )
    except OSError as error:
        raise ConfigurationError(f"local={local.where!r} can't be used: {error.strerror}.") from None


def _folder_of_user(root: Path) -> Path:
    return root / str(os.geteuid())


class LocalTier:
    """A run's generations on the nodes' disks. Collective: every rank makes it, and calls its methods in one order.

    Args:
        local: The directory that was given, on this rank's node.
        every_steps: Steps between two generations.
        world: The ranks that take part.
        objects: Objects to save, by name.
        lock_number: Of the durable directory's lock.
        run: What tells this run from others; rank 0's counts.

    Attributes:
        storage: The generations of this node.
        kept: Folder of the newest complete generation, or of the one that was resumed from; None: there is none.
        reached: Steps that the last attempt made, as far as it is known.
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
        self._every_steps, self._world = every_steps, world
        key = world.broadcast_object(hashlib.sha256(run.encode()).hexdigest()[:32])
        user = _folder_of_user(local.root)
        self.storage = local.inside(user / key)
        self._saver = Saver(self.storage, world, objects, None)
        self._saver.open(lock_number)
        self.kept: str | None = None
        self._lock_number = lock_number
        self.reached = self._read_reached()
        self._saved_step: int | None = None
        self._has_failed = False
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
        """Before the first step: remove what this run doesn't go on from."""
        self.remove(lambda folder: folder == self.kept)
        if self._saver.is_leader:
            with contextlib.suppress(OSError):
                self.storage.put(_REACHED, [])  # makes the folder

    def step(self, step: int, metrics: Mapping[str, float], *, waits: bool = False) -> None:
        """Collective: begin a save if one is due.

        Args:
            step: Optimizer steps so far.
            metrics: Numbers to store with it.
            waits: Return when the save has ended.
        """
        if self._saver.is_leader:
            self._note_reached(step)
        is_due = step % self._every_steps == 0
        if is_due:
            self.finish()
        writer = self._saver.writer
        if self._tells and self._saved_step is not None and not (writer.is_busy or writer.has_failed):
            self._tells = False
            took = step - self._saved_step
            say(f"evenstep: local copies are kept: a lost process costs at most {self._every_steps} + {took} steps")
        if is_due:
            self._saver.start(step, metrics)
            self._saved_step = step
            if waits:
                self.finish()

    def finish(self) -> None:
        """Collective: wait for the pending save, and remove what it replaces. A failure is printed."""
        if self._saver.writer.is_pending:
            self._end(self._saver.finish())

    def close(self, *, removes: bool) -> None:
        """Wait for the pending save as far as this rank takes part in it. Not collective.

        Args:
            removes: A durable checkpoint has come after all generations: remove them.
        """
        if self._saver.writer.is_pending:
            self._end(self._saver.finish_alone()[0])
        if removes:
            self.remove()
            if self._saver.is_leader:
                with contextlib.suppress(OSError):  # something else lies in it
                    self.storage.remove(_REACHED)
                    self.storage.root.rmdir()

    def abandon(self) -> None:
        """This rank ends with an error."""
        self._saver.abandon()

    def remove(self, keeps: Callable[[str], bool] = lambda _: False) -> None:
        """Remove this node's generations, whole and in parts, but some.

        Args:
            keeps: Whether a folder stays.
        """
        if self._saver.is_leader:
            self._remove(keeps)

    def _end(self, failure: str | None) -> None:
        """After a save: keep what is complete, or say what went wrong, once until the next one is complete."""
        if failure is None:
            self.kept, self._has_failed = self._saver.folder, False
            self.remove(lambda folder: folder == self.kept)
            return
        if self._world.is_main and not self._has_failed:
            say(
                f"evenstep: the local copies of step {self._saved_step} could not be written: {failure}. Training goes "
                f"on, and so do the next local saves"
            )
        self._has_failed, self._saved_step = True, None
        error = self._saver.error
        if isinstance(error, OSError) and error.errno in _IS_FULL and self.kept is not None:
            say(
                f"evenstep: {self.storage.where} is full on rank {self._world.rank}: what is there of step "
                f"{step_of(self.kept)} is removed, so that the next local save has room"
            )
            self.kept = None
            self._remove()

    def _read_reached(self) -> int:
        """Collective: of what nodes have noted, the last attempt's."""
        mine = [0, 0]
        with contextlib.suppress(OSError, ValueError):  # there is none yet, or a kill has cut it
            lock, step = self.storage.read(_REACHED, most_bytes=100).split()
            mine = [int(lock), int(step)]
        return int(max(self._world.exchange(mine))[1])

    def _note_reached(self, step: int) -> None:
        """Every step: it outlives this process, and needn't outlive the node."""
        with contextlib.suppress(OSError):  # it is only said
            descriptor = os.open(self.storage.root / _REACHED, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.write(descriptor, f"{self._lock_number:9} {step:12}\n".encode())
            finally:
                os.close(descriptor)

    def _remove(self, keeps: Callable[[str], bool] = lambda _: False) -> None:
        with contextlib.suppress(OSError):  # tried again after the next save
            for folder in self.storage.list():
                place = place_of(folder)
                # A job that was taken for dead leaves alone what its successor has.
                if place is not None and place.lock <= self._lock_number and not keeps(folder):
                    with contextlib.suppress(OSError):
                        remove_checkpoint(self.storage, folder)


def _remove_unused(user: Path, key: str) -> None:
    """Remove the generations of this user's runs that haven't been saved to for long."""
    for path in user.iterdir():
        unused_s = time.time() - os.lstat(path).st_mtime
        if path.name != key and path.is_dir() and not path.is_symlink() and unused_s > _UNUSED_AFTER_S:
            say(f"evenstep: removed {path}: local copies of a run that has not saved for {unused_s / 86400:.0f} days")
            shutil.rmtree(path, ignore_errors=True)
