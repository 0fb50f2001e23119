"""Loading an optimizer's state with its exact bits.

torch's own loading changes two things. It converts a parameter's state to the parameter's dtype, including NAdam's
products and momenta that an optimizer keeps in float32. And it keeps the loaded tensors' memory layout. But fused steps
process a parameter and its state in the order of their memory: in a channels_last model, elements of a contiguous
momentum would be applied to the wrong weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, optim

from evenstep.ground.compat.torch_tensors import is_dtensor


def load_exactly(optimizer: optim.Optimizer, state_dict: Mapping[str, Any], *, keeps_dtypes: bool = True) -> None:
    """Load a state dict, in the parameters' memory layout.

    The program's hooks run, before and after loading.

    Args:
        optimizer: An optimizer of torch, or with torch's interface.
        state_dict: In the form of the optimizer's own `state_dict`.
        keeps_dtypes: Keep the dtypes of all state. False: keep those of single numbers; other state gets the
            parameters' dtypes.
    """
    given: list[tuple[Tensor, Mapping[str, Any]]] = []

    def lay_out(_: optim.Optimizer, found: Any) -> dict[str, Any]:
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameter_of = dict(zip(numbers, parameters, strict=False))  # torch has refused different numbers of parameters
        state = dict(found["state"])
        for number, entries in found["state"].items():
            if number in parameter_of and isinstance(entries, Mapping):
                parameter = parameter_of[number]
                state[number] = {key: _laid_out_as(parameter, value) for key, value in entries.items()}
                given.append((parameter, state[number]))
        return {**found, "state": state}

    def restore(_: optim.Optimizer) -> None:
        for parameter, entries in given:
            _keep_as_it_was(optimizer.state[parameter], entries, keeps_dtypes=keeps_dtypes)

    handles = [
        optimizer.register_load_state_dict_pre_hook(lay_out),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    ]
    try:
        optimizer.load_state_dict(dict(state_dict))
    finally:
        for handle in handles:
            handle.remove()


def _laid_out_as(parameter: Tensor, value: Any) -> Any:
    """A value of the parameter's shape, converted to the parameter's memory layout; other values are unchanged."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.dim() == 0:
        return value
    if is_dtensor(value) or value.stride() == torch.empty_like(parameter, device="meta").stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _keep_as_it_was(loaded: dict[str, Any], given: Mapping[str, Any], *, keeps_dtypes: bool) -> None:
    """Restore values that torch has changed: numbers and texts, and tensors of other dtypes if `keeps_dtypes`.

    Args:
        loaded: A parameter's state as torch has loaded it; changed in place.
        given: The state that was to be loaded.
        keeps_dtypes: As in `load_exactly`.
    """
    for key, value in given.items():
        there = loaded.get(key)
        if isinstance(value, Tensor) and isinstance(there, Tensor):
            if value.dtype is not there.dtype and key != "step" and (value.dim() == 0 or keeps_dtypes):
                loaded[key] = value.detach().to(there.device, copy=True)
        elif isinstance(value, str):
            loaded[key] = value
