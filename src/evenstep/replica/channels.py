"""Channels: transports for one purpose each, made when first needed, kept, and closed with their world.

A layer's exchange in the middle of a forward or backward pass must be matched with the same layer's exchange on other
ranks, and never with a bucket, which travels earlier on one rank and later on another.

[Note: several wrapped models]

A loss may go through two wrapped models (a GAN, an encoder and a decoder). A rank that has samples sends the buckets of
both while autograd runs, in the order in which they fill. A rank whose share is empty sends all buckets of one model,
and then all of the other, when the models' passes end. And two models may be trained in two threads, whose calls have
no common order at all. So each wrapped model has its own transport for everything that its passes and its optimizer's
steps send, including messages (`Trained.control`), and another one for its SyncBatchNorms if it has any. Steps send
nothing over the world's `control`. The first model has the world's transport, and a program with one model makes no
other.

Models get their transports in the order in which they are wrapped, so that order has to be the same on all ranks: one
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
    """Return the transport of one purpose and device, which carries no other calls.

    Collective the first time, over the ranks of the group: all of them open new channels in the same order. There is
    one transport per device, because autograd has a thread per device, and the threads' calls have no common order.

    Args:
        world: The ranks; the transport is closed with the world.
        purpose: A name, the same on all ranks.
        device: The tensors' device.
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
    """Collective: make one more transport for tensors on a device. It is closed with its world."""
    made = (members.transport if device.type == members.device.type else members.control).split()
    members.channels.append(made)
    return made


class _Pool:
    """A world's transports for one purpose and device. A transport has one owner at a time; later owners reuse it.

    [Note: calls that not all ranks made]
    If only one rank draws a batch, to show it, only that rank makes the call with which the loader compares data. The
    next owner's first call would be matched with that call by mistake. So a transport isn't used any more once ranks
    have made different numbers of calls over it.

    Args:
        world: The ranks.
        device: The tensors' device.
        first: Transport number 0; None: it is made when needed, like the others.
    """

    def __init__(self, world: World, device: torch.device, first: Transport | None = None) -> None:
        self._world = weakref.ref(world)
        self._device = device
        self._made: list[Transport] = [] if first is None else [first]
        self._busy: set[int] = set()

    def take(self, owner: object) -> Transport:
        """Collective: the first transport that is free on every rank.

        The owner has it until the owner is garbage-collected on this rank.
        """
        world = self._world()
        assert world is not None
        number = self._first_free(world)
        if number == len(self._made):
            gc.collect()  # wrapped models contain reference cycles: an unused model may not be collected yet
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
        world: The ranks.
        owner: Has the transport for itself as long as it lives.
    """
    if world.world_size == 1:
        return world.transport
    pools = _pools.setdefault(world, {})
    return pools.setdefault(("buckets", world.device), _Pool(world, world.device, world.transport)).take(owner)


def channel_of(
    owner: object, world: World, purpose: str, device: torch.device, process_group: dist.ProcessGroup | None = None
) -> Transport:
    """Like `channel`, for a single owner as long as it lives. Collective every time.

    Args:
        owner: The owner, such as the SyncBatchNorms of one model.
        world: As in `channel`.
        purpose: As in `channel`.
        device: As in `channel`.
        process_group: As in `channel`.
    """
    members = world.of_group(process_group)
    pools = _pools.setdefault(members, {})
    return pools.setdefault((purpose, device), _Pool(members, device)).take(owner)


@dataclass(frozen=True)
class Peers:
    """The ranks that have the same parts of a model. `LocalSGD` averages parameters over them.

    Attributes:
        everybody: All ranks that have parts of the model.
        control: Carries messages between the ranks of `everybody`, in order with the model's passes.
        transport: Carries parameters between the ranks that have the same parts as this rank.
        number: Number of this rank's replica of the model.
        mesh: The mesh of all ranks, if each replica is divided over its dimension "shard"; None: each rank has a whole
            replica.
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
    """Raise if another running thread has wrapped models: see [Note: several wrapped models]. Local.

    Args:
        world: The world of the model to wrap.
        model: The new wrapper.

    Raises:
        UsageError: There is such a thread. Nothing was sent.
    """
    if world.world_size == 1:
        return
    thread, models = threading.current_thread(), _wrapped_by.setdefault(world, weakref.WeakKeyDictionary())
    if _others(models, thread):
        gc.collect()  # wrapped models contain reference cycles: an unused one may not be collected yet
    for other in _others(models, thread):
        raise UsageError(
            f"DistributedDataParallel on rank {world.rank}: a model is being wrapped in thread {thread.name!r}, and "
            f"thread {other.name!r} has wrapped one. Ranks match models by the order in which they are wrapped, and "
            f"with two threads that order can differ between ranks. Wrap all models in one thread before you start the "
            f"others; then each model may be used in a thread of its own."
        )
    models[model] = weakref.ref(thread)


def _others(models: Mapping[object, weakref.ref[threading.Thread]], thread: threading.Thread) -> list[threading.Thread]:
    found = [each() for each in models.values()]
    return [each for each in found if each is not None and each is not thread and each.is_alive()]
