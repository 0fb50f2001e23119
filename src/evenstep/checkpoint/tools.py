"""The sub-commands of `evenstep checkpoint`: list, show, verify, diff, export, import, unlock."""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from evenstep.checkpoint.format.manifest import Manifest
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.load.compare import largest_difference
from evenstep.checkpoint.load.reader import check_checkpoint, read_objects
from evenstep.checkpoint.save.commit import Saver
from evenstep.checkpoint.storage.directory import (
    DamagedError,
    UnreadableError,
    folder_of,
    put_in_place,
    read_manifest,
    set_aside_in,
    steps_in,
)
from evenstep.checkpoint.storage.lease import remove_lock
from evenstep.checkpoint.storage.storage import LocalDirectory
from evenstep.errors import CheckpointError
from evenstep.world import World


def locate(path: str, step: int | None = None) -> tuple[LocalDirectory, str]:
    """The storage and the folder of one checkpoint.

    Args:
        path: The directory of a run, or one checkpoint's own folder.
        step: Which one; None: the newest.

    Raises:
        CheckpointError: There is none.
    """
    given = Path(path)
    if step is None and (given / "manifest.json").exists():
        return LocalDirectory(given.resolve().parent), given.resolve().name
    storage = LocalDirectory(given)
    steps = steps_in(storage)
    if not steps or (step is not None and step not in steps):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"; there are: {', '.join(map(str, steps))}" if steps else ""
        raise CheckpointError(f"{path} has {what}{there}.")
    return storage, folder_of(steps[-1] if step is None else step)


def list_lines(path: str) -> Iterator[str]:
    """A line for each checkpoint of a run; looks at manifests only."""
    storage = LocalDirectory(path)
    steps = steps_in(storage)
    aside = set_aside_in(storage)
    if not steps and not aside:
        raise CheckpointError(f"{path} has no checkpoint.")
    yield f"{'step':>10}  {'saved':19}  {'ranks':>5}  {'MB':>9}  metrics"
    for step in steps:
        try:
            manifest = read_manifest(storage, folder_of(step))
        except DamagedError as error:
            yield f"{step:>10}  damaged: {error}"
            continue
        except UnreadableError as error:
            yield f"{step:>10}  {error}"
            continue
        metrics = ", ".join(f"{name} {value:g}" for name, value in manifest.metrics.items())
        size = manifest.payload_bytes / 1e6
        line = f"{step:>10}  {_clock(manifest)}  {manifest.world_size:>5}  {size:>9,.2f}  {metrics}"
        yield line.rstrip()
    for name in aside:
        yield f"{'':>10}  {name}: set aside by a resume"


def show_lines(path: str, step: int | None) -> Iterator[str]:
    """The contents of a manifest, line by line."""
    storage, folder = locate(path, step)
    manifest = read_manifest(storage, folder)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    yield f"{storage.where}/{folder}: step {manifest.step}, saved {_clock(manifest)} by {manifest.world_size} ranks"
    yield f"versions: {versions}"
    for name, value in manifest.metrics.items():
        yield f"metric: {name} {value:g}"
    for name, file in manifest.files.items():
        yield f"file: {name}, {file.bytes:,} bytes"
    for name, item in manifest.objects.items():
        yield f"object: {name}, a {item.kind}"
        for key, tensor in item.tensors.items():
            parts = f" in {len(tensor.parts)} parts" if len(tensor.parts) != 1 else ""
            yield f"    {key}: {tensor.dtype} {list(tensor.shape)}{parts}"
        for alias, key in item.aliases.items():
            yield f"    {alias}: is {key}"


def verify(path: str, step: int | None) -> tuple[list[str], bool]:
    """Read every byte of one checkpoint, or of all of a run.

    Returns:
        A line for each checkpoint or for each thing that is wrong, and whether all is well.
    """
    if step is not None or (Path(path) / "manifest.json").exists():
        chosen = [locate(path, step)]
    else:
        storage = LocalDirectory(path)
        chosen = [(storage, folder_of(number)) for number in steps_in(storage)]
        if not chosen:
            raise CheckpointError(f"{path} has no checkpoint.")
    lines, all_well = [], True
    for storage, folder in chosen:
        findings = check_checkpoint(storage, folder)
        lines += findings or [f"{folder}: whole"]
        all_well = all_well and not findings
    return lines, all_well


def difference_lines(first: str, second: str, first_step: int | None, second_step: int | None) -> list[str]:
    """A line for each tensor that differs between two checkpoints; none if they are equal."""
    pair = [_load(first, first_step), _load(second, second_step)]
    lines = []
    for name in sorted(set(pair[0][1]) | set(pair[1][1])):
        if name not in pair[0][1] or name not in pair[1][1]:
            lines.append(f"{name}: only in the {'first' if name in pair[0][1] else 'second'}")
            continue
        ours, theirs = pair[0][1][name], pair[1][1][name]
        for path in sorted(set(ours) | set(theirs)):
            where = f"{name}{path}"
            if path not in ours or path not in theirs:
                lines.append(f"{where}: only in the {'first' if path in ours else 'second'}")
            elif isinstance(ours[path], torch.Tensor) and isinstance(theirs[path], torch.Tensor):
                lines += _tensor_difference(where, ours[path], theirs[path])
            elif not _equal(ours[path], theirs[path]):
                lines.append(f"{where}: {_shown(ours[path])} and {_shown(theirs[path])}")
    return lines


