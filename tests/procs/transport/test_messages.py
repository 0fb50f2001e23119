"""Messages between two ranks of the backend "evenstep": in lanes of shared memory, beside the collectives."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import evenstep
from evenstep.errors import CollectiveTimeoutError, ConfigurationError, EvenstepError, MismatchError, PeerLostError
from evenstep.testing import RankPool
from evenstep.transport import fallback
from evenstep.transport.shm import lanes
from evenstep.transport.shm.lanes import SHORT_BYTES
from evenstep.transport.shm.segment import NUM_RECORDS
from tests.ranks import on_ranks

SHORT, LONG = 3, 300_000
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int16, torch.uint8)


def make_group(members: list[int] | None = None, timeout_s: float = 60) -> Any:
    evenstep.init(quiet=True)
    fallback.reset()
    return dist.new_group(members, backend="evenstep", timeout=timedelta(seconds=timeout_s))


def end_group(group: Any) -> None:
    dist.barrier(group)
    assert fallback.counts() == {}
    dist.destroy_process_group(group)


@pytest.mark.parametrize("sends_first", [False, True])
@pytest.mark.parametrize(("numel", "members"), [(SHORT, [0, 1]), (LONG, [2, 1])])
@on_ranks(3)
def test_a_message_blocks_no_collective_and_none_blocks_it(
    world: evenstep.World, numel: int, members: list[int], sends_first: bool
) -> None:
    """`irecv`, `all_reduce`, `wait` against `all_reduce`, `send` and `send`, `all_reduce`; on sub-groups."""
    group = make_group(members)
    if not isinstance(group, int):  # what torch gives ranks that aren't in the group
        total, got = torch.ones(1), torch.zeros(numel)
        if group.rank() == 0:
            arriving = dist.irecv(got, group=group, group_src=1)
            dist.all_reduce(total, group=group)
            assert arriving is not None
            arriving.wait()
            assert got.eq(7).all()
        else:
            calls = [
                lambda: dist.send(torch.full((numel,), 7.0), group=group, group_dst=0),
                lambda: dist.all_reduce(total, group=group),
            ]
            for call in calls if sends_first else reversed(calls):
                call()
        assert total.item() == 2
        end_group(group)
    dist.barrier()


@on_ranks(2)
def test_a_later_tag_is_received_before_a_megabyte_of_an_earlier_one(world: evenstep.World) -> None:
    """Messages are matched by tag, and not by the order in which they were sent."""
    group = make_group()
    count = 1_000_000 // SHORT_BYTES + 1
    if group.rank() == 0:
        long = dist.isend(torch.full((250_000,), 1.0), group=group, group_dst=1, tag=1)
        short = [
            dist.isend(torch.full((SHORT_BYTES // 4,), float(each)), group=group, group_dst=1, tag=1)
            for each in range(count)
        ]
        dist.send(torch.full((3,), 2.0), group=group, group_dst=1, tag=2)
        for work in (*short, long):
            assert work is not None
            work.wait()
    else:
        tensor = torch.zeros(3)
        dist.recv(tensor, group=group, group_src=0, tag=2)
        assert tensor.eq(2).all()
        dist.recv(long_tensor := torch.zeros(250_000), group=group, group_src=0, tag=1)
        assert long_tensor.eq(1).all()
        for each in range(count):
            dist.recv(tensor := torch.zeros(SHORT_BYTES // 4), group=group, group_src=0, tag=1)
            assert tensor.eq(each).all()
    end_group(group)


# ---------------------------------------------------------------------- random messages


def draw_message(rng: random.Random) -> tuple[Tensor, bool]:
    """A tensor, and whether it has gaps."""
    numel = rng.choice([0, 1, 2, SHORT_BYTES // 8, SHORT_BYTES // 2, SHORT_BYTES, 20_000, rng.randrange(100_000)])
    dtype = rng.choice(DTYPES)
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    return torch.randint(0, 2 if dtype is torch.bool else 100, (numel,), generator=generator).to(
        dtype
    ), rng.random() < 0.3


def with_gaps(tensor: Tensor) -> Tensor:
    wide = torch.zeros((*tensor.shape, 3), dtype=tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]


def random_messages(seed: int, count: int) -> int:
    """All ranks draw the same messages; each starts its own in the order of its own, beside collectives."""
    group = make_group()
    rank, size, world = group.rank(), group.size(), evenstep.init(quiet=True)
    shared, own = random.Random(seed), random.Random(seed * 10 + world.rank)
    num_mine = 0
    for _ in range(count):
        works, expected = [], []
        # (source, receiver, tag): messages that are alike keep their order.
        for _ in range(shared.randrange(12)):
            source, to = shared.sample(range(size), 2)
            tag = shared.randrange(3)
            tensor, has_gaps = draw_message(shared)
            num_mine += rank in (source, to)
            if rank == source:
                mine = with_gaps(tensor) if has_gaps else tensor
                works.append(dist.isend(mine, group=group, group_dst=to, tag=tag))
            elif rank == to:
                out = (
                    with_gaps(torch.zeros_like(tensor))
                    if not has_gaps and own.random() < 0.3
                    else torch.zeros_like(tensor)
                )
                works.append(dist.irecv(out, group=group, group_src=source, tag=tag))
                expected.append((out, tensor))
            if shared.random() < 0.2:
                total = torch.full((shared.choice([1, 50_000]),), 1.0)
                works.append(dist.all_reduce(total, group=group, async_op=True))
                expected.append((total, torch.full_like(total, size)))
        own.shuffle(works)
        for work in works:
            way = own.randrange(3)
            if way == 0:
                work.wait()
            elif way == 1:
                work.get_future().wait()
            else:
                while not work.is_completed():
                    time.sleep(0)
        for out, tensor in expected:
            assert torch.equal(out, tensor), (seed, out, tensor)
    end_group(group)
    return num_mine


def test_random_messages_are_what_was_sent(ranks: RankPool, fresh_seed: int) -> None:
    """Of all dtypes and sizes, with gaps, waited for in any order and in any way, beside collectives."""
    assert sum(ranks.run(random_messages, 4, fresh_seed, 40, timeout_s=150)) > 100


@on_ranks(2)
def test_threads_wait_for_a_message_each(world: evenstep.World) -> None:
    """One of them sleeps on the doorbell, and wakes the others."""
    group = make_group()
    tags = list(range(6))
    if group.rank() == 0:
        got: dict[int, float] = {}

        def receive(tag: int) -> None:
            dist.recv(tensor := torch.zeros(2), group=group, group_src=1, tag=tag)
            got[tag] = float(tensor[0])

        threads = [threading.Thread(target=receive, args=(tag,)) for tag in tags]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == {tag: float(tag) for tag in tags}
    else:
        for tag in reversed(tags):
            time.sleep(0.02)
            dist.send(torch.full((2,), float(tag)), group=group, group_dst=0, tag=tag)
    end_group(group)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("numel", [SHORT, 5_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@on_ranks(2)
def test_a_message_whose_receiver_expects_another_one_is_an_error_on_both(
    world: evenstep.World, numel: int, dtype: torch.dtype
) -> None:
    """Number of elements, or dtype and that: both ranks raise the same text."""
    group = make_group()
    expected = f"^rank 0 sends {numel} float32 to rank 1, tag 0, which receives 4 {str(dtype)[6:]}\\. Both must"

    def exchange() -> None:
        if group.rank() == 0:
            dist.send(torch.ones(numel), group=group, group_dst=1)
            dist.recv(torch.zeros(1), group=group, group_src=1)  # a short message is sent before it is received
        else:
            dist.recv(torch.zeros(4, dtype=dtype), group=group, group_src=0)

    with pytest.raises(MismatchError, match=expected):
        exchange()
    with pytest.raises(EvenstepError):
        dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)


@on_ranks(2)
def test_what_one_rank_alone_calls_and_needs_gloo_is_refused_by_name(world: evenstep.World) -> None:
    """Gloo is made by all ranks of a group, and the others know nothing of a message. Afterwards the group works."""
    group = make_group()
    sparse, other = torch.eye(2).to_sparse(), 1 - group.rank()
    dense = ": messages between ranks that share memory must be dense CPU tensors, and on rank 0.* a sparse_coo float32"
    calls: list[tuple[str, Callable[[], object]]] = [
        (f"send{dense}", lambda: dist.send(sparse, group=group, group_dst=1)),
        (f"recv{dense}", lambda: dist.recv(sparse, group=group, group_src=1)),
        (f"recv{dense}", lambda: dist.recv(sparse, group=group)),
        ("send: rank 0 can't exchange a message with itself", lambda: group.send([torch.ones(1)], 0, 0)),
        ("send: tag=-1 on rank 0", lambda: group.send([torch.ones(1)], 1, -1)),
        (
            r"recv on rank 0: float32 \[3\] with strides \[0\] has elements that share memory",
            lambda: group.recv([torch.zeros(1).expand(3)], 1, 0),
        ),
    ]
    for words, call in calls if group.rank() == 0 else ():
        with pytest.raises(ConfigurationError, match=f"^{words}"):
            call()
    sent = dist.isend(torch.ones(2), group=group, group_dst=other)
    dist.recv(tensor := torch.zeros(2), group=group, group_src=other)
    assert sent is not None
    sent.wait()
    assert tensor.eq(1).all()
    end_group(group)


def departed(numel: int, by_future: bool) -> str:
    """Rank 1 ends its group, while rank 0 sends to it and then receives from it."""
    group = make_group()
    if group.rank() == 1:
        dist.destroy_process_group(group)
        return ""
    work = group.recv([torch.zeros(numel)], 1, 0)
    with pytest.raises(RuntimeError) as raised:
        (work.get_future() if by_future else work).wait()
    with pytest.raises(PeerLostError):
        dist.send(torch.zeros(numel), group=group, group_dst=1)
    dist.destroy_process_group(group)
    return str(raised.value)


@pytest.mark.parametrize("by_future", [False, True])
def test_a_rank_that_has_left_is_noticed_at_once(ranks: RankPool, by_future: bool) -> None:
    """By `wait` and by a future, long before the deadline."""
    told, _ = ranks.run(departed, 2, SHORT, by_future)
    assert "lost rank 1" in told
    assert "closed its end" in told


KILLED = """
import os, signal, sys, time
import torch, torch.distributed as dist, evenstep
rank, numel, by_future, way = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True", sys.argv[5]
dist.init_process_group("evenstep", store=dist.FileStore(sys.argv[1], 3), rank=rank, world_size=3)
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 2:
    time.sleep(0.5)  # meanwhile rank 0 looks several times which ranks can still send
    dist.send(torch.full((numel,), 2.0), 0)
    os._exit(0)
