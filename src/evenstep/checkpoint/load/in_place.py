"""Where the tensors of a saved model belong: into its own parameters and buffers, without a copy in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from evenstep.checkpoint.manifest import ObjectEntry
from evenstep.checkpoint.payload import dtype_name
from evenstep.checkpoint.snapshot import unwrapped

# What these do with a tensor that is the module's own already is nothing.
_PLAIN_LOADERS = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def homes(saved: ObjectEntry, target: Any) -> dict[str, Tensor]:
    """The parameters and buffers of a model into which saved tensors can be read as they are; no other is safe.

    Whoever has read them gives `load_state_dict` these very tensors. A model that does more there than to copy each
    tensor to its place would find its parameters changed too early: it has no homes.

    Args:
        saved: As the manifest has it.
        target: The object of this run.

    Returns:
        The model's own tensors, by the names of the saved ones.
    """
    target = unwrapped(target)
    if not isinstance(target, nn.Module) or not _only_copies(target) or not isinstance(saved.structure, dict):
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


def _only_copies(model: nn.Module) -> bool:
    return type(model).load_state_dict is nn.Module.load_state_dict and all(
        type(module)._load_from_state_dict in _PLAIN_LOADERS
        and not module._load_state_dict_pre_hooks
        and not {"load_state_dict", "_load_from_state_dict"} & vars(module).keys()
        for module in model.modules()
    )


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
    """Those that share memory with another one: of two that were saved, the later one must win as a whole."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in tensors.items())
    found: set[str] = set()
    end, last = 0, ""
    for begin, until, name in spans:
        if begin < end:
            found |= {name, last}
        if until > end:
            end, last = until, name
    return found
