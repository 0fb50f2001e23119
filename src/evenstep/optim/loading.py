"""Loading an optimizer's state so that it goes on with the same bits.

torch's own loading changes two things. It converts what is kept of a parameter to the parameter's dtype, also NAdam's
products and momenta that an optimizer keeps in float32. And it keeps the layout in memory of the tensors that it is
given, while fused steps go through a parameter and its state in the order of their memory: in a channels_last model
every contiguous momentum would belong to another weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, optim

from evenstep.ground.compat.torch_tensors import is_dtensor


def load_exactly(optimizer: optim.Optimizer, state_dict: Mapping[str, Any], *, keeps_dtypes: bool = True) -> None:
    """Load a state dict, laid out as the parameters are.

    Hooks of the program run, those before loading first and those behind it last.

    Args:
        optimizer: One of torch's, or of its interface.
        state_dict: Such as its own `state_dict` returned.
        keeps_dtypes: Of all that is kept; False: of single numbers only, the rest takes the parameters'.
    """
    given: list[tuple[Tensor, Mapping[str, Any]]] = []

    def lay_out(_: optim.Optimizer, found: Any) -> dict[str, Any]:
        numbers = [number for group in found["param_groups"] for number in group["params"]]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        parameter_of = dict(zip(numbers, parameters, strict=False))  # torch refuses another number of them
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
    """A value of the parameter's shape as the parameter lies in memory; anything else as it is."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.dim() == 0:
        return value
    if is_dtensor(value) or value.stride() == torch.empty_like(parameter, device="meta").stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _keep_as_it_was(loaded: dict[str, Any], given: Mapping[str, Any], *, keeps_dtypes: bool) -> None:
    """Put back what torch has loaded otherwise: numbers and texts, and tensors of other dtypes if `keeps_dtypes`.

    Args:
        loaded: What is kept of a parameter now; changed.
        given: What it was to be.
        keeps_dtypes: As in `load_exactly`.
    """
    for key, value in given.items():
        there = loaded.get(key)
        if isinstance(value, Tensor) and isinstance(there, Tensor):
            if value.dtype is not there.dtype and key != "step" and (value.dim() == 0 or keeps_dtypes):
                loaded[key] = value.detach().to(there.device, copy=True)
        elif isinstance(value, str):
            loaded[key] = value
