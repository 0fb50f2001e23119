"""Parameter servers between nodes: strangers on their network, and a worker's node that loses its power."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from evenstep.ground.environment.run_settings import Settings
from tests.hosts.conftest import DEADLINE_S, Host, Hosts

TRAINS = """
    import hashlib, pathlib, time
    import evenstep, torch

    def make():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))

    with evenstep.parameter_server(
        make, lambda p: torch.optim.AdamW(p, lr=0.01), mode={mode!r}, checkpoint={saved!r}, every_steps=10, timeout_s=90
    ) as ps:
        generator = torch.Generator().manual_seed(ps.worker)
        for step in range({steps}):
            x = torch.randn(16, 64, generator=generator)
            ps.backward(ps.model(x).square().mean(), weight=len(x))
            ps.step()
            time.sleep(0.01)
            if step == 20:
                pathlib.Path({there!r}, f"worker {{ps.worker}} trains").touch()
                while not pathlib.Path({there!r}, "done").exists():
                    ps.pull()
                    time.sleep(0.01)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in ps.model.parameters())).hexdigest()
    print(f"worker {{ps.worker}}: {{digest}}")
"""


def start(
    hosts: Hosts, script: str, num_ranks: int, *, node_timeout_s: float = 30.0, secret_file: Path | None = None
) -> list[Host]:
    """A rank on each host, the last a server, with few descriptors; started as a scheduler does."""
    started = []
    for rank in range(num_ranks):
        directory = hosts.directory / str(rank)
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        (directory / "script.py").write_text(textwrap.dedent(script))
        variables = {
            "RANK": rank,
            "WORLD_SIZE": num_ranks,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 1,
            "MASTER_ADDR": hosts.addresses[0],
            "MASTER_PORT": 29500,
            "EVENSTEP_SERVERS": 1,
            "OMP_NUM_THREADS": 1,
            "PYTHONUNBUFFERED": 1,
            "TMPDIR": directory / "tmp",
            **({} if secret_file is None else {"EVENSTEP_SECRET_FILE": secret_file}),
            **Settings(node_timeout_s=node_timeout_s).variables(),
        }
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PET_", "GLOO"))}
        script_of_node = 'hostname "$1"; shift; ulimit -n 256; exec "$@"'  # which node it is, processes see by its name
        command = ["unshare", "--uts", "sh", "-c", script_of_node, "sh", f"node{rank}", sys.executable, "script.py"]
        with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
            process = subprocess.Popen(
                hosts.command(rank, command),
                cwd=directory,
                env=env | {name: str(value) for name, value in variables.items()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        started.append(Host(process, directory))
    hosts.started += started
    return started


def listening_ports(hosts: Hosts, host: int) -> list[int]:
    table = subprocess.run(
        [*hosts.command(host, ["cat", "/proc/net/tcp"])], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in table.splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"]


def trains(there: Path, worker: int) -> Callable[[], bool]:
    return (there / f"worker {worker} trains").exists


def digests(host: Host) -> list[str]:
    return re.findall(r"worker \d: (\w+)", host.stdout)


def check_strangers(
    hosts: Hosts, tmp_path: Path, *, has_secret: bool, times: int, silent: int, again_s: float
) -> tuple[Host, Host]:
    """A training between two nodes beside which a third plays strangers ends with the digits of one left alone."""
    secret_file: Path | None = None
    if has_secret:
        secret_file = tmp_path / "secret"
        secret_file.write_text("of this run\n")
        secret_file.chmod(0o600)
    found = []
    for name in ("alone", "with strangers"):
        there = tmp_path / name
        there.mkdir()
        script = TRAINS.format(mode="sync", saved=str(there / "saved"), steps=60, there=str(there))
        worker, server = start(hosts, script, 2, secret_file=secret_file)
        if name == "alone":
            (there / "done").touch()
        else:
            worker.wait_until(trains(there, 0))
            (port,) = listening_ports(hosts, 1)
            arguments = [hosts.addresses[1], port, "--times", times, "--silent", silent, "--again-s", again_s]
            arguments += [] if secret_file is None else ["--secret-file", secret_file]
            strangers = subprocess.run(
                hosts.command(2, [sys.executable, "-m", "tests.hosts.strangers", *map(str, arguments)]),
                capture_output=True,
                text=True,
                check=False,
                timeout=DEADLINE_S + 2 * again_s,
            )
            assert strangers.returncode == 0, strangers.stdout + strangers.stderr + server.stderr
            (there / "done").touch()
        assert [worker.wait(), server.wait()] == [0, 0], worker.stderr + server.stderr
        steps = [json.loads(each.read_text()) for each in sorted((there / "saved").glob("step-*/manifest.json"))]
        assert steps, "it saves"
        found.append(digests(worker))
    assert found[0] == found[1]
    assert len(found[0]) == 1
    return worker, server


@pytest.mark.parametrize("has_secret", [True, False])
def test_strangers_change_nothing(has_secret: bool, make_hosts: Callable[[int], Hosts], tmp_path: Path) -> None:
    hosts = make_hosts(3)
    worker, server = check_strangers(hosts, tmp_path, has_secret=has_secret, times=5, silent=300, again_s=3)
    assert f"a stranger's connection from {hosts.addresses[2]} was refused" in server.stderr
    assert "Traceback" not in server.stderr + worker.stderr
    assert ("there is no secret file" in server.stderr) is not has_secret


def test_a_worker_whose_node_loses_its_power_is_lost_and_the_others_go_on(
    make_hosts: Callable[[int], Hosts], tmp_path: Path
) -> None:
    """After the node timeout, though nobody says a word."""
    hosts = make_hosts(3)
    there = tmp_path / "there"
    there.mkdir()
    script = TRAINS.format(mode="sync", saved=str(there / "saved"), steps=60, there=str(there))
    first, second, server = start(hosts, script, 3, node_timeout_s=6.0)
    first.wait_until(trains(there, 0))
    second.wait_until(trains(there, 1))
    hosts.cut(1)
    (there / "done").touch()
    assert [first.wait(), server.wait()] == [0, 0], first.stderr + server.stderr
    assert "worker 1 was lost; its batches go to the others" in server.stderr
    assert second.wait() != 0
    assert "worker 1 (rank 1) lost server 0" in second.stderr


if __name__ == "__main__":
    # 100 of each, 1,000 silent connections, and a minute of coming again; as root.
    with tempfile.TemporaryDirectory(prefix="evenstep-strangers-") as name, Hosts(3, Path(name)) as nodes:
        for is_secret in (True, False):
            place = Path(name, f"secret {is_secret}")
            place.mkdir()
            check_strangers(nodes, place, has_secret=is_secret, times=100, silent=1000, again_s=60)
            sys.stdout.write(f"the same digits; secret file: {is_secret}\n")
