"""A conformance suite for storages: what every implementation of `checkpoint.storage.Storage` does.

    check_storage(lambda: MyStorage("bucket/run"))      # a new, empty one at each call

It runs in one process; that two jobs keep out of each other's way is checked as far as one process can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from evenstep.checkpoint.storage.storage import Storage
from evenstep.errors import CheckpointError


def check_storage(factory: Callable[[], Storage]) -> int:
    """Raise AssertionError where a storage does not do what `Storage` says.

    Args:
        factory: Makes a storage with nothing in it; called once per case.

    Returns:
        The number of cases.
    """
    cases = [_writes_and_reads, _lists, _renames, _removes, _refuses, _locks, _works_from_threads]
    for case in cases:
        case(factory())
    return len(cases)


def read_all(storage: Storage, path: str) -> bytes:
    """The content of a file."""
    with storage.open(path) as file:
        content = bytearray(file.num_bytes)
        assert file.read_into(0, memoryview(content)) == len(content), f"{path} is shorter than its num_bytes"
        return bytes(content)


def _writes_and_reads(storage: Storage) -> None:
    assert isinstance(storage.where, str), "where is what messages call it"
    assert storage.where
    chunks: list[bytes | memoryview] = [b"one", memoryview(b"two"), b"", b"three" * 1000]
    storage.write("folder/file", iter(chunks))
    content = b"".join(bytes(chunk) for chunk in chunks)
    assert read_all(storage, "folder/file") == content, "what is read is not what was written"
    storage.write("folder/nothing", [])
    assert read_all(storage, "folder/nothing") == b""
    with storage.open("folder/file") as file:
        out = bytearray(4)
        assert file.read_into(1, memoryview(out)) == 4
        assert bytes(out) == content[1:5], "read_into starts at its offset"
        assert file.read_into(len(content) - 2, memoryview(out)) == 2, "read_into stops at the end"
        assert file.read_into(len(content), memoryview(out)) == 0


def _lists(storage: Storage) -> None:
    assert list(storage.list()) == []
    assert list(storage.list("none")) == [], "a folder that isn't there has no files"
    for path in ("b/2", "a/1", ".hidden/3", "b/1"):
        storage.write(path, [b"x"])
    assert sorted(storage.list()) == [".hidden", "a", "b"]
    assert sorted(storage.list("b")) == ["1", "2"]


def _renames(storage: Storage) -> None:
    storage.write("old/file", [b"content"])
    storage.rename("old", "new")
    assert list(storage.list()) == ["new"]
    assert read_all(storage, "new/file") == b"content"
    storage.write("other/file", [b"x"])
    _raises_os_error(lambda: storage.rename("other", "new"), "rename onto a folder that exists")
    _raises_os_error(lambda: storage.rename("none", "fresh"), "rename of a folder that isn't there")
    assert read_all(storage, "new/file") == b"content", "a rename that failed has changed something"


def _removes(storage: Storage) -> None:
    storage.write("folder/file", [b"x"])
    storage.remove("folder")
    storage.remove("folder")  # nothing if there is none
    assert list(storage.list()) == []
    storage.write("folder/file", [b"y"])
    assert read_all(storage, "folder/file") == b"y", "what was removed has come back"


def _refuses(storage: Storage) -> None:
    storage.write("folder/file", [b"x"])
    _raises_os_error(lambda: storage.write("folder/file", [b"y"]), "a second write of one file")
    assert read_all(storage, "folder/file") == b"x", "a write that failed has changed something"
    _raises_os_error(lambda: read_all(storage, "folder/none"), "open of a file that isn't there")
    for path in ("../file", "folder/../file", "/etc/passwd", "a/b/c", "folder/.."):
        try:
            storage.write(path, [b"x"])
        except (ValueError, OSError):
            continue
        raise AssertionError(f"a write to {path!r} left the storage, and was not refused")


def _locks(storage: Storage) -> None:
    lock = storage.lock({"test": True})
    lock.confirm()
    again = storage.lock({"test": True}, wait_s=0.0)  # the same process: a job may begin anew
    again.confirm()
    try:
        lock.confirm()
    except CheckpointError:
        pass
    else:
        raise AssertionError("confirm of a lock that was taken over must raise LockedError")
    lock.release()
    again.confirm()  # whoever has lost a lock doesn't release the next one
    again.release()
    again.release()
    storage.lock({}).release()
    assert list(storage.list()) == [], "the lock shows among the folders"


def _works_from_threads(storage: Storage) -> None:
    def work(number: int) -> None:
        storage.write(f"folder/{number}", [bytes([number]) * 100_000])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert read_all(storage, f"folder/{number}") == bytes([number]) * 100_000


def _raises_os_error(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except OSError:
        return
    raise AssertionError(f"{what} must raise OSError")
