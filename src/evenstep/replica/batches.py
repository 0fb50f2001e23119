"""Batches as pytrees of tensors: splitting, the dummy batch in place of an empty one, and watchers of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError
from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.computing.virtual_ranks import begin_of

# Two rows, because batch normalisation refuses to train on a single value per channel.
_MIN_ROWS = 2


class InputWatcher(Protocol):
    """An object that is called with the training inputs of wrapped models."""

    def see(self, inputs: Any) -> None:
        """Called with the pytree of a model's arguments, before a forward pass in grad mode."""


# Keep this empty in most steps: wrapped models don't take their fast path while there is a watcher.
input_watchers: WeakSet[InputWatcher] = WeakSet()


def show_inputs(inputs: Any) -> None:
    """Call the watchers with a pytree of arguments, unless gradients are off, as in evaluation."""
    if input_watchers and torch.is_grad_enabled():
        for watcher in list(input_watchers):
            watcher.see(inputs)


def is_empty_batch(batch: Any, dim: int = 0) -> bool:
    """Whether a batch has no sample: there are tensors with a batch dimension, and all of them have length 0 there.

    A batch with one longer tensor has samples: other tensors may be empty, such as the images of samples that only have
    texts.
    """
    lengths = {leaf.shape[dim] for leaf in pytree.tree_leaves(batch) if has_rows(leaf, dim)}
    return lengths == {0}


