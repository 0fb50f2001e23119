"""How ranks agree to share a segment: they try it, and don't rely on environment variables.

    every rank     sends a description of itself: boot id, namespaces, user, machine, process
    rank 0         makes the segment, and sends its location
    every rank     attaches, compares the nonce, signs
    every rank     checks that all have signed

A rank that fails sends the reason in the next message instead of raising, so all ranks get the same result: a transport
on every rank, or on every rank the reason why there is none.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evenstep.errors import ConfigurationError
from evenstep.ground.host import control_groups
from evenstep.ground.host.processes import state_and_start
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.store_gather import StoreGather
from evenstep.transport.core.transport import Transport
from evenstep.transport.shm.peers import PeerProcess
from evenstep.transport.shm.segment import NONCE_BYTES, Segment, host_memory_bytes, plan_segment
from evenstep.transport.shm.sync import plan_waiting
from evenstep.transport.shm.transport import SharedMemoryTransport


def connect_shared_memory(
    control: Transport | StoreGather,
    *,
    timeout_s: float,
    threads_per_rank: int = 1,
    seen: Sequence[dict[str, Any]] | None = None,
) -> SharedMemoryTransport | str:
    """Connect the ranks of `control` through shared memory.

    Collective: every rank calls this, in the same order.

    Args:
        control: Carries the few messages of the handshake: the rendezvous store (`StoreGather`), or a transport.
        timeout_s: Deadline for peers to arrive.
        threads_per_rank: Number of threads of a rank that are busy while it waits.
        seen: Every rank's description (`describe_this_process`); None: ranks exchange their descriptions now.

    Returns:
        The transport on every rank, or on every rank the same reason why there is none.
    """
    if seen is None:
        seen = exchange(control, describe_this_process())
    reason = why_not_together(seen)
    if reason is not None:
        return reason
    layout = plan_segment(control.world_size, memory_bytes=seen[0]["memory_bytes"])
    nonce = secrets.token_bytes(NONCE_BYTES)
    segment, problem = _tried(lambda: Segment.create(layout, nonce)) if control.rank == 0 else (None, None)
    offer = exchange(control, {"problem": problem, "fd": segment.fd if segment else -1, "nonce": nonce.hex()})[0]
    if offer["problem"] is not None:
        return f"rank 0 could not make it: {offer['problem']}"
    nonce = bytes.fromhex(offer["nonce"])
    problem = None
    if control.rank != 0:
        pid = seen[0]["process"]["pid"]
        segment, problem = _tried(lambda: Segment.attach(pid, offer["fd"], layout))
        if segment is not None and segment.nonce != nonce:
            segment, problem = None, f"process {pid} shows another segment"
    if segment is not None:
        segment.sign(control.rank)
    problems = exchange(control, problem)
    if segment is not None and not any(problems):
        unsigned = [rank for rank in range(control.world_size) if not segment.has_signed(rank, nonce)]
        problem = f"rank {unsigned[0]} holds another segment" if unsigned else None
    problems = [first or later for first, later in zip(problems, exchange(control, problem), strict=True)]
    for rank, problem in enumerate(problems):
        if problem is not None:
            return f"rank {rank} could not join: {problem}"
    assert segment is not None
    processes = [PeerProcess(**each["process"]) for each in seen]
    policy = plan_waiting(threads_per_rank * control.world_size, num_cores=count_cores(seen), timeout_s=timeout_s)
    split_by = functools.partial(_connect_again, threads_per_rank=threads_per_rank)
    return SharedMemoryTransport(segment, processes, rank=control.rank, policy=policy, split_by=split_by)


def _connect_again(transport: SharedMemoryTransport, *, threads_per_rank: int) -> SharedMemoryTransport:
    """Make another segment for the same ranks."""
    timeout_s = transport.counters.policy.timeout_s
    made = connect_shared_memory(transport, timeout_s=timeout_s, threads_per_rank=threads_per_rank)
    if isinstance(made, str):
        raise ConfigurationError(f"rank {transport.rank}: no second segment of shared memory could be made: {made}.")
    return made


def describe_this_process() -> dict[str, Any]:
    """Describe the properties of this process that decide whether ranks can share memory.

    The result is plain data that ranks exchange.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return {"problem": f"{platform.system()} has no memfd"}
    try:
        return {
            "problem": None,
            "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            "namespaces": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user")],
            "user": os.geteuid(),
            "machine": f"{platform.machine()} {sys.byteorder} {sys.maxsize}",
            "memory_bytes": host_memory_bytes(),
            "cores": sorted(os.sched_getaffinity(0)),
            "core_limit": control_groups.cpu_limit(),
            "process": {"pid": os.getpid(), "start_ticks": state_and_start(os.getpid())[1]},
        }
    except OSError as error:
        return {"problem": str(error)}


def count_cores(seen: Sequence[dict[str, Any]]) -> int:
    """The number of cores that ranks with these descriptions may use together. Pure.

    Launchers pin each rank to its own cores (Slurm, mpirun), so a rank's affinity doesn't show the total.
    """
    cores = {core for each in seen for core in each["cores"]}
    # All ranks of a node are usually in one control group, so the groups' limits must not be added up.
    limits = [math.ceil(each["core_limit"] or len(cores)) for each in seen]
    return min(len(cores), max(limits))


def why_not_together(seen: Sequence[dict[str, Any]]) -> str | None:
    """Why ranks with these descriptions can't share memory; None if they may try. Pure."""
    for rank, each in enumerate(seen):
        if each["problem"] is not None:
            return f"rank {rank}: {each['problem']}"
    words = {
        "boot": "are on different nodes",
        "namespaces": "are in different containers (pid or user namespace)",
        "user": "belong to different users",
        "machine": "are different machines",
    }
    for key, what in words.items():
        for rank, each in enumerate(seen):
            if each[key] != seen[0][key]:
                return f"ranks 0 and {rank} {what}"
    return None


def _tried(make: Callable[[], Segment]) -> tuple[Segment | None, str | None]:
    """Make a segment: (segment, None), or (None, the reason why there is none)."""
    try:
        return make(), None
    except (OSError, ConfigurationError) as error:
        return None, str(error)
