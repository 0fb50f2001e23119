"""Batches as nests of tensors: splitting one, and what stands in for one that is empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from evenstep.errors import ConfigurationError
from evenstep.lanes import begin_of

# Two rows and not one: batch normalisation refuses to train on a single value per channel.
_STAND_IN_ROWS = 2


def batch_length(batch: Any, dim: int = 0) -> int | None:
    """Length of the batch dimension of the first tensor in a nest that has one; None if there is none."""
    for leaf in pytree.tree_leaves(batch):
        if _has_rows(leaf, dim):
            return int(leaf.shape[dim])
    return None


def split(batch: Any, num_parts: int, dim: int = 0) -> list[Any]:
    """Divide a batch into parts that differ by at most one sample. Pure.

    Args:
        batch: A nest of tensors with n samples along `dim`; tensors that lack it and other values go into every part.
        num_parts: How many parts; fewer come back when there are fewer samples, none for none.
        dim: The batch dimension.

    Raises:
        ConfigurationError: Not a positive number of parts, no tensor, or tensors of different lengths.
    """
    if not isinstance(num_parts, int) or isinstance(num_parts, bool) or num_parts < 1:
        raise ConfigurationError(f"microbatches: n={num_parts!r}; a whole number of at least 1.")
    leaves, structure, length = rows_of(batch, dim)
    parts = []
    num_parts = min(num_parts, length)
    for index in range(num_parts):
        start, stop = begin_of(length, index, num_parts), begin_of(length, index + 1, num_parts)
        part = [leaf.narrow(dim, start, stop - start) if has_rows else leaf for leaf, has_rows in leaves]
        parts.append(pytree.tree_unflatten(part, structure))
    return parts


def rows_of(batch: Any, dim: int) -> tuple[list[tuple[Any, bool]], Any, int]:
    """What a batch can be divided by: (leaves, each with whether it has rows; structure; number of samples). Pure.

    Raises:
        ConfigurationError: No tensor, or tensors of different lengths.
    """
    leaves, structure = pytree.tree_flatten(batch)
    lengths = {int(leaf.shape[dim]) for leaf in leaves if _has_rows(leaf, dim)}
    if len(lengths) != 1:
        which = "first dimension" if dim == 0 else f"dimension {dim}"
        found = f"tensors of lengths {sorted(lengths)}" if lengths else f"no tensor with a {which}"
        raise ConfigurationError(
            f"microbatches: the batch has {found}. It is divided along the {which}, which counts its samples: pass a "
            f"tensor, or a list, tuple or dictionary of tensors with as many."
        )
    return [(leaf, _has_rows(leaf, dim)) for leaf in leaves], structure, lengths.pop()


class StandIn:
    """What a module is run on when this rank's share of a batch is empty: one remembered sample.

    Without one (the very first batch is empty) zeros of the right shape stand in.

    Args:
        dim: The batch dimension.

    Attributes:
        has_sample: One has been remembered.
    """

    def __init__(self, dim: int = 0) -> None:
        self._dim = dim
        self.has_sample = False
        self._samples: list[Any] | None = None

    def remember(self, inputs: Any) -> None:
        """Keep the first sample of the first batch that has one."""
        if self._samples is None:
            self._samples = [
                leaf.narrow(self._dim, 0, 1).detach().clone() if _has_rows(leaf, self._dim) else None
                for leaf in pytree.tree_leaves(inputs)
            ]
            self.has_sample = True

    def build(self, inputs: Any) -> Any:
        """The same nest with every empty tensor replaced by `_STAND_IN_ROWS` rows."""
        leaves, structure = pytree.tree_flatten(inputs)
        remembered = self._samples if self._samples is not None and len(self._samples) == len(leaves) else None
        filled = [
            self._fill(leaf, remembered[index] if remembered is not None else None)
            if _has_rows(leaf, self._dim) and leaf.shape[self._dim] == 0
            else leaf
            for index, leaf in enumerate(leaves)
        ]
        return pytree.tree_unflatten(filled, structure)

    def _fill(self, empty: Tensor, sample: Tensor | None) -> Tensor:
        shape = list(empty.shape)
        shape[self._dim] = _STAND_IN_ROWS
        if sample is not None and sample.dim() == empty.dim() and sample.dtype == empty.dtype:
            rows = sample.to(empty.device).repeat_interleave(_STAND_IN_ROWS, self._dim)
        else:
            rows = torch.zeros(shape, dtype=empty.dtype, device=empty.device)
        # What made the empty tensor may be wrapped, too: its pass has to come on this rank as on the others.
        return rows + empty.sum() if empty.requires_grad else rows

    def empty_outputs(self, outputs: Any) -> Any:
        """The outputs of the stand-in cut to length 0, still part of the graph."""
        dim = self._dim
        return pytree.tree_map_only(
            Tensor,
            lambda out: out.narrow(dim, 0, 0) if _has_rows(out, dim) and out.shape[dim] == _STAND_IN_ROWS else out,
            outputs,
        )


def _has_rows(leaf: Any, dim: int) -> bool:
    return isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim()
