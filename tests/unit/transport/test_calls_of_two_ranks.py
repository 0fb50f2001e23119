"""The queue of a shared-memory transport, at moments that only two ranks of one process bring about for certain."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from evenstep.errors import MismatchError, PeerLostError
from evenstep.transport.core.store_gather import StoreGather
from evenstep.transport.shm.handshake import connect_shared_memory
from evenstep.transport.shm.progress import background
from evenstep.transport.shm.transport import SharedMemoryTransport

TIMEOUT_S = 20.0


@pytest.fixture
def pair() -> Iterator[list[SharedMemoryTransport]]:
    """Two ranks, which this process drives in turns."""
    store, made = dist.HashStore(), {}

    def connect(rank: int) -> None:
        made[rank] = connect_shared_memory(StoreGather(store, rank, 2, timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ranks = [made[rank] for rank in range(2)]
    assert all(isinstance(each, SharedMemoryTransport) for each in ranks), ranks
    yield ranks
    for each in ranks:
        each.close()


def test_who_begins_to_wait_as_the_driver_leaves_is_woken(pair: list[SharedMemoryTransport]) -> None:
    """The driver leaves between a waiter's look at it and the wait."""
    first, _ = pair
    looked, woken = threading.Event(), []

    def look() -> bool:
        looked.set()
        time.sleep(0.2)
        return False

    waiter = threading.Thread(target=lambda: woken.append(first._wait_for_change(look, 10.0)))
    waiter.start()
    looked.wait(TIMEOUT_S)
    first._tell_waiting()
    waiter.join(5.0)
    assert woken == [True]


class Interrupted(Exception):
    """Raised by a signal's handler."""


@pytest.mark.parametrize("at", ["_drive", "_arrive"])
def test_an_interrupted_call_fails_and_none_takes_its_place(
    pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Whoever catches the interrupt and calls again would get the sum of the interrupted call."""
    first, second = pair

    def interrupt(*args: object, **options: object) -> None:
        monkeypatch.undo()
        raise Interrupted

    def call() -> None:
        work = first.all_reduce(torch.ones(3))
        monkeypatch.setattr(first, at, interrupt)
        work.wait()

    theirs = second.all_reduce(torch.ones(3))
    if at == "_arrive":
        monkeypatch.setattr(first, at, interrupt)
    with pytest.raises(Interrupted):
        call()
    with pytest.raises(PeerLostError, match="was interrupted by Interrupted"):
        first.all_reduce(torch.full((3,), 2.0))
    if at == "_arrive":
        with pytest.raises(PeerLostError):
            theirs.wait()


def test_a_call_inside_another_ones_start_is_refused(
    pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler that starts a call, as the outer one is shown to the other rank."""
    first, second = pair
    arrive = first._context.arrive

    def arrive_and_call(*args: object, **options: object) -> None:
        monkeypatch.undo()
        arrive(*args, **options)
        first.all_reduce(torch.ones(1))

    monkeypatch.setattr(first._context, "arrive", arrive_and_call)
    with pytest.raises(PeerLostError, match="was called inside another one"):
        first.all_reduce(torch.ones(3))
    with pytest.raises(PeerLostError, match="was called inside another one"):
        first.all_reduce(torch.ones(3))
    result = torch.ones(3)
    second.all_reduce(result).wait()  # what the other rank had shown is whole
    assert result.tolist() == [2.0] * 3


def test_the_first_failure_is_the_one_that_later_calls_raise(pair: list[SharedMemoryTransport]) -> None:
    first, second = pair
    works = [first.all_reduce(torch.ones(3)), second.all_reduce(torch.ones(4))]
    for work in works:
        with pytest.raises(MismatchError):
            work.wait()
    first._fail(PeerLostError("a consequence"))
    with pytest.raises(MismatchError):
        first.all_reduce(torch.ones(3))


@pytest.mark.parametrize("numel", [3, 300_000])
def test_a_call_that_is_only_asked_about_notices_a_lost_rank(pair: list[SharedMemoryTransport], numel: int) -> None:
    first, second = pair
    work = first.all_reduce(torch.ones(numel))
    assert not work.is_completed()
    second.close()
    deadline = time.monotonic() + TIMEOUT_S
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert work.is_completed()
    with pytest.raises(PeerLostError, match="lost rank 1"):
        work.wait()


def test_after_close_memory_is_refused_and_a_deadline_is_nothing(pair: list[SharedMemoryTransport]) -> None:
    first, _ = pair
    first.close()
    with pytest.raises(PeerLostError, match="has been closed"):
        first.allocate(1 << 20, dtype=torch.float32, device=torch.device("cpu"))
    first.set_timeout(3.0)


def test_a_handler_may_close_a_transport_while_the_thread_is_being_woken(pair: list[SharedMemoryTransport]) -> None:
    """A handler runs in the thread that holds the lock."""
    first, second = pair
    closed = []

    def close_inside() -> None:
        with background._lock:
            first.close()
            second.close()
        closed.append(os.getpid())

    thread = threading.Thread(target=close_inside, daemon=True)
    thread.start()
    thread.join(10.0)
    assert closed == [os.getpid()]


PROGRAM = """
import threading, time
import torch
import torch.distributed as dist
from evenstep.transport.core.store_gather import StoreGather
from evenstep.transport.shm.handshake import connect_shared_memory

store, made, has_begun = dist.HashStore(), {}, threading.Event()

def connect(rank):
    made[rank] = connect_shared_memory(StoreGather(store, rank, 2, timeout_s=20), timeout_s=20)

threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads], [thread.join() for thread in threads]

def call_back(error):
    has_begun.set()
    time.sleep(0.3)
    print("ended", error, flush=True)

made[0].all_reduce(torch.ones(3)).add_done_callback(call_back)
made[1].all_reduce(torch.ones(3))
has_begun.wait(20)
"""


def test_a_callback_that_runs_as_the_process_ends_is_finished() -> None:
    """Python ends threads wherever they are; inside C++, as in a future's callback, that is std::terminate."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "ended None\n"), ended.stderr
