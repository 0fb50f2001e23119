"""MPI launchers and schedulers: the variables of each, to one `Claim`. Pure.

The order matters: mpirun and Hydra inside a Slurm job leave Slurm's variables as they were for the whole job
(`SLURM_PROCID=0` on every rank), so Slurm comes last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from evenstep.errors import ConfigurationError
from evenstep.ground.environment.hosts import (
    control_of_hydra,
    expand_slurm_counts,
    expand_slurm_hosts,
    host_of_open_mpi_uri,
    hosts_of_node_file,
)
from evenstep.ground.environment.values import first_set, integer, shown
from evenstep.network import LOOPBACK


@dataclass(frozen=True)
class Surroundings:
    """Everything that a process can learn of its launcher.

    Attributes:
        variables: The environment.
        node_file: The lines of the file that `PBS_NODEFILE` names; empty without one.
        ancestors: Command lines of this process's parent, its parent, and so on.
    """

    variables: Mapping[str, str]
    node_file: Sequence[str] = ()
    ancestors: Sequence[str] = ()


@dataclass(frozen=True)
class Claim:
    """A launcher's description of one rank.

    `node_rank` and `num_nodes` are the best guess before the rendezvous.

    Attributes:
        launcher: Its name, for people.
        names: The variables that say so.
        address: Where rank 0 can be found; None if nothing says so.
        job: Identifies this job among others; "" if nothing does.
    """

    launcher: str
    names: tuple[str, ...]
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int = 0
    num_nodes: int = 1
    address: str | None = None
    job: str = ""


def recognise(given: Surroundings) -> Claim | None:
    """Recognise the launcher that started this process as a rank; None if none did.

    Raises:
        ConfigurationError: A launcher's variables contradict each other, or some are missing; the message shows them.
    """
    for read in _LAUNCHERS:
        claim = read(given)
        if claim is not None:
            _validate(claim, given.variables)
            return claim
    return None


def _open_mpi(given: Surroundings) -> Claim | None:
    variables = given.variables
    names = tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    if names[0] not in variables and names[1] not in variables:
        return None
    rank, size, local_rank, local_size = _integers("Open MPI", variables, names)
    # Open MPI 5 names its jobs prterun-<host>-<pid>@<n>, where <host> is mpirun's.
    namespace = variables.get("PMIX_NAMESPACE", "")
    mpirun = re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", namespace)
    launcher_host = mpirun[1] if mpirun else host_of_open_mpi_uri(variables.get("OMPI_MCA_orte_hnp_uri", ""))
    return _with_hosts(
        given,
        Claim(
            "Open MPI",
            names,
            rank,
            size,
            local_rank,
            local_size,
            job=f"open mpi {namespace or variables.get('OMPI_MCA_ess_base_jobid', '')}",
        ),
        launcher_host,
        num_nodes=integer(variables, "OMPI_MCA_orte_num_nodes", default=0),
    )


def _pals(given: Surroundings) -> Claim | None:
    variables = given.variables
    if "PALS_RANKID" not in variables:
        return None
    names = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE")
    rank, size, local_rank, local_size = _integers("PALS", variables, names)
    job = variables.get(first_set(variables, "PALS_APID", "PMI_JOBID", "PBS_JOBID") or "", "")
    return _with_hosts(given, Claim("PALS", names, rank, size, local_rank, local_size, job=f"pals {job}"), None)


def _pmi(given: Surroundings) -> Claim | None:
    variables = given.variables
    if "PMI_RANK" not in variables and "PMI_SIZE" not in variables:
        return None
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    if not any(name in variables for name in local) and "SLURM_STEP_ID" in variables:
        return None  # `srun --mpi=pmi2`: the step's own variables say more
    names = ("PMI_RANK", "PMI_SIZE", *local)
    is_intel = any(name.startswith("I_MPI_") for name in variables)
    launcher = "Intel MPI" if is_intel else "MPICH"
    rank, size, local_rank, local_size = _integers(launcher, variables, names)
    control = control_of_hydra(given.ancestors)
    claim = Claim(launcher, names, rank, size, local_rank, local_size, job=f"hydra {control or _job_id(variables)}")
    return _with_hosts(given, claim, control.rpartition(":")[0] if control else None)


def _slurm_step(given: Surroundings) -> Claim | None:
    variables = given.variables
    # Without a step it is the body of an sbatch script, or a shell of salloc's: one process, whatever NTASKS says.
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return None
    size_name = first_set(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS") or "SLURM_NTASKS"
    names = ("SLURM_PROCID", size_name, "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID")
    rank, size, local_rank, node_rank, _ = _integers("srun", variables, names)
    try:
        counts_name = first_set(variables, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        counts = expand_slurm_counts(variables[counts_name]) if counts_name else []
        hosts_name = first_set(variables, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        hosts = expand_slurm_hosts(variables[hosts_name]) if hosts_name else []
    except ValueError as error:
        raise ConfigurationError(f"srun: {error}. {_SET_MASTER}") from None
    num_nodes = max(len(hosts), node_rank + 1)
    # Ranks of this node: the list's number if it fits the rest, else an even share.
    local_size = counts[node_rank] if node_rank < len(counts) and sum(counts) == size else 0
    local_size = local_size or max(local_rank + 1, -(-size // num_nodes))
    address: str | None = LOOPBACK if num_nodes == 1 else hosts[0] if hosts else None
    job = f"slurm {variables.get('SLURM_CLUSTER_NAME', '')} {_job_id(variables)}.{variables['SLURM_STEP_ID']}"
    address = address or variables.get("SLURM_LAUNCH_NODE_IPADDR")
    return Claim("srun", names, rank, size, local_rank, local_size, node_rank, num_nodes, address, job)


_LAUNCHERS: tuple[Callable[[Surroundings], Claim | None], ...] = (_open_mpi, _pals, _pmi, _slurm_step)

_SET_MASTER = "Set MASTER_ADDR to the address of rank 0's node, and MASTER_PORT to a free port there."


def _with_hosts(given: Surroundings, claim: Claim, launcher_host: str | None, num_nodes: int = 0) -> Claim:
    """Complete a claim of an MPI launcher, which doesn't give the order of the nodes."""
    variables = given.variables
    if claim.local_world_size >= claim.world_size:
        address: str | None = LOOPBACK
        num_nodes = 1
    else:
        num_nodes = max(2, num_nodes, -(-claim.world_size // max(1, claim.local_world_size)))
        hosts = hosts_of_node_file(given.node_file)
        if not hosts and variables.get("SLURM_JOB_NODELIST"):
            try:
                hosts = expand_slurm_hosts(variables["SLURM_JOB_NODELIST"])
            except ValueError as error:
                raise ConfigurationError(f"SLURM_JOB_NODELIST: {error}. {_SET_MASTER}") from None
        address = hosts[0] if hosts else launcher_host
    node_rank = min(num_nodes - 1, claim.rank // max(1, claim.local_world_size))
    changed = {"address": address, "num_nodes": num_nodes, "node_rank": node_rank}
    return Claim(**{**vars(claim), **changed})


def _job_id(variables: Mapping[str, str]) -> str:
    name = first_set(variables, "SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID")
    return variables[name] if name else ""


def _integers(launcher: str, variables: Mapping[str, str], names: Sequence[str]) -> list[int]:
    missing = [name for name in names if name not in variables]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigurationError(
            f"{shown(variables, names)} look like {launcher}, but {', '.join(missing)} {verb} not set, and evenstep "
            f"does not guess. Set what is missing on every rank, unset the others to run as one process, or start with "
            f"`evenstep run`."
        )
    return [integer(variables, name) for name in names]


def _validate(claim: Claim, variables: Mapping[str, str]) -> None:
    fits = 0 <= claim.rank < claim.world_size and 0 <= claim.local_rank < claim.local_world_size
    if not fits or claim.local_world_size > claim.world_size or claim.local_rank > claim.rank:
        raise ConfigurationError(
            f"{shown(variables, claim.names)}: {claim.launcher}'s variables contradict each other (rank {claim.rank} "
            f"of {claim.world_size}, {claim.local_rank} of {claim.local_world_size} on its node). Unset them to run as "
            f"one process, or start with `evenstep run`."
        )
