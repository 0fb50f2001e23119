"""The parts of the shared-memory transport that need no second process."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import CollectiveTimeoutError, ConfigurationError
from evenstep.ground.health.heartbeat import Heartbeat, Phase
from evenstep.ground.host.processes import state_and_start
from evenstep.transport.base import Row
from evenstep.transport.core.header import NUMBER_OFFSET
from evenstep.transport.shm import segment as segment_module
from evenstep.transport.shm.allocator import Arena, FreeList, Views
from evenstep.transport.shm.handshake import describe_this_process, why_not_together
from evenstep.transport.shm.peers import PeerProcess, PeerWatch
from evenstep.transport.shm.segment import (
    HEADER_BYTES,
    NUM_RECORDS,
    RECORD_BYTES,
    ROW_OFFSET,
    Segment,
    host_memory_bytes,
    plan_segment,
)
from evenstep.transport.shm.sync import (
    SEMAPHORE_BYTES,
    ProgressCounters,
    Waiting,
    WaitPolicy,
    doorbell,
    lane_semaphores,
    num_semaphores,
)


def used_bytes(arena: Arena) -> int:
    """Bytes of the zone that tensors use."""
    arena._collect()
    return sum(length for _, length in arena._stretches.values())


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=60))
def test_the_free_list_gives_nothing_twice_and_gets_everything_back(steps):
    free, in_use = FreeList(1000), []
    for length, gives_back in steps:
        if gives_back and in_use:
            free.give(*in_use.pop(len(in_use) // 2))
            continue
        start = free.take(length)
        if start is not None:
            assert all(start + length <= s or s + n <= start for s, n in in_use)
            in_use.append((start, length))
        assert sum(end - start for start, end in free._free) == 1000 - sum(n for _, n in in_use)
    for each in in_use:
        free.give(*each)
    assert free.take(1000) == 0


@pytest.mark.parametrize("world_size", [2, 3, 64])
def test_the_layout_has_no_overlap(world_size):
    layout = plan_segment(world_size, memory_bytes=(1 << 30) + 5)
    assert layout.notes < layout.semaphores < layout.headers < layout.eager < layout.chunks < layout.common_bytes
    assert layout.eager_slot(world_size - 1, segment_module.NUM_SLOTS) == layout.chunks
    assert layout.chunk(world_size - 1, segment_module.NUM_CHUNKS) <= layout.zone(0) == layout.common_bytes
    assert layout.zone(1) - layout.zone(0) >= (1 << 30) + 5
    assert layout.lane(0, 0) == layout.zone(world_size)
    assert layout.lane(0, 1) - layout.lane(0, 0) >= NUM_RECORDS * RECORD_BYTES
    assert layout.lane(world_size - 1, world_size - 1) < layout.total_bytes == layout.lane(world_size, 0)
    semaphores = {
        each for r in range(world_size) for s in range(world_size) for each in lane_semaphores(0, world_size, r, s)
    }
    semaphores |= {doorbell(0, world_size, rank) for rank in range(world_size)}
    assert len(semaphores) == 2 * world_size**2 + world_size, "each is one of its own"
    assert max(semaphores) == (num_semaphores(world_size) - 1) * SEMAPHORE_BYTES
    assert layout.header(0, 1) - layout.header(0, 0) == HEADER_BYTES >= ROW_OFFSET + 8 * len(Row())
    assert ROW_OFFSET >= NUMBER_OFFSET + 8


def make_segment(world_size: int = 2) -> Segment:
    return Segment.create(plan_segment(world_size, memory_bytes=host_memory_bytes()), b"n" * 16)


def test_a_segment_is_private_anonymous_and_attached_by_another_descriptor():
    segment = make_segment()
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    assert "memfd:evenstep" in os.readlink(f"/proc/self/fd/{segment.fd}")
    other = Segment.attach(os.getpid(), segment.fd, segment.layout)
    assert other.nonce == b"n" * 16
    assert not segment.has_signed(1, b"n" * 16)
    other.sign(1)
    assert segment.has_signed(1, b"n" * 16)
    other.leave(1)
    assert segment.has_left(1)
    assert not segment.has_left(0)
    fds = [segment.fd, other.fd]
    del segment, other
    gc.collect()
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)
    with pytest.raises(OSError):
        Segment.attach(os.getpid(), os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), plan_segment(2, memory_bytes=1))


def test_memory_is_for_real_and_goes_back_with_the_last_tensor():
    segment = make_segment()
    arena = Arena(segment, 1)
    before = os.fstat(segment.fd).st_blocks
    tensor = arena.allocate(1 << 20, torch.float32)
    view = tensor[100_000:].view(2, -1)
    assert os.fstat(segment.fd).st_blocks - before == (4 << 20) // 512
    assert used_bytes(arena) == 4 << 20
    assert arena.locate(view.data_ptr(), view.nbytes) == 400_000
    assert arena.locate(torch.empty(5).data_ptr(), 20) is None
    assert arena.locate(tensor.data_ptr(), tensor.nbytes + 1) is None
    views = Views(segment)
    view.fill_(7.0)
    assert views.zone(1, 400_000, torch.float32, 3).tolist() == [7.0] * 3
    second = arena.allocate(1 << 20, torch.int64)
    second.fill_(9)
    assert views.zone(1, 4 << 20, torch.int64, 2).tolist() == [9, 9]
    del tensor
    assert used_bytes(arena) == 12 << 20  # a view still needs it
    address = view.data_ptr()
    del view
    assert used_bytes(arena) == 8 << 20
    assert arena.locate(address, 4) is None
    assert not arena.allocate(1 << 20, torch.float32).any()  # what was released reads as zeros
    del second
    assert os.fstat(segment.fd).st_blocks - before == 0


def test_too_little_memory_names_needed_and_available_bytes(monkeypatch):
    segment = make_segment()
    arena = Arena(segment, 0)
    monkeypatch.setattr(segment_module, "available_bytes", lambda: 1000)
    with pytest.raises(ConfigurationError, match=r"bucket of 100,000 torch.float32.* 458,752 bytes are needed, 1,000"):
        arena.allocate(100_000, torch.float32)
    monkeypatch.undo()
    assert used_bytes(arena) == 0
    assert arena.allocate(100_000, torch.float32).shape == (100_000,)


def test_who_can_share_memory():
    here = describe_this_process()
    assert here["problem"] is None
    assert why_not_together([here, here]) is None
    assert why_not_together([here, here | {"boot": "another"}]) == "ranks 0 and 1 are on different nodes"
    assert "containers" in (why_not_together([here, here | {"namespaces": ["pid:[1]", "user:[1]"]}]) or "")
    assert "users" in (why_not_together([here, here | {"user": 12345}]) or "")
    assert why_not_together([here, {"problem": "no memfd"}]) == "rank 1: no memfd"


def test_a_process_of_the_same_pid_but_another_start_is_another():
    me = PeerProcess(os.getpid(), state_and_start(os.getpid())[1])
    watch = PeerWatch([me])
    assert not watch.is_gone(0)
    assert not watch.is_stopped(0)
    assert watch.pid(0) == os.getpid()
    assert PeerWatch([type(me)(me.pid, me.start_ticks + 1)]).is_gone(0)
    assert PeerWatch([type(me)(1 << 22, 5)]).is_gone(0)


@pytest.mark.parametrize(
    ("phases", "gives_up"),
    [
        ((Phase.FORWARD, Phase.FORWARD), True),
        ((Phase.FORWARD, Phase.EVALUATING), True),
        ((Phase.EVALUATING, Phase.SAVING), False),
    ],
)
def test_a_rank_in_a_long_phase_earns_no_time_for_one_that_hangs(phases: tuple[Phase, Phase], gives_up: bool):
    """After 100 s of the 60 s that a step may take, and the 360 s of an evaluation or a save."""
    pages = [Heartbeat(each, phase, 3, 1, False, 0) for each, phase in enumerate(phases, start=1)]
    watch = SimpleNamespace(
        seen=lambda rank: pages[rank - 1], pid=id, is_gone=lambda _: False, is_stopped=lambda _: False
    )
    policy = WaitPolicy(timeout_s=60.0)
    counters = ProgressCounters(0, rank=0, watch=watch, policy=policy, has_left=lambda _: False, known_as=range(3))
    with pytest.raises(CollectiveTimeoutError) if gives_up else contextlib.nullcontext():
        counters.check(Waiting(time.monotonic() - 100), [1, 2], lambda: "a call", lambda: [1, 2])
