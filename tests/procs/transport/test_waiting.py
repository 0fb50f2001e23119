"""Threads of one rank that wait for calls over shared memory: each for its own, and whoever gives up does so alone."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.errors import CollectiveTimeoutError, PeerLostError
from evenstep.testing import RankPool
from evenstep.transport.shm.handshake import connect_shared_memory
from evenstep.transport.shm.queue import SharedWork
from evenstep.transport.shm.transport import SharedMemoryTransport
from tests.ranks import on_ranks

NUMELS = (3, 20_000, 300_000)  # eager, added up whole, in chunks


def connect() -> SharedMemoryTransport:
    made = connect_shared_memory(evenstep.init(quiet=True).control, timeout_s=20)
    assert isinstance(made, SharedMemoryTransport), made
    return made


def start(transport: SharedMemoryTransport, tensor: torch.Tensor) -> SharedWork:
    work = transport.all_reduce(tensor)
    assert isinstance(work, SharedWork)
    return work


def in_a_thread(function: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # looked at by the test
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@on_ranks(2)
def test_each_thread_returns_when_its_own_call_has_ended(world: evenstep.World, order: tuple[int, ...]) -> None:
    """Rank 0 waits for three calls, each in a thread of its own; rank 1 makes the next one when the last has ended."""
    transport, told = connect(), connect()
    tensors = [torch.full((numel,), float(transport.rank + 1)) for numel in NUMELS]
    if transport.rank == 0:
        works = [start(transport, tensor) for tensor in tensors]
        waiting = {number: in_a_thread(works[number].wait) for number in order}
        for number in range(len(works)):
            thread, errors = waiting[number]
            thread.join(15)
            assert not thread.is_alive(), f"call {number} has ended, and its thread waits"
            assert not errors, errors
            told.barrier().wait()
    else:
        for tensor in tensors:
            transport.all_reduce(tensor).wait()
            told.barrier().wait()
    for each in (transport, told):
        each.close()
    assert [float(value) for tensor in tensors for value in tensor.unique()] == [3.0] * 3


def give_up_alone(drives: bool) -> str:
    """Rank 0's main thread gives up after a while, another one waits on; rank 1 comes after that."""
    transport, told = connect(), connect()
    tensors = [torch.full((numel,), float(transport.rank + 1)) for numel in NUMELS[:2]]
    text = ""
    if transport.rank == 0:
        first, second = (start(transport, tensor) for tensor in tensors)
        if not drives:
            other, errors = in_a_thread(first.wait)
            while not transport._driver:
                pass
        with pytest.raises(CollectiveTimeoutError) as raised:
            second.wait(0.3)
        text = str(raised.value)
        if drives:
            other, errors = in_a_thread(first.wait)
        told.barrier().wait()
        other.join(15)
        assert not other.is_alive()
        assert not errors, errors
        second.wait()
    else:
        told.barrier().wait()
        for tensor in tensors:
            transport.all_reduce(tensor).wait()
    again = torch.ones(1)
    transport.all_reduce(again).wait()
    assert [each.unique().tolist() for each in (*tensors, again)] == [[3.0], [3.0], [2.0]]
    for each in (transport, told):
        each.close()
    return text


@pytest.mark.parametrize("drives", [True, False])
def test_who_gives_up_after_a_time_of_its_own_fails_nothing(ranks: RankPool, drives: bool) -> None:
    text = ranks.run(give_up_alone, 2, drives)[0]
    assert "rank 0 waited 0.3 s in shared memory collective number 2, all_reduce(sum) of float32 [20000]." in text
    assert "Missing: rank 1 (pid " in text
    assert "allow more than timeout_s=0.3" in text


def end_with_callbacks() -> list[str]:
    """Of three callbacks the first raises, and the second waits for a thread that needs the transport."""
    transport, seen = connect(), list[str]()
    shown, done = list[str](), threading.Semaphore(0)
    before, threading.excepthook = threading.excepthook, lambda args: shown.append(repr(args.exc_value))

    def fail(error: object) -> None:
        raise ValueError("from a callback")

    def need_another(error: object) -> None:
        thread, errors = in_a_thread(
            lambda: transport.allocate(100_000, dtype=torch.float32, device=torch.device("cpu"))
        )
        thread.join(15)
        seen.append(f"another thread came {not thread.is_alive()} {errors}")
        done.release()

    def end(error: object) -> None:
        seen.append("ended")
        done.release()

    try:
        for callback in (fail, need_another, end):
            start(transport, torch.ones(3)).add_done_callback(callback)
            if callback is need_another:  # which may run as one of these two calls starts
                sizes = [1 + transport.rank, 1 + transport.rank]
                transport.all_to_all(torch.ones(2 * (1 + transport.rank)), torch.ones(3), sizes, [1, 2]).wait()
        assert done.acquire(timeout=15)
        assert done.acquire(timeout=15)
    finally:
        threading.excepthook = before
    transport.barrier().wait()
    transport.close()
    return [*shown, *sorted(seen)]  # in two threads, perhaps


def test_callbacks_end_nothing_but_themselves_and_may_do_anything(ranks: RankPool) -> None:
    expected = ["ValueError('from a callback')", "another thread came True []", "ended"]
    assert ranks.run(end_with_callbacks, 2) == [expected] * 2


def open_descriptors() -> dict[str, tuple[str, int]]:
    """What each descriptor of this process is, without the one that lists them: its name and its inode."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = (str(path.readlink()), path.stat().st_ino)
    return found


@on_ranks(2, 4)
def test_a_transport_keeps_one_descriptor_and_looks_before_it_uses_it(world: evenstep.World) -> None:
    """How many one transport keeps; and a stranger closes them and takes their number."""
    evenstep.init(quiet=True).barrier()
    gc.collect()  # transports of earlier tests
    before = open_descriptors()
    transport = connect()
    kept = dict(open_descriptors().items() - before.items())  # threads of earlier tests may close theirs meanwhile
    bucket = transport.allocate(100_000, dtype=torch.float32, device=torch.device("cpu")).fill_(1.0)
    transport.all_reduce(bucket).wait()
    number = transport._segment.fd
    os.close(number)
    taken = os.open(__file__, os.O_RDONLY)
    assert taken == number
    transport.all_reduce(bucket).wait()
    assert bucket.eq(transport.world_size**2).all()
    with pytest.raises(PeerLostError, match="was closed by something else in this process"):
        transport.allocate(100_000, dtype=torch.float32, device=torch.device("cpu"))
    transport.close()
    del bucket, transport
    os.fstat(taken)  # it is the stranger's
    os.close(taken)
    assert list(kept) == [str(number)], kept
