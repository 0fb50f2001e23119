"""State dictionaries to JSON and named tensors, and back. Pure; nothing is ever pickled.

A value that JSON lacks becomes a dictionary with one key that begins with "~":

    {"~tensor": "0.weight"}     the tensor of that name        {"~array": name}, {"~number": name}     of numpy
    {"~tuple": [...]}           {"~size": [...]}               {"~counter": [[key, n], ...]}
    {"~float": "nan"}           {"~bytes": base64}             {"~dtype": "float32"}
    {"~ordered": {...}}         {"~dict": [[key, value], ...]}     keys that aren't plain
    {"~module": state, "metadata": ...}    a module's state dictionary with torch's versions of its parts

A value is restored with its type. So a type that only derives from one of these (an enum of strings, a named tuple, a
defaultdict, a masked array) is refused instead of converted to its base. Parameters are an exception: they are restored
as tensors.
"""

from __future__ import annotations

import base64
import collections
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_modules import compiled_module
from evenstep.ground.compat.torch_tensors import is_dtensor, local_part, split_of

_PLAIN_TENSORS = {Tensor, nn.Parameter, nn.Buffer}
_MAX_DEPTH = 200


def unwrapped(value: Any) -> Any:
    """The model inside `DistributedDataParallel` and `torch.compile`; other objects are returned unchanged."""
    while isinstance(value, nn.Module):
        if isinstance(value, nn.parallel.DistributedDataParallel | nn.DataParallel):
            value = value.module
        elif (inner := compiled_module(value)) is not None:
            value = inner
        else:
            break
    return value


def flatten(value: Any, owner: str) -> tuple[Any, dict[str, Tensor]]:
    """Split an object's state into a JSON structure and named tensors.

    Args:
        value: None, bool, int, float, str, bytes, dtypes, sizes, tensors, numpy arrays and numbers, and lists, tuples
            and dictionaries of them.
        owner: The object's name in messages.

    Returns:
        The JSON structure, and the tensors by name: their path, joined by dots. Two names may refer to one tensor.

    Raises:
        ConfigurationError: The state contains a value of another type; the message has its path and type.
    """
    tensors: dict[str, Tensor] = {}
    return _flatten(value, (owner,), tensors), tensors


