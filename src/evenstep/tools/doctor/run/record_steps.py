"""What a rank computes: passes, losses, gradients before the optimizer, optimizers and schedulers."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import lr_scheduler

from evenstep.ground.compat.torch_autograd import without_torch_function
from evenstep.tools.doctor.run.record_data import row_digests
from evenstep.tools.doctor.run.recorder import Recorder
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.steps import watch_steps
from evenstep.tools.verify.evidence import digest

# Functions whose result is a mean over the samples, by the name of their node.
_MEANS = ("NllLoss", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "KlDiv", "Mean")
_MOST_FACTORS = 8
# Calls by which ranks come to hold other parts of a model, and objects that train parts, or let replicas drift.
_APART = ("new_group", "send", "recv", "isend", "irecv", "batch_isend_irecv")
_IN_PARTS = re.compile(r"LocalSGD|ModelAverager|FullySharded|FSDP|PipelineStage|DTensor")
_MOST_LOOKS = 2  # steps in which the parameters of optimizers are looked at


class Steps:
    """Notes what this process computes.

    Args:
        recorder: Where to.
        stepped: Called after every optimizer step.
    """

    def __init__(self, recorder: Recorder, stepped: Callable[[], object]) -> None:
        self._recorder = recorder
        self._stepped = stepped
        self._depth = 0
        self._going_back = False
        self._used: set[nn.Module] = set()  # wrappers whose forward has run since the last backward pass
        self._scale: float | None = None
        self._counts: dict[int, int] = {}
        # Models of outermost passes, numbered in the order of their first. Weakly: none may outlive its process group.
        self._models: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._looked: set[tuple[int, int]] = set()

    def install(self, patches: Patches) -> None:
        """Watch until the patches are undone."""
        patches.replace(nn.Module, "__call__", self._called)
        patches.replace(torch.autograd, "backward", self._backward)
        watch_steps(patches, lambda optimizer: None, self._after_step)
        for name in ("cross_entropy", "nll_loss"):
            patches.replace(functional, name, self._loss)
        patches.replace(functional, "batch_norm", self._norm)
        for module in (nn.utils, nn.utils.clip_grad):
            for name in ("clip_grad_norm_", "clip_grad_value_"):
                patches.replace(module, name, self._clip)
        patches.replace(torch.amp.GradScaler, "scale", self._scaling)
        patches.replace(torch.amp.GradScaler, "unscale_", self._unscaling)
        for module in (dist, distributed_c10d):
            for name in _APART:
                patches.replace(module, name, self._parting)
        for kind in {each for each in vars(lr_scheduler).values() if isinstance(each, type) and "step" in vars(each)}:
            patches.replace(kind, "step", self._scheduling)

    # ------------------------------------------------------------------ forward

    def _called(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_wrapper = isinstance(module, TorchDistributedDataParallel)
            if self._going_back or (self._depth and not is_wrapper):
                return original(module, *args, **kwargs)
            number = 0
            if is_wrapper or _is_trained(module):
                with without_torch_function():
                    number = self._forward(module, is_wrapper, (args, kwargs))
            self._depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1
                if number:
                    self._recorder.leave(number)

        return call

    def _forward(self, module: Any, is_wrapper: bool, inputs: Any) -> int:
        """Note a forward pass; returns the number of the call if all ranks have to make it."""
        grad = torch.is_grad_enabled()
        syncs = is_wrapper and bool(module.require_backward_grad_sync)
        self._recorder.note("forward", wrapped=is_wrapper, grad=grad, rows=row_digests(inputs) if grad else [])
        if grad and self._recorder.num_steps in (0, 2):
            self._look_at(module)
        if not is_wrapper:
            return 0
        if grad:
            self._used.add(module)
        # torch's wrapper sends the buffers of rank 0 before the pass, also in an evaluation; and after the first step
        # it agrees on the order of its buckets.
        sends = getattr(module, "broadcast_buffers", False) and any(True for _ in module.buffers())
        return self._recorder.enter("forward of the model") if syncs and (grad or sends) else 0

    def _look_at(self, module: nn.Module) -> None:
        """Note digests of what a model trains, before the first step and after the second: whole parameters only."""
        if module not in self._models:
            self._models[module] = len({number for number, _ in self._looked})
        model, when = self._models[module], self._recorder.num_steps // 2
        if (model, when) in self._looked or any(_IN_PARTS.search(type(each).__name__) for each in module.modules()):
            return
        self._looked.add((model, when))
        if when and any(_IN_PARTS.search(type(each).__name__) for each in gc.get_objects()):
            self._recorder.note("apart", what="parameters")
        named = {n.removeprefix("module."): p for n, p in module.named_parameters() if p.requires_grad}
        plain = {name: digest(p) for name, p in named.items() if type(p.data) is Tensor and p.numel()}
        self._recorder.note("parameters", model=model, when=when, digests=plain)

    def _parting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def part(*args: Any, **kwargs: Any) -> Any:
            self._recorder.note("apart", what=original.__name__)
            return original(*args, **kwargs)

        return part

    # ------------------------------------------------------------------ backward

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._going_back:
                return original(tensors, grad_tensors, *args, **kwargs)
            used, self._used = self._used, set()
            syncs = any(bool(each.require_backward_grad_sync) for each in used)
            number = self._recorder.enter("gradients of the model") if syncs else 0
            places, root = self._recorder.places(), self._root(tensors)  # before its tensors are freed
            self._going_back = True
            try:
                original(tensors, grad_tensors, *args, **kwargs)
            finally:
                self._going_back = False
                if number:
                    self._recorder.leave(number)
            facts = {"synced": syncs, "wrapped": bool(used), "weighted": grad_tensors is not None, **root}
            self._recorder.write("backward", places, facts)
            return None

        return backward

    def _root(self, tensors: Any) -> dict[str, Any]:
        """By what the loss is multiplied, and whether it is a mean."""
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        factor, node = 1.0, None if root is None else root.grad_fn
        for _ in range(_MOST_FACTORS):
            name = "" if node is None else node.name()
            if not name.startswith(("DivBackward", "MulBackward")):
                break
            other = getattr(node, "_saved_other", None)
            if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad:
                return {"factor": None, "is_mean": False, "is_sum": False}
            value = float(other)
            if self._scale is not None and value == self._scale:
                self._scale = None  # the loss scale of mixed precision, which is divided out again
            elif value:
                factor = factor * value if name.startswith("Mul") else factor / value
            node = node.next_functions[0][0] or node.next_functions[-1][0]  # type: ignore[union-attr]
        is_mean = name.startswith(_MEANS) and getattr(node, "_saved_reduction", 1) == 1
        return {"factor": factor, "is_mean": is_mean, "is_sum": name.startswith("Sum")}

    def _loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and isinstance(target, Tensor) and not target.is_floating_point():
                with without_torch_function():
                    ignored = kwargs.get("ignore_index", args[2] if len(args) > 2 else -100)
                    reduction = kwargs.get("reduction", args[4] if len(args) > 4 else "mean")
                    valid = int((target != ignored).sum())
                    self._recorder.note("loss", valid=valid, labels=target.numel(), reduction=reduction)
            return original(input, target, *args, **kwargs)

        return loss

    def _norm(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def batch_norm(input: Any, mean: Any = None, var: Any = None, *args: Any, **kwargs: Any) -> Any:
            training = kwargs.get("training", args[2] if len(args) > 2 else False)
            if training and torch.is_grad_enabled():
                self._recorder.note("norm", rows=int(input.shape[0]))
            return original(input, mean, var, *args, **kwargs)

        return batch_norm

    # ------------------------------------------------------------------ from gradients to parameters

    def _clip(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            self._recorder.note("clip")
            return original(*args, **kwargs)

        return clip

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaler.is_enabled():
                self._scale = float(scaler.get_scale())
                self._recorder.note("scale")
            return scaled

        return scale

    def _unscaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            self._recorder.note("unscale")
            return original(scaler, optimizer)

        return unscale_

    def _scheduling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            # The first step is the constructor's own.
            if not getattr(scheduler, "_is_initial", False) and getattr(scheduler, "_step_count", True):
                total = getattr(scheduler, "total_steps", None) or getattr(scheduler, "T_max", None)
                self._recorder.note("schedule", scheduler=type(scheduler).__name__, total=total)
            return original(scheduler, *args, **kwargs)

        return step

    def _after_step(self, optimizer: Any) -> None:
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        facts: dict[str, Any] = {"lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]}
        facts["optimizer"] = list(self._counts).index(id(optimizer))
        if self._counts[id(optimizer)] <= _MOST_LOOKS:
            facts |= _replaced(optimizer)
        if max(self._counts.values()) <= self._recorder.num_steps:
            self._recorder.note("stepped again", **facts)
            return
        self._recorder.note("stepped", **facts)
        self._recorder.num_steps += 1
        self._stepped()


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _replaced(optimizer: Any) -> dict[str, int]:
    """Parameters of an optimizer that no module has, and those with a gradient that no optimizer has."""
    owned: set[int] = set()
    trained: dict[int, Tensor] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # `isinstance` would look through proxies, whose objects may have gone
        if issubclass(kind, nn.Module):
            trained |= {id(p): p for p in vars(thing).get("_parameters", {}).values() if p is not None}
        elif issubclass(kind, torch.optim.Optimizer):
            groups = getattr(thing, "param_groups", ())  # none: its constructor raised, and the exception holds it
            owned |= {id(p) for group in groups for p in group["params"]}
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "stale": sum(id(p) not in trained and p.grad is None for p in stepped),
        "untrained": sum(key not in owned and p.requires_grad and p.grad is not None for key, p in trained.items()),
    }
