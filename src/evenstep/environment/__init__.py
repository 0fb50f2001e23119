"""Who is this process? The only reader and writer of the environment.

`detect` is pure: a mapping of variables in, a frozen `Placement` out. Everything else in evenstep is told what it
needs and never looks at `os.environ` itself.

    placement.py   where a rank stands
    detect.py      whose variables are these, and do they fit together?
    foreign.py     one function for each MPI launcher and scheduler
    hosts.py       lists of hosts as they write them
    measuring.py   what `evenstep bench` tells the ranks
    values.py      reading and showing single variables

Variables that evenstep itself sets for the ranks it starts (nobody else needs to set them):

    EVENSTEP_RUN_DIR     private directory of the run: rendezvous file and first-blame slot
    EVENSTEP_LAUNCHER    "run" or "launch": which of ours started this rank
    EVENSTEP_DEVICE      what `evenstep run --device` said; an argument of `evenstep.init` beats it
    EVENSTEP_INJECT      faults that `evenstep run --inject` asked for
    EVENSTEP_BUDGETS     how long the phases may take that `evenstep run --budget` named
    EVENSTEP_STAMP_LINES set if lines of log files begin with time, rank and step
    EVENSTEP_MEETING     name of this meeting of several hosts: after a restart another one
    EVENSTEP_ANNOUNCED   the line that the launcher printed at start, so that rank 0 doesn't repeat it
    EVENSTEP_REHEARSAL   file that says how a resume is rehearsed; set by `evenstep verify --resume`
    EVENSTEP_VERIFY      file that says what a rank records of its steps; set by `evenstep verify`
    EVENSTEP_BENCH_...   how a run is measured, see `measuring.py`; set by `evenstep bench`
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from evenstep.checks import counted
from evenstep.environment.detect import detect, host_of_task, refuse_independent_runs
from evenstep.environment.foreign import Surroundings
from evenstep.environment.measuring import Measurement
from evenstep.environment.placement import Placement, placement_from_hosts

__all__ = [
    "Measurement",
    "Placement",
    "Surroundings",
    "announcement",
    "budgets_of_run",
    "current_placement",
    "detect",
    "export",
    "exported",
    "faults_to_inject",
    "host_identity",
    "host_of_task",
    "is_set",
    "measurement",
    "openmp_threads",
    "placement_from_hosts",
    "rank_variables",
    "refuse_independent_runs",
    "rehearsal_file",
    "replace",
    "run_variables",
    "surroundings",
    "telling_variables",
    "verification_file",
    "with_measurement",
    "with_rehearsal",
    "with_verification",
]


def surroundings() -> Surroundings:
    """This process's own: its environment, the scheduler's list of hosts, who its ancestors are."""
    variables = dict(os.environ)
    # Only Hydra says nothing in its variables that tells its jobs apart.
    ancestors = _ancestors() if "PMI_RANK" in variables else []
    return Surroundings(variables, _lines(variables.get("PBS_NODEFILE")), ancestors)


def current_placement() -> Placement:
    """`detect` on this process's own surroundings."""
    given = surroundings()
    return detect(given.variables, node_file=given.node_file, ancestors=given.ancestors)


def rank_variables(
    *,
    rank: int,
    world_size: int,
    run_directory: Path,
    device: str | None = None,
    announced: str | None = None,
    restart_count: int = 0,
) -> dict[str, str]:
    """The variables of a rank that `evenstep.launch` starts on this host: what `detect` reads back. Pure."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
    }
    return variables | run_variables("launch", run_directory=run_directory, device=device, announced=announced)


def run_variables(
    launcher: str,
    *,
    run_directory: Path,
    num_nodes: int = 1,
    device: str | None = None,
    announced: str | None = None,
    faults: str | None = None,
    stamps_lines: bool = False,
    budgets: str = "",
) -> dict[str, str]:
    """The variables that are the same for all ranks that a launcher of ours ("run", "launch") starts. Pure."""
    variables = {"EVENSTEP_LAUNCHER": launcher, "EVENSTEP_RUN_DIR": str(run_directory)}
    if num_nodes == 1:
        # Gloo otherwise resolves the host's name and listens on whatever address that gives.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if device is not None:
        variables["EVENSTEP_DEVICE"] = device
    if announced is not None:
        variables["EVENSTEP_ANNOUNCED"] = announced
    if budgets:
        variables["EVENSTEP_BUDGETS"] = budgets
    if stamps_lines:
        variables["EVENSTEP_STAMP_LINES"] = "1"
    if faults is not None:
        variables["EVENSTEP_INJECT"] = faults
    return variables


def host_identity() -> str:
    """A text that two processes share exactly when they run on one host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def announcement(
    *, world_size: int, num_nodes: int, device: str, num_threads: int, transport: str, fewest_nodes: int | None = None
) -> str:
    """The one line that says at start what runs where. Pure; launcher and ranks both write it with this.

    Args:
        device: "cpu" or "cuda", without an index.
        num_threads: Threads of one rank's CPU operations.
        fewest_nodes: With how many hosts the run begins; None: with all.
    """

    ranks = f"{counted(world_size, 'rank')} on {counted(num_nodes, 'host')}"
    if fewest_nodes not in (None, num_nodes):
        ranks = f"{counted(world_size // num_nodes, 'rank')} on each of {fewest_nodes} to {num_nodes} hosts"
    return f"evenstep: {ranks}, {device}, {counted(num_threads, 'thread')} per rank, {transport}"


