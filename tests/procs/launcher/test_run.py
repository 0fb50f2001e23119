"""`evenstep run` where all goes well. The scripts don't import torch unless they need it."""

from __future__ import annotations

import os
import re
import socket
import textwrap
from pathlib import Path

import pytest

from tests.commands import call, start

ANNOUNCED = "evenstep: 2 ranks on 1 node, cpu, 1 thread per rank"

TRAINS_AND_SAYS = """
    import logging, os, sys, warnings
    import evenstep, torch

    with evenstep.init(seed=0) as world:
        model = evenstep.DistributedDataParallel(torch.nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
        print("out", world.rank, sys.argv[1:])
        logging.warning("logged")
        warnings.warn("warned")
"""

STANDS_IN_FOR_RANDOM = """
import os, sys
open("taken-by-rank-" + os.environ.get("RANK", "none"), "w").close()
directory = sys.path.pop(0)
del sys.modules["random"]
import random  # python's own
sys.path.insert(0, directory)
"""


def test_rank_0_writes_to_the_terminal_and_the_others_to_files(tmp_path: Path) -> None:
    flags = ["--nproc-per-node", "2", "--threads-per-rank", "1", "--log-dir", "logs", "--device", "cpu"]
    code, command = call(tmp_path, [*flags, "script.py", "--lr", "3"], TRAINS_AND_SAYS)
    assert (code, command.stdout) == (0, "out 0 ['--lr', '3']\n")
    announced, *rest = command.stderr.splitlines()
    assert announced.startswith(ANNOUNCED)
    assert rest[0] == "WARNING:root:logged"
    (log,) = (tmp_path / "logs").glob("*/rank-1.log")
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} rank 1 step 2 \| (.*)"
    lines = [re.fullmatch(stamp, line) for line in log.read_text().splitlines()]
    assert all(lines), log.read_text()
    said = "".join(line[1] for line in lines if line is not None)
    assert all(said.count(word) >= 1 for word in ("out 1 ['--lr', '3']", "logged", "warned")), said
    assert command.left_files() == []
    assert command.leaves_no_process()


def test_lines_of_other_ranks_appear_while_they_run(tmp_path: Path) -> None:
    script = """
        import os, time
        print("started", flush=True)
        while os.environ["RANK"] == "1" and not os.path.exists("seen"):
            time.sleep(0.02)
    """
    command = start(tmp_path, ["--nproc-per-node", "2", "--all-ranks", "script.py"], script)
    command.wait_until(lambda: "[rank 1] started" in command.stdout)
    (tmp_path / "seen").touch()
    assert command.wait() == 0


def test_threads_and_device_reach_the_ranks(tmp_path: Path) -> None:
    script = """
        import os
        from evenstep.ground.environment import settings
        print(os.environ["OMP_NUM_THREADS"], settings().device, settings().launcher)
    """
    code, command = call(
        tmp_path, ["--nproc-per-node", "1", "--device", "cpu", "script.py"], script, OMP_NUM_THREADS="3"
    )
    assert (code, command.stdout) == (0, "3 cpu run\n")
    assert command.stderr == "evenstep: 1 rank on 1 node, cpu, 3 threads per rank\n"


@pytest.mark.extended
def test_the_script_is_main_to_the_very_end(tmp_path: Path) -> None:
    """Names, paths and pickling are those of `python script.py`, also in exit handlers."""
    script = """
        import atexit, os, pickle, sys

        class Mine:
            pass

        def at_exit():
            print(type(pickle.loads(pickle.dumps(Mine()))) is Mine)

        atexit.register(at_exit)
        print(__name__, os.path.basename(__file__), sys.modules["__main__"].Mine is Mine, sys.argv)
        print([os.path.relpath(entry) for entry in sys.path[:2]], os.getcwd() in sys.path or "" in sys.path)
        import neighbour
    """
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "neighbour.py").write_text("print('found', __name__)")
    (tmp_path / "sub" / "main.py").write_text(textwrap.dedent(script))
    # Torch imports a module of this name. `python sub/main.py` doesn't look for it here; `python -m evenstep` does.
    (tmp_path / "random.py").write_text(STANDS_IN_FOR_RANDOM)
    python_path = os.pathsep.join(filter(None, [str(tmp_path / "lib"), os.environ.get("PYTHONPATH")]))
    code, command = call(tmp_path, ["--nproc-per-node", "1", "sub/main.py", "x"], fresh=True, PYTHONPATH=python_path)
    assert (code, command.stdout.splitlines()) == (
        0,
        ["__main__ main.py True ['sub/main.py', 'x']", "['sub', 'lib'] False", "found neighbour", "True"],
    )
    assert not (tmp_path / "taken-by-rank-0").exists()