def split(batch: Any, num_parts: int, dim: int = 0) -> list[Any]:
    """Divide a batch into parts that differ by at most one sample. Pure.

    Args:
        batch: A pytree of tensors with n samples along `dim`. Tensors without that dimension and other values go into
            every part.
        num_parts: The number of parts; there are fewer if there are fewer samples, and none if there are none.
        dim: The batch dimension.

    Raises:
        ConfigurationError: The number of parts isn't positive, or the batch has no tensor or tensors of different
            lengths.
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
    """Flatten a batch: (leaves, each with whether it has rows; structure; number of samples). Pure.

    Raises:
        ConfigurationError: There is no tensor, or tensors have different lengths.
    """
    leaves, structure = pytree.tree_flatten(batch)
    lengths = {int(leaf.shape[dim]) for leaf in leaves if has_rows(leaf, dim)}
    if len(lengths) != 1:
        which = "first dimension" if dim == 0 else f"dimension {dim}"
        found = f"tensors of lengths {sorted(lengths)}" if lengths else f"no tensor with a {which}"
        raise ConfigurationError(
            f"A batch can't be divided: it has {found}. It is divided along the {which}, whose length is the number of "
            f"samples. Pass a tensor, or a list, tuple or dictionary of tensors with the same length there. A 0-dim "
            f"tensor goes into every part."
        )
    return [(leaf, has_rows(leaf, dim)) for leaf in leaves], structure, lengths.pop()


def pad_parts(parts: Sequence[Any], most: int, batch: Any, dim: int = 0) -> list[Any]:
    """Add empty parts in front, so that all ranks have the same number of parts. Pure.

    Args:
        parts: The parts of this rank's share.
        most: The largest number of parts that a rank has.
        batch: The rank's share, for its structure.
        dim: The batch dimension.
    """

    def emptied(tensor: Tensor) -> Tensor:
        return tensor.narrow(dim, 0, 0) if tensor.dim() > dim else tensor

    empty = pytree.tree_map_only(Tensor, emptied, batch)
    return [empty] * (most - len(parts)) + list(parts)


class DummyBatch:
    """The batch on which a module runs when this rank's share is empty: one remembered sample, repeated.

    If the very first batch is empty there is no sample, and the dummy batch consists of zeros of the right shape.

    [Note: outputs of a dummy batch]

    Outputs that depend on the number of rows are cut to length 0, so that a criterion accepts them with empty targets.
    A model may flatten its outputs ([n * tokens, classes]), or return tensors that have nothing to do with rows (a
    table of biases). So a dummy batch never has as many rows as the batch from which its sample was taken. An output
    with the same shape for both batches doesn't depend on rows, and isn't cut. If the outputs of that earlier batch
    aren't known, or its inputs differed in length, an output is cut if its batch dimension is a multiple of the number
    of rows.

    Args:
        dim: The batch dimension.

    Attributes:
        has_sample: Whether a sample has been remembered.
    """

    def __init__(self, dim: int = 0) -> None:
        self._dim = dim
        self.has_sample = False
        self._num_rows = _MIN_ROWS
        self._is_comparable = False
        self._samples: list[Tensor | None] = []
        self._output_shapes: list[tuple[int, ...]] = []

    def remember(self, inputs: Any) -> None:
        """Keep the first sample of a batch that isn't empty."""
        leaves = pytree.tree_leaves(inputs)
        self._samples = [
            leaf.narrow(self._dim, 0, 1).detach().clone()
            if has_rows(leaf, self._dim) and leaf.shape[self._dim]
            else None
            for leaf in leaves
        ]
        lengths = {leaf.shape[self._dim] for leaf in leaves if has_rows(leaf, self._dim)}
        # If lengths differ, two samples together may be as long as two dummies.
        self._is_comparable = len(lengths) == 1
        self._num_rows = _MIN_ROWS + (lengths == {_MIN_ROWS})
        self.has_sample = True

    def remember_outputs(self, outputs: Any) -> None:
        """Remember the shapes of the module's outputs for the batch from which the sample was taken."""
        if self._is_comparable:
            self._output_shapes = _shapes(outputs)

    def build(self, inputs: Any) -> Any:
        """Return the same pytree with a few rows in every empty tensor."""
        leaves, structure = pytree.tree_flatten(inputs)
        samples = self._samples if len(self._samples) == len(leaves) else [None] * len(leaves)
        filled = [
            self._fill(leaf, sample) if has_rows(leaf, self._dim) else leaf
            for leaf, sample in zip(leaves, samples, strict=True)
        ]
        return pytree.tree_unflatten(filled, structure)

    def _fill(self, empty: Tensor, sample: Tensor | None) -> Tensor:
        if sample is not None and sample.dim() == empty.dim() and sample.dtype == empty.dtype:
            rows = sample.to(empty.device).repeat_interleave(self._num_rows, self._dim)
        else:
            shape = list(empty.shape)
            shape[self._dim] = self._num_rows
            rows = torch.zeros(shape, dtype=empty.dtype, device=empty.device)
        # The empty tensor may be the output of another wrapped model, whose backward pass must run on this rank, too.
        return rows + empty.sum() if empty.requires_grad else rows

    def empty_outputs(self, outputs: Any) -> Any:
        """Views of the dummy batch's outputs, without rows but still in the graph; see the note."""
        shapes = _shapes(outputs)
        known = self._output_shapes if list(map(len, self._output_shapes)) == list(map(len, shapes)) else None
        before = iter(shapes if known is None else known)

        def cut(output: Tensor) -> Tensor:
            then, dims = next(before), list(range(output.dim()))
            if has_rows(output, self._dim):
                dims.insert(0, self._dim)
            if known is None:
                found = [dim for dim in dims[:1] if has_rows(output, self._dim) and not then[dim] % self._num_rows]
            else:
                found = [dim for dim in dims if output.shape[dim] != then[dim]]
            # Return a view even of an output that isn't cut: it gets hooks, and it may also be another wrapped model's
            # output.
            return output.narrow(found[0], 0, 0) if found else output.view_as(output)

        return pytree.tree_map_only(Tensor, cut, outputs)


def _shapes(outputs: Any) -> list[tuple[int, ...]]:
    """The shapes of all tensors of a pytree."""
    return [tuple(leaf.shape) for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def has_rows(leaf: Any, dim: int) -> bool:
    """Whether a leaf is a tensor with a batch dimension. Other values go into every part."""
    return isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim()
