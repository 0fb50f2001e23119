"""Restoring a checkpoint: all ranks read and check it before any of them changes anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evenstep.checkpoint.format.manifest import Manifest
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.format.random_streams import restore_streams
from evenstep.checkpoint.format.tree import unwrapped
from evenstep.checkpoint.load import compare
from evenstep.checkpoint.load.in_place import in_place_targets
from evenstep.checkpoint.load.layouts import find_layouts
from evenstep.checkpoint.load.reader import fill, read_objects, unlisted_files
from evenstep.checkpoint.storage.directory import DamagedError, UnreadableError, folder_of, read_manifest
from evenstep.checkpoint.storage.storage import Storage
from evenstep.errors import CheckpointError, ConfigurationError
from evenstep.world import World

_MAX_LINES = 60


@dataclass(frozen=True)
class Found:
    """A checkpoint that all ranks have read.

    Attributes:
        manifest: Of the checkpoint.
        states: By object. In-place targets in them are not filled yet.
        fill: Fills those of one object, on this rank.
        misfits: Differences from the objects of this run, a line each.
        unlisted: Files that the manifest doesn't list.
    """

    manifest: Manifest
    states: dict[str, Any]
    fill: Callable[[str], None]
    misfits: list[str]
    unlisted: list[str]


def find(storage: Storage, world: World, step: int, objects: Mapping[str, Any], *, strict: bool) -> Found:
    """Collective: read and check a checkpoint without changing anything.

    Raises:
        DamagedError: At least one rank finds it damaged.
        UnreadableError: At least one rank can't read it.
        CheckpointError: It is good, but doesn't fit the objects, or a tensor of theirs can't be loaded into.
    """
    folder = folder_of(step)
    damage: str | None = None
    unread: str | None = None
    refused: str | None = None
    misfits: list[str] = []
    found: Found | None = None
    try:
        manifest = read_manifest(storage, folder)
        if manifest.step != step:
            raise DamagedError(f"{folder}: its manifest is that of step {manifest.step}")
        misfits = compare.missing_objects(manifest.objects, objects)
        targets, layouts = {}, {}
        for name, target in objects.items():
            if name in manifest.objects:
                lines = compare.differences(name, manifest.objects[name], target)
                targets[name] = {} if lines else in_place_targets(manifest.objects[name], target)
                layouts[name] = find_layouts(name, manifest.objects[name], target)
                misfits += lines
        share = (world.local_rank, world.local_world_size)
        states: dict[str, Any] = {}
        if not (misfits and strict):
            names = [name for name in (*objects, RANDOM) if name in manifest.objects]
            states = read_objects(storage, folder, manifest, names, share=share, targets=targets, layouts=layouts)
        unlisted = unlisted_files(storage, folder, manifest) if world.is_main else []

        def fill_one(name: str) -> None:
            fill(storage, folder, manifest, name, targets, share=share)

        found = Found(manifest, states, fill_one, misfits, unlisted)
    except DamagedError as error:
        damage = str(error)
    except UnreadableError as error:
        unread = f"{storage.where}/{error} (on rank {world.rank}). The checkpoint may be good: it is left as it is."
    except ConfigurationError as error:
        refused = f"{storage.where}/{folder}: {error} That is so on rank {world.rank}."
    seen = world.exchange({"damage": damage, "unread": unread, "refused": refused, "misfits": misfits})
    unread = next((each["unread"] for each in seen if each["unread"] is not None), None)
    if unread is not None:
        raise UnreadableError(unread)
    damage = next((each["damage"] for each in seen if each["damage"] is not None), None)
    if damage is not None:
        raise DamagedError(damage)
    refused = next((each["refused"] for each in seen if each["refused"] is not None), None)
    if refused is not None:
        raise CheckpointError(refused)
    listed: list[str] = next((each["misfits"] for each in seen if each["misfits"]), [])
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
    """Collective: load the states into the objects, and restore the random streams.

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
    problems = [each for each in world.exchange(problem) if each is not None]
    if problems:
        raise CheckpointError(
            f"{where}: {problems[0].rstrip('.')}. The objects may have been changed in parts; build them anew."
        )
    if RANDOM in found.states:
        restore_streams(found.states[RANDOM]["ranks"], world)
