"""Errors of the backend "evenstep", on all ranks: refused arguments, calls that differ, deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import evenstep
from evenstep.errors import CollectiveTimeoutError, MismatchError, UsageError
from evenstep.testing import RankPool
from evenstep.transport.shm.transport import SharedMemoryTransport
from tests.procs.transport.test_internode import on_nodes


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


def between_nodes(names: str) -> list[str]:
    """What a rank is told where rank 1 alone leaves a call to Gloo; then a sparse sum."""
    evenstep.init(quiet=True)
    told = []
    for is_wrong in (True, False):
        with on_nodes(names):
            group = dist.new_group(backend="evenstep", timeout=timedelta(seconds=40))
        is_sparse, total = group.rank() == 1 or not is_wrong, torch.eye(2) * (1 + group.rank())
        tensor, started = total.to_sparse() if is_sparse else total, time.monotonic()
        try:
            dist.all_reduce(tensor, group=group)
            told.append(str(tensor.to_dense().tolist()))
        except MismatchError as error:
            told.append(str(error))
        dist.destroy_process_group(group)
        del group
        assert time.monotonic() - started < 20  # what rank 1 alone has left to Gloo isn't waited for
    return told


def test_between_nodes_they_are_errors_on_all_too(ranks: RankPool) -> None:
    told = ranks.run(between_nodes, 3, "aab", timeout_s=120)
    for sparse, total in told:
        assert sparse == told[0][0]
        assert "rank 1: all_reduce over gloo of tensors that shared memory doesn't carry" in sparse
        assert total == "[[6.0, 0.0], [0.0, 6.0]]"


def failure_of(work: Any, *, by_future: bool) -> Exception:
    """What `wait` raises, the work's own or that of its future."""
    with pytest.raises((MismatchError, RuntimeError)) as failed:
        (work.get_future() if by_future else work).wait()
    return failed.value


def disagreements() -> list[str]:
    """What a rank is told when the ranks call different things, by `wait` and by a future."""
    evenstep.init(quiet=True)
    told = []
    for by_future in (False, True):
        group = dist.new_group(backend="evenstep")
        work = dist.all_reduce(torch.ones(3 + group.rank()), group=group, async_op=True)
        error = failure_of(work, by_future=by_future)
        told.append(f"{type(error).__name__}: {error}")
        assert not work.is_success()
        assert isinstance(work.exception(), MismatchError)
        dist.destroy_process_group(group)
    group = dist.new_group(backend="evenstep")
    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3), process_group=group)
    try:
        if group.rank() == 0:
            replica(torch.ones(1, 3)).sum().backward()
        else:
            dist.all_reduce(torch.ones(5), group=group)
    except RuntimeError as error:  # MismatchError is one, too
        told.append(str(error))
    del replica  # one that outlives its process group may never end
    dist.destroy_process_group(group)
    return told


def test_mismatches_are_the_transports_own_errors(ranks: RankPool) -> None:
    told = ranks.run(disagreements, 2)
    # Where the process's own thread finds it, a rank is "nowhere in a script" for that thread, and not for others.
    first, second = ([each.partition(" They were called here")[0] for each in of_rank] for of_rank in told)
    assert first[:2] == second[:2]
    sizes = "rank 0: all_reduce(sum) of float32 [3]; rank 1: all_reduce(sum) of float32 [4]"
    assert told[0][0].startswith("MismatchError: the ranks disagree in collective number 1 over shared memory")
    assert sizes in told[0][0]
    assert told[0][1].startswith("RuntimeError")
    assert sizes in told[0][1]
    for each in told:
        assert "rank 0: all_reduce(sum) of float32 [12]; rank 1: all_reduce(sum) of float32 [5]" in each[2]


def with_gloo() -> Any:
    """A group that has made its Gloo."""
    group = dist.new_group(backend="evenstep", timeout=timedelta(seconds=20))
    dist.all_reduce(torch.eye(2).to_sparse(), group=group)
    return group


