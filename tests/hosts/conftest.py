"""Runs on two or three hosts, and what they leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import namespaces
from tests.namespaces import Namespaces

DEADLINE_S = 120.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a run of all tests only those that are marked `brief` run; the rest has a make target of its own."""
    here = Path(__file__).parent
    if any(here.name in argument for argument in config.args):
        return
    for item in items:
        if here in item.path.parents and item.get_closest_marker("brief") is None:
            item.add_marker(pytest.mark.skip(reason="faults of hosts are played by `make test-hosts`"))


@dataclass
class Host:
    """`evenstep run` on one host."""

    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()

    def wait(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(f"it hangs:\n{self.stdout}\n{self.stderr}") from None

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"it did not get there:\n{self.stdout}\n{self.stderr}")
            time.sleep(0.05)


class Hosts(Namespaces):
    """Namespaces in which scripts are started, each host with a directory of its own."""

    def __init__(self, num_hosts: int, directory: Path, rate_mbit: float | None = None) -> None:
        super().__init__(num_hosts, rate_mbit=rate_mbit)
        self.directory = directory
        self.started: list[Host] = []

    def start(self, host: int, script: str, flags: Sequence[str], *, static: bool = True) -> Host:
        """`evenstep run FLAGS script.py`; without variables that name an interface: evenstep has to find it."""
        directory = self.directory / str(host)
        (directory / "tmp").mkdir(parents=True, exist_ok=True)
        (directory / "script.py").write_text(textwrap.dedent(script))
        flags = ["--nproc-per-node", "1", "--threads-per-rank", "1", *flags, "script.py"]
        command = (
            self.evenstep_run(host, flags)
            if static
            else self.command(host, [sys.executable, "-m", "evenstep", "run", *flags])
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PET_", "GLOO", "TP_"))}
        with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env=env | {"TMPDIR": str(directory / "tmp"), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.started.append(Host(process, directory))
        return self.started[-1]

    def elastic(self, hosts: str, *, keeper: int = 0) -> list[str]:
        """Flags of a run whose hosts may come and go; one of them keeps the store where they meet."""
        endpoint = f"{self.addresses[keeper]}:29400"
        quick = "join_timeout=60,last_call_timeout=3"
        return [
            "--nnodes",
            hosts,
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            endpoint,
            "--rdzv-id",
            "a",
            "--rdzv-conf",
            quick,
        ]


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[..., Hosts]]:
    """Hosts, gone after the test with all that runs on them."""
    reason = namespaces.why_not()
    if reason is not None:
        pytest.skip(reason)
    made: list[Hosts] = []

    def make(num_hosts: int, *, rate_mbit: float | None = None) -> Hosts:
        hosts = Hosts(num_hosts, tmp_path, rate_mbit)
        hosts.__enter__()
        made.append(hosts)
        return hosts

    yield make
    for hosts in made:
        hosts.__exit__(None, None, None)
        for host in hosts.started:
            host.process.wait()
