"""The parts of the shared-memory transport that need no second process."""

from __future__ import annotations

import ctypes
import gc
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenstep.errors import ConfigurationError
from evenstep.transport import segment as segment_module
from evenstep.transport.arena import Arena, FreeList, Views
from evenstep.transport.arguments import flat_view
from evenstep.transport.arrivals import WaitPolicy, adapt_spin, plan_waiting
from evenstep.transport.header import (
    DTYPES,
    HEADER_USED_BYTES,
    Fingerprint,
    explain_mismatch,
    pack_place,
    unpack_header,
)
from evenstep.transport.host import describe_this_process, why_not_together
from evenstep.transport.peers import PeerWatch, this_process
from evenstep.transport.reduction import Scratch, plan_arithmetic, plan_slices, plan_tree, reduce_into
from evenstep.transport.segment import HEADER_BYTES, Segment, host_memory_bytes, plan_segment
from evenstep.transport.semaphores import make_semaphores, sem_post, sem_trywait, take

NUMEL = 300_001  # more than a block of sums


@given(st.integers(0, 100_000), st.integers(1, 70), st.sampled_from([1, 2, 4, 8, 16]))
def test_slices_cover_each_element_once_and_share_no_cache_line(numel, num_slices, itemsize):
    slices = plan_slices(numel, num_slices, itemsize)
    assert len(slices) == num_slices
    position = 0
    for begin, end in slices:
        assert begin == position or begin == end == numel
        assert begin == numel or begin * itemsize % 64 == 0
        position = max(position, end)
    assert position == numel


@given(st.integers(1, 64))
def test_the_tree_adds_every_rank_once_and_is_shallow(num_ranks):
    depth = [0] * num_ranks
    members = [{rank} for rank in range(num_ranks)]
    for a, b in plan_tree(num_ranks):
        assert members[a].isdisjoint(members[b])
        members[a] |= members[b]
        depth[a] = max(depth[a], depth[b]) + 1
    assert members[0] == set(range(num_ranks))
    assert depth[0] == (num_ranks - 1).bit_length()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_sums_are_rounded_once(dtype, num_ranks):
    inputs = [torch.randn(NUMEL).to(dtype) for _ in range(num_ranks)]
    outputs = [torch.empty(NUMEL, dtype=dtype) for _ in range(2)]
    reduce_into(outputs, inputs, plan_arithmetic("sum", dtype), Scratch())
    partial = [each.float() for each in inputs]
    for a, b in plan_tree(num_ranks):
        partial[a] = partial[a] + partial[b]
    for output in outputs:
        assert torch.equal(output, partial[0].to(dtype))


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_outputs_may_be_the_inputs(num_ranks):
    inputs = [torch.randn(NUMEL) for _ in range(num_ranks)]
    expected = [torch.empty(NUMEL)]
    reduce_into(expected, [each.clone() for each in inputs], plan_arithmetic("sum", torch.float32), Scratch())
    reduce_into(inputs[::-1], inputs, plan_arithmetic("sum", torch.float32), Scratch())
    assert all(torch.equal(each, expected[0]) for each in inputs)


@pytest.mark.parametrize(
    ("op", "dtype", "words"),
    [
        ("average", torch.float32, "there are sum, mean"),
        ("max", torch.complex64, "no order"),
        ("band", torch.float32, "integers and bool"),
        ("mean", torch.int64, "no integer"),
        ("sum", torch.float8_e5m2, "8-bit floats"),
    ],
)
def test_what_has_no_meaning_is_refused(op, dtype, words):
    with pytest.raises(ConfigurationError, match=words):
        plan_arithmetic(op, dtype)


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
        assert free.free_bytes == 1000 - sum(n for _, n in in_use)
    for each in in_use:
        free.give(*each)
    assert free.take(1000) == 0


@pytest.mark.parametrize("world_size", [2, 3, 64])
def test_the_layout_has_no_overlap(world_size):
    layout = plan_segment(world_size, memory_bytes=(1 << 30) + 5)
    assert layout.notes < layout.semaphores < layout.headers < layout.small < layout.pieces < layout.common_bytes
    assert layout.small_slot(world_size - 1, segment_module.NUM_SLOTS) == layout.pieces
    assert layout.piece(world_size - 1, segment_module.NUM_PIECES) <= layout.zone(0) == layout.common_bytes
    assert layout.zone(1) - layout.zone(0) >= (1 << 30) + 5
    assert layout.header(0, 1) - layout.header(0, 0) == HEADER_BYTES >= HEADER_USED_BYTES


