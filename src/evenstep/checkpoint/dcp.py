"""Directories of `torch.distributed.checkpoint`: written by torch, read here.

torch's reader unpickles the directory's index, and plain values. This reader accepts only the records of torch's writer
in the index, and reads each item with torch's reader of tensors and plain data.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from evenstep.checkpoint.format.regions import is_tiled
from evenstep.errors import CheckpointError

_INDEX = ".metadata"
_RECORDS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def write(target: str, state: dict[str, Any]) -> None:
    """Write a state to a new directory.

    Raises:
        FileExistsError: The name exists already.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    Path(target).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        save(state, checkpoint_id=target, no_dist=True)


def read(source: str) -> dict[str, Any]:
    """Read a directory that any number of ranks has written.

    Raises:
        CheckpointError: The directory isn't one of `torch.distributed.checkpoint`, contains more than tensors and plain
            data, or doesn't match its index.
    """
    place = Path(source)
    try:
        index = _Index((place / _INDEX).read_bytes()).load()
        items, paths = index.state_dict_metadata, index.planner_data or {}
        stored: dict[str, list[tuple[Any, Any]]] = {}
        for where, info in index.storage_data.items():
            stored.setdefault(where.fqn, []).append((where, info))
        state: dict[str, Any] = {}
        for name, item in items.items():
            value = _item(place, name, item, stored.get(name, []))
            _put(state, tuple(paths.get(name, (name,))), value)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{source} has no {Path(error.filename).name}: it isn't a directory of safetensors or of "
            f"torch.distributed.checkpoint."
        ) from None
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{error.filename or source}: {error.strerror or error}.") from None
    except Exception as error:  # a damaged or foreign pickle may raise anything
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{source}/{_INDEX} can't be read: {type(error).__name__}: {first}.") from None
    return {key: _with_numbers(value) for key, value in state.items()}


class _Index(pickle._Unpickler):
    """An unpickler that makes only the records of torch's writer.

    It derives from the unpickler in python, because the one in C can crash the process on damaged content.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))

    def find_class(self, module: str, name: str) -> Any:
        if module in _RECORDS and "." not in name:
            found = super().find_class(module, name)
            if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)):
                return found
        elif module == "torch":
            found = getattr(torch, name, None)
            if found is torch.Size or isinstance(found, torch.dtype | torch.layout):
                return found
        elif module == "torch.serialization" and name == "_get_layout":
            return _layout
        elif module.split(".")[0] == "pathlib" and name in ("Path", "PosixPath", "WindowsPath"):
            return PurePosixPath  # the path of the directory in which it was written
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index has")


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError(f"{name!r} is no layout")
    return found


def _item(place: Path, name: str, item: Any, stored: list[tuple[Any, Any]]) -> Any:
    """Read a value, or a tensor, which may consist of several pieces.

    Raises:
        CheckpointError: The item doesn't match the index.
    """
    if not hasattr(item, "chunks"):
        if len(stored) != 1:
            raise CheckpointError(f"{place}: {name} has {len(stored)} pieces, but is a single value.")
        return _load(place, name, stored[0][1])
    shape = tuple(item.size)
    whole = torch.empty(shape, dtype=item.properties.dtype, device="cpu")
    boxes = []
    for where, info in stored:
        piece = _load(place, name, info)
        offsets = tuple(where.offset) if where.offset is not None else (0,) * len(shape)
        ends = [offset + size for offset, size in zip(offsets, piece.shape, strict=True)]
        if not isinstance(piece, Tensor) or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise CheckpointError(f"{place}: a piece of {name} isn't a part of its shape {list(shape)}.")
        if piece.numel():
            whole[tuple(slice(*span) for span in zip(offsets, ends, strict=True))] = piece
            boxes.append((offsets, tuple(piece.shape)))
    if not is_tiled(shape, boxes) and whole.numel():
        raise CheckpointError(f"{place}: the pieces of {name} don't make up its shape {list(shape)}.")
    return whole


def _load(place: Path, name: str, info: Any) -> Any:
    file = info.relative_path
    if Path(file).name != file:
        raise CheckpointError(f"{place}: {name} is in {file!r}, which isn't a file of this directory.")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{place}: {name} is compressed ({info.transform_descriptors}), which isn't supported.")
    with open(place / file, "rb") as opened:
        opened.seek(info.offset)
        content = io.BytesIO(opened.read(info.length))
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0].partition(". ")[0]
        raise CheckpointError(f"{place}: {name} is more than tensors and plain data: {first}.") from None


def _put(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Store a value at its path. Numbers in a path are indices of lists, in any order."""
    here: Any = state
    for key, following in zip(path, (*path[1:], None), strict=True):
        new: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(here, list):
            here += [None] * (key + 1 - len(here))
            if following is None or here[key] is None:
                here[key] = new
        elif following is None:
            here[key] = new
        else:
            here.setdefault(key, new)
        here = here[key]


def _with_numbers(state: Any) -> Any:
    """Restore an optimizer's parameter numbers, in the order of its groups.

    `torch.distributed.checkpoint` has converted the numbers to text; `get_optimizer_state_dict` has replaced them by
    names.
    """
    if not (isinstance(state, Mapping) and isinstance(state.get("state"), Mapping)):
        return state
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return state
    names = [name for group in groups for name in group.get("params", [])]
    if names and all(isinstance(name, str) for name in names):
        numbers = {name: number for number, name in enumerate(names)}
        numbered = {numbers.get(key, key): value for key, value in state["state"].items()}
        renamed = [{**group, "params": [numbers[name] for name in group.get("params", [])]} for group in groups]
        return {**state, "state": numbered, "param_groups": renamed}
    return {
        **state,
        "state": {int(key) if str(key).isdecimal() else key: value for key, value in state["state"].items()},
    }
