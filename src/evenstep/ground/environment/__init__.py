"""The only reader and writer of environment variables: rank, launcher, settings.

`detect` is pure: a mapping of variables in, a frozen `Placement` out. The rest of evenstep gets values from here and
never reads `os.environ` itself.

Reading order:

    placement.py     `Placement`, the result: the place of a rank among the others
    detect.py        from variables to a placement; refuses variables that contradict each other
    launchers.py     MPI launchers and schedulers: one table, a row for each
    hosts.py         lists of hosts, as launchers and schedulers write them
    values.py        reads single variables, and formats them for messages
    run_settings.py  settings that evenstep's commands pass to ranks
    inheritance.py   whether the variables are this process's own: [Note: a rank's children]

Below are the functions that touch `os.environ`: they gather the surroundings and build the variables of new ranks.

Evenstep's own variables:

    EVENSTEP_SETTINGS      settings that commands pass to ranks: JSON, see `run_settings.py`
    EVENSTEP_RANK_PROCESS  the process that is the rank; set by `evenstep.init`
    EVENSTEP_SERVERS       the number of parameter servers, which are the last ranks; users of other launchers set it
    EVENSTEP_SECRET_FILE   a file with the secret that parameter servers on several nodes prove to know; users set it
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import torch.distributed as dist

from evenstep import checks
from evenstep.checks import counted
from evenstep.errors import ConfigurationError
from evenstep.ground.environment.detect import detect, node_of_task, refuse_independent_runs
from evenstep.ground.environment.inheritance import RankProcess, identity, is_inherited
from evenstep.ground.environment.launchers import Surroundings
from evenstep.ground.environment.placement import Placement, placement_from_nodes
from evenstep.ground.environment.run_settings import NODE_TIMEOUT_S, Measurement, Settings
from evenstep.ground.host.processes import PARENT_PID, boot_id, stat_fields, state_and_start

__all__ = [
    "NODE_TIMEOUT_S",
    "Measurement",
    "Placement",
    "Settings",
    "Surroundings",
    "announcement",
    "attempts",
    "changed_settings",
    "claim_rank",
    "current_placement",
    "detect",
    "export",
    "exported",
    "is_claimed",
    "is_set",
    "lacks_servers",
    "meeting_point",
    "node_identity",
    "node_of_task",
    "num_servers",
    "openmp_threads",
    "placement_from_nodes",
    "rank_variables",
    "refuse_independent_runs",
    "replace",
    "run_secret",
    "run_variables",
    "secret_variable",
    "settings",
    "surroundings",
    "telling_variables",
    "under_watch",
    "value",
    "with_settings",
]

_RANK_PROCESS = "EVENSTEP_RANK_PROCESS"
_has_roles = False  # see `num_servers`
_SERVERS = "EVENSTEP_SERVERS"
_SECRET_FILE = "EVENSTEP_SECRET_FILE"
_secret = b""  # see `run_secret`


def settings() -> Settings:
    """The settings that evenstep's command has passed to this process.

    Raises:
        ConfigurationError: The variable wasn't written by this version of evenstep.
    """
    return Settings.parse(os.environ)


def changed_settings(**changes: Any) -> dict[str, str]:
    """The settings variable for child processes: this process's settings with some changed."""
    return replaced(settings(), **changes).variables()


def with_settings(**changes: Any) -> dict[str, str]:
    """This process's environment, for a run with some settings changed."""
    return {**os.environ, **changed_settings(**changes)}


def surroundings() -> Surroundings:
    """This process's surroundings: its environment, the scheduler's list of hosts, its ancestors.

    Empty in a child of a rank, which has only inherited them: [Note: a rank's children].
    """
    return _variables_without_ranks() if _rank_inherited_from() is not None else _whole_surroundings()


