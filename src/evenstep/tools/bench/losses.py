"""The losses of a script, by optimizer step: what its backward passes begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from evenstep.tools.observing.record import Subscriber


class LossWatch(Subscriber):
    """Keeps the losses of this rank. Nothing waits for a GPU before `by_step`.

    Attributes:
        dtype: Of the losses, such as "float32"; "" until one was seen.
    """

    def __init__(self) -> None:
        self.dtype = ""
        self._seen: dict[int, list[tuple[Tensor, Any]]] = {}  # by step: the loss and its weight; None: a plain pass

    def backward(self, root: Any, weight: Any, scale: float) -> None:
        """See base class."""
        if isinstance(root, Tensor) and root.numel() == 1:
            self.dtype = self.dtype or str(root.dtype).removeprefix("torch.")
            its_weight = weight.detach().clone() if isinstance(weight, Tensor) else weight
            self._seen.setdefault(self.recorder.num_steps, []).append((root.detach().clone(), its_weight))

    def by_step(self, num_steps: int) -> Iterator[tuple[float, float]]:
        """Of each of the first steps (losses times their weights, weights), as `RankRecord.losses`."""
        for step in range(num_steps):
            passes = [
                (float(loss), None if weight is None else float(weight)) for loss, weight in self._seen.get(step, [])
            ]
            if any(weight is not None for _, weight in passes):
                # An empty share has a weight of 0, and a mean over nothing for its loss.
                weighted = [(loss, weight) for loss, weight in passes if weight]
                yield sum(loss * weight for loss, weight in weighted), sum(weight for _, weight in weighted)
            else:
                yield sum(loss for loss, _ in passes), float(bool(passes))
