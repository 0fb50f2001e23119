"""Batches as nests of tensors: splitting one, and what stands in for one that is empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evenstep.errors import ConfigurationError

# Two rows and not one: batch normalisation refuses to train on a single value per channel.
_STAND_IN_ROWS = 2


def batch_length(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor in a nest that has one; None if there is none."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return None


def split(batch: Any, num_parts: int) -> list[Any]:
    """Divide a batch along its first dimension into parts that differ by at most one sample. Pure.

    Args:
        batch: A nest of tensors [n, ...]; 0-dim tensors and other values go into every part.
        num_parts: How many parts; fewer come back when there are fewer samples, none for none.

    Raises:
        ConfigurationError: Not a positive number of parts, no tensor, or tensors of different lengths.
    """
    if not isinstance(num_parts, int) or isinstance(num_parts, bool) or num_parts < 1:
        raise ConfigurationError(f"microbatches: n={num_parts!r}; a whole number of at least 1.")
    leaves, structure = pytree.tree_flatten(batch)
    lengths = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0}
    if len(lengths) != 1:
        found = f"tensors of lengths {sorted(lengths)}" if lengths else "no tensor with a first dimension"
        raise ConfigurationError(f"microbatches: the batch has {found}; it is divided along its one first dimension.")
    length = lengths.pop()
    parts = []
    start = 0
    num_parts = min(num_parts, length)
    for index in range(num_parts):
        stop = start + length // num_parts + (index < length % num_parts)
        part = [leaf[start:stop] if isinstance(leaf, Tensor) and leaf.dim() > 0 else leaf for leaf in leaves]
        parts.append(pytree.tree_unflatten(part, structure))
        start = stop
    return parts


class StandIn:
    """What a module is run on when this rank's share of a batch is empty: one remembered sample.

    Without one (the very first batch is empty) zeros of the right shape stand in.
    """

    def __init__(self) -> None:
        self._samples: list[Any] | None = None

    @property
    def has_sample(self) -> bool:
        """Whether one has been remembered."""
        return self._samples is not None

    def remember(self, inputs: Any) -> None:
        """Keep the first sample of the first batch that has one."""
        if self._samples is None:
            self._samples = [
                leaf[:1].detach().clone() if isinstance(leaf, Tensor) and leaf.dim() > 0 else None
                for leaf in pytree.tree_leaves(inputs)
            ]

    def build(self, inputs: Any) -> Any:
        """The same nest with every empty tensor replaced by `_STAND_IN_ROWS` rows."""
        leaves, structure = pytree.tree_flatten(inputs)
        remembered = self._samples if self._samples is not None and len(self._samples) == len(leaves) else None
        filled = [
            self._fill(leaf, remembered[index] if remembered is not None else None)
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == 0
            else leaf
            for index, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(filled, structure)

    @staticmethod
    def _fill(empty: Tensor, sample: Tensor | None) -> Tensor:
        if sample is not None and sample.dim() == empty.dim() and sample.dtype == empty.dtype:
            rows = sample.to(empty.device).expand(_STAND_IN_ROWS, *sample.shape[1:]).clone()
        else:
            rows = torch.zeros(_STAND_IN_ROWS, *empty.shape[1:], dtype=empty.dtype, device=empty.device)
        return rows.requires_grad_(empty.requires_grad)

    @staticmethod
    def empty_outputs(outputs: Any) -> Any:
        """The outputs of the stand-in cut to length 0, still part of the graph."""
        return pytree.tree_map_only(
            Tensor, lambda out: out[:0] if out.dim() > 0 and len(out) == _STAND_IN_ROWS else out, outputs
        )
