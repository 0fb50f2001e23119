"""Watching an unchanged script: what each of its steps saw, computed and left behind, on one rank.

The hooks are torch's own, or stand in the place of its functions, so that scripts with torch's wrapper, with evenstep's
or with none are seen alike. They are made before the script begins, by the process that becomes the script.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import world as worlds
from evenstep.errors import EvenstepError
from evenstep.ground.compat.torch_autograd import without_torch_function
from evenstep.ground.compat.torch_modules import BatchNorm
from evenstep.ground.compat.torch_tensors import is_dtensor
from evenstep.tools.observing.loaders import LoaderWatch, WatchedIteration
from evenstep.tools.observing.models import first_samples, ranks_with_the_same_samples, uses_fsdp
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.steps import watch_steps
from evenstep.tools.verify import double, dropout, loaders
from evenstep.tools.verify.evidence import (
    NUM_PROBES,
    OVER_BATCH,
    Plan,
    Seen,
    Writer,
    digest,
    num_finished,
    probe,
    thinned,
)

_MOST_NODES = 50_000  # of a graph that are counted
_MOST_NAMES = 5_000  # modules of a forward that are noted
_MOST_DRAWS = 8  # states of the random stream in a step
_WAIT_S = 120.0  # for the other ranks at the end
# Nodes that add up what they are given, or change only its size.
_ADDITIVE = ("Add", "Sub", "Neg", "Mul", "Div", "Mean", "Sum", "Squeeze", "View", "ToCopy")
# Functions whose result is a mean over the samples, by the name of their node.
_MEANS = ("NllLoss", "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "KlDiv", "Mean")


@contextlib.contextmanager
def recording(file: Path, *, rank: int) -> Iterator[None]:
    """Record what this process does, as the plan in a file says; the script ends with the plan's last step."""
    with Patches() as patches:
        Recorder(Plan.read(file), rank, patches)
        yield


