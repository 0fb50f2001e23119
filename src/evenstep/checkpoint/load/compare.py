"""All differences between a checkpoint and the objects of this run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from evenstep.checkpoint.format.manifest import ObjectEntry
from evenstep.checkpoint.format.tree import unwrapped
from evenstep.optim.loading import load_exactly
from evenstep.optim.local_sgd.local_sgd import LocalSGD
from evenstep.optim.local_sgd.state import ROWS

# State that optimizers keep in the parameter's own shape.
_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta")


def differences(name: str, saved: ObjectEntry, target: Any) -> list[str]:
    """A line for each difference between a saved object and one of this run.

    Args:
        name: The object's name.
        saved: The object's entry in the manifest.
        target: The object of this run.
    """
    target = unwrapped(target)
    if isinstance(target, nn.Module):
        return _module_differences(name, saved, target)
    structure: Any = saved.structure if isinstance(saved.structure, dict) else {}
    if isinstance(getattr(target, "param_groups", None), list):
        return _optimizer_differences(name, saved, structure.get("param_groups"), target)
    if isinstance(target, LocalSGD) and "ranks" in structure:
        found = _optimizer_differences(name, saved, structure["ranks"][0]["param_groups"], target.optimizer)
        return found + _outer_differences(name, structure, target)
    return []


def _outer_differences(name: str, structure: Mapping[str, Any], target: LocalSGD) -> list[str]:
    """A line if two LocalSGDs differ: in whether they have an outer optimizer, or in its parameter groups."""
    here = None if target.outer is None else target.outer.state_dict()["param_groups"]
    kept = structure.get("outer")
    saved, wanted = (
        "no outer optimizer"
        if groups is None
        else f"an outer one of {[len(each['params']) for each in groups]} parameters"
        for groups in (None if kept is None else kept["param_groups"], here)
    )
    return [] if saved == wanted else [f"{name}: was with {saved}, and is with {wanted} here"]


def fitting(state: Any, target: Any) -> Any:
    """The part of a saved state that fits: a model's tensors with the same names, shapes and dtypes."""
    target = unwrapped(target)
    if not isinstance(target, nn.Module):
        return state
    wanted = target.state_dict()
    return {
        key: value
        for key, value in state.items()
        if key in wanted and _dtype_and_shape(value) == _dtype_and_shape(wanted[key])
    }


def load_into(target: Any, state: Any, *, strict: bool, keeps_dtypes: bool) -> None:
    """Load a state into an object.

    Args:
        target: The object.
        state: The state.
        strict: The model and the state must have the same entries.
        keeps_dtypes: An optimizer's state keeps its saved dtypes; False: it gets its parameters' dtypes.
    """
    target = unwrapped(target)
    if isinstance(target, nn.Module):
        target.load_state_dict(state, strict=strict)
    elif isinstance(target, optim.Optimizer) and not hasattr(target, "state_shards"):
        load_exactly(target, state, keeps_dtypes=keeps_dtypes)
    else:
        target.load_state_dict(state)


def _module_differences(name: str, saved: ObjectEntry, target: nn.Module) -> list[str]:
    have = {key: f"{tensor.dtype} {list(tensor.shape)}" for key, tensor in saved.tensors.items()}
    have |= {alias: have[key] for alias, key in saved.aliases.items()}
    structure: Any = saved.structure if isinstance(saved.structure, dict) else {}
    state = structure.get("~module", structure.get("~ordered", structure))
    placed = {path[0] for path, _ in saved.placed if len(path) == 1}
    # Not deeper entries, inside an extra state.
    have = {key: text for key, text in have.items() if key in state or key in placed}
    want = {key: _dtype_and_shape(value) for key, value in target.state_dict().items() if isinstance(value, Tensor)}
    lines = [f"{name}: {key} {have[key]} was saved, and this model has none" for key in have if key not in want]
    lines += [f"{name}: {key} {want[key]} was not saved" for key in want if key not in have]
    lines += [
        f"{name}: {key} was {have[key]}, and is {want[key]} here"
        for key in want
        if key in have and have[key] != want[key]
    ]
    return lines


def _optimizer_differences(name: str, saved: ObjectEntry, groups: Any, target: Any) -> list[str]:
    if not isinstance(groups, list):
        return [f"{name}: {saved.kind} was saved, which has no param_groups; it is a {_kind(target)} here"]
    lines = []
    here = target.param_groups
    counts = [len(group["params"]) for group in groups], [len(group["params"]) for group in here]
    if counts[0] != counts[1]:
        lines.append(f"{name}: groups of {counts[0]} parameters were saved, and there are {counts[1]} here")
    options = {key for group in groups for key in group}, {key for group in here for key in group}
    missing, new = sorted(options[0] - options[1] - {"initial_lr"}), sorted(options[1] - options[0] - {"initial_lr"})
    if missing and new:  # only one of the two may be due to another version of torch
        lines.append(
            f"{name}: saved from {saved.kind} with {', '.join(missing)}; a {_kind(target)} here, with {', '.join(new)}"
        )
    parameters = [parameter for group in here for parameter in group["params"]]
    for key, tensor in saved.tensors.items():
        first, _, rest = key.partition(".")
        index, _, what = rest.partition(".")
        if first in ("state", ROWS) and index.isdecimal() and what in _LIKE_PARAMETER and int(index) < len(parameters):
            shape = tuple(parameters[int(index)].shape)
            was = tensor.shape[1:] if first == ROWS else tensor.shape
            if shape != was:
                lines.append(f"{name}: {key} was {list(was)}, and its parameter is {list(shape)} here")
    return lines


def missing_objects(saved: Mapping[str, ObjectEntry], wanted: Mapping[str, Any]) -> list[str]:
    """Objects of this run that the checkpoint doesn't have."""
    return [f"{name}: was not saved" for name in wanted if name not in saved]


def _dtype_and_shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors of one shape; infinite if only one has a NaN somewhere."""
    if ours.numel() == 0 or torch.equal(ours, theirs):
        return 0.0
    kind = torch.complex128 if ours.is_complex() else torch.float64
    gap = (ours.to(kind) - theirs.to(kind)).abs()
    same = (ours == theirs) | ((ours != ours) & (theirs != theirs))
    return float(torch.where(same, 0.0, torch.nan_to_num(gap, nan=float("inf"))).max())
