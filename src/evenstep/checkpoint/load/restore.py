"""The way back into a checkpoint: all ranks read it, agree that it is good and fits, and only then change anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.checkpoint import compare
from evenstep.checkpoint.folders import folder_of
from evenstep.checkpoint.homes import homes as find_homes
from evenstep.checkpoint.manifest import Manifest
from evenstep.checkpoint.reader import DamagedError, fill, read_manifest, read_objects, unlisted_files
from evenstep.checkpoint.snapshot import unwrapped
from evenstep.checkpoint.storage import Storage
from evenstep.checkpoint.streams import NAME as RANDOM
from evenstep.checkpoint.streams import restore_streams
from evenstep.errors import CheckpointError
from evenstep.world import World

_MAX_LINES = 60


@dataclass(frozen=True)
class Found:
    """A checkpoint that all ranks have read.

    Attributes:
        manifest: What it is.
        states: Of the objects. What has a home is still to be filled.
        fill: Does that for one object, on this rank.
        misfits: Where it doesn't fit the objects of this run.
        unlisted: Files that are none of its own.
    """

    manifest: Manifest
    states: dict[str, Any]
    fill: Callable[[str], None]
    misfits: list[str]
    unlisted: list[str]


def find(storage: Storage, world: World, step: int, objects: Mapping[str, Any], *, strict: bool) -> Found:
    """Collective: read a checkpoint; nothing is changed.

    Raises:
        DamagedError: It isn't as it was written, as at least one rank sees it.
        CheckpointError: It is good, and doesn't fit.
    """
    folder = folder_of(step)
    damage: str | None = None
    misfits: list[str] = []
    found: Found | None = None
    try:
        manifest = read_manifest(storage, folder)
        if manifest.step != step:
            raise DamagedError(f"{folder}: its manifest is that of step {manifest.step}")
        misfits = compare.missing_objects(manifest.objects, objects)
        homes = {}
        for name, target in objects.items():
            if name in manifest.objects:
                lines = compare.differences(name, manifest.objects[name], target)
                homes[name] = {} if lines else find_homes(manifest.objects[name], target)
                misfits += lines
        share = (world.local_rank, world.local_world_size)
        states: dict[str, Any] = {}
        if not (misfits and strict):
            names = [name for name in (*objects, RANDOM) if name in manifest.objects]
            states = read_objects(storage, folder, manifest, names, share=share, homes=homes)
        unlisted = unlisted_files(storage, folder, manifest) if world.is_main else []

        def fill_one(name: str) -> None:
            fill(storage, folder, manifest, name, homes, share=share)

        found = Found(manifest, states, fill_one, misfits, unlisted)
    except DamagedError as error:
        damage = str(error)
    seen = world.exchange({"damage": damage, "misfits": misfits})
    damages = {rank: told["damage"] for rank, told in enumerate(seen) if told["damage"] is not None}
    if damages:
        raise DamagedError(next(iter(damages.values())))
    listed: list[str] = next((told["misfits"] for told in seen if told["misfits"]), [])
    if listed and strict:
        more = [f"... and {len(listed) - _MAX_LINES} more"] if len(listed) > _MAX_LINES else []
        text = "\n  ".join([*listed[:_MAX_LINES], *more])
        raise CheckpointError(
            f"{storage.where}/{folder} was not saved from these objects:\n  {text}\nBuild the objects as they were "
            f"when it was saved, or pass strict=False to load what fits."
        )
    assert found is not None
    return found


def apply(found: Found, world: World, objects: Mapping[str, Any], where: str) -> None:
    """Collective: give the objects their states, and the ranks their random streams.

    Raises:
        CheckpointError: An object refused its state on some rank; the objects may have parts of it.
    """
    problem: str | None = None
    for name, target in objects.items():
        if name not in found.states:
            continue
        misfits = any(line.startswith(f"{name}: ") for line in found.misfits)
        state = found.states[name]
        if misfits:
            if not hasattr(unwrapped(target), "forward"):
                continue  # an optimizer's state makes no sense in parts
            state = compare.fitting(state, target)
        try:
            found.fill(name)
            compare.load_into(target, state, strict=not misfits)
        except DamagedError as error:
            problem = f"{name} on rank {world.rank}, when it was read again: {error}"
            break
        except Exception as error:
            problem = f"{name}.load_state_dict on rank {world.rank}: {type(error).__name__}: {error}"
            break
    problems = [told for told in world.exchange(problem) if told is not None]
    if problems:
        raise CheckpointError(
            f"{where}: {problems[0].rstrip('.')}. The objects may have been changed in parts; build them anew."
        )
    if RANDOM in found.states:
        restore_streams(found.states[RANDOM]["ranks"], world)
