"""Random collectives, in random company, with random delays: every result bit for bit, no hang.

python -m tests.procs.test_transport_stress 100000        # the long run: that many on each number of ranks
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time

import pytest
import torch

import evenstep
from evenstep.testing import RankPool
from evenstep.testing.transport import ops_of
from evenstep.transport.arrivals import plan_waiting
from evenstep.transport.base import Transport, Work
from evenstep.transport.host import connect_shared_memory
from evenstep.transport.reduction import Scratch, plan_arithmetic, reduce_into

CPU = torch.device("cpu")
SIZES = (0, 1, 5, 300, 20_000, 70_000, 300_000)
KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "scatter", "all_to_all")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def expected_sum(values, op):
    out = torch.empty_like(values[0])
    reduce_into([out], values, plan_arithmetic(op, out.dtype), Scratch())
    return out


def draw(generator, dtype, numel, world_size):
    return [torch.randint(0, 100, (numel,), generator=generator).to(dtype) for _ in range(world_size)]


def start_one(transport: Transport, shared: random.Random, own: random.Random, seed: int):
    """Launch a collective that all ranks draw alike. Returns the work and what checks it."""
    generator = torch.Generator().manual_seed(seed)
    dtype, numel = shared.choice(DTYPES), shared.choices(SIZES, weights=(1, 5, 9, 9, 5, 2, 1))[0]
    kind, op = shared.choice(KINDS), shared.choice(ops_of(dtype))
    src = shared.randrange(transport.world_size)
    rank, size = transport.rank, transport.world_size
    has_parts = kind in ("reduce_scatter", "scatter", "all_to_all")
    values = draw(generator, dtype, numel * size if has_parts else numel, size)
    own_part = slice(rank * numel, (rank + 1) * numel)
    mine = values[rank].clone()
    if own.random() < 0.5:  # each rank decides for itself where its tensor lies
        mine = transport.allocate(mine.numel(), dtype=dtype, device=CPU).copy_(mine)
    work: Work
    if kind == "all_reduce":
        work, got, expected = transport.all_reduce(mine, op), mine, expected_sum(values, op)
    elif kind == "reduce":
        work, got, expected = transport.reduce(mine, src, op), mine, expected_sum(values, op)
        if rank != src:
            got, expected = mine[:0], mine[:0]
    elif kind == "gather":
        got = torch.empty(numel * size if rank == src else 0, dtype=dtype)
        work, expected = transport.gather(got, mine, src), torch.cat(values)[: got.numel()]
    elif kind == "scatter":
        got = torch.empty(numel, dtype=dtype)
        work, expected = transport.scatter(got, mine if rank == src else None, src), values[src][own_part]
    elif kind == "all_to_all":
        got = torch.empty(numel * size, dtype=dtype)
        splits = [numel] * size if seed % 2 else None  # told, or known
        work, expected = transport.all_to_all(got, mine, splits, splits), torch.cat([each[own_part] for each in values])
    elif kind == "broadcast":
        work, got, expected = transport.broadcast(mine, src), mine, values[src]
    elif kind == "all_gather":
        got = torch.empty(numel * size, dtype=dtype)
        work, expected = transport.all_gather(got, mine), torch.cat(values)
    else:
        got = torch.empty(numel, dtype=dtype)
        work = transport.reduce_scatter(got, mine, op)
        expected = expected_sum(values, op)[own_part]
    return work, got, expected, f"{kind}({op}) of {dtype} {numel} on rank {rank}, seed {seed}"


def random_collectives(seed: int, count: int, delay_s: float) -> int:
    world = evenstep.init(quiet=True)
    first = connect_shared_memory(world.control, plan_waiting(world.world_size, timeout_s=60))
    assert not isinstance(first, str), first
    transports: list[Transport] = [first, first.split(), first.split()]
    shared, own = random.Random(seed), random.Random(seed * 100 + world.rank)
    in_flight = []
    for number in range(count):
        in_flight.append(start_one(shared.choice(transports), shared, own, seed + number))
        if own.random() < 0.05:
            time.sleep(own.random() * delay_s)
        while (in_flight and own.random() < 0.6) or len(in_flight) > 40:
            work, got, expected, what = in_flight.pop(own.randrange(len(in_flight)))
            work.wait()
            assert torch.equal(got, expected), what
    own.shuffle(in_flight)
    for work, got, expected, what in in_flight:
        work.wait()
        assert torch.equal(got, expected), what
    for transport in transports:
        transport.all_reduce(torch.zeros(1)).wait()
        transport.close()
    return count


@pytest.mark.parametrize("nproc", [2, 3, 5])
def test_random_collectives(ranks: RankPool, fresh_seed: int, nproc: int) -> None:
    assert ranks.run(random_collectives, nproc, fresh_seed, 300, 0.01, timeout_s=150) == [300] * nproc


def helped() -> None:
    """Rank 0 launches, and waits for something else first, which rank 1 does only after the call."""
    world = evenstep.init(quiet=True)
    transport = connect_shared_memory(world.control, plan_waiting(world.world_size, timeout_s=30))
    assert not isinstance(transport, str)
    tensors = [torch.ones(size) for size in (10, 500_000)]
    works = [transport.all_reduce(tensor) for tensor in tensors]
    if world.rank == 0:
        world.barrier()
    for work in works:
        work.wait()
    if world.rank == 1:
        world.barrier()
    assert all(tensor.eq(2).all() for tensor in tensors)
    transport.close()


def test_a_rank_that_waits_elsewhere_holds_nobody_up(ranks: RankPool) -> None:
    ranks.run(helped, 2)


def from_threads() -> None:
    world = evenstep.init(quiet=True)
    first = connect_shared_memory(world.control, plan_waiting(world.world_size, timeout_s=30))
    assert not isinstance(first, str)
    transports = [first, first.split(), first.split()]
    sums: list[float] = []

    def run(transport: Transport) -> None:
        for _ in range(100):
            tensor = torch.ones(1000)
            transport.all_reduce(tensor).wait()
            sums.append(float(tensor[0]))

    threads = [threading.Thread(target=run, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [world.world_size] * 300
    for transport in transports:
        transport.close()


def test_several_threads_with_a_transport_each(ranks: RankPool) -> None:
    ranks.run(from_threads, 2)


if __name__ == "__main__":
    total = int(sys.argv[1])
    with RankPool() as pool:
        for nproc in (2, 3, 4, 5):
            started = time.monotonic()
            pool.run(random_collectives, nproc, int(os.getpid()), total, 0.002, timeout_s=36_000)
            print(f"{nproc} ranks: {total} collectives in {time.monotonic() - started:.0f} s")  # noqa: T201
