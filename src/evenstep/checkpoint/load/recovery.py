"""The step from which a run resumes if each node has generations (saved steps) on its own disk. Pure.

    node 0   step 40 whole   step 60 one half     3 nodes, of which node 2 is new
    node 1   step 40 whole   step 60 the other half
    node 2   -               -

The run resumes from step 60 if the two halves make up the whole, else from step 40; or from the durable checkpoint if
that is newer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.checkpoint.format.manifest import Manifest
from evenstep.checkpoint.lock import place_of


@dataclass(frozen=True)
class Holding:
    """A node's part of a generation.

    Attributes:
        node: The node's number in this run.
        folder: The generation's folder.
        manifest: The manifest, equal on all nodes.
        files: Names of the existing files; only a checksum shows whether a file is complete.
    """

    node: int
    folder: str
    manifest: Manifest
    files: frozenset[str]


@dataclass(frozen=True)
class Recovery:
    """A generation that the nodes together hold in full.

    Attributes:
        folder: The generation's folder.
        manifest: The generation's manifest.
        holders: By name of a file, the lowest node that has it.
    """

    folder: str
    manifest: Manifest
    holders: dict[str, int]


def plan_recovery(
    holdings: Sequence[Holding], resumes: Sequence[tuple[int, int]], durable_step: int | None
) -> Recovery | None:
    """The newest generation that can be resumed from; None: the durable checkpoint is newer, or there is no generation.

    Args:
        holdings: The holdings of all nodes.
        resumes: (number of the lock, step): an earlier attempt of this run with this lock resumed from this step. Later
            steps of the attempts before it are void: they are on a disk that was missing when the attempt resumed.
        durable_step: Step of the newest durable checkpoint; None: there is none.
    """
    places = {(place, each.folder) for each in holdings if (place := place_of(each.folder)) is not None}
    for place, folder in sorted(places, reverse=True):
        if durable_step is not None and place.step < durable_step:
            return None
        is_void = any(lock > place.lock and step < place.step for lock, step in resumes)
        held = sorted((each for each in holdings if each.folder == folder), key=lambda each: each.node)
        manifest, holders = held[0].manifest, {file: each.node for each in reversed(held) for file in each.files}
        is_one = all(each.manifest == manifest for each in held)
        if is_one and not is_void and manifest.choose(holders) is not None:
            return Recovery(folder, manifest, holders)
    return None
