"""Writing a checkpoint in the background: a thread per save, on every rank.

    every rank   writes its files, posts a receipt with their checksums
    rank 0       ...             awaits all receipts, writes the manifest, removes old checkpoints, posts "saved"

If each node has its own files, a save has a second stage:

    every rank   writes its files, posts a receipt
    rank 0       ...                                 awaits all receipts, posts the manifest
    leaders      ...                                 await that, write it to their node, post that they hold it
    rank 0       ...                                                                     awaits these, posts that

Ranks exchange receipts through the world's store, not by collectives, because the training loop determines the order of
collectives. A rank that fails posts its error instead of a receipt, and the others stop writing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any

from torch.distributed import Store

from evenstep.checkpoint.format.payload import bytes_of
from evenstep.checkpoint.save.snapshot import File
from evenstep.checkpoint.store import Storage
from evenstep.errors import CheckpointError
from evenstep.ground.host.processes import is_running

_CHUNK_BYTES = 4 << 20
_LARGE_BYTES = 16 << 20
_NUM_THREADS = 2
_POLL_S, _MOST_POLL_S = 0.01, 0.2  # all ranks poll one store
_CHECK_PEERS_EVERY_S = 0.5
_LAST_WAIT_S = 2.0  # for the peers' receipts when this process is about to end


@dataclass(frozen=True)
class Receipt:
    """The files that a rank has written, in JSON types.

    Attributes:
        files: The fields of each file's `FileEntry`.
        parts: For each tensor in the files: owner, name, and the fields of its `Part`.
        facts: Other values that rank 0 needs for the commit.
    """

    files: dict[str, list[int]]
    parts: list[list[Any]]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One rank's part of one save.

    Attributes:
        folder: The checkpoint's folder, the same on all ranks.
        key: Key of this save, the same on all ranks: the run's key and the save's number.
        files: Files that this rank writes.
        facts: Values for this rank's receipt.
        commit: On rank 0: makes the checkpoint from all receipts, or returns the data that leaders need to make it.
        hold: On a leader: makes the checkpoint on its node from the result of `commit`.
        leaders: The first rank of each node, if each node has its own files.
        problem: An error with which the save fails without writing; None: write.
    """

    folder: str
    key: str
    files: Sequence[File]
    facts: dict[str, Any]
    commit: Callable[[Sequence[Receipt]], bytes | None] | None
    hold: Callable[[bytes], None] | None = None
    leaders: Sequence[int] = ()
    problem: CheckpointError | None = None