work = dist.group.WORLD.recv([tensor := torch.zeros(numel)], None, 0)
(work.get_future() if by_future else work).wait()
print(f"got {tensor.unique().tolist()} from rank {work._source_rank()}")
try:
    if way == "send":
        dist.send(torch.zeros(1_000_000), 1)
    else:
        dist.recv(torch.zeros(2), 1 if way == "recv" else None)
except evenstep.errors.PeerLostError as error:
    print(error)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize(
    ("numel", "by_future", "way", "words"),
    [(SHORT, False, "recv", "in recv of"), (LONG, True, "send", "in send of"), (SHORT, True, "any", "in recv of")],
)
def test_a_message_of_any_rank_comes_from_those_that_live_and_a_killed_one_is_named(
    tmp_path: Path, numel: int, by_future: bool, way: str, words: str
) -> None:
    """The receiver gets what another rank sends; then it waits for the killed one, or for a rank that can't come."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    given = [str(numel), str(by_future), way]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(rank), *given],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(3)
    ]
    told = [process.communicate(timeout=150)[0] for process in started]
    assert [each.returncode for each in started] == [0, -signal.SIGKILL, 0], told
    got, lost, *_ = told[0].splitlines()
    assert got == "got [2.0] from rank 2"
    assert f"lost rank 1 (pid {started[1].pid}), whose process has ended" in lost
    assert words in lost


@on_ranks(2)
def test_messages_that_nobody_has_received_are_named_as_the_group_ends(world: evenstep.World) -> None:
    """By the rank that they were for: the sender can't know whether somebody still comes for them."""
    group = make_group()
    said: list[str] = []
    say, lanes.say = lanes.say, said.append
    try:
        if group.rank() == 0:
            dist.send(torch.ones(3), group=group, group_dst=1, tag=6)
            dist.isend(torch.ones(100_000), group=group, group_dst=1, tag=7)
            dist.send(torch.ones(1), group=group, group_dst=1, tag=8)
        else:
            dist.recv(torch.ones(1), group=group, group_src=0, tag=8)
        dist.barrier(group)
        dist.destroy_process_group(group)
    finally:
        lanes.say = say
    named = "nobody has received 3 float32 from rank 0 to rank 1, tag 6; 100000 float32 from rank 0 to rank 1, tag 7"
    assert [named in line for line in said] == [True] * world.rank


