"""`evenstep.init` in processes of its own: alone, under torchrun, and at the end of a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(tmp_path: Path, script: str, *launcher: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    return subprocess.run(
        [sys.executable, *launcher, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        check=False,
    )


@pytest.mark.extended
def test_one_process_without_a_launcher_opens_nothing(tmp_path):
    result = run(
        tmp_path,
        """
import psutil, torch, torch.distributed as dist
import evenstep
with evenstep.init(seed=5) as world:
    first = torch.rand(())
    torch.manual_seed(5)
    print(world.rank, world.world_size, world.launcher, dist.is_initialized(), bool(first == torch.rand(())))
    print([c for c in psutil.Process().net_connections("inet")])
    model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1))
    model.backward(model(torch.ones(3, 1)).mean(), weight=3)
    print(world.mean(2.0, weight=3), world.gather(torch.ones(2)).tolist())
    with world.main_first() as main:
        print(main)
again = evenstep.init(seed=6, quiet=True)
print(again is world, again.seed)
""",
    )
    assert result.stderr == "evenstep: 1 rank on 1 node, cpu, 1 thread per rank, local\n"
    assert result.stdout == "0 1 none False True\n[]\n2.0 [1.0, 1.0]\nTrue\nFalse 6\n"
    assert result.returncode == 0


@pytest.mark.extended
def test_under_torchrun_it_is_the_same_script(tmp_path):
    result = run(
        tmp_path,
        """
import torch.distributed as dist
import evenstep
with evenstep.init() as world:
    world.print(world.launcher, world.mean(float(world.rank)), world.exchange(world.local_rank))
assert not dist.is_initialized()
""",
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )
    assert result.stdout == "torchrun 0.5 [0, 1]\n"
    assert result.stderr.count("evenstep: 2 ranks on 1 node, cpu, 1 thread per rank") == 1
    assert result.returncode == 0


@pytest.mark.extended
def test_a_world_that_nobody_closes_is_closed_at_exit(tmp_path):
    result = run(
        tmp_path,
        "import evenstep\nworld = evenstep.init(quiet=True)\nprint(f'{world.mean(1.0)}\\n', end='')\n",
        *("-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )
    assert (result.returncode, result.stdout) == (0, "1.0\n1.0\n")
    assert "destroy_process_group" not in result.stderr


ADOPTED = """
import pathlib
import evenstep, torch
import torch.distributed as dist

def gloo_threads():
    return [each for each in pathlib.Path("/proc/self/task").glob("*/comm") if "gloo" in each.read_text()]

dist.init_process_group("gloo")
model = evenstep.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3, 2)).sum().backward()
optimizer.step()
assert gloo_threads()
dist.destroy_process_group()
print(f"{len(gloo_threads())}\\n", end="", flush=True)
"""


@pytest.mark.extended
def test_nothing_keeps_a_group_that_the_script_destroys(tmp_path):
    """While its threads live, one that drops a tensor as python ends aborts the process: nothing may keep the group."""
    result = run(tmp_path, ADOPTED, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert (result.returncode, result.stdout) == (0, "0\n0\n"), result.stderr


AGAIN = """
import evenstep
import torch.distributed as dist

for turn in range(3):
    world = evenstep.init(quiet=True, seed=turn, transport="gloo" if turn == 1 else None)
    assert world.mean(world.rank) == 0.5
    if turn < 2:
        world.close()
        assert not dist.is_initialized()
try:
    with world:
        raise ValueError("in a notebook that goes on")
except ValueError:
    pass
with evenstep.init(quiet=True) as world:
    world.print(world.mean(world.rank), world.transport_name)
"""


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["evenstep", "torch.distributed.run"])
def test_a_world_that_was_closed_can_be_made_again(tmp_path, launcher):
    more = ("run",) if launcher == "evenstep" else ("--standalone",)
    result = run(tmp_path, AGAIN, "-m", launcher, *more, "--nproc-per-node", "2")
    assert (result.returncode, result.stdout) == (0, "0.5 shared memory\n"), result.stderr


CHILD = """
import subprocess, sys
import evenstep

CHILD = "import evenstep; print('child', evenstep.init(timeout_s=20).world_size)"

def start_child():
    print(subprocess.run([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True).stdout, end="", flush=True)
"""
CHILD_AFTER = f"""{CHILD}
with evenstep.init(timeout_s=20, quiet=True) as world:
    pass
if world.is_main:
    start_child()
"""
CHILD_BEFORE = f"""{CHILD}
import os
if os.environ["RANK"] == "0":
    start_child()
evenstep.init(timeout_s=20, quiet=True)
"""


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["evenstep", "torch.distributed.run"])
def test_a_child_of_a_rank_is_no_rank_also_after_the_world_has_ended(tmp_path: Path, launcher: str) -> None:
    """It waited for the other ranks, for as long as `timeout_s`."""
    more = ("run", "--device", "cpu") if launcher == "evenstep" else ("--standalone",)
    result = run(tmp_path, CHILD_AFTER, "-m", launcher, *more, "--nproc-per-node", "2")
    assert (result.returncode, result.stdout) == (0, "child 1\n"), result.stderr
    assert result.stderr.count("from which this process has inherited the launcher's variables") == 1


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["evenstep", "torch.distributed.run"])
def test_a_rank_that_a_child_has_been_is_no_rank_any_more(tmp_path: Path, launcher: str) -> None:
    """The child can't know that its parent will call `init`, but the parent sees that it has come too late."""
    more = ("run", "--device", "cpu") if launcher == "evenstep" else ("--standalone",)
    result = run(tmp_path, CHILD_BEFORE, "-m", launcher, *more, "--nproc-per-node", "2")
    assert result.returncode != 0
    assert result.stdout == "child 2\n"
    assert "two processes say that they are rank 0 of 2" in result.stderr


GIVEN_RANKS = f"""{CHILD}
import os, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, file):
    dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
    world = evenstep.init()
    model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1))
    model(torch.ones(3, 1)).sum().backward()
    with evenstep.Logger(os.path.dirname(__file__) + "/run") as log:
        log.log(dict(loss=float(rank)), step=0, mean=True)
    if rank == 1:
        print(world.rank, world.world_size, world.mean(float(rank)), flush=True)
        start_child()
    else:
        world.mean(float(rank))
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, [os.path.dirname(__file__) + "/rendezvous"], nprocs=2)
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    "variables", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "7"}]
)
def test_a_group_that_the_script_has_made_beats_variables(tmp_path: Path, variables: dict[str, str]) -> None:
    """Those of `mp.spawn` scripts may set half of torchrun's, or the same on all ranks."""
    result = run(tmp_path, GIVEN_RANKS, **variables)
    assert (result.returncode, result.stdout) == (0, "1 2 0.5\nchild 1\n"), result.stderr