class Writer:
    """Runs saves in a thread, one pending at most: `finish` before the next `start`.

    Args:
        storage: Holds the checkpoints.
        store: Carries receipts and errors between the ranks.
        rank: This rank.
        world_size: Number of receipts of a save.
        timeout_s: Rank 0's deadline for the other receipts after its own.

    Attributes:
        thread: The pending save's thread; None: none is pending.
        pids: By rank, the processes of ranks on this host.
    """

    def __init__(self, storage: Storage, store: Store, rank: int, world_size: int, *, timeout_s: float) -> None:
        self._storage, self._store = storage, store
        self._rank, self._world_size, self._timeout_s = rank, world_size, timeout_s
        self.thread: threading.Thread | None = None
        self.pids: Mapping[int, int] = {}
        self._error: BaseException | None = None
        self._job: Job | None = None  # the last job
        self._noted: Job | None = None  # the last job that rank 0 has posted as saved
        self._num_pieces = 0  # pieces of the last job's result that rank 0 has posted
        self._abandoned = threading.Event()

    @property
    def is_pending(self) -> bool:
        """Whether a save was started and not finished."""
        return self.thread is not None

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing or waiting."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def has_failed(self) -> bool:
        """Whether the pending save has failed on this rank."""
        return self._error is not None

    def start(self, job: Job) -> None:
        """Begin to write, in a thread. The thread is no daemon, so an orderly exit waits for it."""
        assert self.thread is None, "one pending save at most"
        self._error, self._job = None, job
        self.thread = threading.Thread(target=self._run, args=(job,), name=f"evenstep save {job.folder}")
        self.thread.start()

    def finish(self) -> BaseException | None:
        """Wait for the pending save on this rank; returns its error, or None."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        error, self._error = self._error, None
        return error

    def finish_with_commit(self) -> BaseException | None:
        """Like `finish`, but ranks other than 0 wait until rank 0 has made the checkpoint or has failed."""
        was_pending = self.is_pending
        error = self.finish()
        if error is not None or self._job is None or self._rank == 0 or not was_pending:
            return error
        try:
            self._await(self._job, "saved", 0)
        except CheckpointError as failure:
            return _PeerFailedError(str(failure))
        except (RuntimeError, OSError):  # the store has ended with rank 0, which reports its own error
            pass
        return None

    def abandon(self, run: str) -> None:
        """Called if this rank ends with an error: post the error, and wait only briefly for the others."""
        self._abandoned.set()
        if run:
            with contextlib.suppress(RuntimeError, OSError):  # the store may have ended with the rank that hosts it
                self._store.set(_left_key(run, self._rank), "")

    def _run(self, job: Job) -> None:
        try:
            if job.problem is not None:
                raise job.problem
            receipt = self.write(job)
            self._store.set(_key(job, self._rank), json.dumps(astuple(receipt)))
            made = None
            if job.commit is not None:
                texts = [self._await(job, rank, rank) for rank in range(self._world_size)]
                made = job.commit([Receipt(*json.loads(text)) for text in texts])
                if made is not None:
                    self._post(job, made)
            if job.hold is not None:
                job.hold(self._posted(job) if made is None else made)
                self._store.set(_key(job, f"held/{self._rank}"), "")
            if job.commit is not None:
                for rank in job.leaders:
                    self._await(job, f"held/{rank}", rank)
                self.forget()
                self._note_saved(job)
        except BaseException as error:
            self._error = error
            if not isinstance(error, _PeerFailedError):
                with contextlib.suppress(RuntimeError, OSError):  # as in `abandon`
                    self._store.set(_key(job, "failed"), f"rank {self._rank}: {describe(error)}")

    def write(self, job: Job) -> Receipt:
        """Write files, in this thread."""
        checksums = {file.name: [0] * len(file.layout.entries) for file in job.files}

        def write(file: File) -> None:
            chunks = self._chunks(file, checksums[file.name], lambda: self._check_peers(job))
            self._storage.put(f"{job.folder}/{file.name}", chunks)

        # One large file is checksummed and copied while the disk syncs another one.
        large = [file for file in job.files if file.layout.payload_bytes >= _LARGE_BYTES]
        if len(large) > 1:
            with ThreadPoolExecutor(_NUM_THREADS) as pool:
                list(pool.map(write, large))
        for file in job.files:
            if file not in large or len(large) == 1:
                write(file)
        receipt = Receipt({}, [], job.facts)
        for file in job.files:
            header = file.layout.header
            receipt.files[file.name] = [file.layout.file_bytes, len(header), zlib.crc32(header)]
            for entry, crc in zip(file.layout.entries, checksums[file.name], strict=True):
                shard = file.shards.get(entry.key)
                name, start, sizes = (entry.key, 0, None) if shard is None else (shard.name, shard.start, shard.sizes)
                part = [file.name, entry.key, start, math.prod(entry.shape), crc, sizes]
                receipt.parts.append([file.owner, name, *part])
        return receipt

    def _chunks(
        self, file: File, checksums: list[int], check_peers: Callable[[], None]
    ) -> Iterator[bytes | memoryview]:
        """Yield the file's bytes, and fill in the checksums while the bytes are in the cache."""
        small = bytearray(file.layout.header)
        checked = time.monotonic()
        for index, entry in enumerate(file.layout.entries):
            memory = bytes_of(file.tensors[entry.key])
            for begin in range(0, len(memory), _CHUNK_BYTES):
                chunk = memory[begin : begin + _CHUNK_BYTES]
                checksums[index] = zlib.crc32(chunk, checksums[index])
                if len(small) + len(chunk) <= _CHUNK_BYTES:
                    small += chunk  # a system call per bias would cost more than copying it
                    continue
                yield bytes(small)
                small.clear()
                yield chunk
                if time.monotonic() - checked > _CHECK_PEERS_EVERY_S:
                    check_peers()
                    checked = time.monotonic()
        if small:
            yield bytes(small)

    def _read(self, key: str) -> str | None:
        """A text from the store; None if there is none yet. Doesn't wait."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _check_peers(self, job: Job) -> None:
        failure = self._read(_key(job, "failed"))
        if failure is not None:
            raise _PeerFailedError(failure)

    def _note_saved(self, job: Job) -> None:
        self._store.set(_key(job, "saved"), "")
        if self._noted is not None:  # one such post is enough: ranks query only the last save
            self._store.delete_key(_key(self._noted, "saved"))
        self._noted = job

    def forget(self) -> None:
        """Remove the last save's posts, else the store would grow with every save. The post "saved" stays.

        Called on rank 0, when no rank waits for the posts any more.
        """
        job = self._job
        if job is not None:
            pieces = [f"made/{number}" for number in range(self._num_pieces)]
            for what in (
                *range(self._world_size),
                "failed",
                "made",
                *pieces,
                *(f"held/{rank}" for rank in job.leaders),
            ):
                self._store.delete_key(_key(job, what))

    def _post(self, job: Job, content: bytes) -> None:
        """Post the result of `commit` in pieces that fit into the store, and then their number. On rank 0."""
        text = base64.b64encode(zlib.compress(content)).decode()
        pieces = [text[begin : begin + _CHUNK_BYTES] for begin in range(0, len(text), _CHUNK_BYTES)]
        for number, piece in enumerate(pieces):
            self._store.set(_key(job, f"made/{number}"), piece)
        self._num_pieces = len(pieces)
        self._store.set(_key(job, "made"), str(len(pieces)))

    def _posted(self, job: Job) -> bytes:
        """Wait for the result of `commit` that rank 0 posts."""
        count = int(self._await(job, "made", 0))
        text = "".join(self._await(job, f"made/{number}", 0) for number in range(count))
        return zlib.decompress(base64.b64decode(text))

    def _await(self, job: Job, what: object, rank: int) -> str:
        """Wait for a rank's post.

        Raises:
            CheckpointError: The rank failed, left, or has not posted in time.
        """
        began = time.monotonic()
        leaving_since: float | None = None
        pause_s = _POLL_S
        has_ended = False
        while (text := self._read(_key(job, what))) is None:
            self._check_peers(job)
            if self._read(_left_key(job.key.rpartition("-")[0], rank)) is not None:
                raise _PeerFailedError(f"rank {rank} has left before its part was written")
            if has_ended:
                raise _PeerFailedError(f"rank {rank} ended before its part was written")
            now = time.monotonic()
            if leaving_since is None and (self._abandoned.is_set() or not threading.main_thread().is_alive()):
                leaving_since = now
            if rank in self.pids:  # the loop waits for this thread, and so doesn't notice that a rank has died
                has_ended = not is_running(self.pids[rank])  # then check once more for its post
            if now - began > self._timeout_s or (leaving_since is not None and now - leaving_since > _LAST_WAIT_S):
                raise CheckpointError(f"rank {rank} had not written its part after {now - began:.1f} s")
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _MOST_POLL_S)
        return text


def _key(job: Job, what: object) -> str:
    return f"evenstep/checkpoint/{job.key}/{what}"


def _left_key(run: str, rank: int) -> str:
    return f"evenstep/checkpoint/{run}/left/{rank}"


class _PeerFailedError(CheckpointError):
    """Another rank has failed: a secondary failure, not the root cause."""


def describe(error: BaseException) -> str:
    """An exception as one line of a message."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def is_secondary(error: BaseException) -> bool:
    """Whether a save failed here only because it failed on another rank."""
    return isinstance(error, _PeerFailedError)
