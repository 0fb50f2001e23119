"""`Storage`: the store of checkpoints, with an object store's verbs: put, open, list and remove.

`LocalDirectory` implements the verbs for a directory, `Storage` itself for every store that fsspec supports. A path has
one or two parts: a folder, and a file in it. `evenstep.testing.storage.check_storage` has the cases that both pass.

[Note: the guarantees of put]

For every reader, a file written by `put` exists completely or not at all, and it survives a power failure once `put`
has returned. Locally this needs a temporary name, a sync of the file, a rename, a sync of the folder, and a sync of the
parent of each new folder; in an object store one PUT, or one completed upload in parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evenstep import checks
from evenstep.errors import ConfigurationError, EvenstepError
from evenstep.ground.compat.c_library import libc

Hook = Callable[[str, str], None]

_PART_BYTES = 64 << 20  # size of an upload's parts; S3 accepts ten thousand parts
_RANGE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20  # small enough to be still in the cache for its checksum
_SEND_BYTES = 4 << 20
_LEFT_AFTER_S = 60.0
_TEMPORARY = ".put-"
# By protocol: the package that fsspec needs, and evenstep's extra that installs it.
_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "az": ("adlfs", "az"), "hf": ("huggingface_hub", "hf")}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range: Any = libc.function("sync_file_range")  # Linux has it, but python doesn't
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


@dataclass(frozen=True)
class Reader:
    """An open file.

    Attributes:
        num_bytes: The file's length.
        chunk_bytes: How much to read at once.
        read_into: Called with an offset and memory: fills the memory with the file's bytes from that offset on. Returns
            their number, which is smaller than the memory only at the file's end.
    """

    num_bytes: int
    chunk_bytes: int
    read_into: Callable[[int, memoryview], int]


def _no_hook(operation: str, path: str) -> None:
    """Called before each effect; tests inject faults here, and record what a power cut would leave."""


def storage_at(url: str, *, private: bool = True) -> Storage:
    """The storage of a path or a URL.

    Raises:
        ConfigurationError: fsspec doesn't know the URL, or the package for it is missing.
    """
    if url.startswith("file:"):
        url = url.removeprefix("file:").removeprefix("//")
    if _URL.match(url) is None and "://" not in url:
        return LocalDirectory(url, private=private)
    if not private:
        raise ConfigurationError(f"private=False is for a local directory; its server controls who may read {url}.")
    return Storage(url)


class Storage:
    """The files of one run's checkpoints, in an object store. All methods may be called from any thread.

    Args:
        url: The URL, such as "s3://bucket/run".
        hook: Called with (operation, path) before each effect: "write" (a part), "put", "remove". Its exceptions look
            like faults of the storage.
        options: fsspec's options for this kind of store, such as `endpoint_url="http://127.0.0.1:9000"`.

    Attributes:
        where: The storage's name in messages.

    Raises:
        ConfigurationError: fsspec doesn't know the URL, or the package for it is missing.
    """

    def __init__(self, url: str, *, hook: Hook = _no_hook, **options: Any) -> None:
        self.where, self._hook = url.rstrip("/"), hook
        if "://" not in url:
            raise ConfigurationError(
                f"{url!r} isn't a URL: it needs two slashes, and a Path drops one of them. Pass a str."
            )
        from fsspec.core import url_to_fs

        try:
            self._files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        except (ImportError, ValueError) as error:  # "Install s3fs to access S3", "Protocol not known"
            package = _PACKAGES.get(url.partition("://")[0])
            if isinstance(error, ImportError) and package is not None:
                raise ConfigurationError(checks.needs(url, *package)) from None
            raise ConfigurationError(f"{url} can't be reached: {error}.") from None
        self._root = root.rstrip("/")
        # A "memory:" file is visible while it is being written.
        self._part_bytes = sys.maxsize if self._files.protocol == "memory" else _PART_BYTES

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.where}>"

    def list(self, folder: str = "") -> list[str]:
        """Names of the folders and files in this storage, or of the files in a folder; none if there is no such folder.

        Never cached. Hidden names are left out: they may belong to the storage.
        """
        return [name for name in self._names(folder) if not name.startswith(".")]

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file, or replace it. Atomic, and durable on return.

        Raises:
            OSError: The file can't be written. An existing file is unchanged.
        """
        target, file, buffer = self._path(path), None, bytearray()
        with _as_os_errors(path):
            try:
                for chunk in chunks:
                    self._hook("write", path)
                    buffer += chunk
                    if len(buffer) >= self._part_bytes:
                        file = file or self._files.open(target, "wb", block_size=_PART_BYTES)
                        file.write(buffer)
                        buffer = bytearray()
                self._hook("put", path)
                if file is None:
                    self._files.pipe_file(target, bytes(buffer))
                else:
                    file.write(buffer)
                    file.close()
            except BaseException:
                if file is not None:
                    with contextlib.suppress(Exception):
                        file.closed = True  # else python's collector would complete the upload
                    with contextlib.suppress(Exception):
                        file.discard()
                raise

    def put_new(self, path: str, content: bytes) -> bool:
        """Write a file if it doesn't exist; returns whether it did. Atomic: only one of several callers succeeds.

        Raises:
            OSError: The file can't be written, or this storage doesn't support the condition.
        """
        self._hook("put", path)
        if not self._create(path, content):
            return False
        # With servers that don't support the condition, or clients that drop it, two jobs could have one lock.
        if self._create(path, content):
            raise OSError(
                errno.ENOTSUP, "it can't create a file only if it doesn't exist, so no lock would be safe", path
            )
        return True

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[Reader]:
        """Open a regular file for reading. Links are not followed.

        Raises:
            OSError: There is no such file.
        """
        target = self._path(path)
        with _as_os_errors(path):
            found = self._files.info(target)
            if found["type"] != "file":
                raise OSError(errno.EINVAL, "not a regular file", path)
        num_bytes = int(found["size"])

        def read_into(offset: int, out: memoryview) -> int:
            end = min(offset + len(out), num_bytes)
            content = b""
            if offset < end:
                with _as_os_errors(path):
                    content = self._files.cat_file(target, start=offset, end=end)
            out[: len(content)] = content
            return len(content)

        yield Reader(num_bytes, _RANGE_BYTES, read_into)

    def read(self, path: str, *, most_bytes: int) -> bytes:
        """The content of a file; if it is longer than `most_bytes`, only `most_bytes` + 1 bytes of it."""
        with self.open(path) as file:
            content = bytearray(min(file.num_bytes, most_bytes + 1))
            return bytes(content[: file.read_into(0, memoryview(content))])

    def remove(self, path: str) -> None:
        """Remove a file, or a folder and its files; durable on return. Does nothing if there is none."""
        self._hook("remove", path)
        with _as_os_errors(path), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(path), recursive=True)

    def age_s(self, path: str) -> float:
        """Seconds since a file was written, by the storage's own clock; 0 if the storage keeps no times."""
        now = f"{_TEMPORARY}{secrets.token_hex(8)}"
        self.put(now, [])
        try:
            return max(0.0, self._modified_s(now) - self._modified_s(path))
        finally:
            self.remove(now)

    def sweep(self) -> None:
        """Remove leftovers of killed puts: temporary files, and parts of uploads, which cost money."""
        for name in self._names(""):
            if name.startswith(_TEMPORARY):
                with contextlib.suppress(FileNotFoundError):  # its writer has finished meanwhile
                    if self.age_s(name) >= _LEFT_AFTER_S:
                        self.remove(name)
        if hasattr(self._files, "call_s3"):  # in other stores such parts are free, and expire by themselves
            bucket, key, _ = self._files.split_path(self._root)
            prefix = f"{key}/step-".lstrip("/")
            with contextlib.suppress(OSError), _as_os_errors(self.where):  # some servers don't let every user list them
                found = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
                for each in found.get("Uploads", []):
                    named = {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
                    self._files.call_s3("abort_multipart_upload", **named)

    def _names(self, folder: str) -> Sequence[str]:
        target = self._path(folder)
        with _as_os_errors(folder):
            self._files.invalidate_cache()
            try:
                entries = self._files.ls(target, detail=False)
            except FileNotFoundError:
                return []
        # Consoles create objects with the name of their folder.
        found = {entry.rstrip("/") for entry in entries} - {target}
        return sorted(entry.rpartition("/")[2] for entry in found)

    def _create(self, path: str, content: bytes) -> bool:
        target = self._path(path)
        with _as_os_errors(path):
            try:
                self._files.pipe_file(target, content, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, ValueError):  # the client doesn't support it: expect it to overwrite
                return True
            except OSError as error:  # some servers' refusals differ from Amazon's
                if error.errno in (errno.EINVAL, errno.EBUSY) and self._files.exists(target):
                    return False
                raise
        return True

    def _modified_s(self, path: str) -> float:
        with _as_os_errors(path):
            try:
                return float(self._files.modified(self._path(path)).timestamp())
            except NotImplementedError:
                return 0.0

    def _path(self, path: str) -> Any:
        return "/".join([self._root, *_parts(path)])


class LocalDirectory(Storage):
    """Checkpoints in a directory of a file system that all ranks share.

    Args:
        root: The directory; made when first written to.
        private: Files have mode 0600, folders 0700. False: 0666 and 0777 without the bits of the process's umask.
        hook: Called with (operation, path) before each effect: "mkdir", "create", "write", "sync", "rename", "link",
            "unlink", "rmdir". Its exceptions look like faults of the disk.
    """

    def __init__(self, root: str | os.PathLike[str], *, private: bool = True, hook: Hook = _no_hook) -> None:
        self.root = Path(root).absolute()
        self.where, self._hook = os.fspath(root), hook
        self._files = None
        self._file_mode, self._folder_mode = (0o600, 0o700) if private else (0o666, 0o777)

    def inside(self, root: Path) -> LocalDirectory:
        """A directory in this one, private."""
        return LocalDirectory(root, hook=self._hook)

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """See `Storage.put`."""
        with self._written(path, chunks) as temporary:
            self._hook("rename", path)
            temporary.rename(self._path(path))

    def put_new(self, path: str, content: bytes) -> bool:
        """See `Storage.put_new`."""
        with self._written(path, [content]) as temporary:
            self._hook("link", path)
            try:
                os.link(temporary, self._path(path))
            except FileExistsError:
                return False
            except OSError:  # a file system without links, on which a reader may find the file empty
                try:
                    descriptor = os.open(self._path(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._file_mode)
                except FileExistsError:
                    return False
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(descriptor)
        return True

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[Reader]:
        """See `Storage.open`."""
        folder, _, name = path.rpartition("/")
        # The directory itself may be a link.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if folder else 0)
        parent = os.open(self._path(folder), flags)
        try:
            # Open without waiting: the path might be a pipe.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=parent)
        finally:
            os.close(parent)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)

            def read_into(offset: int, out: memoryview) -> int:
                done = 0
                while done < len(out) and (got := os.preadv(descriptor, [out[done:]], offset + done)):
                    done += got
                return done

            yield Reader(status.st_size, _CHUNK_BYTES, read_into)
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        """See `Storage.remove`."""
        target = self._path(path)
        if not os.path.lexists(target):
            return
        if target.is_dir() and not target.is_symlink():
            for entry in sorted(target.iterdir()):
                self._hook("unlink", f"{path}/{entry.name}")
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink(missing_ok=True)
            self._hook("rmdir", path)
            try:
                target.rmdir()
            except OSError:  # NFS keeps an open file under another name until its reader closes it
                if not all(name.startswith(".nfs") for name in os.listdir(target)):
                    raise
        else:
            self._hook("unlink", path)
            target.unlink(missing_ok=True)
        self._sync(target.parent)

    @contextlib.contextmanager
    def _written(self, path: str, chunks: Iterable[bytes | memoryview]) -> Iterator[Path]:
        """Context that writes and syncs a file under a temporary name; at the end its folder is synced."""
        target = self._path(path)
        self._make_folder(target.parent)
        temporary = target.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        self._hook("create", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, self._file_mode)
        try:
            try:
                self._write(descriptor, path, chunks)
            finally:
                os.close(descriptor)
            yield temporary
        finally:
            if temporary.exists():
                self._hook("unlink", path)
                temporary.unlink(missing_ok=True)
        self._sync(target.parent)

    def _write(self, descriptor: int, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        sent = done = 0
        for chunk in chunks:
            self._hook("write", path)
            left = memoryview(chunk)
            while left:
                written = os.write(descriptor, left)
                left = left[written:]
                done += written
            if done - sent >= _SEND_BYTES and _sync_file_range is not None:
                # Start writing pages to the disk while the next checksums are computed. This is only a hint.
                _sync_file_range(descriptor, sent, done - sent, _SYNC_FILE_RANGE_WRITE)
                sent = done
        self._hook("sync", path)
        os.fsync(descriptor)

    def _make_folder(self, folder: Path) -> None:
        for path in reversed([path for path in (folder, *folder.parents) if not path.is_dir()]):
            self._hook("mkdir", self._shown(path))
            if os.path.lexists(path) and not path.is_dir():  # another thread hasn't made the folder meanwhile
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            path.mkdir(mode=self._folder_mode, exist_ok=True)
            self._sync(path.parent)

    def _sync(self, folder: Path) -> None:
        self._hook("sync", self._shown(folder))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _shown(self, folder: Path) -> str:
        return os.path.relpath(folder, self.root)

    def _names(self, folder: str) -> list[str]:
        try:
            with os.scandir(self._path(folder)) as entries:
                # No folder may be a link: its target could change between two accesses.
                return sorted(entry.name for entry in entries if folder or not entry.is_symlink())
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _modified_s(self, path: str) -> float:
        with self.open(path):  # makes a network file system query its server
            return os.lstat(self._path(path)).st_mtime

    def _path(self, path: str) -> Path:
        return self.root.joinpath(*_parts(path))


def _parts(path: str) -> list[str]:
    parts = path.split("/") if path else []
    if len(parts) > 2 or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{path!r} isn't a path inside a storage")
    return parts


@contextlib.contextmanager
def _as_os_errors(path: str) -> Iterator[None]:
    """Context that turns errors of object stores' clients into OSErrors, with the right errno for missing files."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)} ({error})", path) from error
    except (OSError, EvenstepError):
        raise
    except Exception as error:  # no route, no credentials, an unknown answer
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error
