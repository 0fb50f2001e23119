"""Notifies subscribers of what a script does in this process. No other module patches torch's functions to observe it.

A `Subscriber` overrides a method for each event that it wants. Without a subscriber to an event, torch's function isn't
patched. Most methods are called before a function, with its arguments. They may return a callable, which is called when
the function has returned or raised, or an `Instead`, which replaces the function.

For all subscribers:

- forward passes that a backward pass recomputes (checkpointing) aren't reported, nor modules inside a compiled one;
- of nested backward passes, steps, loaders and collectives, only the outermost is reported;
- a loader that another thread reads isn't reported, because the script doesn't wait there;
- methods run without the script's `TorchFunctionMode`s, so they see tensors as they are.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader as TorchDataLoader

from evenstep.data.loader import DataLoader
from evenstep.ground.compat.torch_autograd import without_torch_function
from evenstep.ground.compat.torch_data import MapDatasetFetcher
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.tools.observing.patching import Patches

_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)
# Calls after which ranks may hold different parts of a model.
_APART = ("new_group", "send", "recv", "isend", "irecv", "batch_isend_irecv")
WRAPPERS = (TorchDistributedDataParallel, DistributedDataParallel)
LOADERS = (TorchDataLoader, DataLoader)

# By event, the functions (owner, name) whose calls are reported as they are.
_CALLS: dict[str, Sequence[tuple[Any, str]]] = {
    "loss": [(functional, "cross_entropy"), (functional, "nll_loss")],
    "batch_norm": [(functional, "batch_norm")],
    "scaler_step": [(torch.amp.GradScaler, "step")],
    "join": [(Join, "__enter__")],
    "part": [(module, name) for module in (dist, distributed_c10d) for name in _APART],
    "save": [(torch, "save")],
    "spawn": [(torch.multiprocessing, "spawn")],
    "fetch": [(MapDatasetFetcher, "fetch")],
    "loader": [(kind, "__init__") for kind in LOADERS],
}


@dataclass(frozen=True)
class Instead:
    """The result of a subscriber's method that replaces the observed function by another one."""

    function: Callable[..., Any]


Ended = Callable[[], object] | Instead | None
NO_CALL = Instead(lambda *arguments, **named: None)


