"""`Storage`: the methods by which checkpoints are stored, and a local directory that has them.

A path has one or two parts: a folder, and a file in it. `evenstep.testing.storage.check_storage` has the cases that
every implementation passes.

[Note: what survives a power failure]

A file is synced before `write` returns, a folder's list of names before the folder is renamed, and the list of folders
after that. So when a rename is durable, everything inside the folder is, and before it the folder is no checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from evenstep.checkpoint.storage.lease import take_lock
from evenstep.ground.compat.c_library import libc

Fault = Callable[[str, str], None]

_SEND_BYTES = 4 << 20
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range: Any = libc.function("sync_file_range")  # Linux has it, python hasn't
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class Reader(Protocol):
    """An open file."""

    @property
    def num_bytes(self) -> int:
        """Its length."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill `out` with the bytes from `offset` on; returns how many there were, fewer only at the file's end."""


class Lock(Protocol):
    """A lock that this process holds. It shows by itself that its holder lives."""

    def confirm(self) -> None:
        """Called before every change of what others see.

        Raises:
            LockedError: Another job has taken the lock: this one was taken for dead.
            OSError: The storage can't be reached.
        """

    def release(self) -> None:
        """End it, if this process still holds it. Twice is once."""


class Storage(Protocol):
    """The files of one run's checkpoints. All methods may be called from any thread.

    Attributes:
        where: Its name in messages.
    """

    where: str

    def list(self, folder: str = "") -> list[str]:
        """Names of the folders here, or of the entries of one; empty if there is no such folder."""

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a new file, durable on return. Makes its folder if needed.

        Raises:
            OSError: It can't be written, or exists.
        """

    def open(self, path: str) -> contextlib.AbstractContextManager[Reader]:
        """Open a regular file for reading. Links are not followed.

        Raises:
            OSError: There is no such file.
        """

    def rename(self, folder: str, to: str) -> None:
        """Rename a folder atomically; durable on return.

        Raises:
            OSError: It isn't there, or the other name is taken.
        """

    def remove(self, folder: str) -> None:
        """Remove a folder and its files; does nothing if there is none."""

    def lock(self, owner: Mapping[str, object], *, wait_s: float = 0.0) -> Lock:
        """Lock out other jobs until this process ends, or releases the lock.

        Args:
            owner: What others may want to know of this job; JSON types.
            wait_s: How long it may take to find out whether another holder still lives.

        Raises:
            LockedError: Another job has it.
            OSError: Nothing can be written here.
        """


def _no_fault(operation: str, path: str) -> None:
    """Called before each effect on the disk; tests inject faults here."""


class LocalDirectory:
    """Checkpoints in a directory of a file system that all ranks share.

    Args:
        root: The directory; made when first written to.
        private: Files have mode 0600, folders 0700. False: 0666 and 0777 without the bits of the process's umask.
        fault: Called with (operation, path) before each effect: "mkdir", "create", "write", "sync", "rename",
            "unlink", "rmdir", "lock". What it raises looks like a fault of the disk.
    """

    def __init__(self, root: str | os.PathLike[str], *, private: bool = True, fault: Fault = _no_fault) -> None:
        self.root = Path(root).absolute()
        self.where = os.fspath(root)
        self._fault = fault
        self._file_mode, self._folder_mode = (0o600, 0o700) if private else (0o666, 0o777)

    def __repr__(self) -> str:
        return f"<LocalDirectory {self.where}>"

    def list(self, folder: str = "") -> list[str]:
        """See `Storage.list`."""
        try:
            with os.scandir(self._path(folder)) as entries:
                # Of the folders themselves none is a link: what it points to could change between two looks.
                return sorted(entry.name for entry in entries if folder or entry.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """See `Storage.write`."""
        target = self._path(path)
        if not target.parent.is_dir():
            self._fault("mkdir", path)
            self._make_root()
            target.parent.mkdir(mode=self._folder_mode, exist_ok=True)
        self._fault("create", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(target, flags, self._file_mode)
        try:
            sent = done = 0
            for chunk in chunks:
                self._fault("write", path)
                left = memoryview(chunk)
                while left:
                    written = os.write(descriptor, left)
                    left = left[written:]
                    done += written
                if done - sent >= _SEND_BYTES:
                    _begin_to_sync(descriptor, sent, done - sent)
                    sent = done
            self._fault("sync", path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[Reader]:
        """See `Storage.open`."""
        folder, _, name = path.rpartition("/")
        parent = os.open(self._path(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            # Without waiting: what lies there might be a pipe.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=parent)
        finally:
            os.close(parent)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            yield _OpenFile(descriptor, status.st_size)
        finally:
            os.close(descriptor)

    def rename(self, folder: str, to: str) -> None:
        """See `Storage.rename`."""
        self._fault("sync", folder)
        _sync_directory(self._path(folder))
        self._fault("rename", to)
        if self._path(to).exists():  # an empty directory would be replaced
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self._path(to)))
        self._path(folder).rename(self._path(to))
        self._fault("sync", "")
        _sync_directory(self.root)

    def remove(self, folder: str) -> None:
        """See `Storage.remove`."""
        path = self._path(folder)
        if not path.is_dir() or path.is_symlink():
            return
        for entry in sorted(path.iterdir()):
            self._fault("unlink", f"{folder}/{entry.name}")
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        self._fault("rmdir", folder)
        try:
            path.rmdir()
        except OSError:  # NFS keeps a file that somebody still reads, under a name of its own, until that one is done
            if not all(name.startswith(".nfs") for name in os.listdir(path)):
                raise

    def lock(self, owner: Mapping[str, object], *, wait_s: float = 0.0) -> Lock:
        """See `Storage.lock`."""
        self._fault("lock", "lock.json")
        self._make_root()
        return take_lock(self.root, owner, mode=self._file_mode, wait_s=wait_s)

    def _make_root(self) -> None:
        missing = [path for path in (self.root, *self.root.parents) if not path.is_dir()]
        for path in reversed(missing):
            if path.exists() and not path.is_dir():  # not made by another thread meanwhile
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            path.mkdir(mode=self._folder_mode, exist_ok=True)
            _sync_directory(path.parent)

    def _path(self, path: str) -> Path:
        parts = path.split("/") if path else []
        if len(parts) > 2 or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{path!r} is no path inside a storage")
        return self.root.joinpath(*parts)


class _OpenFile:
    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def read_into(self, offset: int, out: memoryview) -> int:
        done = 0
        while done < len(out):
            got = os.preadv(self._descriptor, [out[done:]], offset + done)
            if got == 0:
                break
            done += got
        return done


def _begin_to_sync(descriptor: int, offset: int, num_bytes: int) -> None:
    """Start to write pages to disk while the next checksums are computed. Only a hint."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
