"""Who is this process? The only reader and writer of the environment.

`detect` is pure: a mapping of variables in, a frozen `Placement` out. Everything else in evenstep is told what it
needs and never looks at `os.environ` itself.

Variables that evenstep itself sets for the ranks it starts (nobody else needs to set them):

    EVENSTEP_RUN_DIR     private directory of the run: rendezvous file and first-blame slot
    EVENSTEP_LAUNCHER    "run" or "launch": which of ours started this rank
    EVENSTEP_DEVICE      what `evenstep run --device` said; an argument of `evenstep.init` beats it
    EVENSTEP_ANNOUNCED   the line that the launcher printed at start, so that rank 0 doesn't repeat it
    EVENSTEP_REHEARSAL   file that says how a resume is rehearsed; set by `evenstep verify --resume`
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.errors import ConfigurationError

# Of each launcher that is recognised but not supported yet: its name, and a variable that holds the number of ranks.
# A rank of theirs must not believe that it is alone (FAULTS.md, 45).
_FOREIGN_LAUNCHERS = {
    "Open MPI": "OMPI_COMM_WORLD_SIZE",
    "MPICH, Intel MPI or PALS": "PMI_SIZE",
    "srun": "SLURM_STEP_NUM_TASKS",
}


@dataclass(frozen=True)
class Placement:
    """Where a rank stands in the world, and how it finds the others.

    Attributes:
        launcher: "evenstep run", "evenstep.launch", "torchrun", or "none" for a process that nobody launched.
        rendezvous_file: File through which the ranks of one host meet; None: `MASTER_ADDR` and `MASTER_PORT`.
        restart_count: How many times the launcher has restarted the ranks.
        run_directory: Private directory that the launcher made; None if it isn't ours.
        device: The device that the launcher's command line asked for.
        announced: The line that the launcher printed at start.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "none"
    rendezvous_file: Path | None = None
    restart_count: int = 0
    run_directory: Path | None = None
    device: str | None = None
    announced: str | None = None

    def __post_init__(self) -> None:
        for index, count, names in (
            (self.rank, self.world_size, "RANK and WORLD_SIZE"),
            (self.local_rank, self.local_world_size, "LOCAL_RANK and LOCAL_WORLD_SIZE"),
            (self.node_rank, self.num_nodes, "GROUP_RANK and GROUP_WORLD_SIZE"),
        ):
            if not 0 <= index < count:
                raise ConfigurationError(
                    f"{names} are inconsistent: {index} of {count}. A rank lies between 0 and the size less one; "
                    f"unset the variables to run as one process, or start with `evenstep run`."
                )


def detect(variables: Mapping[str, str]) -> Placement:
    """Read the launcher's variables into a `Placement`. Pure.

    Raises:
        ConfigurationError: The variables contradict each other, are no numbers, or come from a launcher that
            evenstep can't join yet; the message shows them.
    """
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        _refuse_foreign_launcher(variables)
        return Placement(device=variables.get("EVENSTEP_DEVICE"))
    for name in ("RANK", "WORLD_SIZE"):
        if name not in variables:
            raise ConfigurationError(f"{_shown(variables)} are set, but {name} is not. {_REMEDY}")
    if "LOCAL_RANK" not in variables:
        raise ConfigurationError(
            f"{_shown(variables)} are set without LOCAL_RANK, so RANK may be the rank of a host and not of a process, "
            f"and evenstep does not guess. {_REMEDY}"
        )
    world_size = _integer(variables, "WORLD_SIZE")
    local_world_size = _integer(variables, "LOCAL_WORLD_SIZE", default=world_size)
    run_directory = variables.get("EVENSTEP_RUN_DIR")
    num_nodes = _integer(variables, "GROUP_WORLD_SIZE", default=max(1, world_size // max(1, local_world_size)))
    restart_count = _integer(variables, "TORCHELASTIC_RESTART_COUNT", default=0)
    ours = {"run": "evenstep run", "launch": "evenstep.launch"}.get(variables.get("EVENSTEP_LAUNCHER", ""))
    rendezvous_file = None
    if ours is not None and run_directory is not None and num_nodes == 1:
        # A file instead of a TCP store: that one would listen on every interface (FAULTS.md, Security).
        rendezvous_file = Path(run_directory) / f"rendezvous-{restart_count}"
    return Placement(
        rank=_integer(variables, "RANK"),
        world_size=world_size,
        local_rank=_integer(variables, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=_integer(variables, "GROUP_RANK", default=0),
        num_nodes=num_nodes,
        launcher=ours or "torchrun",
        rendezvous_file=rendezvous_file,
        restart_count=restart_count,
        run_directory=Path(run_directory) if run_directory is not None and ours is not None else None,
        device=variables.get("EVENSTEP_DEVICE"),
        announced=variables.get("EVENSTEP_ANNOUNCED"),
    )


def current_placement() -> Placement:
    """`detect` on this process's own environment."""
    return detect(os.environ)


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
    return variables


def placement_from_hosts(hosts: Sequence[str], rank: int) -> Placement:
    """Local ranks and node ranks from the hosts of all ranks, in order of rank. Pure."""
    distinct = list(dict.fromkeys(hosts))
    return Placement(
        rank=rank,
        world_size=len(hosts),
        local_rank=sum(host == hosts[rank] for host in hosts[:rank]),
        local_world_size=Counter(hosts)[hosts[rank]],
        node_rank=distinct.index(hosts[rank]),
        num_nodes=len(distinct),
        launcher="none",
    )


def host_identity() -> str:
    """A text that two processes share exactly when they run on one host."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def announcement(*, world_size: int, num_nodes: int, device: str, num_threads: int, transport: str) -> str:
    """The one line that says at start what runs where. Pure; launcher and ranks both write it with this.

    Args:
        device: "cpu" or "cuda", without an index.
        num_threads: Threads of one rank's CPU operations.
    """

    def counted(count: int, noun: str) -> str:
        return f"{count} {noun}" + ("" if count == 1 else "s")

    ranks = f"{counted(world_size, 'rank')} on {counted(num_nodes, 'host')}"
    return f"evenstep: {ranks}, {device}, {counted(num_threads, 'thread')} per rank, {transport}"


def openmp_threads() -> int | None:
    """What `OMP_NUM_THREADS` asks for; None when unset or no positive number."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def rehearsal_file() -> Path | None:
    """The file that says how this run rehearses a resume; None, as in every other run."""
    text = os.environ.get("EVENSTEP_REHEARSAL")
    return Path(text) if text else None


def with_rehearsal(file: Path) -> dict[str, str]:
    """This process's environment, for a run that rehearses a resume."""
    return {**os.environ, "EVENSTEP_REHEARSAL": str(file)}


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


_REMEDY = "Start with `evenstep run` or `torchrun`, or unset them to run as one process."


def _shown(variables: Mapping[str, str]) -> str:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    return ", ".join(f"{name}={variables[name]}" for name in names if name in variables)


def _integer(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a whole number. {_REMEDY}") from None


def _refuse_foreign_launcher(variables: Mapping[str, str]) -> None:
    for launcher, size_name in _FOREIGN_LAUNCHERS.items():
        if variables.get(size_name, "1") not in ("", "1"):
            raise ConfigurationError(
                f"{size_name}={variables[size_name]}: started by {launcher}, which this version can't join. "
                f"It would run as {variables[size_name]} independent jobs. Start with `evenstep run` or `torchrun`."
            )
