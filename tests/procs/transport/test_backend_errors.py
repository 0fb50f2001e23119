"""What the backend "evenstep" is given and can't use: one error on all ranks, and calls work where all ranks refuse."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions

import evenstep
from evenstep.errors import ConfigurationError, MismatchError
from evenstep.testing import RankPool

from .test_backend import rank_1_comes_late
from .test_several_hosts import on_hosts


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


# By words of the reason: the call that is refused where it is the odd one, on two ranks.
Make = Callable[[Any, bool], Any]
REFUSED: dict[str, Make] = {
    "3 rows, which are not divisible by 2 ranks": lambda g, odd: dist.all_to_all_single(
        torch.ones(3 if odd else 4, 2), torch.ones(3 if odd else 4, 2), group=g, async_op=True
    ),
    "1 outputs for 2 inputs": lambda g, odd: g.all_gather_single_coalesced(
        tensors(4) if odd else tensors(4, 6), tensors(2, 3)
    ),
    "2 outputs for 1 inputs": lambda g, odd: g.reduce_scatter_single_coalesced(
        tensors(2, 3), tensors(4) if odd else tensors(4, 6)
    ),
    "outputs are float32 [2], float32 [4]": lambda g, odd: g.allgather(
        [tensors(2, 4) if odd else tensors(3, 3)], tensors(3)
    ),
    "outputs are none": lambda g, odd: g.allgather([[] if odd else tensors(3, 3)], tensors(3)),
    "inputs are float32 [3]": lambda g, odd: g.reduce_scatter(tensors(3), [tensors(3) if odd else tensors(3, 3)]),
    "inputs are float32 [2], float32 [4]": lambda g, odd: g.scatter(
        tensors(3), [tensors(2, 4) if odd else tensors(3, 3)] if g.rank() == 1 else [], root=1
    ),
    "outputs are float32 [1]": lambda g, odd: g.gather(
        [tensors(1) if odd else tensors(3, 3)] if g.rank() == 1 else [], tensors(3), root=1
    ),
    "inputs are float32 [2]; there is one for each of 2 ranks, of one dtype": lambda g, odd: g.alltoall(
        tensors(1, 1), tensors(2) if odd else tensors(1, 1)
    ),
}  # fmt: skip


def refused_on_rank_1() -> list[str]:
    evenstep.init(quiet=True)
    told = []
    for make in REFUSED.values():
        group = dist.new_group(backend="evenstep", timeout=timedelta(seconds=20))
        started = time.monotonic()
        with pytest.raises((ConfigurationError, MismatchError)) as refused:
            make(group, group.rank() == 1).wait()
        assert time.monotonic() - started < 10
        told.append(f"{type(refused.value).__name__}: {refused.value}")
        dist.destroy_process_group(group)
    return told


def test_lists_that_do_not_fit_on_one_rank_are_an_error_on_all(ranks: RankPool) -> None:
    first, second = ranks.run(refused_on_rank_1, 2, timeout_s=120)
    for words, others, own in zip(REFUSED, first, second, strict=True):
        assert own.startswith("ConfigurationError: ")
        assert words in own, own
        assert others.startswith("MismatchError: ")
        assert f"Rank 1: {own.removeprefix('ConfigurationError: ')}" in others, others


def refused_on_both() -> float:
    evenstep.init(quiet=True)
    group = dist.new_group(backend="evenstep", timeout=timedelta(seconds=20))
    for make in [*REFUSED.values()][:3]:
        with pytest.raises(ConfigurationError):
            make(group, True)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return float(total)


def test_lists_that_do_not_fit_on_any_rank_are_no_call(ranks: RankPool) -> None:
    assert ranks.run(refused_on_both, 2) == [2.0, 2.0]


def left_to_gloo_too_late() -> tuple[float, str]:
    """Rank 1 comes when rank 0 has given up: after the call's own deadline, not after the group's."""
    evenstep.init(quiet=True)
    group = dist.new_group(backend="evenstep", timeout=timedelta(seconds=50))
    options = AllreduceOptions()
    options.timeout = timedelta(seconds=0.5)
    return rank_1_comes_late(group, lambda: group.allreduce([torch.eye(3).to_sparse()], options).wait())


def test_what_gloo_carries_has_the_calls_own_deadline(ranks: RankPool) -> None:
    (took_s, told), _ = ranks.run(left_to_gloo_too_late, 2)
    assert 0.5 <= took_s < 30
    assert "Missing: rank 1" in told
    assert "timeout_s=0.5" in told


def between_hosts(names: str) -> list[str]:
    """What a rank is told where rank 1 alone leaves a call to Gloo, or gives what can't be used; then sparse sums."""
    evenstep.init(quiet=True)
    told = []
    for case in range(3):
        with on_hosts(names):
            group = dist.new_group(backend="evenstep", timeout=timedelta(seconds=40))
        odd = group.rank() == 1
        started = time.monotonic()
        try:
            if case == 0:
                dist.all_reduce(torch.eye(3).to_sparse() if odd else torch.eye(3), group=group)
            elif case == 1:
                group.all_gather_single_coalesced([torch.ones(group.size())] * (1 + odd), [torch.ones(1)]).wait()
            else:
                total = (torch.eye(2) * (1 + group.rank())).to_sparse()
                dist.all_reduce(total, group=group)
                told.append(str(total.to_dense().tolist()))
        except (ConfigurationError, MismatchError) as error:
            told.append(f"{type(error).__name__}: {error}")
        assert time.monotonic() - started < 20
        dist.destroy_process_group(group)
        del group
        assert time.monotonic() - started < 20  # what rank 1 alone has left to Gloo isn't waited for
    return told


def test_between_hosts_they_are_errors_on_all_too(ranks: RankPool) -> None:
    told = ranks.run(between_hosts, 3, "aab", timeout_s=120)
    for rank, (sparse, unequal, total) in enumerate(told):
        assert sparse == told[0][0]
        assert "rank 1: all_reduce over gloo, of what shared memory doesn't carry" in sparse
        assert "2 outputs for 1 inputs" in unequal
        assert unequal.startswith("ConfigurationError" if rank == 1 else "MismatchError")
        assert total == "[[6.0, 0.0], [0.0, 6.0]]"


ENDING = """
import evenstep
from tests.procs.test_backend_arguments import between_hosts

if __name__ == "__main__":
    print(evenstep.launch(between_hosts, 3, ("aab",))[-1])
"""


def test_a_process_can_end_while_such_a_call_is_under_way(tmp_path: Path) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout.splitlines()[-1:] == ["[[6.0, 0.0], [0.0, 6.0]]"], ended.stderr
    assert ended.returncode == 0
    assert "terminate called" not in ended.stderr  # of a rank
