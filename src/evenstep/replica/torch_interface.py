"""What programs ask of torch's class beyond forward and backward: hooks, uneven inputs, pickling, private names.

It derives from torch's class, because torch asks `isinstance` in its checkpoint, compile and pipeline code; none of
that class's machinery is set up. docs/ddp-compatibility.md has a line per name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import UsageError
from evenstep.health.steps import mark_compilations
from evenstep.replica import registrations
from evenstep.replica.comm_hook import CommHook
from evenstep.replica.engine import Engine
from evenstep.replica.lane_loop import LaneBuffers
from evenstep.replica.settings import Settings
from evenstep.replica.sync_layers import SyncLayers
from evenstep.replica.uneven import JoinOfOne, Uneven, UnevenJoinHook
from evenstep.replica.weighting import drop_grads
from evenstep.transport.base import Transport
from evenstep.world import World

_MIN_COMPILED_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
_is_known_to_dynamo = False
_has_compiled = False

_wrapped: weakref.WeakSet[TorchInterface] = weakref.WeakSet()


def compiled_backends() -> Mapping[int, object]:
    """What torch.compile compiles with, in use or not; grows when another one is asked for."""
    compiling = sys.modules.get("torch._dynamo.eval_frame")
    backends: Mapping[int, object] = {} if compiling is None else compiling.cached_backends
    return backends


def compilation_is_in_use() -> bool:
    """Whether anything has been compiled, or is to be: then torch.compile has to be told of the module that runs.

    Telling it means to change an attribute of torch's class, which costs 5 microseconds: python forgets what it knew of
    the attributes of the class and of those that derive from it.

    As soon as torch.compile has been imported, by whomever, it is told to trace the wrapped module and not evenstep.
    """
    global _is_known_to_dynamo, _has_compiled
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not _is_known_to_dynamo:
        _is_known_to_dynamo = True
        mark_compilations()
        rules.add("evenstep")
    if not _has_compiled:
        _has_compiled = any(compiled_backends().values())
    return _has_compiled


compilation_is_in_use._torchdynamo_disable = True  # type: ignore[attr-defined]  # torch.compiler.disable imports dynamo

Hook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]

_BUILTIN_HOOKS: dict[str, Hook] = {
    "ALLREDUCE": default_hooks.allreduce_hook,
    "FP16_COMPRESS": default_hooks.fp16_compress_hook,
}


def wrapped_models() -> list[TorchInterface]:
    """The wrapped models of this process that are alive."""
    return list(_wrapped)


class TorchInterface(TorchDistributedDataParallel):
    """The part of torch's interface that isn't training itself.

    Attributes:
        module: The wrapped module.
        world: Who takes part.
        settings: What it was wrapped with.
        engine: Keeps the gradients in step.
        sync_layers: The module's SyncBatchNorms.
    """

    module: nn.Module
    world: World
    settings: Settings
    engine: Engine
    sync_layers: SyncLayers

    def _set_up(self, world: World, settings: Settings, transport: Transport) -> None:
        """Everything but the module and what the constructor agreed on with the other ranks."""
        Joinable.__init__(self)
        self.world = world
        self.settings = settings
        self.process_group: dist.ProcessGroup | None = world.process_group  # type: ignore[assignment]
        self.engine = Engine(self.module, world, settings, transport)
        _wrapped.add(self)
        self.sync_layers = SyncLayers(self.module, world, self.engine)
        self.engine.shares_statistics = bool(self.sync_layers)
        self._lane_buffers = LaneBuffers(self.module, settings.ignored)
        self._hook: CommHook | None = None
        self._frozen = [(name, p) for name, p in settings.kept(self.module) if not p.requires_grad]
        # What torch's class has, for those who read it.
        self.parameters_to_ignore = set(settings.ignored)
        # torch.compile splits graphs at buckets of this size, and insists on a minimum.
        self.bucket_bytes_cap = max(*settings.policy.caps_bytes, _MIN_COMPILED_BUCKET_BYTES)
        self.bucket_bytes_cap_default = settings.policy.cap_bytes(0) < self.bucket_bytes_cap
        self._module_parameters = [parameter for _, parameter in settings.kept(self.module)]
        self.is_multi_device_module = len({parameter.device for parameter in self._module_parameters}) > 1
        self.use_side_stream_for_tensor_copies = True
        self._num_registrations = registrations.watch()
        # How much was imported and compiled when nothing asked for care in `forward`; until that changes, nothing does.
        self._num_modules, self._num_backends = -1, 0
        self._backends: Mapping[int, object] = {}
        self._names = [name for name, _ in self.module.named_parameters()]

    # ------------------------------------------------------------------ what torch calls it

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass averages; accelerate and Lightning set it."""
        return self.engine.synchronise

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        """Set by programs that hold synchronisation back themselves."""
        self.engine.synchronise = bool(value)

    @property
    def require_forward_param_sync(self) -> bool:
        """As `require_backward_grad_sync`: module buffers are made equal where gradients are."""
        return self.engine.synchronise

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        """Nothing: torch's class sets it anew in every forward pass."""

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether module buffers are made equal at the end of every synchronised backward pass.

        May be set between two steps, to the same on all ranks.
        """
        return self.settings.sync_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        """From the next backward pass on."""
        checks.switches("", forward_sync_buffers=value)
        if not value and self.engine.lanes is not None and self.modules_buffers:
            raise UsageError(
                "forward_sync_buffers=False in reproducible mode: every rank would have module buffers of its own. "
                "Leave it on."
            )
        self.settings = dataclasses.replace(self.settings, sync_buffers=bool(value))
        self.engine.trained.module_buffers.is_on = bool(value)

    @property
    def modules_buffers(self) -> list[Tensor]:  # type: ignore[override]
        """The module buffers that are not ignored."""
        return [buffer for _, buffer in self.settings.kept_buffers(self.module)]

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The same by name."""
        return dict(self.settings.kept_buffers(self.module))

    @property
    def broadcast_buffers(self) -> bool:
        """What `forward_sync_buffers` is called in torch 2.11, where nothing has the newer name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        """Torch's own class takes it too."""
        self.forward_sync_buffers = value

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self.engine.has_learned_order

    def will_sync_module_buffers(self) -> bool:
        """Whether module buffers are made equal at the end of the next backward pass."""
        return self.settings.sync_buffers and self.engine.synchronise and bool(self.modules_buffers)

    def unused_parameters(self) -> list[str]:
        """Names of the parameters that had no gradient on any rank when gradients were last averaged."""
        return self.engine.unused_parameters()

    def train(self, mode: bool = True) -> TorchInterface:
        """As `nn.Module.train`."""
        nn.Module.train(self, mode)
        return self

    def _set_static_graph(self) -> None:
        """Nothing: no graph is assumed to stay as it is, and none has to."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Nothing: outputs pass through no node of their own."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Nothing: what is measured is measured in every step."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        sizes = [bucket.flat.numel() * bucket.flat.element_size() for bucket in self.engine.buckets]
        return {
            "world_size": self.world.world_size,
            "rank": self.world.rank,
            "module_name": type(self.module).__name__,
            "backend_name": self.world.transport_name,
            "iteration": self.engine.num_reductions,
            "num_parameter_tensors": len(self.engine.parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in self.engine.parameters),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": ", ".join(map(str, sizes)),
            "has_rebuilt_buckets": int(self._has_rebuilt_buckets),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "comm_hook": "" if self._hook is None else getattr(self._hook.function, "__qualname__", "hook"),
        }

    # ------------------------------------------------------------------ communication hooks

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Have a hook average buckets over ranks instead of the transport: compression, for example.

        torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) run unchanged. A hook averages; with
        `backward(loss, weight=)` ranks add up their weights before, and what it is handed is multiplied by the number
        of ranks over that sum, so that weights stay exact, and neither overflow 16 bits nor change what a hook keeps
        for later. In a world of one nothing travels and the hook is not called.

        Args:
            state: Passed to every call; often a process group, or None for the default one.
            hook: Called with the state and a `GradBucket`-like bucket whose gradients are complete.

        Raises:
            ConfigurationError: The hook can't be called so.
            UsageError: There is one already.
        """
        if self._hook is not None:
            raise UsageError("register_comm_hook: there is one already, and a model has at most one.")
        if self.engine.lanes is not None:
            raise UsageError("register_comm_hook in reproducible mode: a hook adds in an order of its own.")
        made = CommHook(state, hook)
        self.engine.exchange.set_hook(made)
        if self.engine.drift is not None:
            self.engine.drift.doubt_hook(hook)
        self._hook = made

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        name = str(comm_hook_type).rpartition(".")[2]
        if name not in _BUILTIN_HOOKS:
            raise UsageError(f"_register_builtin_comm_hook: {comm_hook_type!r}; one of {', '.join(_BUILTIN_HOOKS)}.")
        self.register_comm_hook(self.process_group, _BUILTIN_HOOKS[name])

    # ------------------------------------------------------------------ uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[Any]:
        """Around a loop that ends earlier on some ranks: those take part in the others' steps with weight zero.

            with model.join():
                for x, y in loader:
                    ...

        Collective: every rank enters and leaves. When the last rank has left its loop, parameters and module buffers
        are made equal to its own.

        Args:
            divide_by_initial_world_size: `loss.backward()` averages over all ranks; False: over those that still have
                data. `model.backward(loss, weight=)` is the exact mean in either case.
            enable: False: the context does nothing.
            throw_on_early_termination: Raise a RuntimeError on every rank as soon as one has left its loop.
        """
        if self.engine.lanes is not None:
            raise UsageError("join in reproducible mode: every rank has its lanes of every batch. Leave it out.")
        if self.world.world_size == 1 or not enable:
            return contextlib.nullcontext()
        return JoinOfOne(
            self,
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join`: takes the keyword `divide_by_initial_world_size`."""
        by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        return UnevenJoinHook(self, by_all)

    @property
    def join_device(self) -> torch.device:
        """Where `Join` keeps its counters."""
        device: torch.device = self._module_parameters[0].device
        return device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """The group in which ranks are counted."""
        return self.process_group

    def _take_part_without_data(self) -> None:
        """Another window's end, to which this rank gives nothing. An optimizer that is in the `Join` steps with it."""
        self._drop_gradients()
        self.sync_layers.shadow()
        self.engine.reduce_without_backward()

    def _drop_gradients(self) -> None:
        drop_grads(self.engine.parameters)

    def _set_uneven(self, uneven: Uneven | None) -> None:
        self.engine.exchange.set_uneven(uneven)

    def _kept_tensors(self) -> list[Tensor]:
        buffers = [buffer for _, buffer in self.settings.kept_buffers(self.module)]
        return [*(parameter.data for parameter in self._module_parameters), *buffers]

    # ------------------------------------------------------------------ around a forward pass

    @contextlib.contextmanager
    def _seen_by_dynamo(self) -> Iterator[None]:
        """torch.compile asks which module runs, to split its graph at buckets."""
        running = TorchDistributedDataParallel._active_ddp_module
        TorchDistributedDataParallel._active_ddp_module = self
        try:
            yield
        finally:
            TorchDistributedDataParallel._active_ddp_module = running

    def _validate_parameters(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name!r} was frozen when the model was wrapped and is trained now; its gradient would "
                    f"not be averaged. Freeze parameters after wrapping, or wrap the module again."
                )
        if registrations.counted != self._num_registrations:
            counted = registrations.counted
            trained = [(name, p) for name, p in self.settings.kept(self.module) if p.requires_grad]
            known, own = set(self._names), set(map(id, self._module_parameters))
            replaced = [name for name, p in trained if name in known and id(p) not in own]
            if replaced:  # whose gradients would come where nobody looks
                raise UsageError(
                    f"parameter {replaced[0]!r} is another one than when the model was wrapped "
                    f"(load_state_dict(assign=True), or an nn.Parameter put in its place); its gradient would not be "
                    f"averaged. Copy into parameters instead, or wrap the model, and make its optimizer, behind that."
                )
            new = [name for name, _ in trained if name not in known]
            if new:
                raise UsageError(
                    f"parameter {new[0]!r} was added after the model was wrapped; its gradient would not be averaged. "
                    f"Wrap the module again."
                )
            self._num_registrations = counted  # not before: who catches these is told again

    # ------------------------------------------------------------------ pickling

    def __getstate__(self) -> dict[str, Any]:
        """The module and the settings; the world is found again where it is loaded."""
        if self.process_group is not None and self.process_group is not dist.group.WORLD:
            raise UsageError(
                "only a module that is replicated over all ranks can be pickled or copied; save "
                "its state_dict, or `.module`."
            )
        without = {
            "world",
            "engine",
            "sync_layers",
            "process_group",
            "_lane_buffers",
            "_hook",
            "_frozen",
            "_join_config",
            "_backends",
        }
        return {name: value for name, value in self.__dict__.items() if name not in without}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        # A copy may be made on one rank alone, where nothing can be agreed: it shares the world's own transport.
        world = worlds.current()
        self._set_up(world, state["settings"], world.transport)
