"""The pool of ranks that other tests stand on."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import evenstep
from evenstep.launcher.pool import RankGroup
from evenstep.testing import RankPool


def identity() -> tuple[int, int, int, int]:
    world = evenstep.init(quiet=True)
    return world.rank, world.world_size, os.getpid(), torch.get_num_threads()


def sum_of_ranks() -> float:
    world = evenstep.init(quiet=True)
    return world.mean(float(world.rank)) * world.world_size


def sum_and_close() -> float:
    with evenstep.init(quiet=True) as world:
        return world.mean(float(world.rank)) * world.world_size


def raise_on_rank_1() -> None:
    if evenstep.init(quiet=True).rank == 1:
        raise ValueError("as asked")
    evenstep.world.current().barrier()


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def test_results_come_in_order_of_rank_and_the_processes_are_kept(ranks: RankPool) -> None:
    first = ranks.run(identity, 2)
    assert [result[:2] for result in first] == [(0, 2), (1, 2)]
    assert [result[3] for result in first] == [1, 1]
    assert ranks.run(identity, 2) == first
    assert ranks.run(double, 2, torch.arange(3))[1].tolist() == [0, 2, 4]


def test_a_world_that_a_task_closed_can_be_made_again(ranks: RankPool) -> None:
    for _ in range(3):
        assert ranks.run(sum_and_close, 2) == [1.0, 1.0]


def test_sizes_live_beside_each_other(ranks: RankPool) -> None:
    assert ranks.run(sum_of_ranks, 2) == [1.0] * 2
    assert ranks.run(sum_of_ranks, 1) == [0.0]


@pytest.mark.extended
def test_a_failure_is_the_culprits_and_the_next_task_has_new_processes() -> None:
    with RankPool() as pool:
        before = pool.run(identity, 2)
        with pytest.raises(ValueError, match="as asked") as caught:
            pool.run(raise_on_rank_1, 2)
        assert "rank 1" in str(caught.value.__cause__)
        assert pool.pids == set()
        after = pool.run(identity, 2)
        assert {result[2] for result in before}.isdisjoint(result[2] for result in after)
        assert (pool.num_cases, pool.num_groups) == (3, 2)


def test_a_pool_that_has_ended_leaves_sigchld_ignored_where_it_was() -> None:
    """The user's own process, whose children the kernel reaped before: they would stay as zombies."""
    before = signal.getsignal(signal.SIGCHLD)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        pool = RankGroup(1)
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "or no rank's status would be known"
        pool.close()
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)
