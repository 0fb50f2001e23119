"""Finds optimizers that were made before the model was divided, and would step parameters that nobody uses."""

from __future__ import annotations

import gc
from collections import Counter

from torch import nn, optim

from evenstep.compat.torch_tensors import is_dtensor
from evenstep.errors import UsageError


def _optimizers() -> list[optim.Optimizer]:
    return [each for each in gc.get_objects() if issubclass(type(each), optim.Optimizer)]


def validate_none_yet(module: nn.Module, who: str) -> None:
    """Refuse a model that is about to be divided, if an optimizer has its parameters already.

    Raises:
        UsageError: There is one.
    """
    own = set(map(id, module.parameters()))
    for optimizer in _optimizers():
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise _too_early(optimizer, who)


def validate_none_left(module: nn.Module, who: str) -> None:
    """Refuse a model that was divided, if an optimizer has the parameters from before.

    Such an optimizer has parameters of the whole model's shapes that belong to no module any more.

    Raises:
        UsageError: There is one.
    """
    if _left_over(module) is None:
        return
    gc.collect()  # of a training that has ended an optimizer may lie in a cycle
    found = _left_over(module)
    if found is not None:
        raise _too_early(found, who)


def _left_over(module: nn.Module) -> optim.Optimizer | None:
    """An optimizer that may have the parameters from before the model was divided."""
    shapes = Counter(tuple(parameter.shape) for parameter in module.parameters() if is_dtensor(parameter))
    registered: set[int] | None = None
    for optimizer in _optimizers():
        held = [p for group in optimizer.param_groups for p in group["params"] if not is_dtensor(p)]
        if not held or Counter(tuple(p.shape) for p in held) - shapes:
            continue
        if registered is None:
            modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
            registered = {id(p) for each in modules for p in each.__dict__.get("_parameters", {}).values()}
        if not any(id(p) in registered for p in held):
            return optimizer
    return None


def _too_early(optimizer: optim.Optimizer, who: str) -> UsageError:
    return UsageError(
        f"{who}: {type(optimizer).__name__} was made before the model was divided, and has the whole parameters, which "
        f"are not trained any more. Make the optimizer after {who}, of model.parameters()."
    )
