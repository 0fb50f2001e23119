"""Objects to bytes and back, without pickle: JSON for the structure, safetensors for the tensors.

8 bytes   length of the JSON part, little-endian
JSON      the structure; tensors are {"~tensor": "3"} or {"~complex": "3"}, a tuple is {"~tuple": [...]},
          a dictionary is {"~dict": {...}} if one of its keys begins with "~"
rest      safetensors, one entry per tensor
"""

from __future__ import annotations

import ctypes
import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from evenstep.errors import ConfigurationError


def encode(value: Any) -> bytes:
    """Encode plain data as bytes.

    Args:
        value: None, bool, int, float, str, tensors, and lists, tuples and dictionaries (keys: str) of them.

    Raises:
        ConfigurationError: The value contains something else; the message names its path and type.
    """
    tensors: dict[str, Tensor] = {}
    try:
        structure = json.dumps(_flatten(value, "object", tensors)).encode()
    except RecursionError:
        raise ConfigurationError("object contains itself, or is nested too deeply to be sent.") from None
    try:
        payload = save(tensors) if tensors else b""
    except Exception as error:
        found = ", ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
        raise ConfigurationError(f"the object's tensors ({found}) can't be sent: {error!r}.") from None
    return len(structure).to_bytes(8, "little") + structure + payload


def decode(data: bytes) -> Any:
    """The inverse of `encode`; tensors come back on the CPU."""
    length = int.from_bytes(data[:8], "little")
    structure = json.loads(data[8 : 8 + length])
    payload = data[8 + length :]
    return _rebuild(structure, load(payload) if payload else {})


def to_tensor(data: bytes) -> Tensor:
    """The bytes as a tensor: [len(data)], uint8."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def to_bytes(tensor: Tensor) -> bytes:
    """The inverse of `to_tensor`."""
    # `Tensor.numpy` would need numpy, and `bytes(storage)` would call Python for every byte.
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def _flatten(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ConfigurationError(f"{path} is a {value.layout} tensor; only dense tensors can be sent.")
        key = str(len(tensors))
        # Clone, because safetensors refuses tensors that share memory. The receiver's tensors share none in any case.
        copied = value.detach().to("cpu", copy=True).contiguous()
        tensors[key] = torch.view_as_real(copied).contiguous() if value.is_complex() else copied
        return {"~complex" if value.is_complex() else "~tensor": key}
    if isinstance(value, tuple):
        return {"~tuple": [_flatten(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_flatten(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ConfigurationError(
                    f"{path} has the key {key!r} of type {type(key).__name__}; keys must be strings."
                )
        flat = {key: _flatten(item, f"{path}[{key!r}]", tensors) for key, item in value.items()}
        return {"~dict": flat} if any(key.startswith("~") for key in flat) else flat
    raise ConfigurationError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which can't be sent, because ranks exchange "
        f"no pickles. Send None, numbers, strings, tensors, and lists, tuples and dictionaries of them."
    )


def _rebuild(structure: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(structure, list):
        return [_rebuild(item, tensors) for item in structure]
    if isinstance(structure, dict):
        if structure.keys() == {"~tensor"}:
            return tensors[structure["~tensor"]]
        if structure.keys() == {"~complex"}:
            return torch.view_as_complex(tensors[structure["~complex"]])
        if structure.keys() == {"~tuple"}:
            return tuple(_rebuild(item, tensors) for item in structure["~tuple"])
        if structure.keys() == {"~dict"}:
            structure = structure["~dict"]
        return {key: _rebuild(item, tensors) for key, item in structure.items()}
    return structure