def sparse_on_one_rank() -> list[str]:
    """What a rank is told at once where rank 1 alone has a tensor that goes over Gloo."""
    evenstep.init(quiet=True)
    told = []
    group = dist.new_group(backend="evenstep", timeout=timedelta(seconds=20))
    started = time.monotonic()
    with pytest.raises(MismatchError) as raised:  # on rank 1 already as it calls: there is no Gloo yet
        dist.all_reduce(torch.eye(3).to_sparse() if group.rank() == 1 else torch.eye(3), group=group)
    assert time.monotonic() - started < 5
    told.append(str(raised.value).partition("\n")[0])
    dist.destroy_process_group(group)
    group = with_gloo()
    try:
        # Gloo refuses it, on this rank.
        dist.broadcast(torch.eye(3).to_sparse() if group.rank() == 1 else torch.eye(3), group_src=0, group=group)
    except (MismatchError, RuntimeError) as error:
        told.append(str(error))
    dist.destroy_process_group(group)
    return told


def test_what_one_rank_leaves_to_gloo_is_a_mismatch_at_once(ranks: RankPool) -> None:
    first, second = ranks.run(sparse_on_one_rank, 2, timeout_s=150)
    sparse = "rank 0: all_reduce(sum) of float32 [3, 3]; rank 1: all_reduce over gloo of tensors that shared memory"
    assert sparse in first[0]
    assert first[0] == second[0]
    assert "rank 0: broadcast from rank 0 of float32 [3, 3]; rank 1: no call, because its arguments were" in first[1]
    assert f" Rank 1: {second[1][:200]}" in first[1]


def told_another_deadline() -> tuple[float, str]:
    """Rank 1 comes late. What rank 0 says, and after how many seconds."""
    evenstep.init(quiet=True)
    group = dist.new_group(backend="evenstep", timeout=timedelta(days=1, seconds=0.5))
    shared = group._shared
    assert isinstance(shared, SharedMemoryTransport), group.why_gloo
    before = shared.counters.policy.timeout_s
    group.set_timeout(timedelta(seconds=50))  # which `torch.distributed.set_timeout` of torch 2.15 calls
    assert shared.counters.policy.timeout_s == 50
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.4), group)
    assert before == 86400.5, "as it was made"
    assert shared.counters.policy.timeout_s == 0.4
    assert group._gloo is None, "a deadline needs no Gloo"
    assert group._timeout == timedelta(seconds=0.4), "what falls through has the same deadline"
    return rank_1_comes_late(group, lambda: dist.all_reduce(torch.ones(8), group=group))


def monitored() -> tuple[float, str]:
    """Rank 1 comes late to a barrier with a deadline of its own."""
    evenstep.init(quiet=True)
    group = dist.new_group(backend="evenstep")
    group.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)
    return rank_1_comes_late(group, lambda: group.monitored_barrier(timedelta(seconds=0.4)))


def rank_1_comes_late(group: Any, call: Callable[[], object]) -> tuple[float, str]:
    """After how many seconds rank 0 gives a call up, and what it says. Ends the group."""
    began, told = time.monotonic(), ""
    if group.rank() == 0:
        with pytest.raises(CollectiveTimeoutError) as raised:
            call()
        told = str(raised.value)
        *before, last = [line for line in told.splitlines() if f"group {group.group_name}: " in line]
        assert all(line.endswith(": completed") for line in before)
        assert last.endswith(": started")
    took_s = time.monotonic() - began
    evenstep.init(quiet=True).barrier()
    dist.destroy_process_group(group)
    return took_s, told


@pytest.mark.parametrize("way", [told_another_deadline, monitored])
def test_a_deadline_that_is_set_later_takes_effect(ranks: RankPool, way: Callable[[], tuple[float, str]]) -> None:
    """torch's own `_set_pg_timeout` knows Gloo and NCCL only."""
    (took_s, told), _ = ranks.run(way, 2)
    assert 0.4 <= took_s < 30
    assert "Missing: rank 1" in told
    assert "timeout_s=0.4" in told


def after_its_end() -> list[str]:
    evenstep.init(quiet=True)
    group = dist.new_group(backend="evenstep")
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)
    told = []
    calls: list[Callable[[], Any]] = [lambda: group.allreduce([torch.ones(1)]), group.barrier]
    for call in calls:
        with pytest.raises(UsageError) as raised:
            call()
        told.append(str(raised.value))
    return told


def test_a_group_that_is_over_refuses_calls_at_once(ranks: RankPool) -> None:
    for told in ranks.run(after_its_end, 2):
        assert all("has been destroyed" in each for each in told), told