def export(path: str, target: str, step: int | None, name: str | None) -> str:
    """Write a checkpoint's objects to one file that `torch.load(..., weights_only=True)` reads.

    `torch.load` then reads no numpy types: arrays become tensors, and numbers python's own.

    Args:
        path: The directory of a run, or a checkpoint's folder.
        target: The file to make.
        step: Which one; None: the newest.
        name: One object's state alone; None: a dictionary of all of them, and the step.

    Returns:
        A line for the user.

    Raises:
        CheckpointError: There is no such checkpoint or object, it is damaged, or the file exists.
    """
    storage, folder = locate(path, step)
    manifest = read_manifest(storage, folder)
    names = [key for key in manifest.objects if key != RANDOM]
    if name is not None and name not in names:
        raise CheckpointError(f"{path}/{folder} has no object {name!r}; there are: {', '.join(names)}.")
    states = _of_torch(read_objects(storage, folder, manifest, names if name is None else [name]))
    content: Any = {"step": manifest.step, **states} if name is None else states[name]
    try:
        with open(target, "xb") as file:
            try:
                torch.save(content, file)
            except BaseException:
                Path(target).unlink(missing_ok=True)  # a part of a file looks like one
                raise
    except RuntimeError as error:  # torch's own, where the disk is full
        raise CheckpointError(f"{target} could not be written: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise CheckpointError(f"{target}: {error.strerror}. Name a new file in a directory that exists.") from None
    return f"{target}: {'the state of ' + name if name else ', '.join(names)} of step {manifest.step}"


def import_file(source: str, path: str, name: str | None, step: int | None) -> str:
    """Make a checkpoint from a file that `torch.save` has written.

    The one place where a pickle is read, by torch's reader that makes tensors and plain data only.

    Args:
        source: The file.
        path: The directory of the run to make.
        name: The file is the state of this object; None: a dictionary of states, as `export` writes it.
        step: Of the checkpoint; None: what the file says, else 0.

    Returns:
        A line for the user.

    Raises:
        CheckpointError: The file can't be read so, holds something else, or the directory has checkpoints.
    """
    try:
        content = torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{source}: {error.strerror or error}.") from None
    except Exception as error:
        # torch's next sentences advise to read it without that protection.
        first = (str(error).splitlines() or [""])[0].partition(". ")[0]
        raise CheckpointError(
            f"{source} is no file of tensors and plain data: {first.rstrip('.')}. Load it where you trust it, and "
            f"save its state_dict."
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{source} holds a {type(content).__name__}, and no state dictionary.")
    found = content.get("step") if name is None else None
    objects = {name: content} if name is not None else {k: v for k, v in content.items() if isinstance(v, dict)}
    left_out = [str(key) for key in content if name is None and key not in objects and key != "step"]
    if not objects or not all(isinstance(key, str) and key.isidentifier() for key in objects) or left_out:
        what = f" (there is {left_out[0]!r})" if left_out else ""
        raise CheckpointError(
            f"{source} is no dictionary of states by name{what}. If it is the state of one object, say of which: "
            f"--object model."
        )
    storage = LocalDirectory(path)
    if steps_in(storage):
        raise CheckpointError(f"{path} has checkpoints already; name a new directory.")
    number = step if step is not None else found if isinstance(found, int) else 0

    def commit(folder: str, manifest: Manifest) -> None:
        put_in_place(storage, folder, manifest.step)

    saver = Saver(storage, World.alone(device="cpu"), objects, commit)
    saver.open()
    lock = storage.lock({"import": source})
    try:
        saver.start(number, {})
        failure = saver.finish()
    finally:
        lock.release()
    if failure is not None:
        raise CheckpointError(f"{source}: {failure}.")
    return f"{path}/{folder_of(number)}: {', '.join(objects)}"


def unlock(path: str) -> str:
    """Remove the lock of a job that is gone; returns a line for the user.

    Raises:
        LockedError: That job runs on this host.
        CheckpointError: There is no such directory.
    """
    if not Path(path).is_dir():
        raise CheckpointError(f"{path} is no directory.")
    return remove_lock(Path(path))


def _load(path: str, step: int | None) -> tuple[Manifest, dict[str, dict[str, Any]]]:
    storage, folder = locate(path, step)
    manifest = read_manifest(storage, folder)
    states = _of_torch(read_objects(storage, folder, manifest, list(manifest.objects)))
    return manifest, {name: dict(_leaves(state)) for name, state in states.items()}


def _of_torch(state: Any) -> Any:
    """The state without numpy types."""
    numpy = sys.modules.get("numpy")
    if type(state) in (dict, collections.OrderedDict):
        for key in state:
            state[key] = _of_torch(state[key])
    elif type(state) in (list, tuple):
        return type(state)(_of_torch(item) for item in state)
    elif numpy is not None and isinstance(state, numpy.ndarray):
        return torch.from_numpy(state)
    elif numpy is not None and isinstance(state, numpy.generic):
        return state.item()
    return state


def _leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict) and state:
        for key, value in state.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(state, list | tuple) and state:
        for index, value in enumerate(state):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, state


def _equal(ours: Any, theirs: Any) -> bool:
    """Whether two leaves, of which one at most is a tensor, have the same type and value; NaN equals NaN."""
    if type(ours) is not type(theirs):
        return False
    return bool(ours == theirs or (ours != ours and theirs != theirs))


def _shown(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _tensor_difference(where: str, ours: torch.Tensor, theirs: torch.Tensor) -> list[str]:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return [f"{where}: {_shown(ours)} and {_shown(theirs)}"]
    gap = largest_difference(ours, theirs)
    if gap == 0:
        return []
    count = int(((ours != theirs) & ~((ours != ours) & (theirs != theirs))).sum())
    return [f"{where}: {count:,} of {ours.numel():,} elements differ, by {gap:.3g} at most"]


def _clock(manifest: Manifest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
