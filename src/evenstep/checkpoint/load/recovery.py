"""Which step a run resumes from, when each node keeps generations on a disk of its own. Pure.

    node 0   step 40 whole   step 60 its half     3 nodes of which each holds a half of the state; node 2 is new
    node 1   step 40 whole   step 60 its half
    node 2   -               -

Step 60, if the two halves make up the whole, or else step 40; or the durable checkpoint, if that is newer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evenstep.checkpoint.format.manifest import Manifest
from evenstep.checkpoint.lock import Place, place_of


@dataclass(frozen=True)
class Holding:
    """What a node has of a generation.

    Attributes:
        node: Its number in this run.
        folder: Of the generation.
        manifest: Equal on all nodes.
        files: Names of those files that are there, with their whole length.
    """

    node: int
    folder: str
    manifest: Manifest
    files: frozenset[str]


@dataclass(frozen=True)
class Recovery:
    """A generation of which the nodes hold every part between them.

    Attributes:
        folder: Of it.
        manifest: Of it.
        holders: The lowest node that has a file, by name.
    """

    folder: str
    manifest: Manifest
    holders: dict[str, int]


def plan_recovery(
    holdings: Iterable[Holding], resumes: Sequence[tuple[int, int]], durable_step: int | None
) -> Recovery | None:
    """The newest generation that can be resumed from; None: the durable checkpoint is newer, or there is no generation.

    Args:
        holdings: Of all nodes.
        resumes: (number of the lock, step) of this run's earlier attempts: each went on from that step. What attempts
            before it did behind that step is void: it lies on a disk that was away when the later one resumed.
        durable_step: Of the newest durable checkpoint; None: there is none.
    """
    generations: dict[Place, list[Holding]] = {}
    for each in sorted(holdings, key=lambda each: each.node):
        if (place := place_of(each.folder)) is not None:
            generations.setdefault(place, []).append(each)
    for place in sorted(generations, reverse=True):
        held = generations[place]
        if durable_step is not None and place.step < durable_step:
            return None
        is_void = any(lock > place.lock and step < place.step for lock, step in resumes)
        if is_void or any(each.manifest != held[0].manifest for each in held):
            continue
        holders = {file: each.node for each in reversed(held) for file in each.files}
        if held[0].manifest.choose(holders) is not None:
            return Recovery(place.folder, held[0].manifest, holders)
    return None
