"""Transports for one purpose: made when first needed, kept, and closed with their world.

What a layer exchanges in the middle of a forward or backward pass has to be matched with what the same layer exchanges
on other ranks, and never with a bucket, whose turn comes earlier on one rank and later on another.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from evenstep.errors import ConfigurationError
from evenstep.transport.base import Transport
from evenstep.transport.process_group import ProcessGroupTransport
from evenstep.world import DEFAULT_TIMEOUT_S, World

_open: weakref.WeakKeyDictionary[World, dict[tuple[object, ...], Transport]] = weakref.WeakKeyDictionary()


def channel(
    world: World, purpose: str, device: torch.device, process_group: dist.ProcessGroup | None = None
) -> Transport:
    """The transport that carries tensors of one purpose and device, apart from everything else.

    Collective the first time, over the ranks of the group: they ask for new channels in the same order. Per device,
    because autograd has a thread per device and their order among each other is nobody's.

    Args:
        world: Whose ranks; the transport is closed with it.
        purpose: What for.
        device: Where the tensors are.
        process_group: Some ranks of the world; None: all.

    Raises:
        ConfigurationError: This rank is not in the group.
    """
    ranks: tuple[int, ...] | None = None
    if process_group is not None and process_group is not dist.group.WORLD:
        ranks = tuple(dist.get_process_group_ranks(process_group))
        if world.rank not in ranks:
            raise ConfigurationError(f"{purpose}: rank {world.rank} is not in its process group of ranks {ranks}.")
        if len(ranks) == world.world_size:
            ranks = None
    made = _open.setdefault(world, {})
    key = (purpose, device, ranks)
    if key not in made:
        made[key] = _split(world, device) if ranks is None else _subgroup(ranks, device)
        world._on_close.append(made[key].close)
    return made[key]


def _split(world: World, device: torch.device) -> Transport:
    return (world.transport if device.type == world.device.type else world.control).split()


def _subgroup(ranks: tuple[int, ...], device: torch.device) -> Transport:
    name = "nccl" if device.type == "cuda" and "nccl" in str(dist.get_backend_config()) else "gloo"
    # Only the members call: torch would otherwise wait for all ranks of the world.
    group = dist.new_group(
        list(ranks), backend=name, timeout=timedelta(seconds=DEFAULT_TIMEOUT_S), use_local_synchronization=True
    )
    return ProcessGroupTransport(group, name=name, timeout_s=DEFAULT_TIMEOUT_S, owns_group=True)