class Recorder(LoaderWatch):
    """Follows one rank, step by step, until the patches are undone."""

    def __init__(self, plan: Plan, rank: int, patches: Patches) -> None:
        super().__init__(waited=lambda began, ended: None, num_steps=lambda: 0)
        self._plan = plan
        self._writer = Writer(plan, rank)
        self._patches = patches
        self._num_steps = 0
        self._seen = Seen()
        self._batch_sizes: list[int] = []
        self._names: dict[int, str] = {}  # of parameters, buffers and modules, by their `id`
        self._parameters: dict[str, Tensor] = {}
        self._models: dict[str, nn.Module] = {}  # by the prefix of their parameters' names
        self._wrappers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._depth = 0  # of module calls
        self._going_back = False
        self._added: dict[str, Tensor] = {}  # by the present backward pass
        self._passes: list[dict[str, Tensor]] = []  # of each backward pass, probes of what it added
        self._applied: dict[str, Tensor] = {}  # probes of what the optimizer gets
        self._values: dict[str, Tensor] = {}  # on rank 0
        self._rank = rank
        self._loss_scale = 1.0  # of a GradScaler, in what the next backward pass begins with
        self._num_scaled_steps = 0  # calls of a GradScaler's step
        self._install()

    def _install(self) -> None:
        patches = self._patches
        patches.replace(nn.Module, "__call__", self._called)
        patches.replace(torch.autograd, "backward", self._backward)
        patches.replace(torch.amp.GradScaler, "scale", self._scaling)
        patches.replace(torch.amp.GradScaler, "step", self._stepping)
        self.install(patches)
        watch_steps(patches, self._before_step, self._after_step)
        dropout.switch_off(patches, self._about_to_drop)
        loaders.same_global_batches(patches, self._plan.batch_sizes, self._batch_sizes)
        loaders.same_samples(patches)
        if self._plan.in_double:
            double.compute_in_double(patches, is_sharded=self._plan.is_sharded)

    # ------------------------------------------------------------------ forward

    def _called(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._going_back or not torch.is_grad_enabled():  # recomputed, or an evaluation
                return original(module, *args, **kwargs)
            is_wrapper = isinstance(module, nn.parallel.DistributedDataParallel)
            before = None
            with without_torch_function():
                if is_wrapper:
                    self._wrappers.add(module)
                if self._depth == 0 and _is_trained(module):
                    self._begin_forward(module, args, kwargs)
                if not is_wrapper and self._depth <= 1 and _is_trained(module):
                    before = self._stream()
                self._note_module(module)
            self._depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1
                if before is not None and before != self._stream() and not self._virtual_ranks():
                    self._seen.draws = True  # dropout is off, and moves nothing

        return call

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        model = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        samples = first_samples((args, kwargs))
        self._seen.rows.append([digest(row) for row in samples])
        if not any(known is model for known in self._models.values()):
            if not self._models and samples.dtype != torch.float64:  # which may be computed, and has other bits there
                self._seen.initial["inputs"] = float(probe(samples).abs().sum())
            self._adopt(model)

    def read(self, iteration: WatchedIteration, item: Any) -> None:
        """See base class."""
        if torch.is_grad_enabled():
            with without_torch_function():
                self._seen.loaded += [digest(row) for row in first_samples(item)]

    def _adopt(self, model: nn.Module) -> None:
        if self._plan.in_double:
            double.widen(model)
        prefix = f"{type(model).__name__}." if self._models else ""
        if any(name.startswith(prefix) for name in self._parameters if prefix):
            prefix = f"{type(model).__name__}{len(self._models)}."
        self._models[prefix] = model
        for name, module in model.named_modules():
            self._names.setdefault(id(module), prefix + name)
        for name, parameter in model.named_parameters():
            if id(parameter) in self._names:
                continue
            self._names[id(parameter)] = prefix + name
            self._parameters[prefix + name] = parameter
            if type(parameter) is nn.Parameter:
                self._seen.initial[f"param/{prefix}{name}"] = float(probe(parameter).abs().sum())
            if parameter.requires_grad:
                hook = functools.partial(self._arrived, prefix + name)
                handle = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
                self._patches.later(handle.remove)

    def _note_module(self, module: nn.Module) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        if len(self._seen.rows) == 1 and len(self._seen.modules) < _MOST_NAMES:
            self._seen.modules.append(name)
        uses_own = isinstance(module, BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        if uses_own and (module.training or not module.track_running_stats) and name not in self._seen.unsynced:
            self._seen.unsynced.append(name)

    def _about_to_drop(self) -> bool:
        if self._virtual_ranks() or not torch.is_grad_enabled():
            return True
        if not self._going_back and len(self._seen.dropouts) < _MOST_DRAWS:
            self._seen.dropouts.append(self._stream())
        return False

    def _stream(self) -> str:
        """A digest of where torch's random streams are."""
        text = digest(torch.get_rng_state())
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            text += digest(torch.cuda.get_rng_state())
        return text

    # ------------------------------------------------------------------ backward

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._going_back or not self._models:
                return original(tensors, grad_tensors, *args, **kwargs)
            with without_torch_function():
                self._note_roots(tensors, grad_tensors)
            self._going_back = True
            try:
                original(tensors, grad_tensors, *args, **kwargs)
            finally:
                self._going_back = False
            with without_torch_function():
                self._seen.virtual_ranks.append({name: digest(value) for name, value in self._added.items()})
                self._passes.append({name: probe(value) for name, value in self._added.items()})
                self._added = {}
            return None

        return backward

    def _note_roots(self, tensors: Any, weights: Any) -> None:
        root = tensors if isinstance(tensors, Tensor) else next(iter(tensors), None)
        weight = weights if weights is None or isinstance(weights, Tensor) else next(iter(weights), None)
        if not isinstance(root, Tensor) or root.numel() != 1:
            self._seen.losses.append((float("nan"), 0.0))
            return
        scale, self._loss_scale = self._loss_scale, 1.0
        self._seen.losses.append((float(root.detach()) / scale, None if weight is None else float(weight)))
        self._seen.graphs.append(node_counts(root, {len(rows) for rows in self._seen.rows}))
        name = "" if root.grad_fn is None else root.grad_fn.name()
        is_mean = name.startswith(_MEANS) and getattr(root.grad_fn, "_saved_reduction", 1) == 1
        self._seen.means += is_mean and weight is None
        self._seen.held_back |= any(not wrapper.require_backward_grad_sync for wrapper in self._wrappers)

    def _arrived(self, name: str, gradient: Tensor) -> None:
        if is_dtensor(gradient):  # of a part of a layer; the whole is known when the optimizer gets it
            return
        with without_torch_function():
            value = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            added = self._added.get(name)
            self._added[name] = value.clone() if added is None else added + value

    # ------------------------------------------------------------------ step

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            self._loss_scale = float(scaler.get_scale())
            return original(scaler, outputs)

        return scale

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Note which steps a GradScaler skips, and skip the same ones in float64, where nothing overflows."""

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            call, before = self._num_scaled_steps, self._num_steps
            self._num_scaled_steps += 1
            if call in self._plan.skipped:
                return None
            returned = original(scaler, optimizer, *args, **kwargs)
            if self._num_steps == before:
                self._seen.skipped.append(call)
            return returned

        return step

    def _before_step(self, optimizer: Any) -> None:
        if _is_skipped(optimizer):
            return
        with without_torch_function(), torch.no_grad():
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it itself
            if not self._models:  # parameters without a module
                loose = (parameter for group in optimizer.param_groups for parameter in group["params"])
                self._parameters = {f"parameter {i}": p for i, p in enumerate(loose)}
            for name, parameter in self._parameters.items():
                if parameter.grad is None:
                    continue
                grad = _whole(parameter.grad)
                if type(grad) not in (Tensor, nn.Parameter):
                    self._seen.has_hidden = True
                    continue
                with contextlib.suppress(EvenstepError):
                    grad = grad.to_dense() if grad.is_sparse else grad
                    grad = grad if scale is None else grad / scale
                    self._note(f"grad/{name}", grad)
                    self._applied[name] = probe(grad)
            self._seen.settings = [
                {key: float(value) for key, value in group.items() if isinstance(value, int | float | Tensor)}
                for group in optimizer.param_groups
            ]

    def _after_step(self, optimizer: Any) -> None:
        if _is_skipped(optimizer):
            return
        with without_torch_function(), torch.no_grad():
            for name, parameter in self._parameters.items():
                self._note(f"param/{name}", _whole(parameter))
            seen = self._seen
            for prefix, model in self._models.items():
                for name, buffer in model.named_buffers():
                    self._note(f"buffer/{prefix}{name}", _whole(buffer))
                seen.is_sharded |= uses_fsdp(model)
                seen.shares_with = seen.shares_with or ranks_with_the_same_samples(model, self._rank)
            self._seen = Seen()
            seen.batch_sizes = list(self._batch_sizes)
            seen.virtual_ranks_of_run = self._virtual_ranks()
            self._writer.write(self._num_steps, seen, self._values, self._probes())
        self._values, self._applied, self._passes = {}, {}, []
        self._num_steps += 1
        if self._num_steps == self._plan.num_steps:
            self._finish()

    def _note(self, name: str, tensor: Tensor) -> None:
        self._seen.digests[name] = digest(tensor)
        if self._rank == 0:
            self._values[name] = thinned(tensor)

    def _probes(self) -> dict[str, Tensor]:
        """One vector for each backward pass, and one for what the optimizer got; zeros where there is no gradient."""
        names = [name for name, parameter in self._parameters.items() if parameter.requires_grad]
        # Of parameters that FSDP2 divides, a backward pass shows nothing: they aren't what it computes with.
        passes = {str(index): given for index, given in enumerate(self._passes) if given}
        if self._applied:
            passes["applied"] = self._applied
        like = {name: _no_probe(self._parameters[name]) for name in names}
        return {key: torch.cat([given.get(name, like[name]) for name in names]) for key, given in passes.items()}

    def _virtual_ranks(self) -> int:
        virtual_ranks = getattr(worlds.initialised(), "virtual_ranks", None)
        return int(getattr(virtual_ranks, "num_virtual_ranks", 0))

    def _finish(self) -> None:
        """End the script, once all ranks have made the last step: a rank that left would be missed by the others."""
        self._writer.finish()
        deadline = time.monotonic() + _WAIT_S
        while num_finished(self._plan) < self._plan.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
        raise SystemExit(0)


def _is_skipped(optimizer: Any) -> bool:
    """Whether a fused optimizer leaves a step out because a GradScaler has found an overflow."""
    return bool(getattr(optimizer, "found_inf", None) or False)


def _whole(tensor: Any) -> Tensor:
    """The whole of a DTensor, for which all ranks of its mesh call this; another tensor as it is."""
    whole: Tensor = tensor.full_tensor().detach() if is_dtensor(tensor) else tensor
    return whole


def _no_probe(parameter: Tensor) -> Tensor:
    """Zeros, as many as a parameter's gradient has probes."""
    numel = parameter.numel() * (2 if parameter.is_complex() else 1)
    return torch.zeros(min(numel, NUM_PROBES), dtype=torch.float64, device="cpu")


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def node_counts(root: Tensor, batch_sizes: Collection[int]) -> dict[str, int]:
    """How often each kind of node is in the graph of a tensor.

    A mean over samples that isn't that of their losses, but goes into something else, has `OVER_BATCH` behind its name.
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
        is_mean = is_inside and name.startswith("Mean") and 0 in getattr(node, "_saved_dim", (0,))
        if is_mean and node._saved_self_sym_sizes[:1] in [(size,) for size in batch_sizes]:
            name += OVER_BATCH
        counts[name] += 1
        is_inside = is_inside or not name.startswith(_ADDITIVE)
        waiting += [(following, is_inside) for following, _ in node.next_functions]
    return dict(counts)
