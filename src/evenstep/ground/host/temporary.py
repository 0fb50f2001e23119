"""Temporary directories. A directory that a killed process has left is removed when the next one is made.

[Note: directories of killed processes]

A process that is killed can't remove its directory. It holds a lock on a file inside, and the kernel releases the lock
however the process ends. The process that makes the next directory removes the directories whose lock nobody holds.
Directories without such a file stay; the file is written under the lock. The file names the kernel that keeps the lock,
because on a shared file system another node may not see the lock. Directories of other kernels stay.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from evenstep.errors import ConfigurationError
from evenstep.ground.host.processes import boot_id

_PREFIX = "evenstep-"
_OWNER = "owner"
_LEAST_BYTES = 1 << 20
_KERNEL = boot_id().encode() or b"?"
_REMEDY = "Make room there, or set TMPDIR to a directory on another disk."


@contextlib.contextmanager
def private_directory(purpose: str) -> Iterator[Path]:
    """A temporary directory of mode 0700, removed at the end of the block, or by the next call after a kill.

    Args:
        purpose: Part of the directory's name.

    Raises:
        ConfigurationError: The disk is full, now or in a write inside the block.
    """
    root = temporary_root()
    sweep(root)
    with contextlib.ExitStack() as held:
        directory = Path(
            held.enter_context(
                tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{purpose}-", dir=root, ignore_cleanup_errors=True)
            )
        )
        with contextlib.suppress(OSError):  # a file system without locks: then the directory isn't swept
            lock = os.open(directory / _OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock, _KERNEL)
        try:
            yield directory
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ConfigurationError(f"{error.filename or directory}: {error.strerror}. {_REMEDY}") from None


def temporary_root() -> Path:
    """The directory for temporary files; refused if its disk is full, since writes would fail in the middle of a run.

    Raises:
        ConfigurationError: There is no such directory, or no room.
    """
    try:
        root = Path(tempfile.gettempdir())
        disk = os.statvfs(root)
    except OSError as error:
        raise ConfigurationError(f"no directory for temporary files: {error.strerror}. {_REMEDY}") from None
    free_bytes = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free_bytes < _LEAST_BYTES:  # 0: a file system without a size
        full = os.strerror(errno.ENOSPC)
        raise ConfigurationError(f"{root}: {full} ({free_bytes:,} bytes are free, {_LEAST_BYTES:,} needed). {_REMEDY}")
    return root


def sweep(root: Path) -> None:
    """Remove this user's directories that a killed process has left, directly in `root`."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # another process was faster, or this one lacks the permission
                    _remove_if_left(Path(entry.path))


def _remove_if_left(directory: Path) -> None:
    lock = os.open(directory / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == os.geteuid() and os.read(lock, 100) == _KERNEL:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)
