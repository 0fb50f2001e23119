"""Restoring a checkpoint: all ranks read and check it before any rank changes anything."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.checkpoint.directory import DamagedError, MissingError, UnreadableError, read_manifest
from evenstep.checkpoint.format.manifest import Manifest
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.format.random_streams import restore_streams
from evenstep.checkpoint.format.tree import unwrapped
from evenstep.checkpoint.load import compare
from evenstep.checkpoint.load.layouts import find_layouts
from evenstep.checkpoint.load.reader import read_objects, unlisted_files
from evenstep.checkpoint.lock import step_of
from evenstep.checkpoint.store import Storage
from evenstep.errors import CheckpointError, ConfigurationError
from evenstep.world import World

_MAX_LINES = 60
_PAUSES_S = (0.5, 2.0)  # seconds before unreadable files are read again


@dataclass(frozen=True)
class Found:
    """A checkpoint that all ranks have read.

    Attributes:
        manifest: The checkpoint's manifest.
        states: The states by object.
        misfits: Differences from the objects of this run, a line each.
        unlisted: Files that the manifest doesn't list.
    """

    manifest: Manifest
    states: dict[str, Any]
    misfits: list[str]
    unlisted: list[str]


def find(
    storage: Storage,
    world: World,
    folder: str,
    objects: Mapping[str, Any],
    *,
    strict: bool,
    manifest: Manifest | None = None,
) -> Found:
    """Collective: read and check a checkpoint without changing anything.

    If some rank can't read a file all ranks read once more, after a pause: a server may be unreachable for a moment.

    Args:
        storage: Where the checkpoint is stored.
        world: The ranks.
        folder: The checkpoint's folder.
        objects: Objects of this run, by name.
        strict: False: differences from the objects are in `misfits`.
        manifest: The part of the manifest that this rank reads; None: everything in the folder's manifest.

    Raises:
        DamagedError: At least one rank finds content that differs from what was saved, or a file is missing on all
            ranks.
        UnreadableError: At least one rank can't read the checkpoint.
        CheckpointError: The checkpoint is good, but doesn't fit the objects, or one of their tensors can't be loaded
            into.
    """
    for pause_s in (*_PAUSES_S, None):
        found, problem = _read(storage, world, folder, objects, manifest, strict=strict)
        problems = world.exchange(problem)
        unread = _first(problems, "unread") or _first(problems, "missing")
        if unread is None or pause_s is None:
            break
        time.sleep(pause_s)
    if all(each is not None and each[0] == "missing" for each in problems):
        raise DamagedError(_first(problems, "missing"))
    if unread is not None:
        raise UnreadableError(f"{storage.where}/{unread}. The checkpoint may be good: it is left as it is.")
    if (damage := _first(problems, "damage")) is not None:
        raise DamagedError(damage)
    if (refused := _first(problems, "refused")) is not None:
        raise CheckpointError(refused)
    assert found is not None
    listed: list[str] = next((each for each in world.exchange(found.misfits) if each), [])
    if listed and strict:
        more = [f"... and {len(listed) - _MAX_LINES} more"] if len(listed) > _MAX_LINES else []
        text = "\n  ".join([*listed[:_MAX_LINES], *more])
        raise CheckpointError(
            f"{storage.where}/{folder} was not saved from these objects:\n  {text}\nBuild the objects as they "
            f"were when it was saved, or pass strict=False to load what fits."
        )
    return found


def _first(problems: Sequence[tuple[str, str] | None], kind: str) -> str | None:
    """The text of the first problem of a kind."""
    return next((each[1] for each in problems if each is not None and each[0] == kind), None)


def _read(
    storage: Storage,
    world: World,
    folder: str,
    objects: Mapping[str, Any],
    known: Manifest | None,
    *,
    strict: bool,
) -> tuple[Found | None, tuple[str, str] | None]:
    """Read a checkpoint on this rank. Returns the found state, or the kind of problem and its text."""
    try:
        manifest = known or read_manifest(storage, folder)
        if manifest.step != step_of(folder):
            raise DamagedError(f"{folder}: its manifest is that of step {manifest.step}")
        misfits = compare.missing_objects(manifest.objects, objects)
        layouts = {}
        for name, target in objects.items():
            if name in manifest.objects:
                misfits += compare.differences(name, manifest.objects[name], target)
                layouts[name] = find_layouts(name, manifest.objects[name], target)
        share = (world.local_rank, world.local_world_size)
        states: dict[str, Any] = {}
        if not (misfits and strict):
            names = [name for name in (*objects, RANDOM) if name in manifest.objects]
            states = read_objects(storage, folder, manifest, names, share=share, layouts=layouts)
        unlisted = unlisted_files(storage, folder, manifest) if world.is_main else []
    except DamagedError as error:
        return None, ("damage", str(error))
    except UnreadableError as error:
        return None, ("missing" if isinstance(error, MissingError) else "unread", f"{error} (on rank {world.rank})")
    except ConfigurationError as error:
        return None, ("refused", f"{storage.where}/{folder}: {error} (On rank {world.rank}.)")
    return Found(manifest, states, misfits, unlisted), None


def apply(found: Found, world: World, objects: Mapping[str, Any], where: str) -> None:
    """Collective: load the states into the objects, and restore the random streams.

    Raises:
        CheckpointError: An object refused its state on some rank; some objects may have been changed.
    """
    problem: str | None = None
    for name, target in objects.items():
        if name not in found.states:
            continue
        misfits = any(line.startswith(f"{name}: ") for line in found.misfits)
        state = found.states.pop(name)  # a model copies its state, so this memory is freed afterwards
        if misfits:
            if not hasattr(unwrapped(target), "forward"):
                continue  # an incomplete optimizer state can't be used
            state = compare.fitting(state, target)
        try:
            compare.load_into(target, state, strict=not misfits, keeps_dtypes=not found.misfits)
        except Exception as error:
            problem = f"{name}.load_state_dict on rank {world.rank}: {type(error).__name__}: {error}"
            break
    problems = [each for each in world.exchange(problem) if each is not None]
    if problems:
        raise CheckpointError(
            f"{where}: {problems[0].rstrip('.')}. The objects may be partly changed; build them again."
        )
    if RANDOM in found.states:
        restore_streams(found.states[RANDOM]["ranks"], world)
