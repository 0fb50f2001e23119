"""A conformance suite for storages: checks that a storage behaves as `checkpoint.store.Storage` specifies.

    check_storage(lambda: Storage("s3://bucket/run-17", endpoint_url=...))      # a new, empty storage at each call

It runs in one process; the exclusion of a second job is checked as far as one process can do that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from evenstep.checkpoint.lock import LockedError, take_lock
from evenstep.checkpoint.store import Storage


def check_storage(factory: Callable[[], Storage]) -> int:
    """Raise AssertionError if a storage doesn't behave as `Storage` specifies.

    Args:
        factory: Makes an empty storage; called once per case.

    Returns:
        The number of cases.
    """
    cases = [_puts_and_reads, _lists, _creates, _removes, _refuses, _locks, _works_from_threads, _uploads_in_parts]
    for case in cases:
        case(factory())
    return len(cases)


def read_all(storage: Storage, path: str) -> bytes:
    """The content of a file."""
    with storage.open(path) as file:
        content = bytearray(file.num_bytes)
        assert file.read_into(0, memoryview(content)) == len(content), f"{path} is shorter than its num_bytes"
        return bytes(content)


def _puts_and_reads(storage: Storage) -> None:
    assert isinstance(storage.where, str), "where is what messages call it"
    assert storage.where
    chunks: list[bytes | memoryview] = [b"one", memoryview(b"two"), b"", b"three" * 1000]
    storage.put("folder/file", iter(chunks))
    content = b"".join(bytes(chunk) for chunk in chunks)
    assert read_all(storage, "folder/file") == content, "what is read is not what was put"
    storage.put("folder/nothing", [])
    assert read_all(storage, "folder/nothing") == b""
    with storage.open("folder/file") as file:
        out = bytearray(4)
        assert file.read_into(1, memoryview(out)) == 4
        assert bytes(out) == content[1:5], "read_into starts at its offset"
        assert file.read_into(len(content) - 2, memoryview(out)) == 2, "read_into stops at the end"
        assert file.read_into(len(content), memoryview(out)) == 0
    storage.put("folder/file", [b"another"])
    assert read_all(storage, "folder/file") == b"another", "a put replaces what was there"
    assert storage.read("folder/file", most_bytes=3) == b"anot", "one byte more than asked for"
    assert storage.age_s("folder/file") < 30


def _lists(storage: Storage) -> None:
    assert list(storage.list()) == []
    assert list(storage.list("none")) == [], "a folder that isn't there has no files"
    for path in ("b/2", "a/1", ".hidden/3", "b/1", "file", "ab/.hidden"):
        storage.put(path, [b"x"])
    assert sorted(storage.list()) == ["a", "ab", "b", "file"]
    assert sorted(storage.list("b")) == ["1", "2"], "folders whose names begin alike are others"
    assert list(storage.list("ab")) == []
    storage.put("a/2", [b"x"])
    assert sorted(storage.list("a")) == ["1", "2"], "a list was cached"


def _creates(storage: Storage) -> None:
    assert storage.put_new("file", b"first")
    assert not storage.put_new("file", b"second")
    assert read_all(storage, "file") == b"first"
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda number: storage.put_new("one", bytes([number])), range(4)))
    assert sorted(results) == [False, False, False, True], f"of several callers one creates it: {results}"


def _removes(storage: Storage) -> None:
    for path in ("folder/file", "folder/other", "folder2/file"):
        storage.put(path, [b"x"])
    storage.remove("folder/file")
    assert list(storage.list("folder")) == ["other"]
    storage.remove("folder")
    storage.remove("folder")  # does nothing if there is none
    storage.remove("folder/file")
    assert list(storage.list()) == ["folder2"]
    storage.put("folder/file", [b"y"])
    assert read_all(storage, "folder/file") == b"y", "what was removed has come back"
    storage.sweep()
    assert list(storage.list()) == ["folder", "folder2"], "sweep removes what belongs to puts alone"


def _refuses(storage: Storage) -> None:
    storage.put("folder/file", [b"x"])
    _raises_os_error(lambda: read_all(storage, "folder/none"), "open of a file that isn't there")
    _raises_os_error(lambda: read_all(storage, "folder"), "open of a folder")

    def fails() -> Iterator[bytes]:
        yield b"y"
        raise OSError("half of it")

    _raises_os_error(lambda: storage.put("folder/file", fails()), "a put whose content ends with an error")
    assert read_all(storage, "folder/file") == b"x", "a put that failed has changed something"
    for path in ("../file", "folder/../file", "/etc/passwd", "a/b/c", "folder/.."):
        try:
            storage.put(path, [b"x"])
        except (ValueError, OSError):
            continue
        raise AssertionError(f"a put to {path!r} left the storage, and was not refused")


def _locks(storage: Storage) -> None:
    storage.put("step-0000001-00001-1/manifest.json", [b"x"])
    lock = take_lock(storage, {"test": True})
    lock.confirm()
    again = take_lock(storage, {"test": True})  # the same process: a job may restart
    again.confirm()
    try:
        lock.confirm()
    except LockedError:
        pass
    else:
        raise AssertionError("confirm of a lock that was taken over must raise LockedError")
    lock.release()
    again.confirm()  # the loser of a lock doesn't release the next holder's
    assert again.manifests == ["step-0000001-00001-1"]
    again.release()
    again.release()
    third = take_lock(storage, {})
    assert third.number > again.number
    third.release()


def _works_from_threads(storage: Storage) -> None:
    def work(number: int) -> None:
        storage.put(f"folder/{number}", [bytes([number]) * 100_000])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert read_all(storage, f"folder/{number}") == bytes([number]) * 100_000


def _uploads_in_parts(storage: Storage) -> None:
    part = bytes(range(256)) * (1 << 14)
    storage.put("folder/large", (part for _ in range(33)))  # 132 MiB
    with storage.open("folder/large") as file:
        assert file.num_bytes == 33 * len(part)
        out = bytearray(1000)
        for offset in (0, 64 << 20, 128 << 20, 33 * len(part) - 1000):
            file.read_into(offset - offset % 256, memoryview(out))
            assert out[:256] == part[:256]

    def fails() -> Iterator[bytes]:
        yield from (part for _ in range(20))
        raise OSError("half of it")

    _raises_os_error(lambda: storage.put("folder/half", fails()), "a put whose content ends with an error")
    assert list(storage.list("folder")) == ["large"]


def _raises_os_error(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except OSError:
        return
    raise AssertionError(f"{what} must raise OSError")
