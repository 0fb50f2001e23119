"""Random collectives, in random company, from several threads, with random delays: every result bit for bit, no hang.

python -m tests.procs.transport.test_stress 100000        # the long run: that many on each number of ranks, twice
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import evenstep
from evenstep.testing import RankPool
from evenstep.transport.base import Work
from evenstep.transport.core.reduction import Scratch, plan_arithmetic, reduce_into
from evenstep.transport.process_group.gloo import open_gloo
from evenstep.transport.shm.handshake import connect_shared_memory
from evenstep.transport.shm.transport import SharedMemoryTransport
from tests.ranks import on_ranks
from tests.transport_cases import ops_of

CPU = torch.device("cpu")
SIZES = (0, 1, 5, 300, 20_000, 70_000, 300_000)
KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def expected_sum(values, op):
    out = torch.empty_like(values[0])
    divisor = len(values) if op == "mean" else None
    reduce_into([out], values, plan_arithmetic(op, out.dtype), Scratch(), divisor=divisor)
    return out


def draw(generator, dtype, numel, world_size):
    return [torch.randint(0, 100, (numel,), generator=generator).to(dtype) for _ in range(world_size)]


def lay(values: torch.Tensor, transport: SharedMemoryTransport, own: random.Random) -> torch.Tensor:
    """A tensor with these values, which lies where this rank draws: in shared memory, elsewhere, or there with gaps."""
    where = own.choice(("shared", "elsewhere", "with gaps"))
    if where == "shared":
        return transport.allocate(values.numel(), dtype=values.dtype, device=CPU).copy_(values)
    wide = values.new_zeros(values.numel(), 2 if where == "with gaps" else 1)
    wide[:, 0] = values
    return wide[:, 0]


def start_one(transport: SharedMemoryTransport, shared: random.Random, own: random.Random, seed: int):
    """Launch a collective that all ranks draw alike. Returns the work and what checks it."""
    generator = torch.Generator().manual_seed(seed)
    dtype, numel = shared.choice(DTYPES), shared.choices(SIZES, weights=(1, 5, 9, 9, 5, 2, 1))[0]
    kind, op = shared.choice(KINDS), shared.choice(ops_of(dtype))
    src = shared.randrange(transport.world_size)
    rank, size = transport.rank, transport.world_size
    has_parts = kind in ("reduce_scatter", "scatter", "all_to_all")
    values = draw(generator, dtype, numel * size if has_parts else numel, size)
    own_part = slice(rank * numel, (rank + 1) * numel)
    mine = lay(values[rank], transport, own)

    def empty(numel: int) -> torch.Tensor:
        return lay(torch.empty(numel, dtype=dtype), transport, own)

    beside, expected_beside = None, torch.empty(0, dtype=torch.float64)
    if seed % 3 == 0 and kind in ("all_reduce", "reduce", "reduce_scatter"):  # numbers travel beside it
        numbers = draw(generator, torch.float64, 1 + seed % 3000, size)  # above 2,048, in a call of their own
        beside, expected_beside = numbers[rank].clone(), expected_sum(numbers, "sum")
    work: Work
    if kind == "all_reduce":
        work, got, expected = transport.all_reduce(mine, op, beside=beside), mine, expected_sum(values, op)
    elif kind == "reduce":
        work, got, expected = transport.reduce(mine, src, op, beside=beside), mine, expected_sum(values, op)
        if rank != src:
            got, expected = mine[:0], mine[:0]
    elif kind == "gather":
        got = empty(numel * size if rank == src else 0)
        work, expected = transport.gather(got, mine, src), torch.cat(values)[: got.numel()]
    elif kind == "scatter":
        got = empty(numel)
        work, expected = transport.scatter(got, mine if rank == src else None, src), values[src][own_part]
    elif kind == "all_to_all":
        got = empty(numel * size)
        splits = [numel] * size if seed % 2 else None  # told, or known
        work, expected = transport.all_to_all(got, mine, splits, splits), torch.cat([each[own_part] for each in values])
    elif kind == "broadcast":
        work, got, expected = transport.broadcast(mine, src), mine, values[src]
    elif kind == "all_gather":
        got = empty(numel * size)
        if own.random() < 0.3:
            mine = got[own_part].copy_(mine)  # where it belongs in the result
        work, expected = transport.all_gather(got, mine), torch.cat(values)
    else:
        got = empty(numel)
        work = transport.reduce_scatter(got, mine, op, beside=beside)
        expected = expected_sum(values, op)[own_part]
    what = f"{kind}({op}) of {dtype} {numel} on rank {rank}, seed {seed}"
    return work, (got, expected_beside if beside is None else beside), (expected, expected_beside), what


def check(work: Work, got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str) -> None:
    """Bit for bit."""
    work.wait()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other), what


def open_groups(seed: int) -> list[SharedMemoryTransport | None]:
    """Three transports of all ranks and, of more than two ranks, three of some; None: this rank isn't in the group."""
    world = evenstep.init(quiet=True)
    draw_groups = random.Random(seed)
    everybody = list(range(world.world_size))
    groups = [everybody] * 3
    if world.world_size > 2:
        groups += [sorted(draw_groups.sample(everybody, draw_groups.randint(2, world.world_size - 1))) for _ in "abc"]
    opened: list[SharedMemoryTransport | None] = []
    for members in groups:
        opened.append(None)
        if world.rank in members:
            meeting = open_gloo(members, timeout_s=60)
            made = connect_shared_memory(meeting, timeout_s=60)
            meeting.close()
            assert isinstance(made, SharedMemoryTransport), made
            opened[-1] = made
    return opened


