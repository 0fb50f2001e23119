"""Nests of tensors as a module takes and returns them: taken apart, put together again, divided along a dimension."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError

Rebuild = Callable[[Sequence[Tensor]], Any]


def take_apart(nest: Any) -> tuple[list[Tensor], Rebuild]:
    """The tensors of a nest of tuples, lists, named tuples, mappings and dataclasses, and how to put others there.

    Whatever else there is stays as it is. Pure.
    """
    tensors: list[Tensor] = []
    plan = _plan(nest, tensors)
    return tensors, lambda given: plan(given)


def _plan(nest: Any, tensors: list[Tensor]) -> Rebuild:
    if isinstance(nest, Tensor):
        index = len(tensors)
        tensors.append(nest)
        return lambda given: given[index]
    if isinstance(nest, list | tuple):
        plans = [_plan(each, tensors) for each in nest]
        if hasattr(nest, "_fields"):
            return lambda given: type(nest)(*(plan(given) for plan in plans))
        return lambda given: type(nest)(plan(given) for plan in plans)
    if isinstance(nest, Mapping):
        by_key = {key: _plan(value, tensors) for key, value in nest.items()}
        return lambda given: _mapping_like(nest, {key: plan(given) for key, plan in by_key.items()})
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        by_field = {f.name: _plan(getattr(nest, f.name), tensors) for f in dataclasses.fields(nest)}
        return lambda given: _dataclass_like(nest, {name: plan(given) for name, plan in by_field.items()})
    return lambda given: nest


def _mapping_like(nest: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if type(nest) is dict:
        return values
    new: Any = copy.copy(nest)  # a defaultdict's factory, a subclass's attributes
    for key, value in values.items():
        new[key] = value
    return new


def _dataclass_like(nest: Any, values: dict[str, Any]) -> Any:
    new = copy.copy(nest)
    for name, value in values.items():
        object.__setattr__(new, name, value)  # also of a frozen one
    return new


def batch_size(tensors: Sequence[Tensor], dim: int) -> int | None:
    """How long tensors are in the batch dimension; None if none has one. Pure.

    Raises:
        ConfigurationError: They are of different lengths.
    """
    lengths = {tensor.shape[dim] for tensor in tensors if has_dimension(tensor, dim)}
    if len(lengths) > 1:
        raise ConfigurationError(
            f"DataParallel: the batch has tensors of lengths {sorted(lengths)} in dimension {dim}, along which it is "
            f"divided. Give what belongs to the whole batch to the module as a buffer, or as a 0-dim tensor."
        )
    return lengths.pop() if lengths else None


def has_dimension(tensor: Tensor, dim: int) -> bool:
    """Whether a tensor is divided along a dimension; others go to every replica whole."""
    return tensor.dim() > dim if dim >= 0 else tensor.dim() >= -dim


def part_sizes(length: int, num_parts: int) -> list[int]:
    """Sizes that differ by at most one, none of them 0; fewer than `num_parts` if there aren't enough. Pure."""
    num_parts = min(num_parts, length)
    return [length // num_parts + (index < length % num_parts) for index in range(num_parts)]


def divided(tensor: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """A tensor in parts of these sizes; one without the dimension as often as there are parts."""
    return list(torch.split(tensor, list(sizes), dim)) if has_dimension(tensor, dim) else [tensor] * len(sizes)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Parts one after the other; numbers (0-dim) become [len(parts)]."""
    if parts[0].dim() == 0:
        return torch.stack(list(parts))
    return torch.cat(list(parts), dim)