def make_segment() -> Segment:
    return Segment.create(plan_segment(2, memory_bytes=host_memory_bytes()), b"n" * 16)


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
    assert arena.used_bytes == 4 << 20
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
    assert arena.used_bytes == 12 << 20  # a view still needs it
    address = view.data_ptr()
    del view
    assert arena.used_bytes == 8 << 20
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
    assert arena.used_bytes == 0
    assert arena.allocate(100_000, torch.float32).shape == (100_000,)


def test_semaphores_count():
    memory = ctypes.create_string_buffer(256)
    address = -(-ctypes.addressof(memory) // 64) * 64
    make_semaphores(address, 1)
    assert sem_trywait(address) != 0
    assert take(address, 0.01) is False
    sem_post(address)
    sem_post(address)
    assert take(address, 0.01) is True
    assert sem_trywait(address) == 0
    assert sem_trywait(address) != 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_headers_come_back_as_they_were(dtype):
    fingerprint = Fingerprint("all_reduce", "max", dtype, (3, 0, 5), -1)
    place, packed = unpack_header(pack_place(4096) + fingerprint.pack() + b"beyond")
    assert (place, packed) == (4096, fingerprint.pack())
    assert Fingerprint.unpack(packed) == fingerprint
    assert unpack_header(pack_place(None) + packed)[0] is None


def test_a_mismatch_names_both_sides():
    same = Fingerprint("broadcast", None, torch.int64, (2, 3), 1).pack()
    other = Fingerprint("all_reduce", "sum", torch.float32, (6,)).pack()
    assert explain_mismatch(1, "shared memory", [same, same]) is None
    text = explain_mismatch(7, "shared memory", [same, other, same])
    assert text is not None
    assert "number 7" in text
    assert "ranks 0, 2: broadcast from rank 1 of int64 [2, 3]" in text
    assert "rank 1: all_reduce(sum) of float32 [6]" in text


def test_a_mismatch_in_a_ninth_dimension_is_one():
    one, other = (Fingerprint("barrier", None, torch.uint8, (1,) * 8 + last).pack() for last in ((2, 3), (3, 2)))
    assert explain_mismatch(1, "shared memory", [one, one]) is None
    text = explain_mismatch(1, "shared memory", [one, other])
    assert text is not None
    assert "rank 1: barrier of uint8 [1, 1, 1, 1, 1, 1, 1, 1] and 2 more dimensions" in text


def test_one_element_can_be_looked_at_as_bytes_whatever_its_stride_is():
    for numel in (0, 1):
        memory = torch.arange(12.0)
        with_gaps = memory[5::3][:numel]
        assert with_gaps.is_contiguous()
        raw = flat_view(with_gaps).view(torch.uint8)
        assert raw.shape == (4 * numel,)
        raw.zero_()
        assert memory.eq(0).nonzero().flatten().tolist() == ([0, 5] if numel else [0])


def test_who_can_share_memory():
    here = describe_this_process(0)
    assert here["problem"] is None
    assert why_not_together([here, here]) is None
    assert why_not_together([here, here | {"boot": "another"}]) == "ranks 0 and 1 are on different hosts"
    assert "containers" in (why_not_together([here, here | {"namespaces": ["pid:[1]", "user:[1]"]}]) or "")
    assert "users" in (why_not_together([here, here | {"user": 12345}]) or "")
    assert why_not_together([here, {"problem": "no memfd"}]) == "rank 1: no memfd"


def test_spinning_adapts_to_the_cores():
    roomy = plan_waiting(2, num_cores=2, timeout_s=1.0)
    crowded = plan_waiting(4, num_cores=2, timeout_s=1.0)
    assert crowded.num_eager_tries < roomy.num_eager_tries
    assert crowded.spin_s < roomy.spin_s


def test_spinning_adapts_to_how_long_waits_are():
    policy = WaitPolicy(timeout_s=1.0)
    spin_s = policy.spin_s
    for _ in range(10):
        spin_s = adapt_spin(spin_s, 0.01, policy)
    assert spin_s == policy.min_spin_s
    for _ in range(10):
        spin_s = adapt_spin(spin_s, 50e-6, policy)
    assert spin_s == policy.spin_s


def test_a_process_of_the_same_pid_but_another_start_is_another():
    me = this_process(1)
    watch = PeerWatch([me])
    assert not watch.is_gone(1)
    assert not watch.is_stopped(1)
    assert watch.pid(1) == os.getpid()
    watch.close()
    other = PeerWatch([type(me)(1, me.pid, me.start_ticks + 1)])
    assert other.is_gone(1)
    other.close()
    assert PeerWatch([type(me)(1, 1 << 22, 5)]).is_gone(1)