def random_collectives(seed: int, count: int, delay_s: float, num_threads: int = 1) -> int:
    """Each thread makes its part of the calls, over groups of its own. Returns how many this rank took part in."""
    world = evenstep.init(quiet=True)
    groups = open_groups(seed)

    def run(thread: int) -> int:
        own = random.Random(seed * 100 + world.rank * 10 + thread)
        in_flight = []
        num_started = 0
        for number in range(thread, count, num_threads):
            shared = random.Random(seed + number)  # ranks that aren't in this call's group draw nothing of it
            transport = shared.choice(groups[thread::num_threads])
            if transport is None:
                continue
            num_started += 1
            in_flight.append(start_one(transport, shared, own, seed + number))
            if own.random() < 0.05:
                time.sleep(own.random() * delay_s)
            while (in_flight and own.random() < 0.6) or len(in_flight) > 40:
                check(*in_flight.pop(own.randrange(len(in_flight))))
        own.shuffle(in_flight)
        for started in in_flight:
            check(*started)
        return num_started

    with ThreadPoolExecutor(num_threads) as threads:
        num_started = sum(threads.map(run, range(num_threads)))
    for transport in groups:
        if transport is not None:
            transport.all_reduce(torch.zeros(1)).wait()
            transport.close()
    return num_started


@contextlib.contextmanager
def stopping_at_random(pids: Callable[[], set[int]], seed: int, longest_s: float) -> Iterator[list[int]]:
    """Stop and continue processes, one at a time, until the block ends. Yields a list of those that were stopped."""
    ended, stopped, draw_times = threading.Event(), list[int](), random.Random(seed)

    def run() -> None:
        while not ended.wait(draw_times.random() * 2 * longest_s):
            alive = sorted(pids())
            if alive:
                pid = draw_times.choice(alive)
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
                ended.wait(draw_times.random() * longest_s)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield stopped
    finally:
        ended.set()
        thread.join()


@pytest.mark.extended(ranks=3)
@pytest.mark.parametrize("nproc", [2, 3, 5])
def test_random_collectives(ranks: RankPool, fresh_seed: int, nproc: int) -> None:
    num_threads = 1 if nproc == 3 else 3
    started = ranks.run(random_collectives, nproc, fresh_seed, 300, 0.01, num_threads, timeout_s=150)
    assert min(started) > 100
    assert nproc > 2 or started == [300, 300]


