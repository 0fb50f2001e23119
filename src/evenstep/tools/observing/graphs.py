"""Reads the autograd graph behind a loss: means, sums, factors, kinds of nodes. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

_MOST_NODES = 50_000  # counted nodes of a graph
_MOST_FACTORS = 8
# Beginnings of the names of nodes whose result is a mean over samples.
_MEANS = ("NllLoss", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "KlDiv", "Mean")


def is_mean(node: Any) -> bool:
    """Whether a node is a mean, as loss functions with `reduction="mean"` compute it."""
    return node is not None and node.name().startswith(_MEANS) and getattr(node, "_saved_reduction", 1) == 1


def factor_of(root: Tensor, scale: float = 1.0) -> tuple[float | None, Any]:
    """The factor that a loss is multiplied by, and the graph node before the multiplication.

    Args:
        root: The loss.
        scale: The scale of a GradScaler. It isn't part of the factor, because the scaler divides by it again.

    Returns:
        (the factor, the node); (None, None) if the factor isn't known.
    """
    factor, node = 1.0, root.grad_fn
    for _ in range(_MOST_FACTORS):
        if node is None or not node.name().startswith(("DivBackward", "MulBackward")):
            break
        other = getattr(node, "_saved_other", None)
        if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad:
            return None, None
        value = float(other)
        if value == scale != 1.0:
            scale = 1.0
        elif value:
            factor = factor * value if node.name().startswith("Mul") else factor / value
        node = node.next_functions[0][0] or node.next_functions[-1][0]
    return factor, node


def node_counts(root: Tensor) -> dict[str, int]:
    """The number of nodes of each kind in the graph of a tensor, by their name."""
    counts: Counter[str] = Counter()
    known: set[Any] = set()
    waiting = [root.grad_fn]
    while waiting and len(known) < _MOST_NODES:
        node = waiting.pop()
        if node is not None and node not in known:
            known.add(node)
            counts[node.name()] += 1
            waiting += [following for following, _ in node.next_functions]
    return dict(counts)
