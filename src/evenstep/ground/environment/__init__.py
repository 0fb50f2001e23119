"""The only reader and writer of environment variables: rank, launcher, settings.

`detect` is pure: a mapping of variables in, a frozen `Placement` out. The rest of evenstep receives what it
needs and never reads `os.environ` itself.

Reading order:

    placement.py   where a rank stands among the others: the result
    detect.py      from variables to a placement; refuses variables that contradict each other
    foreign.py     one function for each MPI launcher and scheduler
    hosts.py       the lists of hosts that they write
    values.py      reads and shows single variables
    measuring.py   what `evenstep bench` passes to the ranks it measures
    inheritance.py whether the variables are this process's own: [Note: a rank's children]

Below are the functions that touch `os.environ`: they gather the surroundings, build the variables of new ranks, and
read what evenstep's commands pass to them.

Variables that evenstep itself sets for the ranks it starts (no user needs to set them):

    EVENSTEP_PAGES       where the heartbeat pages of the node's ranks can be opened, by local rank
    EVENSTEP_STORE       where the file can be opened in which the ranks of one node meet
    EVENSTEP_LAUNCHER    "run" or "launch": which of ours started this rank
    EVENSTEP_DEVICE      what `evenstep run --device` said; an argument of `evenstep.init` beats it
    EVENSTEP_INJECT      faults of `evenstep run --inject`
    EVENSTEP_SERVERS     how many of the ranks, the last ones, are parameter servers; users of other launchers set it
    EVENSTEP_PHASE_TIMEOUTS     how long the phases may take that `evenstep run --phase-timeout` named
    EVENSTEP_STAMP_LINES set if lines of log files begin with time, rank and step
    EVENSTEP_RENDEZVOUS  name of this rendezvous of several nodes: another one after a restart
    EVENSTEP_ANNOUNCED   the line that the launcher printed at start, so that rank 0 doesn't repeat it
    EVENSTEP_REHEARSAL   file that says how a resume is rehearsed; set by `evenstep verify --resume`
    EVENSTEP_VERIFY      file that says what a rank records of its steps; set by `evenstep verify`
    EVENSTEP_BENCH_...   how a run is measured, see `measuring.py`; set by `evenstep bench`
    EVENSTEP_RANK_PROCESS  the process that is the rank; set by `evenstep.init`
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace as replaced
from pathlib import Path

import torch.distributed as dist

from evenstep import checks
from evenstep.checks import counted
from evenstep.errors import ConfigurationError
from evenstep.ground.environment.detect import detect, node_of_task, refuse_independent_runs
from evenstep.ground.environment.foreign import Surroundings
from evenstep.ground.environment.inheritance import RankProcess, identity, is_inherited
from evenstep.ground.environment.measuring import Measurement
from evenstep.ground.environment.placement import Placement, placement_from_nodes
from evenstep.processes import PARENT_PID, START_TICKS, stat_fields

__all__ = [
    "Measurement",
    "Placement",
    "Surroundings",
    "announcement",
    "claim_rank",
    "current_placement",
    "detect",
    "export",
    "exported",
    "faults_to_inject",
    "inherited_settings",
    "is_set",
    "measurement",
    "meeting_point",
    "node_identity",
    "node_of_task",
    "num_servers",
    "openmp_threads",
    "phase_timeouts_of_run",
    "placement_from_nodes",
    "rank_variables",
    "refuse_independent_runs",
    "rehearsal_file",
    "replace",
    "rpc_variables",
    "run_variables",
    "surroundings",
    "telling_variables",
    "under_watch",
    "verification_file",
    "with_measurement",
    "with_rehearsal",
    "with_verification",
]


_RANK_PROCESS = "EVENSTEP_RANK_PROCESS"
# What launchers and commands of ours set for the ranks of one run, but for its device.
_OF_ONE_RUN = (
    "EVENSTEP_PAGES",
    "EVENSTEP_STORE",
    "EVENSTEP_LAUNCHER",
    "EVENSTEP_INJECT",
    "EVENSTEP_SERVERS",
    "EVENSTEP_PHASE_TIMEOUTS",
    "EVENSTEP_STAMP_LINES",
    "EVENSTEP_RENDEZVOUS",
    "EVENSTEP_ANNOUNCED",
    "EVENSTEP_REHEARSAL",
    "EVENSTEP_VERIFY",
    "EVENSTEP_BENCH_",
    _RANK_PROCESS,
)


def surroundings() -> Surroundings:
    """This process's own: its environment, the scheduler's list of hosts, its ancestors.

    A child of a rank has only inherited them, and has none: [Note: a rank's children].
    """
    return _variables_without_ranks() if _rank_inherited_from() is not None else _whole_surroundings()


def current_placement() -> Placement:
    """This process's place: that of torch's process group, if there is one; else `detect` on its own surroundings.

    Scripts may give ranks to `init_process_group` themselves, as those of `mp.spawn` do. Variables that describe
    something else, or only half of it, are of no account then.
    """
    group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    owner = _rank_inherited_from()
    found = _described() if owner is None else _placement_of_child(owner)
    if isinstance(found, Placement) and group in (None, (found.rank, found.world_size)):
        return found
    if group is None:
        raise ConfigurationError(str(found))
    return Placement(rank=group[0], world_size=group[1])


def claim_rank() -> None:
    """Note for children that this process is the rank that its variables describe: [Note: a rank's children]."""
    placement, described = current_placement(), _described()
    if _rank_inherited_from() is None and (placement.launcher != "none" or isinstance(described, str)):
        pid, start_ticks = _this_process()
        claim = RankProcess(pid, start_ticks, placement.rank, placement.world_size, identity(described))
        os.environ[_RANK_PROCESS] = str(claim)


def inherited_settings() -> dict[str, str | None]:
    """What a launcher that a rank has started must not pass on to its own ranks, for `exported`."""
    if _rank_inherited_from() is None:
        return {}
    return {name: None for name in os.environ if name.startswith(_OF_ONE_RUN)}


def _rank_inherited_from() -> RankProcess | None:
    """The process of the rank whose variables this process has inherited; None if they are its own."""
    owner = RankProcess.parse(os.environ.get(_RANK_PROCESS, ""))
    pid, start_ticks = _this_process()
    is_childs = owner is not None and is_inherited(owner, _described(), pid=pid, start_ticks=start_ticks)
    return owner if is_childs else None


def _described() -> Placement | str:
    """What this process's variables say, whose they may ever be; or why they say nothing."""
    given = _whole_surroundings()
    try:
        return detect(given.variables, node_file=given.node_file, ancestors=given.ancestors)
    except ConfigurationError as error:
        return str(error)


def _placement_of_child(owner: RankProcess) -> Placement:
    given = _variables_without_ranks()
    remark = f"rank {owner.rank} of {owner.world_size} is pid {owner.pid}, from which this process has inherited the "
    return replaced(
        detect(given.variables), remark=remark + "launcher's variables: it is no rank itself, and a world of its own"
    )


def _this_process() -> tuple[int, int]:
    """(pid, when it started in the kernel's ticks)."""
    fields = stat_fields("self")
    return os.getpid(), int(fields[START_TICKS]) if fields else 0


def _variables_without_ranks() -> Surroundings:
    return Surroundings({name: value for name, value in os.environ.items() if name == "EVENSTEP_DEVICE"})


def _whole_surroundings() -> Surroundings:
    variables = dict(os.environ)
    # Only Hydra has no variable that identifies the job.
    ancestors = _ancestors() if "PMI_RANK" in variables else []
    return Surroundings(variables, _lines(variables.get("PBS_NODEFILE")), ancestors)


def rank_variables(
    *,
    rank: int,
    world_size: int,
    device: str | None = None,
    announced: str | None = None,
    restart_count: int = 0,
    servers: int = 0,
) -> dict[str, str]:
    """The variables of a rank that `evenstep.launch` starts on this node: what `detect` reads back. Pure."""
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
    }
    return variables | run_variables("launch", device=device, announced=announced, servers=servers)


def run_variables(
    launcher: str,
    *,
    num_nodes: int = 1,
    device: str | None = None,
    announced: str | None = None,
    faults: str | None = None,
    stamps_lines: bool = False,
    timeouts: str = "",
    servers: int = 0,
) -> dict[str, str]:
    """The variables that a launcher of ours ("run", "launch") sets for all its ranks. Pure."""
    variables = {"EVENSTEP_LAUNCHER": launcher}
    if num_nodes == 1:
        # Gloo otherwise resolves the host's name and listens on whatever address that gives.
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    if device is not None:
        variables["EVENSTEP_DEVICE"] = device
    if announced is not None:
        variables["EVENSTEP_ANNOUNCED"] = announced
    if timeouts:
        variables["EVENSTEP_PHASE_TIMEOUTS"] = timeouts
    if stamps_lines:
        variables["EVENSTEP_STAMP_LINES"] = "1"
    if faults is not None:
        variables["EVENSTEP_INJECT"] = faults
    if servers:
        variables["EVENSTEP_SERVERS"] = str(servers)
    return variables


def node_identity() -> str:
    """A text that two processes share exactly when they run on one node."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def announcement(
    *,
    world_size: int,
    num_nodes: int,
    device: str,
    num_threads: int,
    transport: str | None = None,
    fewest_nodes: int | None = None,
) -> str:
    """The one line that says at start what runs where. Pure; launcher and ranks both write it with this.

    Args:
        device: "cpu" or "cuda", without an index.
        num_threads: Threads of one rank's CPU operations.
        transport: Name of what carries the gradients; None: the launcher, which can't know what the script uses.
        fewest_nodes: With how many nodes the run begins; None: with all.
    """

    ranks = f"{counted(world_size, 'rank')} on {counted(num_nodes, 'node')}"
    if fewest_nodes not in (None, num_nodes):
        ranks = f"{counted(world_size // num_nodes, 'rank')} on each of {fewest_nodes} to {num_nodes} nodes"
    line = f"evenstep: {ranks}, {device}, {counted(num_threads, 'thread')} per rank"
    return line if transport is None else f"{line}, {transport}"


def faults_to_inject() -> str:
    """The value of `evenstep run --inject`; "" without it."""
    return os.environ.get("EVENSTEP_INJECT", "")


def num_servers() -> int:
    """How many of the ranks, the last ones, are parameter servers; 0 when unset.

    Raises:
        ConfigurationError: The variable is no whole number.
    """
    text = os.environ.get("EVENSTEP_SERVERS", "").strip() or "0"
    return checks.whole("EVENSTEP_SERVERS", int(text) if text.isdigit() else text, least=0)


def rpc_variables(interface: str | None) -> dict[str, str]:
    """What has torch's RPC, and its Gloo, listen on one interface only.

    Without them torch resolves the node's name, and listens on whatever address that gives.

    Args:
        interface: Its name; None: what the user's variables say, else the one that was chosen for Gloo.

    Raises:
        ConfigurationError: None is known.
    """
    chosen = interface or os.environ.get("TP_SOCKET_IFNAME") or os.environ.get("GLOO_SOCKET_IFNAME")
    if not chosen:
        raise ConfigurationError(
            "evenstep.parameter_server: the network interface that leads to the other nodes isn't known. Name it: "
            "interface='eth0', or TP_SOCKET_IFNAME."
        )
    return {"TP_SOCKET_IFNAME": chosen, "GLOO_SOCKET_IFNAME": interface or os.environ.get("GLOO_SOCKET_IFNAME", chosen)}


def phase_timeouts_of_run() -> str:
    """The value of `evenstep run --phase-timeout`; "" without it."""
    return os.environ.get("EVENSTEP_PHASE_TIMEOUTS", "")


def openmp_threads() -> int | None:
    """The value of `OMP_NUM_THREADS`; None when unset or no positive number."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def elastic_shutdown_timeout() -> str | None:
    """torchelastic's variable for how long ranks may take to end, as written; None when unset."""
    return os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or None


def rehearsal_file() -> Path | None:
    """The file that describes this run's rehearsal of a resume; None in every other run."""
    text = os.environ.get("EVENSTEP_REHEARSAL")
    return Path(text) if text else None


def with_rehearsal(file: Path) -> dict[str, str]:
    """This process's environment, for a run that rehearses a resume."""
    return {**os.environ, "EVENSTEP_REHEARSAL": str(file)}


def verification_file() -> Path | None:
    """The file with `evenstep verify`'s settings for this rank; None in other runs."""
    text = os.environ.get("EVENSTEP_VERIFY")
    return Path(text) if text else None


def with_verification(file: Path, rehearsal: Path) -> dict[str, str]:
    """This process's environment, for a run that `evenstep verify` records.

    It isn't compiled, and its checkpoints go elsewhere.
    """
    recorded = {"EVENSTEP_VERIFY": str(file), "EVENSTEP_REHEARSAL": str(rehearsal), "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, **recorded}


def meeting_point() -> dict[str, str]:
    """The variables by which `torch.distributed` finds this rank's place and peers, as they are now."""
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {name: os.environ[name] for name in names if name in os.environ}


# Trackers would begin a run on their servers; they read these at import.
_WITHOUT_TRACKERS = {"WANDB_MODE": "disabled", "COMET_START_OFFLINE": "1", "NEPTUNE_MODE": "debug"}


def under_watch(directory: Path, *, on_cpu: bool) -> dict[str, str]:
    """This process's environment, for a run that `evenstep doctor` watches.

    It isn't compiled, and trackers write to `directory` or nowhere. On a CPU accelerate joins its processes only if
    its own launcher's variable says so.
    """
    cpu = {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
    apart = {"MLFLOW_TRACKING_URI": f"file://{directory}/mlruns", "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, **_WITHOUT_TRACKERS, **apart, **cpu}


def measurement() -> Measurement | None:
    """The measurement that `evenstep bench` makes of this run; None in other runs."""
    return Measurement.from_variables(os.environ)


def with_measurement(measured: Measurement) -> dict[str, str]:
    """This process's environment, for a run that is measured."""
    return {**os.environ, **measured.variables()}


# Values of other variables might be secrets, and are never shown.
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
def exported(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None: unset them) for the processes started inside, and restore what was there before."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def export(variables: Mapping[str, str]) -> None:
    """Set variables for good: for a process that exists only to be one rank."""
    os.environ.update(variables)


def replace(variables: Mapping[str, str]) -> None:
    """Have these variables and no others: for a process forked from one with its own."""
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
    """Command lines of this process's ancestors, its parent first, as far as visible."""
    lines: list[str] = []
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1 and len(lines) < 64:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            pid = int(stat_fields(pid)[PARENT_PID])
    return lines
