"""Checkpoints and the files of other programs: torch.save, safetensors, `torch.distributed.checkpoint`.

`export` writes each format, and `import_file` makes a checkpoint from it. No pickle is executed: torch's reader of
tensors and plain data reads files of `torch.save`, and `dcp` reads the index of `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenstep import checks
from evenstep.checkpoint import dcp
from evenstep.checkpoint.directory import RunDirectory, checkpoints_in, read_manifest
from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.payload import bytes_of, entry_of, plan_layout
from evenstep.checkpoint.format.plan import Policy
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.load.reader import read_objects
from evenstep.checkpoint.save.commit import Saver
from evenstep.checkpoint.save.snapshot import capture_one
from evenstep.checkpoint.store import Storage, storage_at
from evenstep.errors import CheckpointError, ConfigurationError
from evenstep.world import World

_SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def locate(path: str, step: int | None = None) -> tuple[Storage, str]:
    """The storage and the folder of one checkpoint.

    Args:
        path: The directory or the URL of a run, or one checkpoint's own folder.
        step: The checkpoint's step; None: the newest.

    Raises:
        CheckpointError: There is no such checkpoint.
    """
    storage = storage_at(path)
    if step is None and manifests.NAME in storage.list():
        # "." is a folder, too.
        run, _, folder = (os.path.realpath(path) if "://" not in path else storage.where).rpartition("/")
        return storage_at(run or "/"), folder
    folders = checkpoints_in(storage)
    if not folders or (step is not None and step not in folders):
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        there = f"; there are: {', '.join(map(str, folders))}" if folders else ""
        raise CheckpointError(f"{path} has {what}{there}.")
    return storage, folders[max(folders) if step is None else step]


# ---------------------------------------------------------------------- export


def export(
    path: str,
    target: str,
    step: int | None,
    name: str | None,
    *,
    max_shard_bytes: int | None = None,
    as_dcp: bool = False,
) -> str:
    """Write a checkpoint's objects to files that other programs read.

    The target determines the format. A name that ends in ".safetensors" is one safetensors file. With `max_shard_bytes`
    the target is a directory with pieces and their index, as model hubs expect them. With `as_dcp` it is a directory of
    `torch.distributed.checkpoint`. Any other name is a file that `torch.load(..., weights_only=True)` can read, without
    numpy's types: arrays become tensors, and numpy numbers become python's.

    Args:
        path: The directory of a run, or a checkpoint's folder.
        target: The file or directory to make.
        step: The checkpoint's step; None: the newest.
        name: The one object to export; None: all objects and the step, or for safetensors the object "model".
        max_shard_bytes: The most bytes of tensors in a piece, unless the piece is a single larger tensor.
        as_dcp: Write a directory of `torch.distributed.checkpoint`.

    Returns:
        A line for the user.

    Raises:
        CheckpointError: There is no such checkpoint or object, the checkpoint is damaged, the target exists or can't be
            written, or the state can't be put into this format.
    """
    storage, folder = locate(path, step)
    manifest = read_manifest(storage, folder)
    names = [key for key in manifest.objects if key != RANDOM]
    in_safetensors = max_shard_bytes is not None or (target.endswith(_SUFFIX) and not as_dcp)
    if in_safetensors and name is None:
        name = "model" if "model" in names else names[0]
        if len(names) > 1 and name != "model":
            raise CheckpointError(
                f"{path}/{folder} has {', '.join(names)}, but a safetensors file stores only one of them. Choose it: "
                f"--object {name}."
            )
    if name is not None and name not in names:
        raise CheckpointError(f"{path}/{folder} has no object {name!r}; there are: {', '.join(names)}.")
    states = without_numpy(read_objects(storage, folder, manifest, names if name is None else [name]))
    with _writing(target):
        if as_dcp:
            dcp.write(target, {"step": manifest.step, **states} if name is None else states)
        elif in_safetensors:
            assert name is not None
            num_files = _write_safetensors(target, states[name], name, max_shard_bytes)
            pieces = "" if max_shard_bytes is None else f" in {num_files} file{'s' if num_files > 1 else ''}"
            return f"{target}: the tensors of {name} of step {manifest.step}{pieces}"
        else:
            content: Any = {"step": manifest.step, **states} if name is None else states[name]
            _write_new(target, lambda file: torch.save(content, file))
    return f"{target}: {'the state of ' + name if name else ', '.join(names)} of step {manifest.step}"


@contextlib.contextmanager
def _writing(target: str) -> Iterator[None]:
    """Context that turns errors of writing into an error that names the target."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or target}: {error.strerror or error}. Pass a new name in an existing directory."
        ) from None
    except CheckpointError:
        raise
    except RuntimeError as error:  # torch raises this if the disk is full
        raise CheckpointError(f"{target} could not be written: {str(error).splitlines()[0]}") from None


