"""Which transports a world gets, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.transport.arrivals import plan_waiting
from evenstep.transport.base import Transport
from evenstep.transport.gloo import open_gloo
from evenstep.transport.host import connect_shared_memory
from evenstep.transport.hosts import connect_ranks
from evenstep.transport.process_group import ProcessGroupTransport
from evenstep.transport.shared_memory import SharedMemoryTransport
from evenstep.transport.through_host import ThroughHostTransport

TRANSPORTS = ("shared memory", "gloo", "nccl")


@dataclass(frozen=True)
class Transports:
    """What carries what.

    Attributes:
        gradients: Gradients, on the ranks' devices.
        control: Everything else, on the CPU.
        why_gloo: Why ranks don't share memory, where they would if they could.
    """

    gradients: Transport
    control: Transport
    why_gloo: str | None = None


def validate_transport(name: str | None, device: torch.device) -> None:
    """Raise ConfigurationError if a transport can't carry what is on a device, whatever the other ranks do. Pure."""
    if name is not None:
        checks.choice("transport", name, TRANSPORTS, otherwise="None to let evenstep choose")
    if name == "nccl" and device.type != "cuda":
        raise ConfigurationError(f"transport={name!r} can't carry gradients on {device}. Leave the argument out.")


def open_transports(
    name: str | None, device: torch.device, *, timeout_s: float, group: dist.ProcessGroup | None = None
) -> Transports:
    """Open the transports of all ranks of a process group.

    Collective: every rank calls this, in the same order.

    Args:
        name: One of `TRANSPORTS`; None: NCCL on a GPU if the process group speaks it; else shared memory between ranks
            that share a host (on GPUs by way of the host's memory), and Gloo between hosts.
        device: Where this rank's gradients are.
        timeout_s: Deadline of a collective.
        group: The group; None: the default one.

    Raises:
        ConfigurationError: The transport that was asked for can't be had. Raised on every rank.
    """
    validate_transport(name, device)
    control = _open("gloo", timeout_s, group)
    if device.type == "cuda" and name is None and "nccl" in str(dist.get_backend_config(group)):
        name = "nccl"
    if name in ("gloo", "nccl"):
        return Transports(_open(name, timeout_s, group), control)
    members = dist.get_process_group_ranks(group)

    def among(ranks: Sequence[int]) -> ProcessGroupTransport:
        return open_gloo([members[rank] for rank in ranks], timeout_s=timeout_s)

    if device.type == "cpu":
        shared = connect_ranks(control, among, timeout_s=timeout_s)
    else:
        shared = connect_shared_memory(control, plan_waiting(control.world_size, timeout_s=timeout_s))
    if isinstance(shared, str):
        if name is not None:
            raise ConfigurationError(f"transport={name!r}: {shared}. Leave the argument out, and Gloo is used.")
        return Transports(_open("gloo", timeout_s, group), control, why_gloo=shared)
    if isinstance(shared, SharedMemoryTransport):
        control.close()
    return Transports(shared if device.type == "cpu" else ThroughHostTransport(shared), shared.split())


def _open(name: str, timeout_s: float, of: dist.ProcessGroup | None) -> Transport:
    return open_between(name, dist.get_process_group_ranks(of), timeout_s=timeout_s, alone=of is not None)


def open_between(name: str, ranks: Sequence[int], *, timeout_s: float, alone: bool = True) -> Transport:
    """Open a transport of torch's between some ranks.

    Collective: these ranks call this, in the same order.

    Args:
        name: "gloo" or "nccl".
        ranks: Their numbers in the default group.
        timeout_s: Deadline of a call.
        alone: The other ranks don't call this.
    """
    if name == "gloo":
        return open_gloo(ranks, timeout_s=timeout_s)
    timeout = timedelta(seconds=timeout_s)
    # Of a group that its members alone know the other ranks can't be told.
    group = dist.new_group(list(ranks), backend=name, timeout=timeout, use_local_synchronization=alone)
    return ProcessGroupTransport(group, name=name, timeout_s=timeout_s, owns_group=True)
