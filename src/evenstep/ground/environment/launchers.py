"""MPI launchers and schedulers: a table of their variables, by which the launcher of this process is recognised. Pure.

The order matters: mpirun and Hydra inside a Slurm job leave Slurm's variables as they were for the whole job
(`SLURM_PROCID=0` on every rank), so Slurm comes last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from evenstep.errors import ConfigurationError
from evenstep.ground.environment.hosts import (
    control_of_hydra,
    expand_slurm_counts,
    expand_slurm_hosts,
    host_of_open_mpi_uri,
    hosts_of_node_file,
)
from evenstep.ground.environment.values import first_set, integer, shown
from evenstep.ground.host.network import LOOPBACK

_Each = TypeVar("_Each", str, int)


@dataclass(frozen=True)
class Surroundings:
    """Everything that a process can read about its launcher.

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
        launcher: The launcher's name, for people.
        names: The variables from which the claim was read.
        address: The address of rank 0; None if it is unknown.
        job: Identifies this job among others; "" if no variable does.
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
    row = next((row for row in _TABLE if row.is_here(given.variables)), None)
    if row is None:
        return None
    names = tuple(first_set(given.variables, *name.split("|")) or name.split("|")[-1] for name in row.names)
    rank, size, local_rank, local_size, *_ = _integers(row.launcher, given.variables, names)
    claim = Claim(row.launcher, names, rank, size, local_rank, local_size, job=row.job(given))
    claim = row.complete(given, claim)
    _validate(claim, given.variables)
    return claim


@dataclass(frozen=True)
class _Row:
    """A launcher.

    Attributes:
        launcher: The launcher's name, for people.
        is_here: Returns whether the launcher started this process as a rank.
        names: Variables with the rank, the number of ranks, and both on this node (Slurm: the node's number). All must
            be set. "A|B": the first that is set.
        job: Returns a text that identifies this job among others.
        complete: Adds nodes and the address of rank 0 to a claim.
    """

    launcher: str
    is_here: Callable[[Mapping[str, str]], bool]
    names: tuple[str, ...]
    job: Callable[[Surroundings], str]
    complete: Callable[[Surroundings, Claim], Claim]


