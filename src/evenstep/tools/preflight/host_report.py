"""The report of `evenstep env` for bug reports. Reads only; opens no port."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import resource
import shutil
import socket
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.utils import collect_env

from evenstep.checks import counted
from evenstep.errors import ConfigurationError
from evenstep.ground import environment
from evenstep.ground.environment import Placement
from evenstep.ground.host.control_groups import memory_limit_bytes
from evenstep.ground.host.network import addresses
from evenstep.launcher.options.resources import look_at_host, plan_ranks
from evenstep.transport.shm.segment import available_bytes, host_memory_bytes

Report = dict[str, dict[str, str]]

_PACKAGES = ("evenstep", "torch", "safetensors", "rich", "mpi4py")
_LIMITS = {"open files": "NOFILE", "processes": "NPROC", "locked memory": "MEMLOCK", "core files": "CORE"}


def torchs_report() -> str:
    """The text of torch's own `collect_env`, or the reason why that fails."""
    try:
        return str(collect_env.get_pretty_env_info())  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:  # such as a torch that wants pip, where there is none
        return f"torch.utils.collect_env fails: {error}"


def collect() -> Report:
    """Facts that torch's report leaves out, by section. A fact that can't be found is replaced by the reason."""
    host, missing = look_at_host(), [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    plan = plan_ranks("auto", host, openmp_threads=environment.openmp_threads())
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host.num_cpus
    return {
        "versions": _versions(),
        "processors": {
            "cores": f"{host.num_cores} physical that this process may use; {allowed} of {host.num_cpus} logical",
            "torch's threads": str(torch.get_num_threads()),
            "evenstep run": f"starts {counted(plan.num_ranks, 'rank')} of {counted(plan.num_threads, 'thread')} here",
        },
        "memory": {
            "memory": _or_why(_memory),
            **{path: _or_why(functools.partial(_disk, path)) for path in ("/dev/shm", "/tmp")},
        },
        "limits": {what: _limit(name) for what, name in _LIMITS.items()},
        "launcher": _launcher(),
        "transports": {
            "shared memory": f"no: this python has no os.{missing[0]}" if missing else "yes",
            "torch's backends": ", ".join(name for name, there in backends.items() if there) or "none",
        },
        "network": {
            "host name": f"{socket.gethostname()}, address {_or_why(_resolved)}",
            **{name: ", ".join(found) for name, found in addresses().items()},
        },
        "variables": environment.telling_variables() or {"none": "no variable that torch or evenstep listen to is set"},
    }


def render(report: Mapping[str, Mapping[str, str]]) -> str:
    """The report as text. Pure."""
    width = max((len(name) for section in report.values() for name in section), default=0)
    lines = []
    for title, section in report.items():
        lines.append(title)
        lines += [f"  {name:<{width}}  {value}" for name, value in section.items()]
    return "\n".join(lines)


def describe_placement(placement: Placement) -> dict[str, str]:
    """The recognised launcher, and the variables that it was recognised by. Pure."""
    if placement.launcher == "none":
        return {"recognised": "none: one process" + (f"; {placement.remark}" if placement.remark else "")}
    found = {
        "recognised": placement.launcher,
        "because": placement.why,
        "this is": f"rank {placement.rank} of {placement.world_size}, {placement.local_rank} of "
        f"{placement.local_world_size} on node {placement.node_rank} of {placement.num_nodes}",
    }
    if placement.rendezvous_file is not None:
        found["rendezvous"] = f"in {placement.rendezvous_file}"
    elif placement.master_address is not None:
        found["rendezvous"] = f"at {placement.master_address}:{placement.master_port}"
    return found


def _or_why(look: Callable[[], str]) -> str:
    """The result of `look`, or the reason why it fails."""
    try:
        return look()
    except OSError as error:
        return f"unknown: {error.strerror or error}"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _memory() -> str:
    limit = memory_limit_bytes()
    allowed = "" if limit is None else f"; control groups allow {_gib(limit)}"
    return f"{_gib(available_bytes())} available of {_gib(host_memory_bytes())}{allowed}"


def _disk(path: str) -> str:
    usage = shutil.disk_usage(path)
    return f"{_gib(usage.free)} free of {_gib(usage.total)}"


def _limit(name: str) -> str:
    soft, hard = (
        "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
        for value in resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    )
    return soft + ("" if soft == hard else f" (may be raised to {hard})")


def _launcher() -> dict[str, str]:
    try:
        return describe_placement(environment.current_placement())
    except ConfigurationError as error:
        return {"error": str(error)}


def _resolved() -> str:
    return ", ".join(sorted({str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)}))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