def current_placement() -> Placement:
    """This process's placement: from torch's process group if there is one, else `detect` on its surroundings.

    Scripts may pass ranks to `init_process_group` themselves, as with `mp.spawn`. Variables that contradict the group,
    or are incomplete, are then ignored.
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
    """Export that this process is the rank that its variables describe: [Note: a rank's children]."""
    placement, described = current_placement(), _described()
    if _rank_inherited_from() is None and (placement.launcher != "none" or isinstance(described, str)):
        pid = os.getpid()
        claim = RankProcess(pid, state_and_start(pid)[1], placement.rank, placement.world_size, identity(described))
        os.environ[_RANK_PROCESS] = str(claim)


def is_claimed() -> bool:
    """Whether this process, or its parent, is a rank that has joined: see `claim_rank`."""
    return is_set(_RANK_PROCESS)


def _rank_inherited_from() -> RankProcess | None:
    """The rank from which this process has inherited its variables; None if they are its own."""
    owner = RankProcess.parse(os.environ.get(_RANK_PROCESS, ""))
    pid = os.getpid()
    start_ticks = state_and_start(pid)[1]
    return owner if owner is not None and is_inherited(owner, _described(), pid=pid, start_ticks=start_ticks) else None


def _described() -> Placement | str:
    """The placement from this process's variables, even if they are inherited; or the error about them."""
    given = _whole_surroundings()
    try:
        return detect(given.variables, node_file=given.node_file, ancestors=given.ancestors)
    except ConfigurationError as error:
        return str(error)


def _placement_of_child(owner: RankProcess) -> Placement:
    given = _variables_without_ranks()
    remark = f"rank {owner.rank} of {owner.world_size} is pid {owner.pid}, from which this process has inherited the "
    return replaced(
        detect(given.variables),
        remark=remark + "launcher's variables: this process isn't a rank, and makes its own world",
    )


def _variables_without_ranks() -> Surroundings:
    return Surroundings(Settings(device=settings().device).variables())


def _whole_surroundings() -> Surroundings:
    variables = dict(os.environ)
    # Only Hydra sets no variable that identifies the job.
    ancestors = _ancestors() if "PMI_RANK" in variables else []
    return Surroundings(variables, _lines(variables.get("PBS_NODEFILE")), ancestors)


def rank_variables(
    *,
    rank: int,
    world_size: int,
    device: str | None = None,
    restart_count: int = 0,
    servers: int = 0,
    **given: Any,
) -> dict[str, str | None]:
    """The variables of a rank that `evenstep.launch` starts on this node; `detect` reads them back."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        **run_variables("launch", device=device, servers=servers, **given),
    }


def run_variables(launcher: str, *, num_nodes: int = 1, servers: int = 0, **given: Any) -> dict[str, str | None]:
    """The variables that evenstep's launchers ("run", "launch") set for all their ranks; None: unset.

    If the launcher is itself the child of a rank, it passes on only the device from the rank's settings.

    Args:
        launcher: "run" or "launch".
        num_nodes: Nodes of the run.
        servers: The number of ranks that are parameter servers.
        given: Other settings; None: this process's own value.
    """
    is_child = _rank_inherited_from() is not None
    own = Settings(device=settings().device) if is_child else settings()
    given = {name: value for name, value in given.items() if value is not None}
    variables = replaced(own, launcher=launcher, **given).variables()
    found: dict[str, str | None] = {**variables, _RANK_PROCESS: None}
    if num_nodes == 1:
        # Without it, Gloo resolves the host's name and listens on the resulting address.
        found["GLOO_SOCKET_IFNAME"] = "lo"
    if servers or is_child:
        found[_SERVERS] = str(servers) if servers else None
    return found


def node_identity() -> str:
    """A text that identifies this node: the host name and the kernel's boot id."""
    return f"{socket.gethostname()} {boot_id()}"


def announcement(
    *,
    world_size: int,
    num_nodes: int,
    device: str,
    num_threads: int,
    fewest_nodes: int | None = None,
) -> str:
    """The line that describes the run at its start. Pure; used by launchers and ranks.

    Args:
        device: "cpu" or "cuda", without an index.
        num_threads: Threads of one rank's CPU operations.
        fewest_nodes: The number of nodes with which the run may begin; None: all.
    """

    ranks = f"{counted(world_size, 'rank')} on {counted(num_nodes, 'node')}"
    if fewest_nodes not in (None, num_nodes):
        ranks = f"{counted(world_size // num_nodes, 'rank')} on each of {fewest_nodes} to {num_nodes} nodes"
    return f"evenstep: {ranks}, {device}, {counted(num_threads, 'thread')} per rank"


def attempts() -> dict[str, int]:
    """How often this process's job and run were restarted, by name."""
    found = {}
    for what, number, count in (
        ("Slurm job", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
        ("run", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ):
        name, restarts = os.environ.get(number, ""), os.environ.get(count, "0")
        if name not in ("", "none") and restarts.isdecimal():  # torchrun names runs without an id "none"
            found[f"{what} {name}"] = int(restarts)
    return found


def num_servers() -> int:
    """The number of parameter servers, which are the last ranks; 0 when unset.

    Raises:
        ConfigurationError: The variable isn't a whole number.
    """
    global _has_roles
    _has_roles = True
    text = os.environ.get(_SERVERS, "").strip() or "0"
    return checks.whole(_SERVERS, int(text) if text.isdecimal() else text, least=0)


def lacks_servers() -> bool:
    """Whether the command asks for servers, but the script has never read the ranks' roles."""
    return is_set(_SERVERS) and not _has_roles


def secret_variable(path: str) -> dict[str, str]:
    """The variable that gives ranks the secret of their run."""
    return {_SECRET_FILE: os.path.abspath(path)}


def run_secret() -> bytes:
    """The secret of all processes of a run: the content of EVENSTEP_SECRET_FILE; b"" when unset.

    Raises:
        ConfigurationError: The file can't be read, is empty, or is readable for other users.
    """
    global _secret
    path = os.environ.pop(_SECRET_FILE, "")  # children of this process don't need the path
    if not path:
        return _secret
    try:
        with open(path, "rb") as file:
            is_private = not os.fstat(file.fileno()).st_mode & 0o077
            secret = file.read().strip()
    except OSError as error:
        raise ConfigurationError(f"{_SECRET_FILE}={path}: {error.strerror}.") from None
    if not secret or not is_private:
        why = "other users may read it: chmod 600" if secret else "the file is empty"
        raise ConfigurationError(f"{_SECRET_FILE}={path}: {why}.")
    _secret = secret
    return secret


def openmp_threads() -> int | None:
    """The value of `OMP_NUM_THREADS`; None when unset or not positive."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def meeting_point() -> dict[str, str]:
    """The current variables by which `torch.distributed` finds this rank's place and peers."""
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {name: os.environ[name] for name in names if name in os.environ}


# Trackers would begin a run on their servers. They read these variables when they are imported.
_WITHOUT_TRACKERS = {"WANDB_MODE": "disabled", "COMET_START_OFFLINE": "1", "NEPTUNE_MODE": "debug"}


def under_watch(directory: Path, *, on_cpu: bool) -> dict[str, str]:
    """This process's environment, for a run that `evenstep doctor` watches.

    Nothing is compiled, and trackers write to `directory` or nowhere. On a CPU, accelerate joins its processes only if
    a variable of its own launcher is set.
    """
    cpu = {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
    apart = {"MLFLOW_TRACKING_URI": f"file://{directory}/mlruns", "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, **_WITHOUT_TRACKERS, **apart, **cpu}


# Values of other variables are never shown, because they might be secrets.
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
    "TORCH_",
    "PYTORCH_",
    "TORCHELASTIC_RESTART",
    "TORCHINDUCTOR_",
    "TP_SOCKET",
)


def telling_variables() -> dict[str, str]:
    """The set variables that affect torch or evenstep, sorted."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_TELLING)}


def value(name: str) -> str | None:
    """A variable's value; None if it is unset or empty."""
    return os.environ.get(name) or None


def is_set(name: str) -> bool:
    """Whether a variable has a value that isn't empty."""
    return value(name) is not None


@contextlib.contextmanager
def exported(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Context in which variables are set (None: unset) for new processes; restores the former values."""
    before = {name: os.environ.get(name) for name in variables}
    export(variables)
    try:
        yield
    finally:
        export(before)


def export(variables: Mapping[str, str | None]) -> None:
    """Set variables (None: unset them) for good: for a process that exists only to be one rank."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def replace(variables: Mapping[str, str]) -> None:
    """Replace all variables of this process by these. For a forked process, which has its parent's variables."""
    os.environ.clear()
    os.environ.update(variables)


def _lines(path: str | None) -> list[str]:
    if not path:
        return []
    with contextlib.suppress(OSError):  # a missing file: the launcher's variables must suffice
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
