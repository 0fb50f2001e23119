"""Transports for one purpose: made when first needed, kept, and closed with their world.

What a layer exchanges in the middle of a forward or backward pass has to be matched with what the same layer exchanges
on other ranks, and never with a bucket, whose turn comes earlier on one rank and later on another.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from evenstep.transport.base import Transport
from evenstep.world import World

_open: weakref.WeakKeyDictionary[World, dict[tuple[str, torch.device], Transport]] = weakref.WeakKeyDictionary()


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
        UsageError: This rank is not in the group.
    """
    members = world.of_group(process_group)
    made = _open.setdefault(members, {})
    key = (purpose, device)
    if key not in made:
        made[key] = (members.transport if device.type == members.device.type else members.control).split()
        members._on_close.append(made[key].close)
    return made[key]