@pytest.mark.extended
def test_a_module_and_a_program(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    code, command = call(tmp_path, ["--nproc-per-node", "1", "-m", "package", "-x"])
    assert (code, command.stdout) == (0, "__main__ package ['-x']\n")
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--no-python", "sh", "-c", "echo rank $RANK; exit $RANK"])
    assert (code, command.stdout) == (1, "rank 0\n")
    assert "the last lines of rank 1" in command.stderr
    assert command.stderr.splitlines()[-2] == "rank 1"
    assert command.stderr.splitlines()[-1].endswith("exited with status 1")


def test_a_script_for_torchrun_runs_as_it_is(tmp_path: Path) -> None:
    script = """
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        print(x.item(), dist.get_world_size())
        dist.destroy_process_group()
    """
    code, command = call(tmp_path, ["--standalone", "--nproc-per-node", "2", "script.py"], script)
    assert (code, command.stdout) == (0, "3.0 2\n")
    assert command.stderr.splitlines() == [ANNOUNCED]


def test_a_script_with_evenstep_announces_itself_once_and_opens_no_port(tmp_path: Path) -> None:
    script = """
        import os
        import psutil
        import evenstep

        with evenstep.init() as world:
            total = world.mean(float(world.rank)) * world.world_size
            listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
            parent = [c.laddr for c in psutil.Process(os.getppid()).net_connections("inet") if c.status == "LISTEN"]
            world.print(total, world.launcher, listening, parent)
    """
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], script)
    assert (code, command.stdout) == (0, "1.0 evenstep run [] []\n")
    assert command.stderr.splitlines() == [ANNOUNCED]
    assert command.left_files() == []


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_hosts(tmp_path: Path, backend: str) -> None:
    """Two launchers on this machine stand for two nodes: what differs is that the ranks meet over TCP."""
    script = """
        import evenstep

        with evenstep.init() as world:
            total = world.mean(float(world.rank)) * world.world_size
            print(total, world.rank, world.local_rank, world.node_rank, world.num_nodes)
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {
        "static": ["--master-addr", "127.0.0.1", "--master-port", str(port)],
        "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a", "--local-addr"],
    }[backend] + (["127.0.0.1"] if backend == "c10d" else [])
    commands = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        flags = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node), "-t", "3", *meeting]
        commands.append(start(tmp_path / str(node), [*flags, "script.py"], script))
    assert [command.wait() for command in commands] == [0, 0]
    said = sorted(line.removeprefix("[rank 1] ") for command in commands for line in command.stdout.splitlines())
    assert said == ["1.0 0 0 0 2", "1.0 1 0 1 2"]
    assert all("2 ranks on 2 nodes" in command.stderr for command in commands)


TAKEN = """
    import os, socket, sys
    import torch, torch.distributed as dist

    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    if rank == 0:  # what any user of the node could do before rank 0 does
        stranger = socket.socket()
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
    for turn, method in enumerate([None, f"tcp://127.0.0.1:{port}", None]):
        given = {} if method is None else {"rank": rank, "world_size": 2}
        dist.init_process_group("gloo", init_method=method, **given)
        total = torch.ones(1) * (turn + rank)
        dist.all_reduce(total)
        assert total.item() == 2 * turn + 1
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        stranger.settimeout(0)
        try:
            stranger.accept()
        except BlockingIOError:
            print("nobody came")
"""


def test_who_listens_on_the_reserved_port_first_gets_no_rank(tmp_path: Path) -> None:
    """Rank 1 connected to a stranger, and rank 0 failed."""
    code, command = call(tmp_path, ["--nproc-per-node", "2", "--device", "cpu", "script.py"], TAKEN)
    assert (code, command.stdout) == (0, "nobody came\n"), command.stderr


ALONE = """
    import os, sys, torch

    if "group" in sys.argv:
        torch.distributed.init_process_group("gloo")
    if "world" in sys.argv:
        import evenstep
        evenstep.init()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    if "group" in sys.argv:
        torch.distributed.destroy_process_group()
"""


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize(
    ("flags", "arguments", "says"),
    [
        (
            ["--nproc-per-node", "2"],
            [],
            "2 ranks train independent copies: the script has called neither evenstep.init",
        ),
        (["--nproc-per-node", "1"], [], ""),
        (["--nproc-per-node", "2"], ["group"], ""),
        (["--nproc-per-node", "2"], ["world"], ""),
    ],
)
def test_ranks_that_do_nothing_together_are_told(
    tmp_path: Path, flags: list[str], arguments: list[str], says: str
) -> None:
    code, command = call(tmp_path, ["--device", "cpu", *flags, "script.py", *arguments], ALONE)
    assert code == 0, command.stderr
    found = [line for line in command.stderr.splitlines() if "independent" in line]
    assert len(found) == bool(says)
    assert says in "".join(found)


SPAWNS = """
    import os
    import torch, torch.distributed as dist, torch.multiprocessing as mp

    def set_up(rank):
        dist.init_process_group("gloo", f"file://{os.path.abspath('meet')}", rank=rank, world_size=2)

    class Training:
        def __init__(self, rank):
            set_up(rank)

        @classmethod
        def run(cls, rank):
            cls(rank)

    def fail(rank):
        raise OSError("no rank")

    if __name__ == "__main__":
        START
"""


@pytest.mark.parametrize(
    ("num_ranks", "start", "code", "says"),
    [
        ("2", "mp.spawn(Training.run, nprocs=2)", 78, "script.py starts its own ranks: processes in which run calls"),
        ("2", "mp.Process(target=set_up, args=(0,)).start()", 78, "ConfigurationError: script.py starts its own"),
        pytest.param(
            *("2", "mp.spawn(fail, nprocs=2)", 1, r"rank \d \(pid \d+\) failed: Process\w+Exception: \S"),
            marks=pytest.mark.extended,
        ),
        pytest.param("1", "mp.spawn(set_up, nprocs=2)", 0, "", marks=pytest.mark.extended),
    ],
)
def test_a_script_that_spawns_its_own_ranks_is_told_how_to_start_it(
    tmp_path: Path, num_ranks: str, start: str, code: int, says: str
) -> None:
    """Where each of several ranks would start them; other processes of a script are its own business."""
    script = SPAWNS.replace("START", start)
    arguments = ["--nproc-per-node", num_ranks, "--device", "cpu", "script.py"]
    status, command = call(tmp_path, arguments, script, fresh=True)  # children look for the script where python began
    assert status == code, command.stderr
    assert re.search(says, command.stderr), command.stderr
    assert code != 78 or ("`python script.py`" in command.stderr and "Traceback" not in command.stderr)
