"""The queue of a shared-memory transport, at moments that only two ranks of one process bring about for certain."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.errors import PeerLostError
from evenstep.transport.core.store_gather import StoreGather
from evenstep.transport.shm.handshake import connect_shared_memory
from evenstep.transport.shm.lanes import SHORT_BYTES
from evenstep.transport.shm.queue import SharedWork
from evenstep.transport.shm.segment import CHUNK_BYTES, EAGER_BYTES, NUM_SLOTS
from evenstep.transport.shm.transport import SharedMemoryTransport

TIMEOUT_S = 20.0
CPU = torch.device("cpu")


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


@pytest.fixture
def by_hand(pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch) -> list[SharedMemoryTransport]:
    """Two ranks whose calls take steps only in `_step` and `wait`: not in the process's thread, nor in later starts."""
    for each in pair:
        monkeypatch.setattr(each, "help", lambda seconds: (False, False))
        monkeypatch.setattr(each, "_advance", lambda until: False)
    return pair


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


def test_a_rank_that_arrives_as_it_leaves_has_arrived(
    pair: list[SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does both between the other rank's look at its signals and the look at whether it has left."""
    first, second = pair
    has_left = first.counters.has_left

    def arrive_and_leave(rank: int) -> bool:
        if rank == 1 and not has_left(rank):
            second.all_reduce(torch.full((3,), 2.0))
            second.close()
        return has_left(rank)

    result = torch.ones(3)
    work = first.all_reduce(result)
    monkeypatch.setattr(first.counters, "has_left", arrive_and_leave)
    work.wait()
    assert result.tolist() == [3.0] * 3


Ready = tuple[SharedWork, list[Tensor], Tensor, Tensor]  # the call, all of its tensors, its result, and what that is


def start_call(pair: list[SharedMemoryTransport], kind: str, rank: int, seed: int) -> Ready:
    """One rank's part of a call, eager or in several chunks, of tensors that lie in its zone or elsewhere."""
    of_all = random.Random(seed)
    long = of_all.randrange(EAGER_BYTES // 4, 3 * CHUNK_BYTES // 8)  # of 4 bytes: up to three chunks
    numel = 2 * of_all.choice([3, 3, long])
    values = [torch.arange(numel) % of_all.randrange(50, 500) + of_all.randrange(1000) for _ in pair]
    root, own = of_all.randrange(2), random.Random(10 * seed + rank)
    transport = pair[rank]

    def place(given: Tensor) -> Tensor:
        """The values in a tensor of the transport's, or in one of torch's."""
        is_in_zone = own.random() < 0.5
        made = transport.allocate if is_in_zone else lambda numel, *, dtype, device: torch.empty(numel, dtype=dtype)
        return made(given.numel(), dtype=torch.float32, device=CPU).copy_(given)

    mine, half = place(values[rank]), numel // 2
    empty = place(torch.zeros(2 * numel if kind == "all_gather" else numel))
    total = values[0] + values[1]
    part = slice(rank * half, (rank + 1) * half)
    made: dict[str, tuple[Callable[[], object], Tensor, Tensor]] = {
        "all_reduce": (lambda: transport.all_reduce(mine), mine, total),
        "reduce": (lambda: transport.reduce(mine, root), mine, total if rank == root else mine.clone()),
        "broadcast": (lambda: transport.broadcast(mine, root), mine, values[root]),
        "all_gather": (lambda: transport.all_gather(empty, mine), empty, torch.cat(values)),
        "reduce_scatter": (lambda: transport.reduce_scatter(empty[:half], mine), empty[:half], total[part]),
        "scatter": (
            lambda: transport.scatter(empty[:half], mine if rank == root else None, root),
            empty[:half],
            values[root][part],
        ),
        "all_to_all": (
            lambda: transport.all_to_all(empty, mine),
            empty,
            torch.cat([each[part] for each in values]),
        ),
    }
    start, result, expected = made[kind]
    work = start()
    assert isinstance(work, SharedWork)
    return work, [mine, empty], result, expected


KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "scatter", "all_to_all")


@pytest.mark.parametrize("kind", KINDS)
def test_calls_have_their_results_whichever_rank_is_ahead(
    by_hand: list[SharedMemoryTransport], kind: str, fresh_seed: int
) -> None:
    """Ranks start calls and take steps in any order, and overwrite their tensors as soon as a call has ended.

    Also more calls than there are slots, of which the other rank has begun none.
    """
    rng = random.Random(fresh_seed)
    for num_calls in (3, 3, NUM_SLOTS + 3):
        seeds = [rng.randrange(1 << 30) for _ in range(num_calls)]
        num_started, under_way = [0, 0], [list[Ready](), list[Ready]()]
        weight = rng.choice([0.02, 0.1, 0.5, 0.9])  # one rank runs ahead, or both take turns
        num_turns = 0
        while min(num_started) < len(seeds) or any(under_way):
            num_turns += 1
            assert num_turns < 10_000, (by_hand, under_way)
            rank = int(rng.random() < weight)
            transport, own = by_hand[rank], under_way[rank]
            if num_started[rank] < len(seeds) and rng.random() < 0.3:
                own.append(start_call(by_hand, kind, rank, seeds[num_started[rank]]))
                num_started[rank] += 1
            elif own:
                work, tensors, result, expected = own[0]
                transport._step(work, blocking=False)
                assert transport._failure is None, transport._failure
                if work.is_done:
                    wrong = (result != expected).nonzero()
                    is_root = kind != "reduce" or work.receiver == rank
                    assert not len(wrong) or not is_root, (kind, rank, wrong[0].item(), len(wrong), seeds)
                    for each in tensors:
                        each.fill_(-1.0)
                    own.pop(0)


def test_a_long_message_of_a_rank_that_has_left_is_not_delivered(pair: list[SharedMemoryTransport]) -> None:
    """Its memory may be in other use by then."""
    first, second = pair
    second.send(torch.ones(SHORT_BYTES), 0)
    second.close()
    with pytest.raises(PeerLostError, match="lost rank 1"):
        first.receive(torch.zeros(SHORT_BYTES), 1)[0].wait()


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


@pytest.mark.extended
def test_a_callback_that_runs_as_the_process_ends_is_finished() -> None:
    """Python ends threads wherever they are; inside C++, as in a future's callback, that is std::terminate."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "ended None\n"), ended.stderr


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "all_gather"])
def test_who_reads_the_memory_of_a_rank_that_has_left_has_no_result(
    by_hand: list[SharedMemoryTransport], kind: str
) -> None:
    """The first has read and signalled, is interrupted as it waits, and frees its bucket before the second reads."""
    first, second = by_hand
    numel = 2 * CHUNK_BYTES // 4

    def call(each: SharedMemoryTransport) -> SharedWork:
        given = each.allocate(numel, dtype=torch.float32, device=CPU).fill_(1.0)
        if kind == "broadcast":
            return each.broadcast(given, 0)
        if kind == "all_reduce":
            return each.all_reduce(given)
        return each.all_gather(torch.empty(2 * numel), given)

    ours, theirs = call(first), call(second)
    assert first._step(ours, blocking=False)  # as far as the point where it waits for the second
    first._fail(KeyboardInterrupt())
    with pytest.raises(PeerLostError, match=r"rank 1 lost rank 0 \(pid \d+\), which has given up"):
        theirs.wait()
