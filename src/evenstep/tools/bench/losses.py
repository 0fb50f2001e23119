"""The losses of a script, by optimizer step: what its backward passes begin with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from evenstep.tools.observing.patching import Patches


class LossWatch:
    """Keeps the losses of this rank. Nothing waits for a GPU before `by_step`.

    Args:
        num_steps: How many steps have ended.

    Attributes:
        dtype: Of the losses, such as "float32"; "" until one was seen.
    """

    def __init__(self, num_steps: Callable[[], int]) -> None:
        self.dtype = ""
        self._num_steps = num_steps
        self._seen: dict[int, list[tuple[Tensor, Any]]] = {}  # by step: the loss and its weight; None: a plain pass

    def install(self, patches: Patches) -> None:
        """See every backward pass, until the patches are undone."""
        patches.replace(torch.autograd, "backward", self._watched)

    def by_step(self, num_steps: int) -> Iterator[tuple[float, float]]:
        """Of each of the first steps (losses times their weights, weights), as `RankRecord.losses`."""
        for step in range(num_steps):
            passes = [(float(loss), None if weight is None else float(weight)) for loss, weight in self._at(step)]
            if any(weight is not None for _, weight in passes):
                # An empty share has a weight of 0, and a mean over nothing for its loss.
                weighted = [(loss, weight) for loss, weight in passes if weight]
                yield sum(loss * weight for loss, weight in weighted), sum(weight for _, weight in weighted)
            else:
                yield sum(loss for loss, _ in passes), float(bool(passes))

    def _at(self, step: int) -> list[tuple[Tensor, Any]]:
        return self._seen.get(step, [])

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            root, weight = _first(tensors), _first(grad_tensors)
            if isinstance(root, Tensor) and root.numel() == 1:
                self.dtype = self.dtype or str(root.dtype).removeprefix("torch.")
                its_weight = weight.detach().clone() if isinstance(weight, Tensor) else weight
                self._seen.setdefault(self._num_steps(), []).append((root.detach().clone(), its_weight))
            return original(tensors, grad_tensors, *args, **kwargs)

        return backward


def _first(given: Any) -> Any:
    return given if given is None or isinstance(given, Tensor) else next(iter(given), None)
