"""The pool of ranks that other tests stand on."""

from __future__ import annotations

import os

import pytest
import torch

import evenstep
from evenstep.testing import RankPool


def identity() -> tuple[int, int, int, int]:
    world = evenstep.init(quiet=True)
    return world.rank, world.world_size, os.getpid(), torch.get_num_threads()


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
