"""Finds optimizers that were made before the model was divided: they would step parameters that aren't in use."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

from torch import nn, optim

from evenstep.errors import UsageError
from evenstep.ground.compat.torch_tensors import is_dtensor


def validate_none_yet(module: nn.Module, who: str) -> None:
    """Refuse a model that is about to be divided, if an optimizer has its parameters already.

    Raises:
        UsageError: There is such an optimizer.
    """
    own = set(map(id, module.parameters()))
    _refuse(who, lambda optimizer: any(id(p) in own for p in _parameters_of(optimizer)))


def validate_none_left(module: nn.Module, who: str) -> None:
    """Refuse a divided model if optimizers have its parameters from before the division.

    Such parameters have the shapes of the whole model's parameters, belong to no module any more, and were never
    stepped. A few equal shapes aren't enough evidence, since a script may optimize tensors that belong to no module.

    Raises:
        UsageError: There are such optimizers.
    """
    wanted = Counter(tuple(p.shape) for p in module.parameters() if is_dtensor(p) and p.requires_grad)
    loose = {
        id(p): p
        for optimizer in _optimizers()
        if not optimizer.state
        for p in _parameters_of(optimizer)
        if type(p) is nn.Parameter and not is_dtensor(p)
    }
    if not wanted or wanted - _shapes(loose):
        return  # the usual case, without a search through all modules
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    registered = {id(p) for each in modules for p in each.__dict__.get("_parameters", {}).values()}
    orphans = {key: p for key, p in loose.items() if key not in registered}
    if not wanted - _shapes(orphans):
        del modules  # else this list would keep optimizers alive that the garbage collector should free
        _refuse(who, lambda optimizer: any(id(p) in orphans for p in _parameters_of(optimizer)))


def _shapes(parameters: dict[int, nn.Parameter]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(p.shape) for p in parameters.values())


def _refuse(who: str, is_too_early: Callable[[optim.Optimizer], bool]) -> None:
    if not any(map(is_too_early, _optimizers())):
        return
    gc.collect()  # a former model's optimizer may be in a reference cycle
    for optimizer in filter(is_too_early, _optimizers()):
        raise UsageError(
            f"{who}: {type(optimizer).__name__} was made before the model was divided, so it has the undivided "
            f"parameters, which are not trained any more. Make the optimizer after {who}, with model.parameters()."
        )


def _optimizers() -> list[optim.Optimizer]:
    """All optimizers of this process, except those whose constructors have raised: an exception may keep them alive."""
    found = [each for each in gc.get_objects() if issubclass(type(each), optim.Optimizer)]
    return [each for each in found if hasattr(each, "param_groups")]


def _parameters_of(optimizer: optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]
