"""The report of `evenstep env` for bug reports. Reads only; opens no port."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from evenstep import environment
from evenstep.control_groups import memory_limit_bytes
from evenstep.environment import Placement
from evenstep.errors import ConfigurationError
from evenstep.launcher.options.resources import Host, count_cores, plan_ranks
from evenstep.network import addresses
from evenstep.preflight.tested_versions import runs_on, untested
from evenstep.transport.shm.segment import available_bytes, host_memory_bytes

Report = dict[str, dict[str, str]]

_PACKAGES = ("evenstep", "torch", "numpy", "safetensors", "rich", "triton", "mpi4py")
_LIMITS = {"open files": "NOFILE", "processes": "NPROC", "locked memory": "MEMLOCK", "core files": "CORE"}


def collect() -> Report:
    """Everything, by section. Each line stands alone: what can't be found out says why."""
    gpus = {f"cuda:{index}": _gpu(index) for index in range(torch.cuda.device_count())}
    host = Host(num_cores=count_cores(), num_cpus=os.cpu_count() or 1, num_gpus=len(gpus))
    return {
        "versions": _versions(),
        "processors": _processors(host),
        "GPUs": gpus
        or {"none": "torch finds no GPU" + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else "")},
        "memory": _memory(),
        "limits": {what: _limit(name) for what, name in _LIMITS.items()},
        "launcher": _launcher(),
        "transports": _transports(),
        "network": {
            "host name": f"{socket.gethostname()}, which means {_resolved(socket.gethostname())}",
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
    """The launcher that was recognised, and by which variables. Pure."""
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


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    nccl = "none"
    if dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    found["torch built with"] = f"CUDA {torch.version.cuda or 'none'}, NCCL {nccl}"
    found["python"] = f"{platform.python_version()} ({sys.executable})"
    pair = (str(torch.__version__), platform.python_version())
    runs = "; ".join(f"{run.date} on torch {run.torch} ({run.wheel}): {run.result}" for run in runs_on(*pair))
    found["tested"] = runs or f"no: {untested(*pair)}"
    found["system"] = f"{platform.platform()}, {' '.join(platform.libc_ver())}"
    return found


def _processors(host: Host) -> dict[str, str]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host.num_cpus
    plan = plan_ranks("auto", host, openmp_threads=environment.openmp_threads())
    return {
        "model": _cpu_model(),
        "cores": f"{host.num_cores} physical that this process may use; {allowed} of {host.num_cpus} logical",
        "torch's threads": str(torch.get_num_threads()),
        "evenstep run": f"starts {plan.num_ranks} {'rank' if plan.num_ranks == 1 else 'ranks'} of {plan.num_threads} "
        f"{'thread' if plan.num_threads == 1 else 'threads'} here",
    }


def _cpu_model() -> str:
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()} ({platform.machine()})"
    return platform.machine()


def _gpu(index: int) -> str:
    seen = torch.cuda.get_device_properties(index)
    return f"{seen.name}, {_gib(seen.total_memory)}, compute capability {seen.major}.{seen.minor}"


def _memory() -> dict[str, str]:
    try:
        limit = memory_limit_bytes()
        allowed = "" if limit is None else f"; control groups allow {_gib(limit)}"
        found = {"memory": f"{_gib(available_bytes())} available of {_gib(host_memory_bytes())}{allowed}"}
    except OSError as error:
        found = {"memory": str(error)}
    for path in ("/dev/shm", "/tmp"):
        try:
            usage = shutil.disk_usage(path)
            found[path] = f"{_gib(usage.free)} free of {_gib(usage.total)}"
        except OSError as error:
            found[path] = str(error)
    return found


def _limit(name: str) -> str:
    def shown(value: int) -> str:
        return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"

    soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return shown(soft) + ("" if soft == hard else f" (may be raised to {shown(hard)})")


def _launcher() -> dict[str, str]:
    try:
        return describe_placement(environment.current_placement())
    except ConfigurationError as error:
        return {"error": str(error)}


def _transports() -> dict[str, str]:
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return {
        "shared memory": f"no: this python has no os.{missing[0]}" if missing else "yes",
        "torch's backends": ", ".join(name for name, there in backends.items() if there) or "none",
    }


def _resolved(name: str) -> str:
    try:
        return ", ".join(sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)}))
    except OSError as error:
        return f"nothing ({error.strerror})"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
