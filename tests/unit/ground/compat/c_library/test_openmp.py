"""A team of threads that would spin lets go of its cores, and work goes on as before."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from evenstep.ground.compat.c_library.openmp import rest_team


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_the_team_ends_and_the_next_operation_makes_another_one() -> None:
    before = torch.get_num_threads()
    x = torch.arange(1 << 20, dtype=torch.float64)
    try:
        torch.set_num_threads(3)
        for _ in range(3):
            rest_team()
            alone = _num_threads()
            torch.testing.assert_close(x * 2, x + x)
            assert _num_threads() == alone + 2, "the operation didn't run in three threads, so there is nothing to rest"
        rest_team()
        rest_team()  # harmless where there is no team
        assert _num_threads() == alone
    finally:
        torch.set_num_threads(before)
        rest_team()
