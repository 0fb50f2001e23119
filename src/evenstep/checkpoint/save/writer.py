"""Writing a checkpoint behind the training loop: a thread per save, on every rank.

    every rank   writes its files, posts a receipt with their checksums                     |
    rank 0       ...                        awaits all receipts, writes the manifest, renames, removes what is too old

Ranks talk through the store in which they have met, and not through collectives, whose order the training loop has.
A rank that fails posts that instead of a receipt, and the others leave off writing.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import Store

from evenstep.checkpoint.payload import Layout
from evenstep.checkpoint.snapshot import bytes_of
from evenstep.checkpoint.storage import Storage
from evenstep.errors import CheckpointError

_CHUNK_BYTES = 4 << 20
_LARGE_BYTES = 16 << 20
_NUM_THREADS = 2
_POLL_S = 0.01
_LOOK_EVERY_S = 0.5
_LAST_WAIT_S = 2.0  # for the others' receipts, once this process is about to end


@dataclass(frozen=True, eq=False)
class StagedFile:
    """A file of this rank, ready to be written.

    Attributes:
        name: Inside the checkpoint's folder.
        layout: Where the tensors stand.
        payload: [payload_bytes], uint8.
    """

    name: str
    layout: Layout
    payload: Tensor


@dataclass(frozen=True)
class Receipt:
    """What a rank has written.

    Attributes:
        header_crc32: Of each file.
        tensor_crc32: Of each file, of each tensor, in the order of its layout.
        said: What rank 0 needs to know of this rank beside that.
    """

    header_crc32: dict[str, int]
    tensor_crc32: dict[str, list[int]]
    said: dict[str, Any]


class Board(Protocol):
    """Where the ranks leave each other texts."""

    def post(self, key: str, text: str) -> None:
        """Leave a text."""

    def read(self, key: str) -> str | None:
        """A text; None if there is none yet. Doesn't wait."""


