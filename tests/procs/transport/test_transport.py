"""One conformance suite for every transport, on 1 to 5 ranks."""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import evenstep
from evenstep.errors import ConfigurationError, EvenstepError
from evenstep.testing import RankPool
from evenstep.transport import factory
from evenstep.transport.base import Op
from evenstep.transport.local import LocalTransport
from evenstep.transport.process_group.gloo import connect_gloo, open_gloo
from evenstep.transport.process_group.transport import ProcessGroupTransport
from evenstep.transport.shm import handshake
from evenstep.transport.shm.handshake import connect_shared_memory
from evenstep.transport.shm.transport import SharedMemoryTransport
from tests.ranks import on_ranks
from tests.transport_cases import UNSIGNED, Coverage, check_transport

TIMEOUT_S = 60.0


def new_shared_memory() -> SharedMemoryTransport:
    made = connect_shared_memory(evenstep.init(quiet=True).control, timeout_s=TIMEOUT_S)
    assert isinstance(made, SharedMemoryTransport), made
    return made


def new_gloo() -> ProcessGroupTransport:
    evenstep.init(quiet=True)
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    return ProcessGroupTransport(group, name="gloo", timeout_s=TIMEOUT_S, owns_group=True)


def gloo_carries(op: Op, dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return op in ("max", "min", "product", "band", "bor", "bxor")  # the sum of two is 2
    if dtype.is_complex:
        return op in ("sum", "mean")
    return dtype not in (torch.int16, *UNSIGNED[1:])


def check_shared_memory(seed: int) -> int:
    return check_transport(new_shared_memory, Coverage(seed=seed))


def check_gloo(seed: int) -> int:
    shapes = ((), (1,), (3, 5), (1000,), (16385,))
    return check_transport(new_gloo, Coverage(shapes=shapes, carries=gloo_carries, seed=seed))


def test_local_conforms() -> None:
    assert check_transport(LocalTransport) > 1000


@pytest.mark.extended(ranks=3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nproc", [2, 3, 4, 5])
def test_shared_memory_conforms(ranks: RankPool, nproc: int, fresh_seed: int) -> None:
    counts = ranks.run(check_shared_memory, nproc, fresh_seed, timeout_s=500)
    assert min(counts) > 1000


@pytest.mark.extended(ranks=3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nproc", [2, 3, 4, 5])
def test_gloo_conforms(ranks: RankPool, nproc: int, fresh_seed: int) -> None:
    assert min(ranks.run(check_gloo, nproc, fresh_seed, timeout_s=500)) > 500


def check_one_rank(seed: int) -> tuple[int, int]:
    """Gloo and shared memory of a single rank, as a group of one in a larger world may be."""

    def shared_memory() -> SharedMemoryTransport:
        made = connect_shared_memory(LocalTransport(), timeout_s=TIMEOUT_S)
        assert isinstance(made, SharedMemoryTransport), made
        return made

    def gloo() -> ProcessGroupTransport:
        return connect_gloo(dist.HashStore(), 0, 1, timeout_s=TIMEOUT_S)

    coverage = Coverage(carries=gloo_carries, seed=seed)
    return check_transport(gloo, coverage), check_transport(shared_memory, Coverage(seed=seed))


def test_one_rank_conforms_over_every_transport(ranks: RankPool, fresh_seed: int) -> None:
    (counts,) = ranks.run(check_one_rank, 1, fresh_seed, timeout_s=150)
    assert min(counts) > 1000


def made_by_some_alone(first: int) -> list[float]:
    """Sums over the ranks from `first` on, each over a group of which the others don't know; and then over all."""
    evenstep.init(quiet=True)
    members = list(range(first, dist.get_world_size()))
    group = dist.new_group(members, backend="gloo")
    sums, splits = [], []
    if dist.get_rank() in members:
        opened = ProcessGroupTransport(group, name="gloo", timeout_s=TIMEOUT_S)
        for _ in range(2):
            split = opened.split()
            tensor = torch.ones(1)
            split.all_reduce(tensor).wait()
            sums.append(tensor.item())
            splits.append(split)
    of_all, tensor = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=20)), torch.ones(1)
    dist.all_reduce(tensor, group=of_all)
    for split in splits:  # not before: a peer may still be in its last call
        split.close()
    return [*sums, tensor.item()]


@pytest.mark.parametrize("first", [1, 2])
def test_after_groups_of_some_ranks_all_of_them_make_one(ranks: RankPool, first: int) -> None:
    """torch 2.15 counts the former on their members only, and names the latter after the count."""
    found = ranks.run(made_by_some_alone, 3, first)
    assert found == [[3.0 - first] * 2 * (rank >= first) + [3.0] for rank in range(3)]


def refusals() -> list[str]:
    """Whatever goes wrong on one rank, all ranks get the same reason."""
    world = evenstep.init(quiet=True)
    reasons = []

    def no_room(*args: object) -> None:
        raise ConfigurationError("5 bytes are needed, 4 are available")

    def refused(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    said = handshake.describe_this_process() | ({"boot": "x"} if os.environ["RANK"] == "1" else {})
    with mock.patch.object(handshake, "describe_this_process", return_value=said):
        reasons.append(handshake.connect_shared_memory(world.control, timeout_s=5))
    with mock.patch.object(handshake.Segment, "create", no_room):
        reasons.append(handshake.connect_shared_memory(world.control, timeout_s=5))
    if world.rank == 1:
        with mock.patch.object(handshake.Segment, "attach", refused):
            reasons.append(handshake.connect_shared_memory(world.control, timeout_s=5))
    else:
        reasons.append(handshake.connect_shared_memory(world.control, timeout_s=5))
    return [str(reason) for reason in reasons]


@pytest.mark.extended
def test_where_memory_cannot_be_shared_all_ranks_know_why(ranks: RankPool) -> None:
    told = ranks.run(refusals, 3)
    assert told[0] == told[1] == told[2]
    assert told[0][0] == "ranks 0 and 1 are on different nodes"
    assert told[0][1] == "rank 0 could not make it: 5 bytes are needed, 4 are available"
    assert told[0][2] == "rank 1 could not join: [Errno 13] Permission denied"


NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 38, 22, 2  # of prctl


def close_world() -> None:
    evenstep.init(quiet=True).close()


@contextlib.contextmanager
def described(describe: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Have ranks say something else of themselves, before and behind the process group's making."""
    with (
        mock.patch.object(handshake, "describe_this_process", describe),
        mock.patch.object(factory, "describe_this_process", describe),
    ):
        yield


def which(transport: str | None, shares: bool) -> tuple[str, str, str]:
    genuine = handshake.describe_this_process
    told = io.StringIO()
    with (
        contextlib.redirect_stderr(told),
        described(genuine if shares else lambda: {"problem": f"no, says {os.environ['RANK']}"}),
        evenstep.init(transport=transport) as world,
    ):
        assert world.mean(float(world.rank)) == (world.world_size - 1) / 2
        names = world.transport_name, world.control.name
    return *names, told.getvalue()


@pytest.mark.extended
def test_init_shares_memory_unless_told_otherwise(ranks: RankPool) -> None:
    ranks.run(close_world, 2)
    (carrier, control, told), (_, _, quiet) = ranks.run(which, 2, None, True)
    assert (carrier, control, quiet) == ("shared memory", "shared memory", "")
    assert told == "evenstep: 2 ranks on 1 node, cpu, 1 thread per rank, shared memory\n"
    assert ranks.run(which, 2, "gloo", True)[0][:2] == ("gloo", "gloo")
    carrier, control, told = ranks.run(which, 2, None, False)[0]
    assert (carrier, control) == ("gloo", "gloo")
    assert told.startswith("evenstep: using Gloo, because there is no shared memory: rank 0: no, says 0\n")


def refused_transports() -> list[str]:
    told = []
    with described(lambda: {"problem": f"no, says {os.environ['RANK']}"}):
        for name in ("shared memory", "nccl", "pigeons"):
            try:
                evenstep.init(transport=name, device="cpu")
            except ConfigurationError as error:
                told.append(str(error))
    assert not dist.is_initialized()
    return told


def test_a_transport_that_cannot_be_had_is_an_error_on_every_rank(ranks: RankPool) -> None:
    ranks.run(close_world, 2)
    for told in ranks.run(refused_transports, 2):
        assert told == [
            "transport='shared memory': rank 0: no, says 0. Leave the argument out, and Gloo is used.",
            "transport='nccl' can't carry gradients on cpu. Leave the argument out.",
            "evenstep.init: transport='pigeons'; 'shared memory', 'gloo' or 'nccl', or None to let evenstep choose.",
        ]


def splits_that_do_not_meet() -> list[str]:
    """Rank 1 sends what rank 0 doesn't expect. What each rank is told of the three calls."""
    evenstep.init(quiet=True)
    transport = open_gloo([0, 1], timeout_s=2)
    told = []
    for number in range(3):
        out_splits = splits = [2, 2]
        if number == 0:
            out_splits, splits = ([2, 0], [2, 2]) if transport.rank == 0 else ([2, 2], [2, 2])
        out = torch.full((sum(out_splits),), -1.0)
        try:
            given = torch.full((4,), 10.0 * number + transport.rank)
            transport.all_to_all(out, given, out_splits, splits).wait()
            told.append(str(out.tolist()))
        except EvenstepError as error:
            told.append(str(error))
    transport.close()
    return told


def test_what_nobody_expected_is_never_taken_for_a_later_calls(ranks: RankPool) -> None:
    first, second = ranks.run(splits_that_do_not_meet, 2)
    assert first[0] == "[0.0, 0.0]"
    # Whose deadline passes first closes the connection, and the other has lost its peer.
    unheard = ("lost a peer in all_to_all number", "waited too long in all_to_all number")
    assert all(any(words in each for words in unheard) for each in [*first[1:], *second])
    assert "in all_to_all number 1 (4 x float32) over gloo" in second[0]


@pytest.mark.parametrize("modes", [[True, False], [False, True]])
@on_ranks(2, 3)
def test_in_inference_mode_and_out_of_it(world: evenstep.World, modes: list[bool]) -> None:
    """An evaluation under torch.inference_mode() leaves nothing behind that training can't write to."""
    transport = new_shared_memory()
    size = transport.world_size
    for numel, mode in itertools.product((5, 200_000), modes):
        with torch.inference_mode(mode):
            total, everybodys = torch.ones(numel, 2)[:, 0], torch.zeros(size * numel)
            by_another_thread = transport.all_reduce(total)
            ended = threading.Event()
            by_another_thread.add_done_callback(lambda error, ended=ended: ended.set())
            assert ended.wait(30)
            by_another_thread.wait()
            work = transport.all_gather(everybodys, total)
        work.wait()  # in no such mode any more
        assert (everybodys == size).all()
        bucket = transport.allocate(numel, dtype=torch.bfloat16, device=torch.device("cpu")).fill_(1)
        transport.all_reduce(bucket).wait()
        assert (bucket == size).all()
    transport.close()


def open_and_close(num_times: int) -> None:
    evenstep.init(quiet=True)
    for _ in range(num_times):
        open_gloo([0, 1], timeout_s=20).close()


def test_a_group_may_be_closed_as_soon_as_it_is_open(ranks: RankPool) -> None:
    """Gloo's constructor had returned on one rank, which closed the group while the other one still connected."""
    ranks.run(open_and_close, 2, 300)


def fork_and_go_on(num_numel: int) -> tuple[str, bool]:
    """A child that has a garbage tensor of the segment, ends in the ordinary way, and may call no collective.

    The garbage collector hasn't come yet to a group of the parent's, whose threads the child doesn't have.
    """
    world = evenstep.init(quiet=True)
    reader, writer = os.pipe()
    gc.disable()
    transport = open_gloo([0, 1], timeout_s=20)
    circle: list[Any] = [transport._group]
    circle.append(circle)
    transport.close()
    del transport, circle
    bucket = world.transport.allocate(num_numel, dtype=torch.float32, device=torch.device("cpu"))
    pid = os.fork()
    if pid == 0:
        said = "no error"
        try:
            world.transport.barrier()
        except evenstep.errors.UsageError as error:
            said = str(error)
        finally:
            del bucket  # gives the memory back, where it is one's own
            gc.collect()
            world.close()
            os.write(writer, said.encode())
            os._exit(0)
    gc.enable()
    bucket.fill_(1.0 + world.rank)
    os.waitpid(pid, 0)
    os.close(writer)
    said = os.read(reader, 1000).decode()
    os.close(reader)
    world.transport.all_reduce(bucket).wait()
    return said, bool((bucket == sum(range(1, world.world_size + 1))).all())


def test_a_forked_child_leaves_memory_and_peers_alone(ranks: RankPool) -> None:
    for rank, (said, is_right) in enumerate(ranks.run(fork_and_go_on, 2, 1 << 18, timeout_s=10)):
        assert said == f"this process was forked from rank {rank}; only ranks can call collectives."
        assert is_right