def faults_to_inject() -> str:
    """What `evenstep run --inject` said; "" without it."""
    return os.environ.get("EVENSTEP_INJECT", "")


def budgets_of_run() -> str:
    """What `evenstep run --budget` said; "" without it."""
    return os.environ.get("EVENSTEP_BUDGETS", "")


def openmp_threads() -> int | None:
    """What `OMP_NUM_THREADS` asks for; None when unset or no positive number."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def elastic_shutdown_timeout() -> str | None:
    """What torchelastic's variable says of how long ranks may take to end, as it was written; None when unset."""
    return os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or None


def rehearsal_file() -> Path | None:
    """The file that says how this run rehearses a resume; None, as in every other run."""
    text = os.environ.get("EVENSTEP_REHEARSAL")
    return Path(text) if text else None


def with_rehearsal(file: Path) -> dict[str, str]:
    """This process's environment, for a run that rehearses a resume."""
    return {**os.environ, "EVENSTEP_REHEARSAL": str(file)}


def verification_file() -> Path | None:
    """The file that says what this rank records of its steps; None, as in every run but those of `evenstep verify`."""
    text = os.environ.get("EVENSTEP_VERIFY")
    return Path(text) if text else None


def with_verification(file: Path, rehearsal: Path) -> dict[str, str]:
    """This process's environment, for a run that is recorded, not compiled, and whose checkpoints go elsewhere."""
    recorded = {"EVENSTEP_VERIFY": str(file), "EVENSTEP_REHEARSAL": str(rehearsal), "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, **recorded}


def measurement() -> Measurement | None:
    """How this run is measured; None, as always but under `evenstep bench`."""
    return Measurement.from_variables(os.environ)


def with_measurement(asked: Measurement) -> dict[str, str]:
    """This process's environment, for a run that is measured."""
    return {**os.environ, **asked.variables()}


# Values of other variables might be secrets, and are nobody's business.
_TELLING = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "NCCL_",
    "GLOO_",
    "CUDA_VISIBLE",
    "CUDA_LAUNCH",
    "MASTER_",
    "PET_",
    "EVENSTEP_",
)
_TELLING_TORCH = ("TORCH_", "PYTORCH_", "TORCHELASTIC_RESTART", "TORCHINDUCTOR_", "TP_SOCKET")


def telling_variables() -> dict[str, str]:
    """The variables that torch's and evenstep's behaviour depends on, sorted."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_TELLING + _TELLING_TORCH)}


def is_set(name: str) -> bool:
    """Whether a variable has a value that isn't empty."""
    return bool(os.environ.get(name))


@contextlib.contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes started inside, and restore what was there before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def export(variables: Mapping[str, str]) -> None:
    """Set variables for good: for a process that exists only to be one rank."""
    os.environ.update(variables)


def replace(variables: Mapping[str, str]) -> None:
    """Have these variables and no others: for a process that was copied from one with variables of its own."""
    for name in [name for name in os.environ if name not in variables]:
        del os.environ[name]
    os.environ.update(variables)


def _lines(path: str | None) -> list[str]:
    if not path:
        return []
    with contextlib.suppress(OSError):  # named, and not there: what the launcher itself says must do
        return Path(path).read_text().splitlines()
    return []


def _ancestors() -> list[str]:
    """Command lines of this process's parent, its parent, and so on, as far as they can be seen."""
    lines: list[str] = []
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1 and len(lines) < 64:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return lines