class StoreBoard:
    """A board in the store through which the ranks of a world have met."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, key: str, text: str) -> None:
        """See `Board.post`."""
        self._store.set(key, text)

    def read(self, key: str) -> str | None:
        """See `Board.read`."""
        return self._store.get(key).decode() if self._store.check([key]) else None


class LocalBoard:
    """A board for one rank."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """See `Board.post`."""
        self._texts[key] = text

    def read(self, key: str) -> str | None:
        """See `Board.read`."""
        return self._texts.get(key)


@dataclass(frozen=True)
class Job:
    """One rank's part of one save.

    Attributes:
        storage: Where to.
        folder: The temporary one, the same on all ranks.
        key: Before all that is posted about this save.
        rank: This rank.
        world_size: How many receipts there will be.
        files: What this rank writes.
        said: Goes into its receipt.
        commit: On rank 0: makes the checkpoint out of all receipts.
        problem: Why there is nothing to write: the save fails with it.
        timeout_s: How long rank 0 waits for the others' receipts after its own.
    """

    storage: Storage
    folder: str
    key: str
    rank: int
    world_size: int
    files: Sequence[StagedFile]
    said: dict[str, Any]
    commit: Callable[[Sequence[Receipt]], None] | None
    problem: CheckpointError | None
    timeout_s: float


class Writer:
    """One pending save at most: `start`, and `finish` before the next `start`."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._abandoned = threading.Event()

    @property
    def is_pending(self) -> bool:
        """Whether a save was started and not finished."""
        return self._thread is not None

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing or waiting."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the pending save has failed on this rank."""
        return self._error is not None

    def start(self, job: Job) -> None:
        """Begin to write, in a thread. It is no daemon: an orderly end of the process waits for it."""
        assert self._thread is None, "one pending save at most"
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"evenstep save {job.folder}")
        self._thread.start()

    def finish(self) -> BaseException | None:
        """Wait until the pending save has ended on this rank; why it failed, or None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def abandon(self, run: str, rank: int) -> None:
        """This rank ends badly: tell the others, and wait for them for a moment only."""
        self._abandoned.set()
        if run:
            with contextlib.suppress(RuntimeError, OSError):  # the store may have gone with the rank that kept it
                self._board.post(f"evenstep/checkpoint/{run}/left/{rank}", "")

    def write_file(self, folder: str, file: StagedFile, storage: Storage) -> Receipt:
        """Write one file, in this thread."""
        checksums = [0] * len(file.layout.entries)
        storage.write(f"{folder}/{file.name}", self._chunks(file, checksums, lambda: None))
        return Receipt({file.name: zlib.crc32(file.layout.header)}, {file.name: checksums}, {})

    def _run(self, job: Job) -> None:
        try:
            if job.problem is not None:
                raise job.problem
            receipt = self._write(job)
            self._board.post(f"{job.key}/{job.rank}", json.dumps(astuple(receipt)))
            if job.commit is not None:
                job.commit(self._await_receipts(job))
        except BaseException as error:
            self._error = error
            if not isinstance(error, _PeerFailedError):
                with contextlib.suppress(RuntimeError, OSError):  # as in `abandon`
                    self._board.post(f"{job.key}/failed", f"rank {job.rank}: {describe(error)}")

    def _write(self, job: Job) -> Receipt:
        checksums = {file.name: [0] * len(file.layout.entries) for file in job.files}

        def write(file: StagedFile) -> None:
            chunks = self._chunks(file, checksums[file.name], lambda: self._check_peers(job))
            job.storage.write(f"{job.folder}/{file.name}", chunks)

        # One large file is summed and copied while the disk still syncs the other.
        large = [file for file in job.files if file.layout.payload_bytes >= _LARGE_BYTES]
        if len(large) > 1:
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                list(pool.map(write, large))
        for file in job.files:
            if file not in large or len(large) == 1:
                write(file)
        return Receipt({file.name: zlib.crc32(file.layout.header) for file in job.files}, checksums, job.said)

    def _chunks(self, file: StagedFile, checksums: list[int], look: Callable[[], None]) -> Iterator[bytes | memoryview]:
        """The file's bytes; fills in the checksums on the way, while the bytes are in the cache."""
        layout, memory = file.layout, bytes_of(file.payload)
        small = bytearray(layout.header)
        looked = time.monotonic()
        for index, (entry, offset) in enumerate(zip(layout.entries, layout.offsets, strict=True)):
            for begin in range(offset, offset + entry.num_bytes, _CHUNK_BYTES):
                chunk = memory[begin : min(begin + _CHUNK_BYTES, offset + entry.num_bytes)]
                checksums[index] = zlib.crc32(chunk, checksums[index])
                if len(small) + len(chunk) <= _CHUNK_BYTES:
                    small += chunk  # a call of the system per bias would cost more than copying it
                    continue
                yield bytes(small)
                small.clear()
                yield chunk
                if time.monotonic() - looked > _LOOK_EVERY_S:
                    look()
                    looked = time.monotonic()
        if small:
            yield bytes(small)

    def _check_peers(self, job: Job) -> None:
        failure = self._board.read(f"{job.key}/failed")
        if failure is not None:
            raise _PeerFailedError(failure)

    def _await_receipts(self, job: Job) -> list[Receipt]:
        receipts: list[Receipt] = []
        began = time.monotonic()
        leaving_since: float | None = None
        while len(receipts) < job.world_size:
            text = self._board.read(f"{job.key}/{len(receipts)}")
            if text is not None:
                receipts.append(Receipt(*json.loads(text)))
                continue
            self._check_peers(job)
            if self._board.read(f"{_left_key(job.key)}/{len(receipts)}") is not None:
                raise _PeerFailedError(f"rank {len(receipts)} has left before its part was written")
            now = time.monotonic()
            if leaving_since is None and (self._abandoned.is_set() or not threading.main_thread().is_alive()):
                leaving_since = now
            if now - began > job.timeout_s or (leaving_since is not None and now - leaving_since > _LAST_WAIT_S):
                raise _PeerFailedError(f"rank {len(receipts)} had not written its part after {now - began:.1f} s")
            time.sleep(_POLL_S)
        return receipts


def _left_key(key: str) -> str:
    return f"{key.rpartition('-')[0]}/left"


class _PeerFailedError(CheckpointError):
    """Another rank failed, or didn't answer; it tells itself, if it can."""


def describe(error: BaseException) -> str:
    """An exception in one line, without what a user can't use."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def is_witness(error: BaseException) -> bool:
    """Whether a save failed here only because it failed elsewhere."""
    return isinstance(error, _PeerFailedError)