class Subscriber:
    """Base class of subscribers: a subclass is notified of the events whose methods it overrides.

    Attributes:
        recorder: The recorder that notifies it; the recorder sets this attribute.
    """

    recorder: Recorder

    # ------------------------------------------------------------------ a step

    def module(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> Ended:
        """A module is called within `depth` other calls. If gradients are enabled, only calls with gradients count."""

    def backward(self, root: Any, weight: Any, scale: float) -> Ended:
        """A backward pass begins at a tensor, with its weight (None: plain `backward`) and a GradScaler's scale."""

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer is about to step."""

    def step_ended(self, optimizer: Any, *, is_counted: bool) -> None:
        """An optimizer has stepped. With several, only the steps of the one with the most are counted."""

    def scaler_step(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Ended:
        """`GradScaler.step` is called."""

    def loss(self, input: Any, target: Any, *args: Any, **kwargs: Any) -> Ended:
        """A loss over labels is computed."""

    def batch_norm(self, input: Any, mean: Any = None, var: Any = None, *args: Any, **kwargs: Any) -> Ended:
        """`batch_norm` is called."""

    # ------------------------------------------------------------------ what all ranks do together

    def makes_group(self, arguments: dict[str, Any]) -> Ended:
        """The process group is made. `arguments`, by name, may be changed."""

    def ends_group(self) -> None:
        """The process group is destroyed."""

    def wrap(self, wrapper: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Ended:
        """A `DistributedDataParallel` is made, torch's or evenstep's."""

    def collective(self, op: str, args: Any, kwargs: Any) -> Ended:
        """A collective of `torch.distributed` is called."""

    def join(self, join: Join) -> Ended:
        """torch's Join is entered, for ranks with different numbers of batches."""

    def part(self, *args: Any, **kwargs: Any) -> Ended:
        """A group of ranks is made, or a rank sends to another: ranks may hold different parts of a model."""

    def spawn(self, fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **named: Any) -> Ended:
        """The script starts processes with `torch.multiprocessing.spawn`."""

    # ------------------------------------------------------------------ data and files

    def loader(self, loader: Any, *args: Any, **kwargs: Any) -> Ended:
        """A loader is made, torch's or evenstep's."""

    def loop_begins(self, loop: Loop) -> None:
        """A loop over a loader begins. The script's `TorchFunctionMode`s are on, since samples may be read."""

    def cuts(self, loop: Loop) -> bool:
        """Whether to end a loop before its next batch."""
        raise NotImplementedError

    def repeats(self, loop: Loop) -> bool:
        """Whether to start another epoch when a loop's loader has no more batches."""
        raise NotImplementedError

    def batch(self, loop: Loop, batch: Any) -> None:
        """A loop gets a batch."""

    def loop_ended(self, loop: Loop, *, is_cut: bool) -> None:
        """A loop has ended, by itself or (`is_cut`) by `cuts`."""

    def waited(self, began_ns: int, ended_ns: int) -> None:
        """The script has waited for data; the times are on the clock of `time.perf_counter_ns`."""

    def fetch(self, fetcher: Any, index: Any) -> Ended:
        """Samples of a map-style data set are read, in this process or in a forked worker."""

    def save(self, obj: Any, f: Any = None, *args: Any, **kwargs: Any) -> Ended:
        """`torch.save` is called."""


class Recorder:
    """Notifies subscribers of what this process does.

    Args:
        subscribers: The subscribers, notified in this order.

    Attributes:
        num_steps: The number of steps so far of the optimizer with the most.
        listeners: By event, the methods of its subscribers.
    """

    def __init__(self, *subscribers: Subscriber) -> None:
        self.num_steps = 0
        self.listeners: dict[str, list[Callable[..., Any]]] = {}
        for moment in (name for name in vars(Subscriber) if not name.startswith("_")):
            nothing = getattr(Subscriber, moment)
            heard = [each for each in subscribers if getattr(type(each), moment) is not nothing]
            self.listeners[moment] = [getattr(each, moment) for each in heard]
        for each in subscribers:
            each.recorder = self
        self._counts: dict[int, int] = {}  # by id of an optimizer, its steps
        self._stepping = 0  # depth of nested optimizer steps
        self._depth, self._training_depth = 0, 0  # depth of nested module calls, and of those with gradients
        self._scale = 1.0  # the scale of a GradScaler, for the next backward pass
        self._is_back = self._is_together = self._is_loading = False
        self._thread = threading.get_ident()

    def install(self, patches: Patches) -> None:
        """Start to notify subscribers, until the patches are undone."""
        for moment, functions in _CALLS.items():
            self._around(patches, [moment], functions, functools.partial(self._call, moment))
        self._around(patches, ["module"], [(nn.Module, "__call__")], self._module)
        self._around(patches, ["backward"], [(torch.autograd, "backward")], self._backward)
        self._around(patches, ["backward"], [(torch.amp.GradScaler, "scale")], self._scaling)
        if self.listeners["step_begins"] or self.listeners["step_ended"]:
            for handle in (
                register_optimizer_step_pre_hook(self._before_step),
                register_optimizer_step_post_hook(self._after_step),
            ):
                patches.later(handle.remove)
        loops = ["loop_begins", "cuts", "repeats", "batch", "loop_ended", "waited"]
        self._around(patches, loops, [(kind, "__iter__") for kind in LOADERS], self._loop)
        together = ["collective", "makes_group", "ends_group", "wrap"]
        self._around(patches, together, [(kind, "__init__") for kind in WRAPPERS], self._wrap)
        for module in (dist, distributed_c10d):
            for op in _COLLECTIVES:
                self._around(patches, ["collective"], [(module, op)], functools.partial(self._collective, op))
            self._around(patches, together, [(module, "init_process_group")], self._making_group)
            self._around(patches, together, [(module, "destroy_process_group")], self._ending_group)

    def _around(
        self,
        patches: Patches,
        moments: Sequence[str],
        functions: Sequence[tuple[Any, str]],
        instead: Callable[..., Any],
    ) -> None:
        if any(self.listeners[moment] for moment in moments):
            for owner, name in functions:
                patches.around(owner, name, instead)

    def _call(self, moment: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and notify subscribers with its arguments."""
        return self._told(moment, args, kwargs, functools.partial(original, *args, **kwargs))

    def _told(self, moment: str, args: Any, kwargs: Any, call: functools.partial[Any]) -> Any:
        """Make a call, and notify subscribers with `args` and `kwargs`, which may differ from the call's own."""
        with without_torch_function():
            ended = [tell(*args, **kwargs) for tell in self.listeners[moment]]
        for each in ended:
            if isinstance(each, Instead):
                return each.function(*call.args, **call.keywords)
        try:
            return call()
        finally:
            with without_torch_function():
                for each in ended:
                    if each is not None:
                        each()

    # ------------------------------------------------------------------ a step

    def _module(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        # The compiler and the tracer would trace the recorder, too.
        if self._is_back or torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return original(module, *args, **kwargs)
        trains = torch.is_grad_enabled()
        depth = self._training_depth if trains else self._depth
        self._depth, self._training_depth = self._depth + 1, self._training_depth + trains
        try:
            call = functools.partial(original, module, *args, **kwargs)
            return self._told("module", (module, args, kwargs, depth), {}, call)
        finally:
            self._depth, self._training_depth = self._depth - 1, self._training_depth - trains

    def _backward(
        self, original: Callable[..., None], tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        call = functools.partial(original, tensors, grad_tensors, *args, **kwargs)
        if self._is_back:
            call()
            return
        root, weight = _first(tensors), _first(grad_tensors)
        scale, self._scale = self._scale, 1.0
        self._is_back = True
        try:
            self._told("backward", (root, weight, scale), {}, call)
        finally:
            self._is_back = False

    def _scaling(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if scaler.is_enabled():
            self._scale = float(scaler.get_scale())
        return scaled

    def _before_step(self, optimizer: Any, *_: object) -> None:
        self._stepping += 1
        if self._stepping == 1:
            with without_torch_function():
                for tell in self.listeners["step_begins"]:
                    tell(optimizer)

    def _after_step(self, optimizer: Any, *_: object) -> None:
        self._stepping = max(0, self._stepping - 1)
        if self._stepping:
            return
        made = self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        is_counted = made > self.num_steps
        self.num_steps = max(self.num_steps, made)
        with without_torch_function():
            for tell in self.listeners["step_ended"]:
                tell(optimizer, is_counted=is_counted)

    # ------------------------------------------------------------------ what all ranks do together

    def _together(self, moment: str, args: Any, call: functools.partial[Any]) -> Any:
        if self._is_together:
            return call()
        self._is_together = True
        try:
            return self._told(moment, args, {}, call)
        finally:
            self._is_together = False

    def _collective(self, op: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._together("collective", (op, args, kwargs), functools.partial(original, *args, **kwargs))

    def _wrap(self, original: Callable[..., None], wrapper: Any, /, module: Any, *args: Any, **kwargs: Any) -> None:
        self._together("wrap", (wrapper, module), functools.partial(original, wrapper, module, *args, **kwargs))

    def _making_group(self, original: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs)
        call = functools.partial(lambda: original(*given.args, **given.kwargs))
        self._together("makes_group", (given.arguments,), call)

    def _ending_group(self, original: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        if not self._is_together:
            for tell in self.listeners["ends_group"]:
                tell()
        original(*args, **kwargs)

    # ------------------------------------------------------------------ data

    def _loop(self, original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
        return original(loader) if self.is_aside() else Loop(self, loader, functools.partial(original, loader))

    def is_aside(self) -> bool:
        """Whether data are being read inside a loader, or by another thread than the script's."""
        return self._is_loading or threading.get_ident() != self._thread

    def load(self, read: Callable[[], Any]) -> Any:
        """Read from a loader and report the wait. Loaders that are read inside aren't reported."""
        began_ns = perf_counter_ns()
        self._is_loading = True
        try:
            return read()
        finally:
            self._is_loading = False
            for tell in self.listeners["waited"]:
                tell(began_ns, perf_counter_ns())


class Loop:
    """The iterator of one loop over a loader, perhaps over several epochs.

    Attributes:
        loader: The loader.
        steps_before: The number of optimizer steps before the loop, or before its newest epoch.
        num_batches: The number of batches yielded so far.
    """

    def __init__(self, recorder: Recorder, loader: Any, begin: Callable[[], Iterator[Any]]) -> None:
        self._recorder, self.loader, self._begin = recorder, loader, begin
        self.steps_before = recorder.num_steps
        self.num_batches = 0
        for tell in recorder.listeners["loop_begins"]:
            tell(self)
        self._items = recorder.load(begin)  # torch's loader starts its workers here

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        recorder = self._recorder
        if recorder.is_aside():
            return next(self._items)
        is_cut = any(asked(self) for asked in recorder.listeners["cuts"])
        try:
            if is_cut:
                raise StopIteration
            batch = recorder.load(self._next)
        except StopIteration:
            for tell in recorder.listeners["loop_ended"]:
                tell(self, is_cut=is_cut)
            raise
        self.num_batches += 1
        with without_torch_function():
            for tell in recorder.listeners["batch"]:
                tell(self, batch)
        return batch

    def _next(self) -> Any:
        try:
            return next(self._items)
        except StopIteration:
            if not any(asked(self) for asked in self._recorder.listeners["repeats"]):
                raise
        self.steps_before = self._recorder.num_steps
        self._items = self._begin()
        return next(self._items)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._items, name)


def _first(given: Any) -> Any:
    """The root of a backward pass, or its weight: a tensor, or the first of several."""
    return given if given is None or isinstance(given, Tensor) else next(iter(given), None)
