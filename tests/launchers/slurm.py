"""A Slurm of one node for the length of a test: munged, slurmctld and slurmd, with all their state in one directory.

No systemd, no accounting, no root service of the host is touched: own key, own sockets, ports of the system's choice.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "squeue")
_READY_S = 30.0


def missing_programs() -> list[str]:
    """Of `PROGRAMS`, those that are not installed."""
    return [name for name in PROGRAMS if _program(name) is None]


class OneNodeSlurm:
    """Started by `with`; `variables` make the client programs talk to it.

    Args:
        directory: Short (unix sockets lie in it), empty.
        num_cpus: CPUs that the node claims to have.
    """

    def __init__(self, directory: Path, *, num_cpus: int = 4) -> None:
        self.directory = directory
        self.num_cpus = num_cpus
        self.variables = {"SLURM_CONF": str(directory / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> OneNodeSlurm:
        os.chmod(self.directory, 0o755)
        try:
            self._start_munge()
            self._write_configuration()
            self._start("slurmctld", "-D", "-i")
            # What a job's environment holds that its submission did not: the daemon's. It must not be a test's.
            self._start("slurmd", "-D", "-N", "node0")
            self._await_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        self._daemons = []

    def call(self, *command: str, check: bool = True, cwd: Path | None = None, timeout_s: float = 90.0) -> str:
        """stdout of a client program (stderr after it)."""
        done = subprocess.run(
            [_program(command[0]) or command[0], *command[1:]],
            cwd=cwd,
            env=clean_environment() | self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout + done.stderr

    def logs(self) -> str:
        """The ends of the daemons' logs, for a failing test."""
        return "\n".join(
            f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-25:])
            for path in sorted(self.directory.glob("*.log"))
        )

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        self._socket = self.directory / "munge.socket"
        files = {"key-file": key, "socket": self._socket} | {
            f"{kind}-file": self.directory / f"munge.{kind}" for kind in ("pid", "log", "seed")
        }
        # --force: as root, in a directory of its own.
        self._start("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        _wait_for(self._socket.exists, "munged's socket", self)

    def _write_configuration(self) -> None:
        host = socket.gethostname()
        controller, node = _free_ports(2)
        for name in ("state", "spool"):
            (self.directory / name).mkdir()
        here = self.directory
        (here / "slurm.conf").write_text(f"""
ClusterName=evenstep
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self._socket}
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={node}
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd.log
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 CPUs={self.num_cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")

    def _start(self, name: str, *arguments: str) -> None:
        with (self.directory / f"{name}.out.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    [_program(name) or name, *arguments],
                    env=clean_environment() | self.variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _await_idle(self) -> None:
        _wait_for(lambda: "idle" in self.call("sinfo", "--noheader", "--format=%T", check=False), "the node", self)


def clean_environment() -> dict[str, str]:
    """This environment without what a launcher, pytest or an outer job has put there."""
    foreign = ("SLURM", "OMPI", "PMI", "MPI", "PBS", "PET_", "PYTEST", "OMP_NUM", "RANK", "WORLD_SIZE", "LOCAL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _wait_for(condition: object, what: str, slurm: OneNodeSlurm) -> None:
    deadline = time.monotonic() + _READY_S
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not there after {_READY_S:g} s\n{slurm.logs()}")
        time.sleep(0.05)