@on_ranks(2)
def test_a_full_ring_blocks_nobody_but_who_waits_for_its_message(world: evenstep.World) -> None:
    """`isend` returns, and the record follows when there is room."""
    group = make_group()
    count = 3 * NUM_RECORDS
    if group.rank() == 0:
        works = [dist.isend(torch.full((1,), float(each)), group=group, group_dst=1) for each in range(count)]
        done = [work.is_completed() for work in works if work is not None]
        assert done[:NUM_RECORDS] == [True] * NUM_RECORDS
        assert not done[-1]
        dist.all_reduce(torch.ones(1), group=group)
        for work in works:
            assert work is not None
            work.wait()
    else:
        dist.all_reduce(torch.ones(1), group=group)
        for each in range(count):
            dist.recv(tensor := torch.zeros(1), group=group, group_src=0)
            assert tensor.item() == each
    end_group(group)


@pytest.mark.parametrize("is_killed", [True, False])
@on_ranks(2)
def test_a_loop_that_polls_ends_with_the_error(world: evenstep.World, is_killed: bool) -> None:
    """`is_completed` becomes true when the other rank has died, and at the deadline; `exception` is the error."""
    group = make_group(timeout_s=60 if is_killed else 0.5)
    dist.barrier()
    if group.rank() == 0:
        arriving = dist.irecv(torch.zeros(3), group=group, group_src=1)
        assert arriving is not None
        if is_killed:
            group._shared.counters.watch.is_gone = lambda rank: True
        until = time.monotonic() + 20
        while not arriving.is_completed():
            assert time.monotonic() < until, "the loop doesn't end"
            time.sleep(0.005)
        error = arriving.exception()
        assert isinstance(error, PeerLostError if is_killed else CollectiveTimeoutError)
        assert ("lost rank 1 " if is_killed else "Missing: rank 1 ") in str(error)
    dist.barrier()
    dist.destroy_process_group(group)