def unflatten(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild the argument of `flatten`, with the tensors of `tensors`.

    Raises:
        ValueError: The structure names a missing tensor, or isn't a result of `flatten`.
    """
    if isinstance(structure, list):
        return [unflatten(item, tensors) for item in structure]
    if not isinstance(structure, dict):
        return structure
    tags = [key for key in structure if key.startswith("~")]
    if not tags:
        return {key: unflatten(item, tensors) for key, item in structure.items()}
    tag, content = tags[0], structure[tags[0]]
    if tag not in _READERS:
        raise ValueError(f"its structure has the mark {tag!r}, which this version doesn't know")
    if tag in _OF_TENSORS:
        if content not in tensors:
            raise ValueError(f"its structure names the tensor {content!r}, which isn't listed")
        content = tensors[content]
    elif tag in _OF_PAIRS:
        content = {unflatten(key, {}): unflatten(item, tensors) for key, item in content}
    else:
        content = unflatten(content, tensors)
    state = _READERS[tag](content)
    if tag == "~module":
        state._metadata = unflatten(structure.get("metadata"), {})
    return state


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"its structure has the dtype {name!r}, which torch doesn't know")
    return found


_OF_TENSORS = ("~tensor", "~array", "~number")  # their content is a tensor's name
_OF_PAIRS = ("~dict", "~counter")
_READERS: dict[str, Callable[[Any], Any]] = {
    "~tensor": lambda tensor: tensor,
    "~array": lambda tensor: tensor.numpy(),
    "~number": lambda tensor: tensor.numpy()[()],
    "~tuple": tuple,
    "~size": torch.Size,
    "~float": float,
    "~bytes": base64.b64decode,
    "~dtype": _dtype,
    "~dict": dict,
    "~counter": collections.Counter,
    "~ordered": collections.OrderedDict,
    "~module": collections.OrderedDict,
}


def dotted(path: tuple[Any, ...]) -> str:
    """The name of the tensor at a path inside a state dictionary."""
    return ".".join(map(str, path))


def _flatten(value: Any, path: tuple[Any, ...], tensors: dict[str, Tensor]) -> Any:
    if len(path) > _MAX_DEPTH:
        raise ConfigurationError(f"the state of {path[0]!r} contains itself, or is nested too deeply to be saved.")
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is str:
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ConfigurationError(
                f"{shown(path)} is a text with half of a character in it (a surrogate), which files can't store. "
                f"Decode it without surrogates, or store its bytes."
            )
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"~float": str(value)}
    if isinstance(value, Tensor):
        _validate_tensor(value, path)
        return {"~tensor": _put(value.detach(), path, tensors)}
    if type(value) in (tuple, torch.Size):
        tag = "~tuple" if type(value) is tuple else "~size"
        return {tag: [_flatten(item, (*path, i), tensors) for i, item in enumerate(value)]}
    if type(value) is list:
        return [_flatten(item, (*path, i), tensors) for i, item in enumerate(value)]
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        return _flatten_dict(value, path, tensors)
    if type(value) is bytes:
        return {"~bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.dtype):
        return {"~dtype": str(value).removeprefix("torch.")}
    numpy = sys.modules.get("numpy")
    is_number = numpy is not None and isinstance(value, numpy.generic)
    if numpy is not None and (is_number or type(value) is numpy.ndarray) and value.dtype.kind in "biufc":
        try:
            copied = torch.from_numpy(numpy.array(value))  # a copy that only the tensor uses
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"{shown(path)} is a numpy array of dtype {value.dtype.str}, which no checkpoint can store: tensors "
                f"have this machine's byte order and at most 64 bits per number. Convert it."
            ) from None
        return {"~number" if is_number else "~array": _put(copied, path, tensors)}
    raise ConfigurationError(
        f"{shown(path)} is a {type(value).__module__}.{type(value).__qualname__}, which can't be saved, because "
        f"checkpoints contain no pickles. Keep only numbers, strings, tensors, lists, tuples and dictionaries in the "
        f"state."
    )


def _flatten_dict(value: dict[Any, Any], path: tuple[Any, ...], tensors: dict[str, Tensor]) -> Any:
    def pairs() -> list[Any]:
        return [[_flatten_key(key, path), _flatten(item, (*path, key), tensors)] for key, item in value.items()]

    if type(value) is collections.Counter:
        return {"~counter": pairs()}
    if all(type(key) is str and not key.startswith("~") for key in value):
        state: Any = {_flatten_key(key, path): _flatten(item, (*path, key), tensors) for key, item in value.items()}
    else:
        state = {"~dict": pairs()}
    metadata = getattr(value, "_metadata", None)
    if isinstance(metadata, dict):
        return {"~module": state, "metadata": _flatten_plain(dict(metadata), (*path, "_metadata"))}
    return {"~ordered": state} if type(value) is collections.OrderedDict else state


def _flatten_key(key: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(key, str | int | float | tuple | None):
        return _flatten_plain(key, (*path, key))
    raise ConfigurationError(
        f"{shown(path)} has the key {key!r} of type {type(key).__qualname__}, which can't be saved. Use strings or "
        f"numbers as keys."
    )


def _flatten_plain(value: Any, path: tuple[Any, ...]) -> Any:
    """Flatten a value without tensors: a key, or metadata."""
    tensors: dict[str, Tensor] = {}
    structure = _flatten(value, path, tensors)
    if tensors:
        raise ConfigurationError(
            f"{shown(path)} contains a tensor or a numpy number, which can't be saved there. Use strings or plain "
            f"numbers as keys."
        )
    return structure


def _put(tensor: Tensor, path: tuple[Any, ...], tensors: dict[str, Tensor]) -> str:
    name = base = dotted(path[1:]) or "value"
    if name == "__metadata__":
        raise ConfigurationError(
            f"{shown(path)} has a name that safetensors files reserve for metadata. Give it another name."
        )
    number = 1
    while name in tensors:  # {"a.b": t, "a": {"b": t}}
        number += 1
        name = f"{base}~{number}"
    tensors[name] = tensor
    return name


def _validate_tensor(tensor: Tensor, path: tuple[Any, ...]) -> None:
    problem = None
    if is_dtensor(tensor):
        if any(split_of(placement) is None for placement in tensor.placements):
            raise ConfigurationError(
                f"{shown(path)} is a DTensor of placements {tensor.placements}: each rank has a summand of it, not a "
                f"part. Redistribute it before saving."
            )
        tensor = local_part(tensor)
    if type(tensor) not in _PLAIN_TENSORS:
        problem = f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    elif tensor.layout is not torch.strided:
        problem = f"a {tensor.layout} tensor"
    elif tensor.is_quantized or tensor.device.type == "meta":
        problem = f"a {tensor.dtype} tensor on {tensor.device}"
    if problem is not None:
        raise ConfigurationError(
            f"{shown(path)} is {problem}, which can't be saved; checkpoints store only dense tensors."
        )


def shown(path: tuple[Any, ...]) -> str:
    """A path in python notation: optimizer['state'][0]['exp_avg']."""
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])
