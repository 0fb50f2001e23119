"""Pytrees of user containers: lists, tuples, named tuples, mappings and dataclasses, taken apart and rebuilt.

The wrapper uses torch's pytrees (`ground.compat.torch_pytree`) for the inputs and outputs of modules. The pytrees here
need no registration: a batch may be a dataclass, and a mapping keeps its factory and attributes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from evenstep.ground.compat import torch_pytree

Rebuild = Callable[[Sequence[Any]], Any]
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))  # leaves of which a batch may have many


def children_of(node: Any) -> tuple[list[Any], Rebuild] | None:
    """Return the entries of a container, and a function that rebuilds it from other entries; None for a leaf. Pure."""
    if isinstance(node, Mapping):
        return list(node.values()), lambda entries: _with_values(node, entries)
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(node), lambda entries: type(node)(*entries)
    if isinstance(node, list | tuple):
        return list(node), lambda entries: type(node)(entries)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = [field.name for field in dataclasses.fields(node)]
        return [getattr(node, name) for name in names], lambda entries: _with_fields(node, names, entries)
    return None


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """The tensors in a module's outputs: in pytrees that torch knows, and in the containers known here."""
    if isinstance(outputs, Tensor):
        yield outputs
        return
    parts: Sequence[Any] = outputs
    if type(outputs) not in (list, tuple):
        parts = torch_pytree.tree_leaves(outputs)
        if len(parts) == 1 and parts[0] is outputs:  # a leaf to torch
            parts = (children_of(outputs) or ((), None))[0]
    for part in parts:
        if type(part) not in _PLAIN:
            yield from tensors_in(part)


def flatten_tensors(tree: Any) -> tuple[list[Tensor], Rebuild]:
    """Return the tensors of a pytree, and a function that rebuilds it with other tensors. Pure."""
    tensors: list[Tensor] = []
    return tensors, _plan(tree, tensors)


def _plan(node: Any, tensors: list[Tensor]) -> Rebuild:
    if isinstance(node, Tensor):
        index = len(tensors)
        tensors.append(node)
        return lambda given: given[index]
    parts = children_of(node)
    if parts is None:
        return lambda given: node
    children, rebuild = parts
    plans = [_plan(child, tensors) for child in children]
    return lambda given: rebuild([plan(given) for plan in plans])


def _with_values(node: Mapping[Any, Any], values: Sequence[Any]) -> Any:
    # A copy keeps a mapping's other contents: the factory of a defaultdict, the encodings of a tokenizer's batch.
    made: Any = copy.copy(node)
    for key, value in zip(list(node), values, strict=True):
        made[key] = value
    return made


def _with_fields(node: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    made = copy.copy(node)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # frozen dataclasses too
    return made
