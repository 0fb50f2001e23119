"""Times of a script's forward and backward passes, from evenstep's own telemetry or torch's hooks, and its losses.

[Note: torch's wrapper]

torch's DistributedDataParallel is observed through hooks of modules, tensors and the backward pass, so its behaviour
doesn't change. The script's own communication hook, if it has one, stays in place.

    before the wrapper's forward     SYNC: module buffers are sent
    before the module's forward      FORWARD
    after the wrapper's forward      FORWARD_END
    gradient of the loss             BACKWARD
    first callback of the pass       WAITING: this rank's gradients are all computed. The wrapper queues its callback,
                                     which waits for the buckets, when it launches the last bucket: later than this one
    callback queued by that          REDUCED, END: the wrapper's callback has run

    A plain module, in a process without a group, has the same marks without a wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from evenstep.ground.compat.torch_autograd import at_end_of_backward
from evenstep.ground.health.telemetry import BACKWARD, END, FORWARD, FORWARD_END, REDUCED, WAITING
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.tools.bench.records import COLLECTIVE, COLLECTIVE_END, SYNC
from evenstep.tools.observing.models import find_models, num_rows
from evenstep.tools.observing.record import Ended, Subscriber


class ModelWatch(Subscriber):
    """Records the times of passes of the models that a script trains.

    Args:
        marks: The list to which the marks of torch's models are appended.

    Attributes:
        num_rows: The samples that the first model was called with in training.
        models: The models that `find` found.
        wrapper: The library whose wrapper the models have: "evenstep", "torch" or "".
    """

    def __init__(self, marks: list[int]) -> None:
        self.num_rows = 0
        self.models: list[nn.Module] = []
        self.wrapper = ""
        self._marks = marks

    def collective(self, op: str, args: Any, kwargs: Any) -> Ended:
        """Record a collective as waiting. On CPUs it returns when all ranks have arrived, and nothing is computed."""
        self._marks += (COLLECTIVE, perf_counter_ns())
        return lambda: self._marks.extend((COLLECTIVE_END, perf_counter_ns()))

    def find(self, optimizer: torch.optim.Optimizer) -> None:
        """Find the models, and attach hooks to those without evenstep's wrapper."""
        self.models, self.wrapper = find_models(optimizer)
        for number, model in enumerate(self.models):
            if number == 0:
                model.register_forward_pre_hook(self._count_rows, with_kwargs=True)
            if self.wrapper != "evenstep":
                self._attach(model)

    def marks(self) -> list[int]:
        """The marks that evenstep's wrapper has recorded itself."""
        ours = [model for model in self.models if isinstance(model, DistributedDataParallel)]
        return [number for model in ours for number in model.engine.recorder.marks()]

    def _count_rows(self, model: nn.Module, inputs: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.num_rows += num_rows(inputs or list(kwargs.values()), getattr(model, "dim", 0))

    # ------------------------------------------------------------------ torch's

    def _attach(self, model: nn.Module) -> None:
        if isinstance(model, TorchDistributedDataParallel):
            model.register_forward_pre_hook(lambda *_: self._mark(SYNC))
            inner: nn.Module = model.module
        else:
            inner = model
        inner.register_forward_pre_hook(lambda *_: self._mark(FORWARD))
        model.register_forward_hook(lambda *_: self._mark(FORWARD_END))

    def _mark(self, what: int) -> None:
        if torch.is_grad_enabled():
            self._marks += (what, perf_counter_ns())

    def backward(self, root: Any, weight: Any, scale: float) -> None:
        """A backward pass begins. evenstep's wrapper records its marks itself."""
        if self.models and self.wrapper != "evenstep" and isinstance(root, Tensor) and root.requires_grad:
            root.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def _backward_begins(self, grad: Tensor) -> None:
        self._marks += (BACKWARD, perf_counter_ns())
        at_end_of_backward(self._gradients_are_there)

    def _gradients_are_there(self) -> None:
        self._marks += (WAITING, perf_counter_ns())
        at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._marks += (REDUCED, perf_counter_ns(), END, perf_counter_ns())


class LossWatch(Subscriber):
    """Records the losses of this rank. Only `by_step` waits for a GPU."""

    def __init__(self) -> None:
        self._seen: dict[int, list[tuple[Tensor, Any]]] = {}  # by step: loss and weight (None: plain pass)

    def backward(self, root: Any, weight: Any, scale: float) -> None:
        """See base class."""
        if isinstance(root, Tensor) and root.numel() == 1:
            its_weight = weight.detach().clone() if isinstance(weight, Tensor) else weight
            self._seen.setdefault(self.recorder.num_steps, []).append((root.detach().clone(), its_weight))

    def by_step(self, num_steps: int) -> Iterator[tuple[float, float]]:
        """(losses times their weights, weights) for each of the first steps, as in `RankRecord.losses`."""
        for step in range(num_steps):
            passes = [
                (float(loss), None if weight is None else float(weight)) for loss, weight in self._seen.get(step, [])
            ]
            if any(weight is not None for _, weight in passes):
                # An empty share has the weight 0, and its loss is the mean of nothing, NaN.
                weighted = [(loss, weight) for loss, weight in passes if weight]
                yield sum(loss * weight for loss, weight in weighted), sum(weight for _, weight in weighted)
            else:
                yield sum(loss for loss, _ in passes), float(bool(passes))
