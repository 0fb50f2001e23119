"""Whether a loss has been scaled by a GradScaler already, read off its graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenstep.errors import UsageError

_MOST_NODES = 1000
_LINEAR = frozenset(  # a number times what is given, or the sum of it
    f"{name}Backward{number}"
    for name in ("Mul", "Div", "Neg", "ToCopy", "Sum", "Mean", "Squeeze", "Unsqueeze", "View", "UnsafeView", "Expand")
    for number in (0, 1, 2)
) | {"ReshapeAliasBackward0", "CloneBackward0", "SelectBackward0"}
_SUMS = frozenset(("AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0", "RsubBackward0"))


def is_scaled(loss: Tensor, scaler: torch.amp.GradScaler, *, rank: int) -> bool:
    """Whether a loss is a product of `scaler.scale`, or a sum of such, perhaps divided or multiplied afterwards.

    Raises:
        UsageError: A sum in which some terms are, and others that are trained aren't.
    """
    scale = getattr(scaler, "_scale", None)
    found: set[bool] = set()
    pending: list[Any] = [loss.grad_fn]
    for _ in range(_MOST_NODES):
        if scale is None or not pending:
            break
        node = pending.pop()
        name = None if node is None else node.name()
        if name == "MulBackward0" and _is_by(node, scale):
            found.add(True)
        elif name in _SUMS:
            pending += [each for each, _ in node.next_functions if each is not None]  # None: a constant
        elif name in _LINEAR:
            pending.append(next((each for each, _ in node.next_functions if each is not None), None))
        else:
            found.add(False)
    if len(found) > 1:
        raise UsageError(
            f"backward on rank {rank}: of the terms of the loss some were scaled by scaler.scale and others weren't, "
            f"so they would count {scaler.get_scale():g} times as much. Add first: loss = loss + penalty, and give "
            f"that to model.backward(loss, scaler=scaler), which scales it."
        )
    return found == {True}


def _is_by(node: Any, scale: Tensor) -> bool:
    """Whether a product has the scaler's number as its other factor."""
    # Not `_saved_other`: what a checkpoint has put away would be computed again.
    other = getattr(getattr(node, "_raw_saved_other", None), "data", None)
    return isinstance(other, Tensor) and other.data_ptr() == scale.data_ptr()
