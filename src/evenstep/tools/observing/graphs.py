"""What the graph behind a loss says of it: means, sums, factors, and means over the batch inside. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import Tensor

from evenstep.ground.compat.torch_autograd import shape_of, shapes_before

# Behind the name of a node inside a loss:
OVER_BATCH = " over the batch"  # a mean over samples, or their spread
OF_PAIRS = " of pairs"  # it compares each sample with each

_MOST_NODES = 50_000  # of a graph that are counted
_MOST_FACTORS = 8
# Nodes that add up what they are given, or change only its size.
_ADDITIVE = ("Add", "Sub", "Neg", "Mul", "Div", "Mean", "Sum", "Squeeze", "View", "ToCopy")
# Functions whose result is a mean over the samples, by the name of their node.
_MEANS = ("NllLoss", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "KlDiv", "Mean")


def is_mean(node: Any) -> bool:
    """Whether a node is a mean over samples, as loss functions take it."""
    return node is not None and node.name().startswith(_MEANS) and getattr(node, "_saved_reduction", 1) == 1


def factor_of(root: Tensor, scale: float = 1.0) -> tuple[float | None, Any]:
    """By what a loss is multiplied, and the node before that.

    Args:
        root: The loss.
        scale: Of a GradScaler, which divides by it again: no part of the factor.

    Returns:
        (the factor; None if it isn't known, the node).
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


def node_counts(root: Tensor, batch_sizes: Collection[int]) -> dict[str, int]:
    """How often each kind of node is in the graph of a tensor.

    A mean over samples that isn't that of their losses, but goes into something else, has `OVER_BATCH` behind its name,
    and a product of samples with samples has `OF_PAIRS`.
    """
    counts: Counter[str] = Counter()
    known: set[Any] = set()
    waiting: list[tuple[Any, bool]] = [(root.grad_fn, False)]
    while waiting and len(known) < _MOST_NODES:
        node, is_inside = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        name = node.name()
        is_statistic = name.startswith(("Std", "Var")) or (is_inside and name.startswith("Mean"))
        if is_statistic and _is_over_batch(node, batch_sizes):
            name += OVER_BATCH
        elif _is_of_pairs(node, batch_sizes):
            name += OF_PAIRS
        counts[name] += 1
        is_inside = is_inside or not name.startswith(_ADDITIVE)
        waiting += [(following, is_inside) for following, _ in node.next_functions]
    return dict(counts)


def _is_over_batch(node: Any, batch_sizes: Collection[int]) -> bool:
    dims = getattr(node, "_saved_dim", None)
    shape = shapes_before(node)[0]
    return bool(shape) and (not dims or 0 in dims) and shape[0] in batch_sizes


def _is_of_pairs(node: Any, batch_sizes: Collection[int]) -> bool:
    """Whether a product, or a difference, is of each sample with each, and no parameter is a factor of it."""
    shape, before = shape_of(node), [each[:2] for each in shapes_before(node)]
    for size in batch_sizes:
        is_product = node.name().startswith(("Mm", "Cdist")) and shape[-2:] == (size, size)
        is_spread = shape[:2] == (size, size) and ((1, size) in before or (size, 1) in before)
        if size > 1 and (is_product or is_spread):
            return not any(_is_parameter(each) for each, _ in node.next_functions)
    return False


def _is_parameter(node: Any) -> bool:
    while node is not None and node.name().startswith(("TBackward", "Transpose", "Permute", "ToCopy")):
        node = node.next_functions[0][0]
    return node is not None and node.name().endswith("AccumulateGrad")