@pytest.mark.extended
def test_random_collectives_while_ranks_are_stopped_and_go_on(fresh_seed: int) -> None:
    """The transport waits for who is stopped, and kills nobody. (Ranks of its own: no other test is stopped.)"""
    with RankPool() as pool:
        pool.run(random_collectives, 3, fresh_seed, 1, 0.0)  # started, and torch imported
        with stopping_at_random(lambda: pool.pids, fresh_seed, 0.1) as stopped:
            assert min(pool.run(random_collectives, 3, fresh_seed, 300, 0.01, timeout_s=150)) > 100
        assert stopped


def appear(path: Path) -> None:
    """Wait for a file, which no collective and no helper can make."""
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} did not come"
        time.sleep(0.01)


@on_ranks(2)
def test_the_helper_stays_awake_while_one_call_waits_and_another_is_in_flight(
    world: evenstep.World, tmp_path: Path
) -> None:
    """Rank 0 waits for one call while the next is in flight, longer than the helper stays awake for nothing.

    Then it waits for what rank 1 does only after that next call.
    """
    transport = connect_shared_memory(world.control, timeout_s=30)
    assert not isinstance(transport, str)
    first, second = torch.ones(10), torch.ones(500_000)
    if world.rank == 0:
        works = [transport.all_reduce(first), transport.all_reduce(second)]
        works[0].wait()
        appear(tmp_path / "second")
        works[1].wait()
    else:
        time.sleep(1.5)
        transport.all_reduce(first).wait()
        time.sleep(0.2)  # rank 0 has returned from its wait
        transport.all_reduce(second).wait()
        (tmp_path / "second").touch()
    assert second.eq(2).all()
    transport.close()


@on_ranks(2)
def test_a_launch_never_waits_for_a_thread_that_waits(world: evenstep.World, tmp_path: Path) -> None:
    """On rank 0 one thread waits for a call that rank 1 makes only after another thread has launched the next.

    That one is shown to rank 1 all the same: it allocates, asks for a callback, and returns at once.
    """
    transport = connect_shared_memory(world.control, timeout_s=30)
    assert not isinstance(transport, str)
    first, second = torch.ones(10), transport.allocate(500_000, dtype=torch.float32, device=CPU).fill_(1)
    called: list[object] = []
    if world.rank == 0:
        work = transport.all_reduce(first)
        thread = threading.Thread(target=work.wait)
        thread.start()
        time.sleep(0.2)  # it waits
        third = transport.allocate(500_000, dtype=torch.float32, device=CPU).fill_(1)
        works = [transport.all_reduce(second), transport.all_reduce(third)]
        works[0].add_done_callback(called.append)
        assert not any(each.is_completed() for each in [work, *works])
        (tmp_path / "launched").touch()
        thread.join()
        works[1].wait()
        appear(tmp_path / "over")
        assert called == [None]
    else:
        third = torch.ones(500_000)
        appear(tmp_path / "launched")
        for tensor in (first, second, third):
            transport.all_reduce(tensor).wait()
        (tmp_path / "over").touch()
    assert all(tensor.eq(2).all() for tensor in (first, second, third))
    transport.close()


if __name__ == "__main__":
    total = int(sys.argv[1])
    for nproc in map(int, sys.argv[2:] or "2345"):
        for longest_s, num_threads in ((0.0, 3), (0.2, 1)):
            with RankPool() as pool:
                pool.run(random_collectives, nproc, os.getpid(), 1, 0.0)
                started = time.monotonic()
                disturbed = stopping_at_random(lambda: pool.pids, nproc, longest_s)
                with disturbed if longest_s else contextlib.nullcontext([]) as stopped:
                    pool.run(random_collectives, nproc, os.getpid(), total, 0.002, num_threads, timeout_s=36_000)
                took = time.monotonic() - started
                what = f"{total} collectives from {num_threads} threads in {took:.0f} s, {len(stopped)} stops"
                print(f"{nproc} ranks: {what}", flush=True)  # noqa: T201
