"""Detects which rank this process is: variables in, a frozen `Placement` out. Pure.

It looks for, in this order: torchrun's variables (which evenstep's launchers set, too), Open MPI, PALS, PMI (MPICH,
Intel MPI), a Slurm step. Otherwise there is one process. If two launchers are nested, both must describe the same
world.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from evenstep.errors import ConfigurationError
from evenstep.ground.environment.hosts import hosts_of_node_file
from evenstep.ground.environment.launchers import Claim, Surroundings, recognise
from evenstep.ground.environment.placement import Placement
from evenstep.ground.environment.run_settings import Settings
from evenstep.ground.environment.values import REMEDY, first_set, integer, master_port, shown

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE")

# Ports below Linux's ephemeral range, which the system gives to any process.
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000


def detect(variables: Mapping[str, str], *, node_file: Sequence[str] = (), ancestors: Sequence[str] = ()) -> Placement:
    """Read the launcher's variables into a `Placement`.

    Args:
        variables: The environment.
        node_file: Lines of the file that `PBS_NODEFILE` names.
        ancestors: Command lines of this process's parent, its parent, and so on.

    Raises:
        ConfigurationError: The variables contradict each other, aren't numbers, belong to a node instead of a process,
            or would split one job into independent ones; the message shows them.
    """
    given = Surroundings(variables, node_file, ancestors)
    claim, settings = recognise(given), Settings.parse(variables)
    if "RANK" in variables or "WORLD_SIZE" in variables:
        is_by_agent = "TORCHELASTIC_RUN_ID" in variables or bool(settings.launcher)
        if claim is None or is_by_agent:
            placement = _from_torchrun(variables, settings)
            if claim is not None and not settings.launcher:  # evenstep's launcher checks before it starts ranks
                _refuse_one_world_per_task(claim, placement, variables)
            return placement
        _check_same(claim, variables)
    if claim is not None:
        return _from_claim(claim, variables, settings)
    _refuse_kubeflow_without_torchrun(variables)
    return Placement(device=settings.device, remark=_remark(given))


def node_of_task(given: Surroundings, *, num_nodes: int) -> tuple[int, str, int] | None:
    """(node rank, address, port) for evenstep's launcher, if another launcher started it once per node.

    Args:
        given: The surroundings of evenstep's launcher.
        num_nodes: Nodes of the run.

    Returns:
        The three values; None if no other launcher started it once per node: then the command line must give them.
    """
    claim = recognise(given)
    if claim is None or claim.world_size != num_nodes or num_nodes == 1 or claim.address is None:
        return None
    return claim.rank, claim.address, port_of_job(claim.job)


def refuse_independent_runs(given: Surroundings, *, num_nodes: int, what: str) -> None:
    """Refuse a run if another launcher started evenstep's launcher once per task: each would make its own world.

    Args:
        given: The surroundings of evenstep's launcher.
        num_nodes: The number of nodes from its flags.
        what: The command, for the message.

    Raises:
        ConfigurationError: The other launcher started several of evenstep's, which wouldn't be connected.
    """
    claim = recognise(given)
    if claim is None or claim.world_size == 1 or num_nodes > 1:
        return
    script = "evenstep.init() in the script finds its rank itself"
    raise ConfigurationError(
        f"this is task {claim.rank} of {claim.world_size} that {claim.launcher} started "
        f"({shown(given.variables, claim.names)}), and each would start a world of its own with `{what}`. Let "
        f"{claim.launcher} start the ranks, without `{what}` ({script}), or start one task per node with --nnodes "
        f"{claim.num_nodes}, or one task in all."
    )


def port_of_job(job: str) -> int:
    """A port that is equal on all ranks of a job, and almost always different in other jobs."""
    digest = hashlib.sha256(job.encode()).digest()
    return _FIRST_PORT + int.from_bytes(digest[:8], "big") % _NUM_PORTS


def _from_torchrun(variables: Mapping[str, str], settings: Settings) -> Placement:
    given = shown(variables, _TORCHRUN) + (" are" if sum(name in variables for name in _TORCHRUN) > 1 else " is")
    for name in ("RANK", "WORLD_SIZE"):
        if name not in variables:
            raise ConfigurationError(f"{given} set, but {name} is not. {REMEDY}")
    if "LOCAL_RANK" not in variables:
        kubeflow = " (Kubeflow sets them so, for torchrun to read)" if "PET_NNODES" in variables else ""
        raise ConfigurationError(
            f"{given} set without LOCAL_RANK, the number of this process on its node, so RANK may be the rank of a node"
            f" and not of a process{kubeflow}, and evenstep does not guess. Set it, too. {REMEDY}"
        )
    world_size = integer(variables, "WORLD_SIZE")
    local_world_size = integer(variables, "LOCAL_WORLD_SIZE", default=world_size)
    num_nodes = integer(variables, "GROUP_WORLD_SIZE", default=max(1, world_size // max(1, local_world_size)))
    restart_count = integer(variables, "TORCHELASTIC_RESTART_COUNT", default=0)
    # A file instead of a TCP store, which would listen on every interface.
    store = settings.store if num_nodes == 1 else None
    return Placement(
        rank=integer(variables, "RANK"),
        world_size=world_size,
        local_rank=integer(variables, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=integer(variables, "GROUP_RANK", default=0),
        num_nodes=num_nodes,
        launcher={"run": "evenstep run", "launch": "evenstep.launch"}.get(settings.launcher, "torchrun"),
        rendezvous_file=None if store is None else Path(store),
        master_address=variables.get("MASTER_ADDR"),
        master_port=master_port(variables, default=0) or None,
        restart_count=restart_count,
        rendezvous_id=settings.rendezvous,
        pages=tuple(settings.pages),
        device=settings.device,
        announced=settings.announced,
        why=shown(variables, _TORCHRUN),
    )


def _from_claim(claim: Claim, variables: Mapping[str, str], settings: Settings) -> Placement:
    address, port = claim.address, port_of_job(claim.job)
    if claim.world_size > 1:
        address = variables.get("MASTER_ADDR") or address
        port = master_port(variables, default=port)
        if address is None:
            raise ConfigurationError(
                f"{shown(variables, claim.names)}: {claim.launcher} started ranks on several nodes, and the address of "
                f"rank 0 is unknown. Set MASTER_ADDR to its node's address (and MASTER_PORT to a free port there)."
            )
    visible = variables.get("CUDA_VISIBLE_DEVICES", "").strip(",")
    return Placement(
        rank=claim.rank,
        world_size=claim.world_size,
        local_rank=claim.local_rank,
        local_world_size=claim.local_world_size,
        node_rank=claim.node_rank,
        num_nodes=claim.num_nodes,
        launcher=claim.launcher,
        master_address=address if claim.world_size > 1 else None,
        master_port=port if claim.world_size > 1 else None,
        makes_store=claim.world_size > 1,
        job=claim.job,
        device=settings.device,
        has_one_gpu_of_its_own=bool(visible) and "," not in visible and claim.local_world_size > 1,
        why=shown(variables, claim.names),
    )


def _check_same(claim: Claim, variables: Mapping[str, str]) -> None:
    """Check that RANK and WORLD_SIZE of a job script agree with its launcher's own variables."""
    said = {name: integer(variables, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in variables}
    found = {"RANK": claim.rank, "WORLD_SIZE": claim.world_size, "LOCAL_RANK": claim.local_rank}
    if any(found[name] != value for name, value in said.items()):
        raise ConfigurationError(
            f"{shown(variables, _TORCHRUN)} contradict {claim.launcher}'s own variables: "
            f"{shown(variables, claim.names)}. Unset the former; evenstep reads the latter."
        )


def _refuse_one_world_per_task(claim: Claim, placement: Placement, variables: Mapping[str, str]) -> None:
    if claim.world_size == 1 or placement.num_nodes > 1:
        return
    raise ConfigurationError(
        f"{claim.launcher} started {claim.world_size} tasks ({shown(variables, claim.names)}), and torchrun in each of "
        f"them a world of its own ({shown(variables, _TORCHRUN)}): {claim.world_size} independent jobs. Leave torchrun "
        f"out, give it --nnodes {claim.num_nodes}, or start one task."
    )


def _refuse_kubeflow_without_torchrun(variables: Mapping[str, str]) -> None:
    nodes = variables.get("PET_NNODES", "1").partition(":")[2] or variables.get("PET_NNODES", "1")
    if nodes not in ("", "1"):
        names = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT")
        raise ConfigurationError(
            f"{shown(variables, names)}: this is one of {nodes} nodes, and the script was started without a launcher, "
            f"so each would train alone. Start it with `evenstep run` or `torchrun`, which read these variables."
        )


def _remark(given: Surroundings) -> str:
    """The remark to print for a single process whose variables look like several ranks: a job script's body."""
    variables = given.variables
    job = variables.get(first_set(variables, "SLURM_JOB_ID", "SLURM_JOBID") or "", "")
    num_tasks = variables.get("SLURM_NTASKS", "1")
    if "SLURM_STEP_ID" not in variables and "SLURM_PROCID" in variables and num_tasks not in ("", "1"):
        return (
            f"inside Slurm job {job or '?'} ({num_tasks} tasks), but not started by srun (no SLURM_STEP_ID): this is "
            f"one process. For {num_tasks} ranks: srun python train.py"
        )
    hosts = hosts_of_node_file(given.node_file)
    if len(given.node_file) > 1:
        where = "1 node" if len(hosts) == 1 else f"{len(hosts)} nodes"
        return (
            f"inside PBS job {variables.get('PBS_JOBID', '?')} ({len(given.node_file)} slots on {where}), but not "
            f"started by mpiexec: this is one process. For a rank per slot: mpiexec python train.py"
        )
    return ""
