"""The same script under the real mpiexec of Open MPI and MPICH."""

from __future__ import annotations

import socket
import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.launchers.conftest import PYTHON, mpiexec
from tests.launchers.slurm import clean_environment

KINDS = {"openmpi": "Open MPI", "mpich": "MPICH"}
DEADLINE_S = 150.0

# Trains a little, so that more than the meeting is shown, and meets a second time. A line is one write: an unbuffered
# `print` makes two, and a launcher may put another rank's between them.
TRAINS = """
    import evenstep, torch

    with evenstep.init(seed=3, device="cpu") as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = evenstep.DataLoader(
            torch.utils.data.TensorDataset(torch.arange(40.0).view(10, 4) / 40), global_batch_size=5
        )
        for (x,) in loader:
            model.backward(model(x).square().mean(), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
        total = sum(p.sum().item() for p in model.parameters())
        print(f"rank {world.rank} of {world.world_size}, {world.local_rank} of {world.local_world_size}, host"
              f" {world.node_rank} of {world.num_nodes}, {world.launcher}, {world.transport_name}, {total:.6f}\\n",
              end="", flush=True)
    with evenstep.init(quiet=True, device="cpu") as world:
        world.barrier()
"""


def call(directory: Path, command: list[str], script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (directory / "script.py").write_text(textwrap.dedent(script))
    return subprocess.run(
        [*command, PYTHON, "script.py"],
        cwd=directory,
        env=clean_environment() | {"OMP_NUM_THREADS": "1"} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


@pytest.mark.parametrize("kind", KINDS)
def test_the_ranks_meet_and_train_as_one_process_does(tmp_path: Path, kind: str) -> None:
    done = call(tmp_path, [*mpiexec(kind), "-n", "2"], TRAINS)
    assert done.returncode == 0, done.stdout + done.stderr
    alone = call(tmp_path, [], TRAINS)
    total = lines(alone.stdout)[0].rpartition(", ")[2]
    assert lines(done.stdout) == [
        f"rank {rank} of 2, {rank} of 2, host 0 of 1, {KINDS[kind]}, shared memory, {total}" for rank in range(2)
    ]
    assert done.stderr.count("evenstep: 2 ranks on 1 node, cpu, 1 thread per rank, shared memory") == 1


def test_a_port_in_use_is_named_with_its_owner(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = call(
            tmp_path,
            [*mpiexec("mpich"), "-n", "2"],
            "import evenstep; evenstep.init(device='cpu', timeout_s=5)",
            MASTER_PORT=str(port),
        )
    assert done.returncode != 0
    assert f"can't listen at 127.0.0.1:{port}: port {port} is in use by pid" in done.stderr
    assert "another process listens there, and does not answer as rank 0 would" in done.stderr


SERVED = """
    import evenstep, torch

    with evenstep.parameter_server(
        lambda: torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1), mode="sync"
    ) as ps:
        loader = evenstep.DataLoader(torch.rand(10, 4), global_batch_size=2, queue=ps.queue())
        for x in loader:
            ps.backward(ps(x).square().mean(), weight=len(x))
            ps.step()
    print(f"worker {ps.worker} of {ps.num_workers}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_ranks_are_parameter_servers(kind: str, tmp_path: Path) -> None:
    done = call(tmp_path, [*mpiexec(kind), "-n", "3"], SERVED, EVENSTEP_SERVERS="1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == ["worker 0 of 2", "worker 1 of 2"], done


ENDLESS = """
    import os, pathlib, signal
    import evenstep, torch
    from evenstep.ground.environment import current_placement

    rank = current_placement().rank
    pathlib.Path(f"{rank}-is-{os.getpid()}").touch()
    with evenstep.parameter_server(
        lambda: torch.nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.1), mode="async"
    ) as ps:
        for step in range(10**9):
            ps.step()
            if step == 50 and ps.worker == 1:
                (victim,) = pathlib.Path.cwd().glob("{VICTIM}-is-*")
                os.kill(int(victim.name.split("-")[-1]), signal.SIGKILL)
"""


@pytest.mark.parametrize(("kind", "victim"), [*zip(KINDS, [1, 2], strict=True)])  # a worker; a server
def test_a_dead_rank_ends_a_run_with_parameter_servers(kind: str, victim: int, tmp_path: Path) -> None:
    """Nobody hangs: mpiexec ends the others."""
    script = ENDLESS.replace("{VICTIM}", str(victim))
    done = call(tmp_path, [*mpiexec(kind), "-n", "3"], script, EVENSTEP_SERVERS="1")
    assert done.returncode != 0, done