def _write_new(target: str | Path, write: Callable[[Any], object]) -> None:
    with open(target, "xb") as file:
        try:
            write(file)
        except BaseException:
            Path(target).unlink(missing_ok=True)  # an incomplete file looks like a complete one
            raise


def _write_safetensors(target: str, state: Any, name: str, max_shard_bytes: int | None) -> int:
    """Write an object's tensors to one file, or to pieces with an index; returns the number of files.

    Raises:
        CheckpointError: The state contains something other than tensors.
    """
    captured = capture_one(name, dict(state))
    others = [path for path, value in _leaves(state) if not isinstance(value, Tensor)]
    if others or not captured.tensors:
        what = f"{others[0]!r} isn't one" if others else "it has none"
        raise CheckpointError(
            f"{name} can't be written as safetensors, which store only tensors: {what}. Export it to a file of torch "
            f"(another ending), or export another object (--object)."
        )
    tensors, aliases = captured.tensors, captured.aliases

    def write(place: Path | str, keys: list[str]) -> None:
        # Tied parameters are written once, as on model hubs; the safetensors package records them in this way.
        tied = {alias: key for alias, key in aliases.items() if key in keys}
        layout = plan_layout([entry_of(key, tensors[key]) for key in keys], {"format": "pt", **tied})

        def write_all(file: Any) -> None:
            file.write(layout.header)
            for entry in layout.entries:
                file.write(bytes_of(tensors[entry.key].contiguous()))

        _write_new(place, write_all)

    if max_shard_bytes is None:
        write(target, list(tensors))
        return 1
    os.mkdir(target)
    pieces = plan_pieces({key: tensor.nbytes for key, tensor in tensors.items()}, max_shard_bytes)
    if len(pieces) == 1:  # as on model hubs, without an index
        write(Path(target) / _SINGLE, pieces[0])
        return 1
    weight_map: dict[str, str] = {}
    for number, keys in enumerate(pieces, start=1):
        file = f"model-{number:05d}-of-{len(pieces):05d}{_SUFFIX}"
        write(Path(target) / file, keys)
        weight_map |= dict.fromkeys(keys, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": {key: weight_map[key] for key in tensors}}
    _write_new(Path(target) / _INDEX, lambda file: file.write(json.dumps(index, indent=2).encode() + b"\n"))
    return len(pieces)


def plan_pieces(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Divide tensors, in their order, into files of a largest size. A larger tensor gets its own file. Pure."""
    pieces: list[list[str]] = []
    room = 0
    for key, num_bytes in sizes.items():
        if not pieces or num_bytes > room:
            pieces.append([])
            room = most
        pieces[-1].append(key)
        room -= num_bytes
    return pieces


# ---------------------------------------------------------------------- import


def import_file(source: str, path: str, name: str | None, step: int | None) -> str:
    """Make a checkpoint from the files of another program.

    Args:
        source: A file of `torch.save`; a file that ends in ".safetensors"; a directory with a safetensors file, or with
            an index and pieces; or a directory of `torch.distributed.checkpoint`.
        path: The directory or the URL of the run to make.
        name: The object whose state the file is; None: a file of `torch.save` is a dictionary of states, as `export`
            writes it, and a safetensors file is the model's state.
        step: The checkpoint's step; None: the file's step, or else 0.

    Returns:
        A line for the user.

    Raises:
        CheckpointError: The file can't be read, contains more than tensors and plain data, or the directory has
            checkpoints.
    """
    content = _read(source)
    if not isinstance(content, dict):
        raise CheckpointError(f"{source} contains a {type(content).__name__}, not a state dictionary.")
    if name is None and _is_safetensors(source):
        name = "model"
    found = content.get("step") if name is None else None
    objects = {name: content} if name is not None else {k: v for k, v in content.items() if isinstance(v, dict)}
    left_out = [str(key) for key in content if name is None and key not in objects and key != "step"]
    if not objects or not all(isinstance(key, str) and manifests.is_object_name(key) for key in objects) or left_out:
        what = f" (there is {left_out[0]!r})" if left_out else ""
        raise CheckpointError(
            f"{source} isn't a dictionary of states by name{what}. If it is the state of one object, name the object: "
            f"--object model."
        )
    storage, world = storage_at(path), World.alone(device="cpu")
    if checkpoints_in(storage):
        raise CheckpointError(f"{path} has checkpoints already; pass a new directory.")
    if step is None and found is not None:
        try:
            step = checks.whole("its step", found, least=0)
        except ConfigurationError as error:
            raise CheckpointError(f"{source}: {error} Pass --step.") from None
    directory = RunDirectory(storage, world, Policy())
    saver = Saver(storage, world, objects, directory.commit)
    saver.open(directory.open())
    try:
        saver.start(step or 0, {})
        failure = saver.finish()
    finally:
        directory.close()
    if failure is not None:
        raise CheckpointError(f"{source}: {failure}.")
    return f"{path}/{saver.folder}: {', '.join(objects)}"


def _is_safetensors(source: str) -> bool:
    place = Path(source)
    return place.suffix == _SUFFIX or (place / _SINGLE).exists() or (place / _INDEX).exists()


def _read(source: str) -> Any:
    """The content of a file or a directory of another program.

    Raises:
        CheckpointError: The source doesn't exist, or contains more than tensors and plain data.
    """
    if _is_safetensors(source):
        return _read_safetensors(Path(source))
    if Path(source).is_dir():
        return dcp.read(source)
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{source}: {error.strerror or error}.") from None
    except Exception as error:
        # Leave out torch's next sentences, which advise to read the file without that protection.
        first = (str(error).splitlines() or [""])[0].partition(". ")[0]
        raise CheckpointError(
            f"{source} isn't a file of only tensors and plain data: {first.rstrip('.')}. If you trust it, load it with "
            f"torch and save its state_dict."
        ) from None


def _read_safetensors(source: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    files = [source]
    index: dict[str, str] = {}
    if source.is_dir():
        files = [source / _SINGLE]
        if (source / _INDEX).exists():
            try:
                index = dict(json.loads((source / _INDEX).read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{source / _INDEX} isn't a safetensors index ({error}).") from None
            outside = [file for file in index.values() if not isinstance(file, str) or Path(file).name != file]
            if outside:
                raise CheckpointError(
                    f"{source / _INDEX} names {outside[0]!r}, which isn't a file in the same directory."
                )
            files = [source / file for file in sorted(set(index.values()))]
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as opened:
                tensors |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # no dictionary
                notes = opened.metadata() or {}
        except FileNotFoundError:
            raise CheckpointError(f"{file} doesn't exist.") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} isn't a safetensors file: {error}.") from None
        tensors |= {alias: tensors[key] for alias, key in notes.items() if alias not in tensors and key in tensors}
    missing = sorted(set(index) - set(tensors))
    if missing:
        raise CheckpointError(f"{source / _INDEX} lists {missing[0]!r}, which {index[missing[0]]} doesn't have.")
    return tensors


# ---------------------------------------------------------------------- states


def without_numpy(state: Any) -> Any:
    """The state without numpy types; changed in place if possible."""
    numpy = sys.modules.get("numpy")
    if type(state) in (dict, collections.OrderedDict):
        for key in state:
            state[key] = without_numpy(state[key])
    elif type(state) in (list, tuple):
        return type(state)(without_numpy(item) for item in state)
    elif numpy is not None and isinstance(state, numpy.ndarray):
        return torch.from_numpy(state)
    elif numpy is not None and isinstance(state, numpy.generic):
        return state.item()
    return state


def _leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict):
            yield from _leaves(value, where)
        else:
            yield where, value
