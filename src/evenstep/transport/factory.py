"""Chooses a world's transports: shared memory within a node, Gloo between nodes, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from evenstep import checks
from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_distributed import make_group_alone
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.store_gather import StoreGather
from evenstep.transport.core.transport import Transport
from evenstep.transport.internode.plan import plan_nodes
from evenstep.transport.local import LocalTransport
from evenstep.transport.process_group.gloo import open_gloo, store_of
from evenstep.transport.process_group.transport import ProcessGroupTransport
from evenstep.transport.shm.handshake import connect_shared_memory, describe_this_process
from evenstep.transport.shm.transport import SharedMemoryTransport

TRANSPORTS = ("shared memory", "gloo", "nccl")
_NONE_TOGETHER = "nodes have one rank each, or different numbers of ranks"


@dataclass(frozen=True)
class Transports:
    """The transports of a world.

    Attributes:
        gradients: Carries gradients, on the ranks' devices.
        control: Carries everything else, on the CPU.
        timeout_s: Deadline of a collective.
        requested: The requested name; None: evenstep chose.
        why_gloo: The reason why ranks don't share memory, if they would otherwise.
    """

    gradients: Transport
    control: Transport
    timeout_s: float
    requested: str | None = None
    why_gloo: str | None = None


def validate_transport(name: str | None, device: torch.device) -> None:
    """Raise ConfigurationError if a transport can't carry tensors of a device on any rank. Pure."""
    if name is not None:
        checks.choice("transport", name, TRANSPORTS, otherwise="None to let evenstep choose")
    carried = {"nccl": "cuda", "shared memory": "cpu"}
    if name in carried and device.type != carried[name]:
        raise ConfigurationError(f"transport={name!r} can't carry gradients on {device}. Leave the argument out.")


def open_transports(
    name: str | None, device: torch.device, *, timeout_s: float, group: dist.ProcessGroup | None = None
) -> Transports:
    """Open the transports of all ranks of a process group.

    Collective: every rank calls this, in the same order.

    Args:
        name: A name in `TRANSPORTS`; None: NCCL on a GPU if the process group has it; else shared memory between ranks
            that share a node, and Gloo between nodes; on a GPU that ranks share, Gloo.
        device: The device of this rank's gradients.
        timeout_s: Deadline of a collective.
        group: The group; None: the default group.

    Raises:
        ConfigurationError: The requested transport is not available. Raised on every rank.
    """
    validate_transport(name, device)
    requested = name
    if device.type == "cuda" and name is None and "nccl" in str(dist.get_backend_config(group)):
        name = "nccl"
    members = dist.get_process_group_ranks(group)
    if name in ("gloo", "nccl") or device.type == "cuda":
        name = name or "gloo"
        messages = open_gloo(members, timeout_s=timeout_s)
        gradients = open_between(name, members, timeout_s=timeout_s, alone=group is not None)
        return Transports(gradients, messages, timeout_s, requested)

    def among(ranks: Sequence[int]) -> ProcessGroupTransport:
        return open_gloo([members[rank] for rank in ranks], timeout_s=timeout_s)

    # Use the store, not Gloo: every Gloo listens on a port as long as it exists.
    control = StoreGather(store_of(members), dist.get_rank(group), len(members), timeout_s=timeout_s)
    shared = connect_ranks(control, among, timeout_s=timeout_s)
    why_gloo = shared if isinstance(shared, str) else _NONE_TOGETHER if shared.name == "gloo" else None
    if why_gloo is not None and name is not None:
        if not isinstance(shared, str):
            shared.close()
        raise ConfigurationError(f"transport={name!r}: {why_gloo}. Leave the argument out, and Gloo is used.")
    transport = open_gloo(members, timeout_s=timeout_s) if isinstance(shared, str) else shared
    return Transports(transport, transport.split(), timeout_s, requested, why_gloo)


def open_shared_memory(store: Store, rank: int, world_size: int, *, timeout_s: float) -> SharedMemoryTransport | None:
    """Connect all ranks of a run through shared memory, before there is a process group.

    Collective: every rank calls this.

    Args:
        store: A store that all ranks can reach.
        rank: This rank.
        world_size: Number of ranks.
        timeout_s: Deadline for the arrival of the others, and for the transport's calls.

    Returns:
        The transport on every rank; None on every rank if they can't share memory.
    """
    control = StoreGather(PrefixStore("shared memory/", store), rank, world_size, timeout_s=timeout_s)
    made = connect_shared_memory(control, timeout_s=timeout_s)
    return None if isinstance(made, str) else made


def open_between(name: str, ranks: Sequence[int], *, timeout_s: float, alone: bool = True) -> Transport:
    """Open a Gloo or NCCL transport between some ranks.

    Collective: these ranks call this, in the same order.

    Args:
        name: "gloo" or "nccl".
        ranks: The ranks' numbers in the default group.
        timeout_s: Deadline of a call.
        alone: Whether only these ranks of the default group call this.
    """
    if name == "gloo":
        return open_gloo(ranks, timeout_s=timeout_s)
    timeout = timedelta(seconds=timeout_s)
    # Only the members of a subgroup call this, so the other ranks can't take part in making a group.
    if alone:
        group = make_group_alone(ranks, name, timeout)
    else:
        group = dist.new_group(list(ranks), backend=name, timeout=timeout)
    return ProcessGroupTransport(group, name=name, timeout_s=timeout_s, owns_group=True)


def connect_ranks(
    control: StoreGather, subgroup: Callable[[Sequence[int]], ProcessGroupTransport], *, timeout_s: float
) -> Transport | str:
    """Connect ranks through shared memory inside nodes, and Gloo between nodes.

    Collective: every rank calls this, in the same order.

    Args:
        control: Carries the few messages of the handshake.
        subgroup: Opens Gloo between some ranks of `control`; called by these ranks alone.
        timeout_s: Deadline of the new transport's calls.

    Returns:
        The transport on every rank, or on every rank the same reason why there is none.
    """
    seen = exchange(control, describe_this_process())
    if any(each["problem"] is not None for each in seen) or len((plan := plan_nodes(seen)).nodes) == 1:
        # One node: this also returns the reason if memory can't be shared.
        return connect_shared_memory(control, timeout_s=timeout_s, seen=seen)
    # Import it here, so that the import costs time only in a world of several nodes.
    from evenstep.transport.internode.transport import InternodeTransport

    node, number = plan.node_and_local_rank(control.rank)
    ranks = plan.nodes[node]
    intra_node: Transport | str = LocalTransport()
    if len(ranks) > 1:
        # Gloo's threads need cores, too.
        of_node = [seen[rank] for rank in ranks]
        intra_node = connect_shared_memory(control.among(ranks), timeout_s=timeout_s, threads_per_rank=2, seen=of_node)
    problems = exchange(control, intra_node if isinstance(intra_node, str) else None)
    for rank, problem in enumerate(problems):
        if problem is not None:
            if not isinstance(intra_node, str):
                intra_node.close()
            return f"on the node of rank {rank}: {problem}"
    assert not isinstance(intra_node, str)
    inter_node = subgroup(plan.inter_node_group(number))
    all_ranks = subgroup(range(control.world_size)) if len(ranks) > 1 else inter_node
    return InternodeTransport(
        plan, intra_node=intra_node, inter_node=inter_node, all_ranks=all_ranks, rank=control.rank, timeout_s=timeout_s
    )
