"""When forward and backward passes begin and end: from evenstep's own telemetry, or by hooks for torch's wrapper.

[Note: torch's wrapper]

torch's DistributedDataParallel is seen through hooks that torch has for everybody, so that it works as it always does;
a communication hook of the script's stays in its place.

    before the wrapper's forward     SYNC: module buffers are sent
    before the module's forward      FORWARD
    after the wrapper's forward      FORWARD_END
    gradient at the outputs          BACKWARD
    first callback of the pass       WAITING: all gradients of this rank are there. The wrapper queues its own callback,
                                     which waits for the buckets, when the last bucket is on its way: later than ours
    callback queued by that          REDUCED, END: the wrapper's has run

A plain module, in a process without a group, has the same marks, without a wait.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.compat.torch_autograd import at_end_of_backward
from evenstep.ground.health.telemetry import BACKWARD, END, FORWARD, FORWARD_END, REDUCED, WAITING
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.tools.bench.records import COLLECTIVE, COLLECTIVE_END, SYNC
from evenstep.tools.observing.models import find_models, num_rows, uses_fsdp
from evenstep.tools.observing.record import Ended, Subscriber


class ModelWatch(Subscriber):
    """The models that a script trains.

    Args:
        marks: Where the marks of torch's models go.

    Attributes:
        num_rows: Samples that the first model was given to train on.
        models: Found by `find`.
        wrapper: "evenstep", "torch", "fsdp" or "": what averages.
    """

    def __init__(self, marks: list[int]) -> None:
        self.num_rows = 0
        self.models: list[nn.Module] = []
        self.wrapper = ""
        self._marks = marks
        self._is_in_backward = False

    def collective(self, op: str, args: Any, kwargs: Any) -> Ended:
        """On CPUs such a call returns when all ranks have come, and nothing is computed meanwhile: all is waiting."""
        self._marks += (COLLECTIVE, perf_counter_ns())
        return lambda: self._marks.extend((COLLECTIVE_END, perf_counter_ns()))

    def find(self, optimizer: torch.optim.Optimizer) -> None:
        """Look for the models, and attach hooks to those that aren't evenstep's."""
        self.models, self.wrapper = find_models(optimizer)
        for number, model in enumerate(self.models):
            if number == 0:
                model.register_forward_pre_hook(self._count_rows, with_kwargs=True)
            if self.wrapper != "evenstep":
                self._attach(model)
        if not self.wrapper and any(map(uses_fsdp, self.models)):
            self.wrapper = "fsdp"

    def marks(self) -> list[int]:
        """What evenstep's models have recorded themselves."""
        ours = [model for model in self.models if isinstance(model, DistributedDataParallel)]
        return [number for model in ours for number in model.engine.recorder.marks()]

    def _count_rows(self, model: nn.Module, inputs: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self.num_rows += num_rows(inputs or list(kwargs.values()), getattr(model, "dim", 0))

    # ------------------------------------------------------------------ torch's

    def _attach(self, model: nn.Module) -> None:
        if isinstance(model, TorchDistributedDataParallel):
            inner: nn.Module = model.module
            model.register_forward_pre_hook(lambda *_: self._mark(SYNC))
            inner.register_forward_pre_hook(lambda *_: self._mark(FORWARD))
        else:
            model.register_forward_pre_hook(lambda *_: self._mark(FORWARD))
        model.register_forward_hook(self._forward_ended)

    def _mark(self, what: int) -> None:
        if torch.is_grad_enabled():
            self._marks += (what, perf_counter_ns())

    def _forward_ended(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for leaf in (outputs,) if isinstance(outputs, Tensor) else pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]
        self._marks += (FORWARD_END, perf_counter_ns())

    def _backward_begins(self, grad: Tensor) -> None:
        if not self._is_in_backward:
            self._is_in_backward = True
            self._marks += (BACKWARD, perf_counter_ns())
            at_end_of_backward(self._gradients_are_there)

    def _gradients_are_there(self) -> None:
        self._marks += (WAITING, perf_counter_ns())
        at_end_of_backward(self._backward_ended)

    def _backward_ended(self) -> None:
        self._is_in_backward = False
        self._marks += (REDUCED, perf_counter_ns(), END, perf_counter_ns())


def facts_of(models: list[nn.Module]) -> dict[str, Any]:
    """Sizes of what travels: the fields of `Facts` that depend on the model."""
    named = [(name, p) for model in models for name, p in model.named_parameters() if p.requires_grad]
    sizes = [(name.removeprefix("module."), p.numel() * p.element_size()) for name, p in named]
    return {
        "gradient_bytes": sum(size for _, size in sizes),
        "largest": max(sizes, key=lambda each: each[1], default=("", 0)),
    }
