"""Transports for one purpose: made when first needed, kept, and closed with their world.

What a layer exchanges in the middle of a forward or backward pass has to be matched with what the same layer exchanges
on other ranks, and never with a bucket, whose turn comes earlier on one rank and later on another.

[Note: several wrapped models]

A loss may go through two of them (a GAN, an encoder and a decoder). A rank that has samples sends the buckets of both
while autograd runs, in the order in which they fill; a rank whose share is empty sends first all of the one, then all
of the other, when their passes end. So each wrapped model has a transport of its own for its buckets: the first has the
world's, and a program with one model makes no other.
"""

from __future__ import annotations

import gc
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


class _BucketTransports:
    """The transports of a world that carry buckets: number 0 is the world's own."""

    def __init__(self, world: World) -> None:
        self._world = weakref.ref(world)
        self._made: list[Transport] = [world.transport]
        self._busy: set[int] = set()

    def take(self, owner: object) -> Transport:
        """Collective: the first that is free on every rank, until the owner is gone on this one."""
        world = self._world()
        assert world is not None
        number = self._first_free(world)
        if number == len(self._made):
            gc.collect()  # a wrapped model is full of cycles: what looks alive may have been left long ago
            number = self._first_free(world)
        if number == len(self._made):
            self._made.append(world.transport.split())
            world._on_close.append(self._made[-1].close)
        self._busy.add(number)
        weakref.finalize(owner, self._busy.discard, number).atexit = False
        return self._made[number]

    def _first_free(self, world: World) -> int:
        busy = set().union(*world.exchange(sorted(self._busy)))
        return next(number for number in range(len(self._made) + 1) if number not in busy)


_of_buckets: weakref.WeakKeyDictionary[World, _BucketTransports] = weakref.WeakKeyDictionary()


def bucket_transport(world: World, owner: object) -> Transport:
    """The transport for the buckets of one wrapped model: see [Note: several wrapped models].

    Collective: every rank calls this, for its replica of the same model.

    Args:
        world: Whose ranks.
        owner: Keeps the transport for itself as long as it lives.
    """
    if world.world_size == 1:
        return world.transport
    if world not in _of_buckets:
        _of_buckets[world] = _BucketTransports(world)
    return _of_buckets[world].take(owner)
