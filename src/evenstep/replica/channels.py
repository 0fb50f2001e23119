"""Channels: transports for one purpose each, made when first needed, kept, and closed with their world.

A layer's exchange in the middle of a forward or backward pass must be matched with the same layer's exchange on other
ranks, and never with a bucket, which travels earlier on one rank and later on another.

[Note: several wrapped models]

A loss may go through two of them (a GAN, an encoder and a decoder). A rank that has samples sends the buckets of both
while autograd runs, in the order in which they fill; a rank whose share is empty sends first all of the one, then all
of the other, when their passes end. And two models may be trained in two threads, whose calls have no common order at
all. So each wrapped model has a transport of its own for all that its passes and its optimizer's steps send, messages
included (`Trained.control`), and one for its SyncBatchNorms if it has some; nothing of a step goes over the world's
`control`. The first model has the world's transport, and a program with one model makes no other.

Models find their transports by the order in which they are wrapped, so that has to be the same on all ranks: one
thread wraps them all (`validate_thread`).
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from evenstep.errors import UsageError
from evenstep.transport.core.transport import Transport
from evenstep.world import World

_open: weakref.WeakKeyDictionary[World, dict[tuple[str, torch.device], Transport]] = weakref.WeakKeyDictionary()


def channel(
    world: World, purpose: str, device: torch.device, process_group: dist.ProcessGroup | None = None
) -> Transport:
    """Return the transport of one purpose and device, whose calls mix with no others.

    Collective the first time, over the ranks of the group: they open new channels in the same order. There is one per
    device, because autograd has a thread per device, and their calls have no common order.

    Args:
        world: The ranks; the transport is closed with it.
        purpose: A name, the same on all ranks.
        device: Where the tensors are.
        process_group: Some ranks of the world; None: all.

    Raises:
        UsageError: This rank is not in the group.
    """
    members = world.of_group(process_group)
    made = _open.setdefault(members, {})
    key = (purpose, device)
    if key not in made:
        made[key] = _split_for(members, device)
    return made[key]


def _split_for(members: World, device: torch.device) -> Transport:
    """Collective: one more transport for tensors on a device, which is closed with its world."""
    made = (members.transport if device.type == members.device.type else members.control).split()
    members.channels.append(made)
    return made


class _Pool:
    """Transports of a world for one purpose and device: an owner has one for itself, and the next owner has it then.

    [Note: calls that not all ranks made]
    A loader's look at its data may have been sent by one rank alone, which has taken a first batch to show it. The next
    owner's calls would meet that one, as if they belonged together. So a transport over which ranks have made unequally
    many calls is used no more.

    Args:
        world: The ranks.
        device: Where the tensors are.
        first: Number 0; None: it is made, too.
    """

    def __init__(self, world: World, device: torch.device, first: Transport | None = None) -> None:
        self._world = weakref.ref(world)
        self._device = device
        self._made: list[Transport] = [] if first is None else [first]
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
            self._made.append(_split_for(world, self._device))
        self._busy.add(number)
        weakref.finalize(owner, self._busy.discard, number).atexit = False
        return self._made[number]

    def _first_free(self, world: World) -> int:
        told = world.exchange((sorted(self._busy), [each.num_given for each in self._made]))
        taken = set().union(*(busy for busy, _ in told))
        of_ranks = zip(*(made for _, made in told), strict=True)
        taken |= {number for number, counts in enumerate(of_ranks) if len(set(counts)) > 1}
        return next(number for number in range(len(self._made) + 1) if number not in taken)


_pools: weakref.WeakKeyDictionary[World, dict[tuple[str, torch.device], _Pool]] = weakref.WeakKeyDictionary()


def bucket_transport(world: World, owner: object) -> Transport:
    """The transport for the buckets of one wrapped model: see [Note: several wrapped models].

    Collective: every rank calls this, for its replica of the same model.

    Args:
        world: Whose ranks.
        owner: Keeps the transport for itself as long as it lives.
    """
    if world.world_size == 1:
        return world.transport
    pools = _pools.setdefault(world, {})
    return pools.setdefault(("buckets", world.device), _Pool(world, world.device, world.transport)).take(owner)


def channel_of(
    owner: object, world: World, purpose: str, device: torch.device, process_group: dist.ProcessGroup | None = None
) -> Transport:
    """As `channel`, for one owner alone as long as it lives. Collective, every time.

    Args:
        owner: Such as the SyncBatchNorms of one model.
        world: As in `channel`, with all that follows.
        purpose: See there.
        device: See there.
        process_group: See there.
    """
    members = world.of_group(process_group)
    pools = _pools.setdefault(members, {})
    return pools.setdefault((purpose, device), _Pool(members, device)).take(owner)


@dataclass(frozen=True)
class Peers:
    """The ranks that have the same parts of a model, as `LocalSGD` needs them, which averages parameters over them.

    Attributes:
        everybody: All ranks that have parts of the model.
        control: Carries messages between all of them, in order with the model's passes.
        transport: Carries parameters between those that have the same parts as this one.
        number: Of this rank's replica of the model.
        mesh: Of all ranks, if each replica is divided over its dimension "shard"; None: each rank has a replica.
    """

    everybody: World
    control: Transport
    transport: Transport
    number: int
    mesh: DeviceMesh | None = None


_wrapped_by: weakref.WeakKeyDictionary[World, weakref.WeakKeyDictionary[object, weakref.ref[threading.Thread]]] = (
    weakref.WeakKeyDictionary()
)


def validate_thread(world: World, model: object) -> None:
    """Raise if another thread, which still runs, has wrapped models: see [Note: several wrapped models]. Local.

    Args:
        world: Of the model that is to be wrapped.
        model: The model; those that are alive count.

    Raises:
        UsageError: There is such a thread. Nothing was sent.
    """
    if world.world_size == 1:
        return
    thread, models = threading.current_thread(), _wrapped_by.setdefault(world, weakref.WeakKeyDictionary())
    if _others(models, thread):
        gc.collect()  # a wrapped model is full of cycles: what looks alive may have been left long ago
    for other in _others(models, thread):
        raise UsageError(
            f"DistributedDataParallel on rank {world.rank}: a model is being wrapped in thread {thread.name!r}, and "
            f"thread {other.name!r} has wrapped one. Ranks find each other's models by the order in which they are "
            f"wrapped, which isn't the same for two threads on all ranks. Wrap all models in one thread, before the "
            f"others start; then each of them may be used in a thread of its own."
        )
    models[model] = weakref.ref(thread)


def _others(models: Mapping[object, weakref.ref[threading.Thread]], thread: threading.Thread) -> list[threading.Thread]:
    found = [each() for each in models.values()]
    return [each for each in found if each is not None and each is not thread and each.is_alive()]
