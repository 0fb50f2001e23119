"""The number of ranks on a node, and of threads per rank, from its hardware and the user's flags."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from evenstep.checks import counted
from evenstep.errors import ConfigurationError
from evenstep.ground.computing.device import choose_device
from evenstep.ground.environment import Placement
from evenstep.ground.host.control_groups import cpu_limit

# Limits of ranks per CPU. A few more ranks than CPUs are useful for testing; thousands would only stop the machine.
_MANY_PER_CPU, _MOST_PER_CPU = 8, 64
_MOST_THREADS = 1024  # of a rank, for any number of CPUs; torch fails with numbers that no system can start


@dataclass(frozen=True)
class Host:
    """A host's hardware for ranks: physical cores, logical CPUs, GPUs."""

    num_cores: int
    num_cpus: int
    num_gpus: int


@dataclass(frozen=True)
class RankPlan:
    """The number of ranks on a host, and the number of threads of each.

    Attributes:
        num_ranks: The number of ranks, parameter servers included.
        num_threads: Threads of each rank's CPU operations.
        remark: A remark about the number of ranks to print, or "".
    """

    num_ranks: int
    num_threads: int
    remark: str = ""


def plan_ranks(
    nproc: str,
    host: Host,
    *,
    threads_per_rank: int | None = None,
    device: str | None = None,
    openmp_threads: int | None = None,
    servers: int = 0,
) -> RankPlan:
    """Ranks and threads of one host. Pure.

    Args:
        nproc: A number, "auto" (GPUs if there are any, else physical cores divided by the threads per rank), "gpu", or
            "cpu" (a rank per logical CPU, as in torchrun).
        host: The hardware of this node.
        threads_per_rank: The user's number; None: `OMP_NUM_THREADS`, else as many as fit.
        device: The value of `--device`; None: GPUs if there are any.
        openmp_threads: The value of `OMP_NUM_THREADS`.
        servers: Number of parameter servers, in addition to the `nproc` ranks.

    Raises:
        ConfigurationError: A number of ranks or threads is invalid, there are too few GPUs, or far too many ranks.
    """
    if threads_per_rank is not None and threads_per_rank < 1:
        raise ConfigurationError(
            f"{threads_per_rank} threads per rank: a rank needs at least 1. Leave it out to let evenstep choose."
        )
    fixed = threads_per_rank or openmp_threads
    most = max(_MOST_THREADS, _MOST_PER_CPU * host.num_cpus)
    if fixed is not None and fixed > most:
        name = "threads per rank" if threads_per_rank else "threads (OMP_NUM_THREADS)"
        raise ConfigurationError(f"{fixed} {name}: at most {most} on a node of {counted(host.num_cpus, 'CPU')}.")
    num_ranks = _count_ranks(nproc, host, threads_per_rank=fixed, device=device)
    if device is not None:
        # Refuse too few GPUs here, with the same message as every rank's `evenstep.init`.
        choose_device(device, Placement(world_size=num_ranks, local_world_size=num_ranks), num_gpus=host.num_gpus)
    by_threads = nproc == "auto" and not _uses_gpus(host, device)
    num_ranks += servers
    fitting = _auto_threads(host) if by_threads else max(1, host.num_cores // num_ranks)
    crowd = f"{num_ranks} ranks on a node of {counted(host.num_cpus, 'CPU')}"
    if num_ranks > _MOST_PER_CPU * host.num_cpus:
        raise ConfigurationError(f"{crowd}: at most {_MOST_PER_CPU} per CPU are allowed. Pass a smaller number.")
    remark = f"{crowd}: they will mostly wait for each other" if num_ranks > _MANY_PER_CPU * host.num_cpus else ""
    return RankPlan(num_ranks=num_ranks, num_threads=fixed or fitting, remark=remark)


def _count_ranks(nproc: str, host: Host, *, threads_per_rank: int | None, device: str | None) -> int:
    if nproc == "auto":
        if _uses_gpus(host, device):
            # A device with an index, "cuda:0", is shared by all ranks: one rank, unless the user gives a number.
            return 1 if device is not None and ":" in device else host.num_gpus
        return max(1, host.num_cores // (threads_per_rank or _auto_threads(host)))
    if nproc == "gpu":
        if host.num_gpus == 0:
            raise ConfigurationError(
                "--nproc-per-node gpu, but this host has no GPU that torch can use. Use auto or a number."
            )
        return host.num_gpus
    if nproc == "cpu":
        return host.num_cpus
    try:
        count = int(nproc)
    except ValueError:
        raise ConfigurationError(f"--nproc-per-node {nproc}: use auto, cpu, gpu or a number of ranks.") from None
    if count < 1:
        raise ConfigurationError(
            f"--nproc-per-node {count}: there must be at least 1 rank. Use auto to let evenstep choose."
        )
    return count


def _uses_gpus(host: Host, device: str | None) -> bool:
    return host.num_gpus > 0 and device != "cpu"


def _auto_threads(host: Host) -> int:
    # On big hosts ranks of one core each would spend their time in communication, and a single rank can't use all
    # cores.
    return math.ceil(host.num_cores / 8)


def look_at_host() -> Host:
    """The hardware of this host that this process may use."""
    import torch

    return Host(num_cores=count_cores(), num_cpus=os.cpu_count() or 1, num_gpus=torch.cuda.device_count())


def count_cores() -> int:
    """Physical cores that this process may use, by its affinity and the limits of its control groups."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    topology = Path("/sys/devices/system/cpu")
    siblings = []
    for cpu in sorted(allowed):
        file = topology / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        siblings.append(file.read_text().strip() if file.exists() else str(cpu))
    return cores_within(siblings, cpu_limit())


def cores_within(siblings: Iterable[str], limit: float | None) -> int:
    """Physical cores, from the sibling list of each allowed CPU, limited by control groups. Pure."""
    cores = len(set(siblings))
    return max(1, cores if limit is None else min(cores, math.ceil(limit)))
