"""The sub-commands list, show, verify, diff and unlock of `evenstep checkpoint`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from evenstep.checkpoint.directory import DamagedError, UnreadableError, checkpoints_in, read_manifest
from evenstep.checkpoint.exchange import locate, without_numpy
from evenstep.checkpoint.format.manifest import Manifest
from evenstep.checkpoint.load.compare import largest_difference
from evenstep.checkpoint.load.reader import check_checkpoint, read_objects
from evenstep.checkpoint.lock import read_top, remove_lock, step_of
from evenstep.checkpoint.store import LocalDirectory, storage_at
from evenstep.errors import CheckpointError


def list_checkpoints(path: str) -> list[dict[str, Any]]:
    """Information from the manifest of each checkpoint of a run; JSON types.

    Each has "folder", "step" and "state": "good" (only the manifest was read), "damaged" or "unreadable". Good
    checkpoints have "saved" (seconds since 1970), "ranks", "bytes" and "metrics"; others have "why".

    Raises:
        CheckpointError: There is no checkpoint.
    """
    storage = storage_at(path)
    top = read_top(storage)
    found: list[dict[str, Any]] = []
    for folder in top.manifests(storage):
        facts: dict[str, Any] = {"state": "damaged", "why": top.damaged.get(folder)}
        try:
            manifest = read_manifest(storage, folder)
            if folder not in top.damaged:
                facts = {"state": "good", **_summary(manifest)}
        except (DamagedError, UnreadableError) as error:
            facts = {"state": "damaged" if isinstance(error, DamagedError) else "unreadable", "why": str(error)}
        found.append({"folder": folder, "step": step_of(folder), **facts})
    if not found:
        raise CheckpointError(f"{path} has no checkpoint.")
    return found


def list_lines(path: str) -> Iterator[str]:
    """A line for each checkpoint of a run; reads only manifests."""
    found = list_checkpoints(path)
    yield f"{'step':>10}  {'saved':19}  {'ranks':>5}  {'MB':>9}  metrics"
    for each in found:
        if each["state"] == "good":
            metrics = ", ".join(f"{name} {value:g}" for name, value in each["metrics"].items())
            size = each["bytes"] / 1e6
            line = f"{each['step']:>10}  {_clock(each['saved'])}  {each['ranks']:>5}  {size:>9,.2f}  {metrics}"
            yield line.rstrip()
        else:
            yield f"{each['step']:>10}  {'damaged: ' if each['state'] == 'damaged' else ''}{each['why']}"


def show_checkpoint(path: str, step: int | None) -> dict[str, Any]:
    """The content of a checkpoint's manifest; JSON types.

    Each object has "kind" and "tensors". Each tensor, by name, has "dtype", "shape", and "parts" (file and number of
    elements of each) or "alias" (the name of the tensor with the same memory).
    """
    storage, folder = locate(path, step)
    manifest = read_manifest(storage, folder)
    objects: dict[str, Any] = {}
    for name, item in manifest.objects.items():
        tensors: dict[str, Any] = {
            key: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "parts": [{"file": part.file, "numel": part.numel} for part in tensor.parts],
            }
            for key, tensor in item.tensors.items()
        }
        objects[name] = {
            "kind": item.kind,
            "tensors": tensors | {alias: {"alias": key} for alias, key in item.aliases.items()},
        }
    return {
        "path": f"{storage.where}/{folder}",
        "step": manifest.step,
        **_summary(manifest),
        "versions": manifest.versions,
        "files": {name: {"bytes": file.bytes} for name, file in manifest.files.items()},
        "objects": objects,
    }


def show_lines(path: str, step: int | None) -> Iterator[str]:
    """The contents of a manifest, line by line."""
    found = show_checkpoint(path, step)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield f"{found['path']}: step {found['step']}, saved {_clock(found['saved'])} by {found['ranks']} ranks"
    yield f"versions: {versions}"
    for name, value in found["metrics"].items():
        yield f"metric: {name} {value:g}"
    for name, file in found["files"].items():
        yield f"file: {name}, {file['bytes']:,} bytes"
    for name, item in found["objects"].items():
        yield f"object: {name}, a {item['kind']}"
        for key, tensor in item["tensors"].items():
            if "alias" in tensor:
                yield f"    {key}: is {tensor['alias']}"
                continue
            parts = f" in {len(tensor['parts'])} parts" if len(tensor["parts"]) != 1 else ""
            yield f"    {key}: {tensor['dtype']} {tensor['shape']}{parts}"


def verify(path: str, step: int | None) -> dict[str, list[str]]:
    """Read every byte of one checkpoint, or of all checkpoints of a run.

    Returns:
        For each folder, a line per problem; empty if there is none.
    """
    storage, folder = locate(path, step)
    is_run = step is None and storage.where == storage_at(path).where
    chosen = checkpoints_in(storage).values() if is_run else [folder]
    return {folder: check_checkpoint(storage, folder) for folder in chosen}


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


def unlock(path: str) -> str:
    """Remove the lock of a job that is gone; returns a line for the user.

    Raises:
        LockedError: That job runs on this host.
        CheckpointError: The directory doesn't exist.
    """
    storage = storage_at(path)
    if isinstance(storage, LocalDirectory) and not storage.root.is_dir():
        raise CheckpointError(f"{path} isn't a directory.")
    return remove_lock(storage)


def _load(path: str, step: int | None) -> tuple[Manifest, dict[str, dict[str, Any]]]:
    storage, folder = locate(path, step)
    manifest = read_manifest(storage, folder)
    states = without_numpy(read_objects(storage, folder, manifest, list(manifest.objects)))
    return manifest, {name: dict(_leaves(state)) for name, state in states.items()}


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
    """Whether two leaves, at most one of them a tensor, have the same type and value; NaN equals NaN."""
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


def _summary(manifest: Manifest) -> dict[str, Any]:
    return {
        "saved": manifest.time,
        "ranks": manifest.world_size,
        "bytes": manifest.payload_bytes,
        "metrics": manifest.metrics,
    }


def _clock(saved: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved))