# ---------------------------------------------------------------------- interrupts


class Interrupted(Exception):
    """What a handler of the user's raises."""


def exchange_until_an_error(group: Any, rng: random.Random, count: int) -> bool:
    """Send numbered messages back and forth. Whether it ended in an error; wrong values raise.

    Who is interrupted makes the same call again: a message that was sent already is sent twice then, by its tag, and
    one that was received already doesn't come again, which the deadline ends.
    """
    rank, number = group.rank(), 0
    numels = [rng.choice([2, 2_000]) for _ in range(count)]
    while number < count:
        numel = numels[number]
        sends = number % 2 == rank
        mine = torch.full((numel,), float(number))
        try:
            if sends:
                dist.send(mine, group=group, group_dst=1 - rank, tag=number)
            else:
                dist.recv(got := torch.full((numel,), -1.0), group=group, group_src=1 - rank, tag=number)
        except Interrupted:
            continue
        except EvenstepError:
            return True
        if not sends:
            assert got.eq(number).all(), (number, got)
        number += 1
    return False


def interrupted(seed: int, count: int) -> int:
    """How many interrupts ended in an error; rank 1 is interrupted."""

    def handle(*_: object) -> None:
        raise Interrupted

    num_errors = 0
    for each in range(count):
        group = make_group(timeout_s=4)
        rng = random.Random(seed + each)
        after_s = random.Random(seed - each).uniform(1e-5, 5e-3)
        before = signal.signal(signal.SIGALRM, handle)
        try:
            if group.rank() == 1:
                signal.setitimer(signal.ITIMER_REAL, after_s)
            num_errors += exchange_until_an_error(group, rng, 40)
        except Interrupted:  # between two calls
            num_errors += 1
            group.abort()
        finally:
            while True:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    signal.signal(signal.SIGALRM, before)
                    break
                except Interrupted:
                    continue
        evenstep.init(quiet=True).barrier()
        dist.destroy_process_group(group)
    return num_errors


def test_an_exception_at_any_moment_gives_right_messages_or_an_error(ranks: RankPool, fresh_seed: int) -> None:
    """A handler that raises fails the group on both ranks, or the message is right."""
    first, second = ranks.run(interrupted, 2, fresh_seed, 25, timeout_s=150)
    assert (first == second) or second > first  # behind the last message nobody waits for anything
