"""The end of a run: replicas are compared once more.

During training each parameter is compared only once in 64 windows, so a short run, and the end of a long one, would not
be compared. At the end ranks compare the parameters as they were after the last step on an average: a parameter that
has changed since (`load_state_dict(best)` on rank 0, averaged or quantised weights) is skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from evenstep.errors import CollectiveTimeoutError, DriftError, PeerLostError
from evenstep.ground.health.users_code import warn
from evenstep.replica.monitors.checks import DriftWatch
from evenstep.transport.core.object_collectives import exchange
from evenstep.world import World

_DEADLINE_S = 5.0  # how long a rank that has finished waits for the others

_watches: weakref.WeakKeyDictionary[World, list[weakref.ref[DriftWatch]]] = weakref.WeakKeyDictionary()


def compare_at_end(watch: DriftWatch, world: World) -> None:
    """Compare a model's replicas after its world's block has ended without an exception. Collective in that case."""
    if world not in _watches:
        world.before_close.append(partial(_compare, weakref.ref(world)))
    _watches.setdefault(world, []).append(weakref.ref(watch))


def _compare(reference: weakref.ref[World]) -> None:
    world = reference()
    assert world is not None
    watches = {str(number): watch for number, ref in enumerate(_watches[world]) if (watch := ref()) is not None}
    if world.process_group is not None and not dist.is_initialized():
        return  # the script has destroyed its process groups
    mine = {number: watch.left_by_last_step() for number, watch in watches.items()}
    try:
        world.control.set_timeout(_DEADLINE_S)
        everybody = exchange(world.control, mine, what="the end of the loop, where replicas are compared")
        found = {number: differing for number in mine if (differing := differing_at_end(number, everybody))}
        told = [watches[number].explain_end(differing, _DEADLINE_S) for number, differing in found.items()]
    except Exception as error:  # this rank's training is complete, so a failed comparison is only a warning
        if isinstance(error, PeerLostError):  # no crash: a rank that has waited long enough leaves
            why = f"another rank has left already: it waits {_DEADLINE_S:.0f} s for the others."
        elif isinstance(error, CollectiveTimeoutError):
            why = f"its ranks did not end within {_DEADLINE_S:.0f} s of each other: {error}"
        else:
            why = f"that failed: {error}"
        warn(f"rank {world.rank}: replicas were not compared at the end of the run, because {why}")
        return
    for text, is_rounding in told:
        if text and not is_rounding:
            raise DriftError(text)


def differing_at_end(number: str, everybody: Sequence[dict[str, Sequence[int | None] | None]]) -> list[int]:
    """Numbers of a model's parameters that differ between ranks. Pure.

    Args:
        number: Number of the model.
        everybody: The digest of each parameter, by rank and model; None: it isn't compared. A model that a rank has
            deleted isn't compared either.
    """
    digests = [each.get(number) for each in everybody]
    found = [each for each in digests if each is not None]
    if len(found) < len(digests):
        return []
    columns = enumerate(zip(*found, strict=True))
    return [index for index, column in columns if None not in column and len(set(column)) > 1]