def _has_pmi(variables: Mapping[str, str]) -> bool:
    # Under `srun --mpi=pmi2` the step's own variables are more complete.
    is_srun = "SLURM_STEP_ID" in variables and not {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"} & variables.keys()
    return ("PMI_RANK" in variables or "PMI_SIZE" in variables) and not is_srun


def _has_intel(variables: Mapping[str, str]) -> bool:
    return _has_pmi(variables) and any(name.startswith("I_MPI_") for name in variables)


def _job_of_open_mpi(given: Surroundings) -> str:
    return f"open mpi {given.variables.get('PMIX_NAMESPACE') or given.variables.get('OMPI_MCA_ess_base_jobid', '')}"


def _job_of_hydra(given: Surroundings) -> str:
    return f"hydra {control_of_hydra(given.ancestors) or _first(given, 'SLURM_JOB_ID', 'SLURM_JOBID', 'PBS_JOBID')}"


def _job_of_slurm(given: Surroundings) -> str:
    number = _first(given, "SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID")
    return f"slurm {given.variables.get('SLURM_CLUSTER_NAME', '')} {number}.{given.variables['SLURM_STEP_ID']}"


def _complete_open_mpi(given: Surroundings, claim: Claim) -> Claim:
    # Open MPI 5 names its jobs prterun-<host>-<pid>@<n>, where <host> is mpirun's.
    mpirun = re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", given.variables.get("PMIX_NAMESPACE", ""))
    host = mpirun[1] if mpirun else host_of_open_mpi_uri(given.variables.get("OMPI_MCA_orte_hnp_uri", ""))
    return _complete(given, claim, host, integer(given.variables, "OMPI_MCA_orte_num_nodes", default=0))


def _complete_hydra(given: Surroundings, claim: Claim) -> Claim:
    return _complete(given, claim, (control_of_hydra(given.ancestors) or "").rpartition(":")[0] or None)


def _complete(given: Surroundings, claim: Claim, launcher_host: str | None = None, num_nodes: int = 0) -> Claim:
    """Complete the claim of an MPI launcher, whose variables lack the order of nodes."""
    if claim.local_world_size >= claim.world_size:
        address: str | None = LOOPBACK
        num_nodes = 1
    else:
        num_nodes = max(2, num_nodes, -(-claim.world_size // max(1, claim.local_world_size)))
        hosts = hosts_of_node_file(given.node_file) or _hosts_of_slurm(given, "SLURM_JOB_NODELIST")
        address = hosts[0] if hosts else launcher_host
    node_rank = min(num_nodes - 1, claim.rank // max(1, claim.local_world_size))
    return replace(claim, address=address, num_nodes=num_nodes, node_rank=node_rank)


def _complete_slurm(given: Surroundings, claim: Claim) -> Claim:
    hosts = _hosts_of_slurm(given, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    counts = _understood(
        "srun", expand_slurm_counts, _first(given, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    )
    node_rank = claim.local_world_size  # this launcher has only one of the two variables
    num_nodes = max(len(hosts), node_rank + 1)
    # Ranks of this node: the list's number if it is consistent, else an even share.
    local_size = counts[node_rank] if node_rank < len(counts) and sum(counts) == claim.world_size else 0
    local_size = local_size or max(claim.local_rank + 1, -(-claim.world_size // num_nodes))
    address = LOOPBACK if num_nodes == 1 else hosts[0] if hosts else given.variables.get("SLURM_LAUNCH_NODE_IPADDR")
    return replace(claim, local_world_size=local_size, node_rank=node_rank, num_nodes=num_nodes, address=address)


_TABLE = (
    _Row(
        "Open MPI",
        lambda variables: "OMPI_COMM_WORLD_RANK" in variables or "OMPI_COMM_WORLD_SIZE" in variables,
        tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        _job_of_open_mpi,
        _complete_open_mpi,
    ),
    _Row(
        "PALS",
        lambda variables: "PALS_RANKID" in variables,
        ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        lambda given: f"pals {_first(given, 'PALS_APID', 'PMI_JOBID', 'PBS_JOBID')}",
        _complete,
    ),
    *(
        _Row(
            launcher,
            is_here,
            ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
            _job_of_hydra,
            _complete_hydra,
        )
        for launcher, is_here in (("Intel MPI", _has_intel), ("MPICH", _has_pmi))
    ),
    _Row(
        "srun",
        # Without a step this is the body of an sbatch script, or a shell of salloc: one process, whatever NTASKS is.
        lambda variables: "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables,
        (
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS|SLURM_NTASKS|SLURM_NPROCS|SLURM_NTASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_ID",
        ),
        _job_of_slurm,
        _complete_slurm,
    ),
)


def _first(given: Surroundings, *names: str) -> str:
    """The value of the first variable that is set; "" if none is."""
    return given.variables.get(first_set(given.variables, *names) or "", "")


def _hosts_of_slurm(given: Surroundings, *names: str) -> list[str]:
    return _understood(first_set(given.variables, *names) or "", expand_slurm_hosts, _first(given, *names))


def _understood(what: str, expand: Callable[[str], list[_Each]], text: str) -> list[_Each]:
    try:
        return expand(text) if text else []
    except ValueError as error:
        raise ConfigurationError(
            f"{what}: {error}. Set MASTER_ADDR to the address of rank 0's node, and MASTER_PORT to a free port there."
        ) from None


def _integers(launcher: str, variables: Mapping[str, str], names: Sequence[str]) -> list[int]:
    missing = [name for name in names if name not in variables]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigurationError(
            f"{shown(variables, names)} look like {launcher}, but {', '.join(missing)} {verb} not set, and evenstep "
            f"does not guess. Set the missing ones on every rank, unset the others to run as one process, or start "
            f"with `evenstep run`."
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
