"""In-place targets: parameters and buffers into which a saved model is read without a copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from evenstep.checkpoint.format.manifest import ObjectEntry
from evenstep.checkpoint.format.payload import dtype_name
from evenstep.checkpoint.format.tree import unwrapped
from evenstep.ground.compat.torch_modules import loads_by_copy

_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def in_place_targets(saved: ObjectEntry, target: Any) -> dict[str, Tensor]:
    """The parameters and buffers of a model into which saved tensors can safely be read.

    `load_state_dict` then receives these very tensors. A model whose `load_state_dict` does more than copy each tensor
    would find its parameters changed too early: it has no targets.

    Args:
        saved: Its entry in the manifest.
        target: The object of this run.

    Returns:
        The model's own tensors, by the names of the saved ones.
    """
    target = unwrapped(target)
    if not isinstance(target, nn.Module) or not loads_by_copy(target) or not isinstance(saved.structure, dict):
        return {}
    state = saved.structure.get("~module")
    own: dict[str, Tensor] = dict(target.named_parameters(remove_duplicate=False))
    own |= dict(target.named_buffers(remove_duplicate=False))
    found = {
        name: own[name]
        for name, entry in saved.tensors.items()
        if name in own
        and isinstance(state, dict)
        and state.get(name) == {"~tensor": name}
        and _is_plain_memory(own[name])
        and (dtype_name(own[name].dtype), tuple(own[name].shape)) == (entry.dtype, entry.shape)
    }
    shared = _overlapping(found)
    return {name: tensor for name, tensor in found.items() if name not in shared}


def _is_plain_memory(tensor: Tensor) -> bool:
    return (
        type(tensor) in _PLAIN_TENSORS
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _overlapping(tensors: dict[str, Tensor]) -> set[str]:
    """Names of tensors that share memory: of two that were saved, the later one must win as a whole."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors.items())
    found: set[str] = set()
    end, last = 0, ""
    for begin, until, name in spans:
        if begin < end:
            found |= {name, last}
        if until > end:
            end, last = until, name
    return found
