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
