"""The class that users see: a module whose replicas on all ranks take the same step.

It derives from torch's class, because torch checks `isinstance` in its checkpoint, compile and pipeline code. The
machinery of torch's class is never set up. docs/reference/ddp-compatibility.md has a line for each of torch's names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from sys import modules
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.compat.torch_ddp import active_in_dynamo
from evenstep.ground.compat.torch_dynamo import any_compiled, compiled_backends, keep_out_of_graphs, untraced
from evenstep.ground.computing import randomness
from evenstep.ground.health import excepthook, heartbeat
from evenstep.ground.health.steps import mark_compilations
from evenstep.ground.health.telemetry import Recorder
from evenstep.ground.health.users_code import warn
from evenstep.replica.batches import DummyBatch, input_watchers, is_empty_batch, show_inputs, split
from evenstep.replica.channels import Peers, bucket_transport, validate_thread
from evenstep.replica.gradients.buckets.comm_hooks import AVERAGING, CommHook
from evenstep.replica.gradients.engine import Engine, weighted_passes
from evenstep.replica.gradients.exchange.all_reduce import AllReduceExchange
from evenstep.replica.gradients.exchange.base import Exchange
from evenstep.replica.gradients.window import drop_grads, validate_weight
from evenstep.replica.join import Uneven, join_of_one
from evenstep.replica.module_buffers import broadcast, untouched
from evenstep.replica.monitors.checks import Monitors, Policy
from evenstep.replica.monitors.end_of_run import compare_at_end
from evenstep.replica.monitors.first_batch import compare_first_batches
from evenstep.replica.normalization.sync_batchnorm import SyncLayers, replace_torchs
from evenstep.replica.virtual_ranks import loop
from evenstep.replica.virtual_ranks.loop import VirtualRankBuffers
from evenstep.replica.wrapper.assembly import build_engine
from evenstep.replica.wrapper.model_check import validate_for_virtual_ranks, validate_same_model
from evenstep.replica.wrapper.reducer import Reducer
from evenstep.replica.wrapper.settings import Settings, group_of, resolve_settings, sparse_parameters, wrapped_inside
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport
from evenstep.world import World

Batch = TypeVar("Batch")
Hook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]

_MIN_COMPILED_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
_BUILTIN_HOOKS: dict[str, Hook] = {
    "ALLREDUCE": default_hooks.allreduce_hook,
    "FP16_COMPRESS": default_hooks.fp16_compress_hook,
}
# Kinds of nodes through which a loss keeps the factor of a GradScaler: products, and sums.
_MOST_NODES = 1000
_PRODUCTS = frozenset(
    f"{name}Backward{number}"
    for name in ("Mul", "Div", "Neg", "ToCopy", "Sum", "Mean", "Squeeze", "Unsqueeze", "View", "UnsafeView", "Expand")
    for number in (0, 1, 2)
) | {"ReshapeAliasBackward0", "CloneBackward0", "SelectBackward0"}
_SUMS = frozenset(("AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0", "RsubBackward0"))

_wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
# Number of parameters and modules registered anywhere in this process, counted by torch's registration hooks. Searching
# a model for new parameters costs microseconds per layer and forward pass, so a search is made only when this number
# has changed.
_num_registered = 0
_registration_hooks: list[Any] = []


def wrapped_models() -> list[DistributedDataParallel]:
    """The wrapped models that exist in this process."""
    return list(_wrapped)


class DistributedDataParallel(TorchDistributedDataParallel):
    """A module whose replicas are kept equal: gradients are averaged over ranks while the backward pass runs.

    Collective: every rank wraps its replica, of the same model. Parameters and module buffers become equal to rank
    0's. `state_dict` has torch's keys (`module.` before each), `.module` is the module itself.

    What is applied after a backward pass:

    =======================================  =====================================================================
    `loss.backward()`                        torch's meaning: summed over micro-batches, averaged over ranks
    `model.backward(loss)`                   the mean over micro-batches and ranks
    `model.backward(loss, weight=w)`         the sum of `w * gradient` over micro-batches and ranks, divided once by
                                             the sum of `w`: the exact global mean
    =======================================  =====================================================================

    Unlike torch's class: parameters that receive no gradient need no flag; whether gradients are sent is decided by the
    state at *backward*, not at forward; module buffers are made equal at the end of a synchronised backward pass, with
    the gradients, not at the beginning of the next forward pass; an empty batch is allowed.

    It derives from torch's class and has its interface. docs/reference/ddp-compatibility.md has a line for each of
    torch's arguments and methods.

    Args:
        module: The model. Moved to `world.device` if `evenstep.init` made the world and `device_ids` isn't given.
        device_ids: None, or the one GPU where the module already is; inputs are moved there.
        output_device: The same device as `device_ids`, or None.
        dim: The batch dimension of inputs and outputs.
        broadcast_buffers: Keep module buffers equal to rank 0's; None: True.
        init_sync: Compare the models of all ranks and make them equal at the start.
        process_group: Average over this group's ranks only.
        bucket_cap_mb: Size of a bucket in MiB; None: 25.
        find_unused_parameters: Accepted and ignored: unused parameters need no flag.
        check_reduction: Accepted and ignored, as torch does.
        gradient_as_bucket_view: Accepted and ignored: gradients are always views of their bucket.
        static_graph: Accepted and ignored: nothing is assumed of the graph.
        delay_all_reduce_named_params: Refused: a bucket is sent when its gradients are complete.
        param_to_hook_all_reduce: Refused, for the same reason as `delay_all_reduce_named_params`.
        mixed_precision: Refused: `torch.autocast` around the forward pass computes in low precision.
        device_mesh: The one-dimensional mesh along which the model is replicated, instead of `process_group`.
        skip_all_reduce_unused_params: Accepted and ignored.
        bucket_cap_mb_list: Sizes of the first bucket, the second, ... in MiB; the last size holds for all buckets that
            follow.
        batched_grad_copy: Accepted and ignored: copies are always batched.
        forward_sync_buffers: torch 2.13's name for `broadcast_buffers`; buffers are made equal at the start in any
            case.
        lazy_bucket_allocation: An argument of torch 2.15; accepted and ignored: buckets hold the gradients themselves.
        first_bucket_cap_mb: Size of the first bucket in MiB; None: 1, or `bucket_cap_mb` if that is smaller.
        reduce_dtype: The dtype in which gradients are added over ranks and divided, such as float32 for 16-bit
            parameters; None: the parameters' dtype. `p.grad` keeps the parameters' dtype.
        on_nonfinite: What happens if a gradient is infinite or not a number on any rank, unless its loss was scaled by
            the `scaler` of `backward`. "warn": one warning names the rank and the parameter; on CPUs only (on GPUs
            nothing is checked), and not while a GradScaler is in use; "skip": every `p.grad` becomes None on all ranks,
            a warning names the rank and the parameter, and `skipped_steps` counts the step; "raise": a NonFiniteError
            on every rank; None: as torch.
        compare_every: Every trained parameter is compared between ranks once in this many synchronised backward passes,
            a few parameters in each pass. A parameter that differs raises a DriftError on every rank. None: 64, and
            only while replicas are certainly meant to be equal (see docs/explanation/drift.md); a number: always
            compare; 0: never.
        buffers: How module buffers are synchronised at the end of a synchronised backward pass: a rule for each pattern
            of names. The first matching pattern decides. "mean" and "sum" combine the amounts that ranks have added
            since the last such pass, for codebooks and counters; "rank 0" copies rank 0's buffer; with "own" each rank
            keeps its own. Buffers that match no pattern follow `broadcast_buffers`.
        world: The ranks that take part; None: the current world.

    Raises:
        MismatchError: The ranks' models or arguments differ; raised on every rank with the first difference.
        ConfigurationError: An argument is wrong, or nothing in the module is trained. Raised on every rank.
        UsageError: Another thread, which still runs, has wrapped a model that still exists.
    """

    module: nn.Module
    world: World
    settings: Settings
    engine: Engine
    monitors: Monitors
    sync_layers: SyncLayers
    is_divided = False  # whether FSDP2 or tensor parallelism has divided it over ranks: see `parallel.model`
    _was_uneven = False  # whether ranks have made different numbers of steps in a `join`
    _has_warned_of_join = False
    _has_warned_of_parts = False
    _is_within_dummy = False  # whether the module around this wrapped part runs on a dummy batch
    logger = None  # torch's class has its timings there; here `world.telemetry` has them
    mixed_precision = None

    @excepthook.for_users
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: None = None,
        param_to_hook_all_reduce: None = None,
        mixed_precision: None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        first_bucket_cap_mb: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        on_nonfinite: Policy | None = "warn",
        compare_every: int | None = None,
        buffers: Mapping[str, str] | None = None,
        world: World | None = None,
    ) -> None:
        nn.Module.__init__(self)
        group = group_of(process_group, device_mesh, module)
        everybody = worlds.chosen(world, "DistributedDataParallel")
        validate_thread(everybody, self)
        world = everybody.data_parallel if group is None else everybody.of_group(group)
        # Stored as attributes because torch's class has them; evenstep doesn't read them.
        remembered = {
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "batched_grad_copy": batched_grad_copy,
            "lazy_bucket_allocation": lazy_bucket_allocation,
        }
        settings = resolve_settings(
            world,
            module,
            dim=dim,
            devices=(device_ids, output_device),
            buffers=(broadcast_buffers, forward_sync_buffers),
            buffer_rules=buffers,
            buckets=(bucket_cap_mb, first_bucket_cap_mb, bucket_cap_mb_list),
            init_sync=init_sync,
            on_nonfinite=on_nonfinite,
            compare_every=compare_every,
            reduce_dtype=reduce_dtype,
            refused={
                "delay_all_reduce_named_params": delay_all_reduce_named_params,
                "param_to_hook_all_reduce": param_to_hook_all_reduce,
                "mixed_precision": mixed_precision,
            },
            check_reduction=check_reduction,
            **remembered,
        )
        if everybody.virtual_ranks is not None:
            per_rank = everybody.virtual_ranks.per_rank
            validate_for_virtual_ranks(
                module, settings, is_of_group=world is not everybody, virtual_ranks_per_rank=per_rank
            )
        if world.is_initialised and device_ids is None:
            module.to(world.device)
        self.module = module = replace_torchs(module)
        self.device = next(p for _, p in settings.kept(module)).device
        self.device_type = self.device.type
        self.device_ids = None if settings.inputs_to is None else [settings.inputs_to.index]
        self.output_device = None if settings.inputs_to is None else settings.inputs_to.index
        self.__dict__.update(remembered)
        self.bucket_bytes_cap_list = [int(size * (1 << 20)) for size in bucket_cap_mb_list or ()]
        if device_mesh is not None:  # without a mesh, torch's class has no such attribute either
            self.device_mesh = device_mesh
        transport = bucket_transport(world, self)
        kept = settings.kept(module) if settings.init_sync else []
        equal = settings.equal_buffers(module, is_on=settings.init_sync and settings.init_sync_buffers)
        if kept or equal:
            validate_same_model(kept, equal, world.exchange)
            broadcast([*(p.data for _, p in kept), *(each for _, each in equal)], transport)
        self._set_up(world, settings, transport)
        self._dummy = DummyBatch(self.dim)
        if self._wrapped_already() is not None and world.rank == 0:
            warn(
                "the module is wrapped already. The new wrapper delegates to the first one and ignores its own "
                "arguments. To use other arguments wrap `model.module`; else use the model as it is.",
            )

    def _wrapped_already(self) -> DistributedDataParallel | None:
        """The module, if it is a wrapped model of the same ranks.

        Both wrappers share one engine, so gradients are averaged once.
        """
        inner = self._modules["module"]
        return inner if isinstance(inner, DistributedDataParallel) and inner.world is self.world else None

    @property
    def _with_parts(self) -> list[DistributedDataParallel]:
        """This model and the wrapped parts of its module, each of which has its own engine and accumulation window."""
        return [self, *self._wrapped_inside]

    def _set_up(self, world: World, settings: Settings, transport: Transport, *, is_copy: bool = False) -> None:
        """Set up everything except the module. Also for a copy, which a rank makes without the other ranks."""
        Joinable.__init__(self)
        self.world, self.settings, self.dim, self._is_copy = world, settings, settings.dim, is_copy
        inner = self._wrapped_already()
        if inner is None:
            self.engine, self.monitors = self._build_engine(world, settings, transport)
            _wrapped.add(self)
            self.sync_layers = SyncLayers(self.module, world.data_parallel, self.engine, is_copy=is_copy)
            self.engine.shares_statistics = bool(self.sync_layers)
            if self.monitors.drift is not None and not (is_copy or self.is_divided):
                compare_at_end(self.monitors.drift, world)
        else:
            self.engine, self.monitors, self.sync_layers = inner.engine, inner.monitors, inner.sync_layers
        self._virtual_rank_buffers = VirtualRankBuffers(self.module, settings.ignored)
        self.reducer = Reducer(self.engine)  # type: ignore[assignment]
        self._hook_name = ""  # name of the communication hook, if there is one
        self._frozen = [p for _, p in settings.kept(self.module) if not p.requires_grad]
        # Attributes of torch's class that other programs read.
        self.parameters_to_ignore = set(settings.ignored)
        # torch.compile splits graphs at buckets of this size, and requires a minimum.
        self.bucket_bytes_cap = max(*settings.policy.caps_bytes, _MIN_COMPILED_BUCKET_BYTES)
        self.broadcast_bucket_size = 250 << 20  # bytes; evenstep doesn't use it
        self.bucket_bytes_cap_default = settings.policy.cap_bytes(0) < self.bucket_bytes_cap
        self._module_parameters = [parameter for _, parameter in settings.kept(self.module)]
        self.is_multi_device_module = len({parameter.device for parameter in self._module_parameters}) > 1
        self.use_side_stream_for_tensor_copies = True
        self._num_registrations = _watch_registrations()
        # Numbers of imported modules and of compiler backends when `forward` last needed no special handling. While
        # both are the same, `forward` takes its fast path.
        self._num_modules, self._num_backends = -1, 0
        self._backends: Mapping[int, object] = {}
        self._names = [name for name, _ in self.module.named_parameters()]
        parts = [each for each in self.module.modules() if isinstance(each, DistributedDataParallel)]
        # A part may be wrapped twice, with one engine.
        by_engine = {part.engine: part for part in parts if part.engine is not self.engine}
        self._wrapped_inside = list(by_engine.values())

    def _build_engine(self, world: World, settings: Settings, transport: Transport) -> tuple[Engine, Monitors]:
        return build_engine(self.module, world, settings, transport, recorder=self._recorder())

    def _recorder(self) -> Recorder:
        """Records the times of this model's steps, even if another engine is in use."""
        engine = self.__dict__.get("engine")
        return self.world.telemetry.open() if engine is None else engine.recorder

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's share of the batch.

        An empty share (every tensor that has the batch dimension has length 0 there) is allowed: the module runs on one
        remembered sample, module buffers and random streams are restored, and outputs whose length depends on the
        number of rows have length 0. The pass contributes no gradient.

        Raises:
            UsageError: The replicas are no longer in step (an earlier backward pass failed), or a parameter was
                replaced.
        """
        # Check first whether modules were imported or anything compiled: torch.compile must not trace the code below.
        if len(modules) != self._num_modules or len(self._backends) != self._num_backends:
            return self._forward_with_care(inputs, kwargs)
        first = inputs[0] if inputs else None
        if not (
            isinstance(first, Tensor)
            and first.numel() > 0
            and first.dim() > self.dim >= 0
            and torch.is_grad_enabled()
            and not input_watchers
            and _num_registered == self._num_registrations
            and self.world.has_diverged
        ):
            return self._forward_with_care(inputs, kwargs)
        # The usual case. Reading an attribute costs a small model more than an instruction count suggests, because
        # torch's kernels have evicted it from the processor's caches. See `_enable_fast_path`.
        engine = self.engine
        engine.begin_forward()
        began_ns = engine.recorder.begin_forward()
        outputs = self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]  # not by way of `__getattr__`
        engine.end_forward(outputs, began_ns, over_dummy=False, is_training=self.training)
        return outputs

    def _forward_with_care(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (inner := self._wrapped_already()) is not None:
            outputs = inner(*inputs, **kwargs)
            if inner.engine is not self.engine:  # the inner model has been laid out again
                self._set_up(self.world, self.settings, inner.engine.transport, is_copy=self._is_copy)
            return outputs
        is_compiled = _compilation_is_in_use()
        with_grad = torch.is_grad_enabled()
        show_inputs((inputs, kwargs))
        if with_grad:
            self._follow_changes()
        engine = self.engine
        if with_grad:
            engine.begin_forward()
            if self.training:
                if not (self.world.has_diverged or self.world.virtual_ranks):
                    compare_first_batches(self.world, (inputs, kwargs))
                    self.world.diverge_random_streams()
                engine.ending.validate_pass("the model was called in training")
            began_ns = engine.recorder.begin_forward()
        else:
            heartbeat.mark(heartbeat.Phase.EVALUATING)
        if self.settings.inputs_to is not None:
            inputs, kwargs = pytree.tree_map_only(Tensor, self._moved, (inputs, kwargs))
        # Recognise the usual case without flattening a pytree, which takes 10 microseconds.
        first = inputs[0] if inputs else None
        has_rows = isinstance(first, Tensor) and first.numel() > 0 and first.dim() > self.dim >= 0
        is_empty = not has_rows and is_empty_batch((inputs, kwargs), self.dim)
        over_dummy = is_empty or self._is_within_dummy
        if with_grad and engine.trained.module_buffers.has_statistics:
            engine.trained.module_buffers.begin_forward(over_dummy=over_dummy)
        is_first = not (over_dummy or self._dummy.has_sample)
        if is_first:
            self._dummy.remember((inputs, kwargs))
        if is_empty or self.sync_layers.layers or is_compiled:
            run = self._forward_dummy if is_empty else partial(self._run_module, over_dummy=over_dummy)
            with active_in_dynamo(self) if is_compiled and not self.is_divided else contextlib.nullcontext():
                outputs = run(inputs, kwargs)
        else:
            outputs = self.module(*inputs, **kwargs)
        if is_first:
            self._dummy.remember_outputs(outputs)
        if with_grad:  # an evaluation's passes are no part of a step
            engine.end_forward(outputs, began_ns, over_dummy=over_dummy, is_training=self.training)
        self._enable_fast_path()
        return outputs

    def _enable_fast_path(self) -> None:
        """Make forward passes take the fast path from now on, if nothing needs the full path; see `_num_modules`."""
        asks_for_care = (
            self._frozen
            or self.sync_layers.layers
            or self.settings.inputs_to is not None
            or self.world.virtual_ranks is not None
            or self.engine.trained.module_buffers.has_statistics
            or not self._dummy.has_sample
        )
        if not (asks_for_care or _compilation_is_in_use()):
            self._backends = compiled_backends()
            self._num_modules, self._num_backends = len(modules), len(self._backends)

    def _run_module(self, inputs: Any, kwargs: Any, *, over_dummy: bool = False) -> Any:
        exchanging = self.sync_layers.forward_pass(over_dummy=over_dummy)
        with exchanging if self.sync_layers.layers else contextlib.nullcontext():
            return self.module(*inputs, **kwargs)

    def _forward_dummy(self, inputs: Any, kwargs: Any) -> Any:
        inputs, kwargs = self._dummy.build((inputs, kwargs))
        try:
            for part in self._wrapped_inside:
                part._is_within_dummy = True
            with randomness.preserved(), untouched(self.module, but=self.sync_layers.buffers()):
                outputs = self._run_module(inputs, kwargs, over_dummy=True)
        finally:
            for part in self._wrapped_inside:
                part._is_within_dummy = False
        return self._dummy.empty_outputs(outputs)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.settings.inputs_to, non_blocking=True)

    def _follow_changes(self) -> None:
        """Find parameters that are trained now and were not when the model was wrapped. Collective if there are any.

        Raises:
            UsageError: A parameter was replaced, or buckets can't be laid out again in the present state.
        """
        counted = _num_registered
        if counted == self._num_registrations and not any(p.requires_grad for p in self._frozen):
            return
        inside = wrapped_inside(self.module, self.world)  # new parameters there are followed by their own wrapper
        settings = dataclasses.replace(self.settings, ignored=self.settings.ignored | inside)
        trained = settings.trained(self.module)
        known, own = set(self._names), set(map(id, self._module_parameters))
        replaced = [name for name, p in trained if name in known and id(p) not in own]
        if replaced:  # nothing would send the new parameters' gradients
            raise UsageError(
                f"parameter {replaced[0]!r} was replaced after the model was wrapped (load_state_dict(assign=True), or "
                f"a new nn.Parameter in its place); its gradient would not be averaged. Copy values into the existing "
                f"parameter instead, or wrap the model and make its optimizer after the replacement."
            )
        new = [(name, p) for name, p in trained if id(p) not in self.engine.parameter_ids]  # not those pruning renames
        if new:
            self._lay_out_again(new, settings)
        self._frozen = [p for _, p in settings.kept(self.module) if not p.requires_grad]
        self._num_registrations = counted  # only now, so that a program that catches these errors gets them again

    def _lay_out_again(self, new: Sequence[tuple[str, nn.Parameter]], settings: Settings) -> None:
        """Lay buckets out again, with parameters that are trained from now on. Collective, between two windows.

        New parameters get rank 0's values.
        """
        before, drift, (first, _) = self.engine, self.monitors.drift, new[0]
        before.begin_forward()  # raises if a pass failed, or drops it
        obstacles = {
            "within a join": before.exchange.uneven is not None
            and self._join_config.enable,  # first: ranks that have left the join can't be queried
            "inside of an accumulation window": before.is_in_pass or before.is_in_window,
            "in reproducible mode": self.world.virtual_ranks is not None,
            "with a communication hook": before.exchange.hook is not None,
            "within LocalSGD": before.stays_local or before.is_apart,
            "with a ShardedOptimizer": type(before.exchange) not in (Exchange, AllReduceExchange)
            or self.monitors.options.has_divided(),
        }
        obstacle = next((name for name, is_there in obstacles.items() if is_there), None)
        if obstacle != "within a join":  # a single rank may still have an optimizer, for example
            obstacle = next((each for each in exchange(before.control, obstacle) if each is not None), None)
        if obstacle is not None:
            raise UsageError(
                f"parameter {first!r} is trained now, and was frozen or missing when the model was wrapped. Its "
                f"gradient would not be averaged, and {obstacle} buckets can't be laid out again. Wrap the module "
                f"again, or change it before you wrap it."
            )
        of_new = set(map(id, (parameter for _, parameter in new)))
        parts = [each for each in self.module.modules() if of_new & set(map(id, each.parameters(recurse=False)))]
        own = {id(buffer) for part in parts for buffer in part.buffers(recurse=False)}
        buffers = settings.equal_buffers(self.module, is_on=settings.init_sync_buffers)
        buffers = [(name, buffer) for name, buffer in buffers if id(buffer) in own]
        validate_same_model(settings.kept(self.module), buffers, partial(exchange, before.control))
        tensors = [*(parameter.data for _, parameter in new), *(buffer for _, buffer in buffers)]
        broadcast(tensors, before.transport)
        num_skipped = self.skipped_steps
        settings = dataclasses.replace(settings, sparse=sparse_parameters(self.module))
        self._set_up(self.world, settings, before.transport, is_copy=self._is_copy)
        self.engine.num_reductions, self.engine.synchronise = before.num_reductions, before.synchronise
        if self.monitors.nonfinite is not None:
            self.monitors.nonfinite.num_skipped = num_skipped
        if drift is not None and not drift.is_on and self.monitors.drift is not None:
            self.monitors.drift.doubt()
        if self.world.is_main:
            others = f" and {len(new) - 1} more" if len(new) > 1 else ""
            warn(
                f"parameter {first!r}{others} is trained now, and was not when the model was wrapped. Its gradients "
                f"are averaged from now on. If your optimizer doesn't have the parameter yet, pass it to "
                f"add_param_group.",
            )

    # ------------------------------------------------------------------ backward

    def backward(
        self,
        loss: Tensor,
        weight: float | Tensor | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """Add `weight` times the gradient of `loss` to the window; the end of the window divides by all weights.

        Collective unless inside `accumulate`, `no_sync` or all but the last of `microbatches`. Until the window ends
        `p.grad` holds this rank's undivided sum. After an error the gradients of this step are lost, and the model is
        unchanged.

        Wrapped parts of the module take part. If the loss goes through other wrapped models, too, call
        `evenstep.backward` with all of them.

        Args:
            loss: One number, the *mean* over `weight` samples (or tokens).
            weight: The number of samples or tokens over which the loss was averaged: a number, or a 0-dim tensor, which
                is not read on the host. If it is 0, the loss is ignored, even a NaN. None: 1, or 0 for an empty share.
            scaler: A `torch.amp.GradScaler`. It scales the loss, unless the loss already is a result of `scaler.scale`,
                or a sum of such results.
            retain_graph: As in `Tensor.backward`.
            create_graph: As in `Tensor.backward`.

        Raises:
            ConfigurationError: The loss isn't a single number, or has no gradient; the weight isn't a finite number of
                at least 0; the scaler isn't a GradScaler.
            UsageError: `loss.backward()` was called in this window; an empty share has a weight; some terms of the loss
                were scaled by the scaler, and others weren't; or the loss goes through another wrapped model.
        """
        _backward(self._with_parts, loss, weight, scaler=scaler, retain_graph=retain_graph, create_graph=create_graph)

    # ------------------------------------------------------------------ accumulation

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside only add to `p.grad`; the first one outside averages the sum over ranks.

        This also holds for wrapped parts of the module.
        """
        models = self._with_parts
        before = [model.engine.synchronise for model in models]
        _set_synchronise(models, [False] * len(models))
        try:
            yield
        finally:
            _set_synchronise(models, before)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """torch's name for `accumulate`."""
        return self.accumulate()

    def microbatches(self, batch: Batch, n: int = 1) -> Iterator[Batch]:
        """Iterate over a batch in parts; gradients are exchanged only in the last part.

        Example::

            for x, y in model.microbatches(batch, 4):
                model.backward(loss_of(model(x), y), weight=len(x))
            optimizer.step()

        Collective: every rank runs the loop to its end, once per step. An empty batch has no parts: the loop runs zero
        times, and this rank still takes part in the exchange when the loop ends. With a `SyncBatchNorm` in the model,
        which exchanges statistics in every part, all ranks get equally many parts, and some of them may be empty.

        In reproducible mode the parts are this rank's virtual ranks, and this loop is the only way to train: see
        docs/how-to/reproducible.md. In that mode `loss.backward()` is averaged over virtual ranks, as if each were a
        rank.

        Args:
            batch: A pytree of tensors [n_samples, ...], divided along the first dimension.
            n: Number of parts; fewer if there are fewer samples. In reproducible mode: number of parts of each virtual
                rank.

        Raises:
            ConfigurationError: `n` isn't a positive number, or the batch can't be divided.
            UsageError: The last part was not followed by a backward pass.
        """
        show_inputs(batch)  # before the split: the parts may be copies
        exchanging = self.sync_layers if self.sync_layers and self.training else None
        if self.world.virtual_ranks is not None:
            yield from loop.loop(batch, n, self.dim, self.engine, self.world, self._virtual_rank_buffers, exchanging)
            return
        parts = self._pad(split(batch, n, self.dim), batch)
        if exchanging and len(parts) > 1:
            self._warn_of_parts(len(parts))
        models = self._with_parts
        before = [model.engine.synchronise for model in models]
        num_reductions = self.engine.num_reductions
        completed = False
        try:
            for index, part in enumerate(parts):
                # Windows of wrapped parts end after the loop, in the same order on all ranks: a rank without
                # micro-batches doesn't know in which order the others' losses reach the parts.
                _set_synchronise(models, [before[0] and index == len(parts) - 1, *[False] * (len(models) - 1)])
                yield part
            completed = True
        finally:
            _set_synchronise(models, before)
            for model, ends in zip(models, before, strict=True):
                if ends and not completed:
                    model.engine.leave_early("a loop over micro-batches was left before its end")
        if before[0] and parts and self.engine.num_reductions == num_reductions:
            self.engine.leave_early("a loop over micro-batches ended without a backward pass for its last part")
            raise UsageError(
                f"microbatches on rank {self.world.rank}: the last part was not followed by a backward pass, so the "
                f"gradients have not been averaged. Call backward inside the loop, once per part."
            )
        if not parts:
            for model in models:
                if model._wrapped_already() is None:
                    model._follow_changes()  # together with the other ranks, which do it in their forward passes
        for model, ends in zip(models, before, strict=True):
            if ends and not (parts and model is self):
                model.engine.reduce_without_backward()

    def _pad(self, parts: list[Batch], batch: Batch) -> list[Batch]:
        """Give every rank equally many parts if ranks exchange statistics in each part. Collective in that case."""
        return self.sync_layers.pad(parts, batch, self.dim) if self.sync_layers and self.training else parts

    @property
    def skipped_steps(self) -> int:
        """Number of steps that were skipped because a gradient was not finite (`on_nonfinite="skip"`)."""
        return 0 if self.monitors.nonfinite is None else self.monitors.nonfinite.num_skipped

    def extra_repr(self) -> str:
        """The text added to the module's when this is printed."""
        return f"rank {self.world.rank}/{self.world.world_size}, {len(self.engine.buckets)} buckets"

    # ------------------------------------------------------------------ what torch calls it

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass averages; accelerate and Lightning set it."""
        return self.engine.synchronise

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        """Set by programs that control synchronisation themselves."""
        self.engine.synchronise = bool(value)

    @property
    def require_forward_param_sync(self) -> bool:
        """The same as `require_backward_grad_sync`: module buffers are synchronised with the gradients."""
        return self.engine.synchronise

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        """Ignored: torch's class overwrites it in every forward pass."""

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether module buffers are made equal at the end of every synchronised backward pass.

        May be set between two steps, to the same value on all ranks.
        """
        return self.settings.sync_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        """Set whether module buffers are made equal, from the next backward pass on."""
        checks.switches("", forward_sync_buffers=value)
        if not value and self.world.virtual_ranks is not None and self.modules_buffers:
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
        """The module buffers that are not ignored, by name."""
        return dict(self.settings.kept_buffers(self.module))

    broadcast_buffers = forward_sync_buffers  # the name in torch 2.11, which torch's later class accepts, too

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self.engine.has_learned_order

    def will_sync_module_buffers(self) -> bool:
        """Whether module buffers are made equal at the end of the next backward pass."""
        return self.settings.sync_buffers and self.engine.synchronise and bool(self.modules_buffers)

    def unused_parameters(self) -> list[str]:
        """Names of the parameters that had no gradient on any rank when gradients were last averaged."""
        return self.engine.unused_parameters()

    def _set_static_graph(self) -> None:
        """Only recorded: the engine doesn't assume that the graph stays the same."""
        self.static_graph = True

    def _register_buffer_comm_hook(self, state: object, hook: object, *_: object, **__: object) -> None:
        """Refuse a hook: module buffers are sent with the gradients, from rank 0.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "_register_buffer_comm_hook: module buffers are made equal with the gradients, from rank 0. Pass "
            "broadcast_buffers=False and exchange them yourself, such as in a forward hook of the module."
        )

    def _check_reducer_finalized(self) -> None:
        """Raise, as the next forward pass would, if a backward pass failed before its gradients were averaged.

        Raises:
            UsageError: A backward pass failed.
        """
        self.engine.begin_forward()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs don't pass through an extra node of the graph."""

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Do nothing: every step is measured.

        Raises:
            ConfigurationError: `sample_rate` is less than 1.
        """
        checks.whole("_set_ddp_runtime_logging_sample_rate: sample_rate", sample_rate, least=1)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """The entries that other programs read; the times are in `world.telemetry`."""
        hook = {"comm_hook": self._hook_name} if self._hook_name else {}
        joined = {"join_uneven_inputs": 1} if "_authoritative_rank" in self.__dict__ else {}  # once a `Join` has ended
        return {
            **hook,
            **joined,
            "has_rebuilt_buckets": int(self._has_rebuilt_buckets),
            "has_sync_bn": int(bool(self.sync_layers)),
        }

    # ------------------------------------------------------------------ communication hooks

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Average buckets over ranks by a hook instead of the transport: for compression, for example.

        torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) run unchanged. A hook averages. So with
        `backward(loss, weight=)` ranks first add up their weights, and each rank multiplies its gradients by the number
        of ranks, divided by that sum, before the hook gets them. So weights are exact, don't make 16-bit gradients
        overflow, and don't scale the state that a hook keeps between steps. In a world of one nothing is sent and the
        hook is not called.

        Args:
            state: Passed to every call; often a process group, or None for the default group.
            hook: Called with the state and a `GradBucket`-like bucket whose gradients are complete.

        Raises:
            ConfigurationError: The hook can't be called with these arguments.
            UsageError: There is a hook already.
        """
        # A wrapper around or inside this one may have set it.
        if self._hook_name or self.engine.exchange.hook is not None:
            raise UsageError("register_comm_hook: there is one already, and a model has at most one.")
        if self.world.virtual_ranks is not None:
            raise UsageError("register_comm_hook in reproducible mode: a hook adds gradients in its own order.")
        made = CommHook(state, hook)
        if self.world.world_size > 1:
            self.engine.exchange.set_hook(made)
        if self.monitors.drift is not None and hook not in AVERAGING:
            self.monitors.drift.doubt()
        self._hook_name = getattr(hook, "__qualname__", type(hook).__name__)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        name = str(comm_hook_type).rpartition(".")[2]
        if name not in _BUILTIN_HOOKS:
            raise checks.refuse("_register_builtin_comm_hook", comm_hook_type, f"one of {', '.join(_BUILTIN_HOOKS)}")
        self.register_comm_hook(self.process_group, _BUILTIN_HOOKS[name])
        self._hook_name = str(comm_hook_type)

    # ------------------------------------------------------------------ uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[Any]:
        """Context for a loop that some ranks leave earlier: these take part in the others' steps with weight zero.

            with model.join():
                for x, y in loader:
                    ...

        Collective: every rank enters and leaves. When the last rank has left its loop, all ranks get its parameters and
        module buffers, but not the state of its optimizers and schedulers: each rank keeps its own.

        Args:
            divide_by_initial_world_size: `loss.backward()` averages over all ranks; False: over the ranks that still
                have data. `model.backward(loss, weight=)` is the exact mean in either case.
            enable: False: the context does nothing.
            throw_on_early_termination: Raise a RuntimeError on every rank as soon as one has left its loop.
        """
        if self.world.virtual_ranks is not None:
            raise UsageError(
                "join in reproducible mode: every batch has virtual ranks for every rank, so no rank ends early. Leave "
                "it out."
            )
        if self.world.world_size == 1 or not enable:
            return contextlib.nullcontext()
        return join_of_one(
            self,
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook for torch's `Join`; takes the keyword `divide_by_initial_world_size`."""
        by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        steps = self.monitors.steps
        is_due = self._was_uneven and self.world.is_main and not self._has_warned_of_join
        if is_due and steps is not None and steps.has_stateful_optimizer():
            self._has_warned_of_join = True
            warn(
                "join: in an earlier one ranks made different numbers of steps. Parameters were made equal at its end, "
                "but each rank has its own optimizer state (momenta, numbers of steps) and schedulers, so that ranks "
                "now take different steps. Give all ranks equally many batches (evenstep.DataLoader), some of them "
                "empty, so that you need no join; or make optimizers and schedulers anew. This warning comes once."
            )
        return Uneven(self, by_all)

    @property
    def process_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        """The group over which gradients are averaged, as torch's class calls it; None in a world of one."""
        return self.world.process_group

    @property
    def join_device(self) -> torch.device:
        """The device on which `Join` keeps its counters."""
        device: torch.device = self._module_parameters[0].device
        return device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """The group in which `Join` counts ranks."""
        return self.process_group

    def _take_part_without_data(self) -> None:
        """Take part in the end of the other ranks' window without contributing.

        An optimizer in the same `Join` steps then.
        """
        self._drop_gradients()
        # Do this before the statistics: an active rank agrees on the scale of weights between its forward and its
        # backward pass. It would wait there for this rank, and this rank for the gradients of that rank's statistics.
        self.engine.exchange.scale.start_agreement()
        self.sync_layers.shadow()
        self.engine.reduce_without_backward()

    def _warn_of_parts(self, num_parts: int) -> None:
        if self._has_warned_of_parts or self.world.world_size == 1 or not self.world.is_main:
            return
        self._has_warned_of_parts = True
        warn(
            f"microbatches with SyncBatchNorm: {num_parts} parts are normalised one after the other, each over all "
            f"ranks. Which samples are in the same part depends on the numbers of ranks and of parts, so the result "
            f"isn't that of one process. If it has to be, pass n=1, or use another normalisation (GroupNorm). This "
            f"warning comes once."
        )

    def _drop_gradients(self) -> None:
        drop_grads(self.engine.parameters)

    def _set_uneven(self, uneven: Uneven | None) -> None:
        self.engine.exchange.set_uneven(uneven)

    @property
    def peers(self) -> Peers | None:
        """The ranks over which `LocalSGD` averages parameters; None if replicas can't step independently."""
        return Peers(self.world, self.engine.control, self.engine.transport, self.world.rank)

    def _kept_tensors(self) -> list[Tensor]:
        buffers = [buffer for _, buffer in self.settings.equal_buffers(self.module, is_on=True)]
        return [*(parameter.data for parameter in self._module_parameters), *buffers]

    # ------------------------------------------------------------------ pickling

    def __getstate__(self) -> dict[str, Any]:
        """The module and the settings; the process that loads these looks up its own world."""
        if self.process_group is not None and self.process_group is not dist.group.WORLD:
            raise UsageError(
                "only a module that is replicated over all ranks can be pickled or copied; save "
                "its state_dict, or `.module`."
            )
        without = {
            "world",
            "engine",
            "monitors",
            "sync_layers",
            "_virtual_rank_buffers",
            "reducer",
            "_frozen",
            "_join_config",
            "_backends",
        }
        return {name: value for name, value in self.__dict__.items() if name not in without}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        # A rank may make a copy without the others, so no collective is possible here: the copy shares the world's own
        # transport.
        world = worlds.current()
        self._set_up(world, state["settings"], world.transport, is_copy=True)


def _set_synchronise(models: Sequence[DistributedDataParallel], values: Sequence[bool]) -> None:
    """Set whether the next backward pass ends each model's window.

    Takes models, not engines: a forward pass may have laid a model out again, with another engine.
    """
    for model, value in zip(models, values, strict=True):
        model.engine.synchronise = value


def backward(
    models: Sequence[DistributedDataParallel],
    loss: Tensor,
    weight: float | Tensor | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> None:
    """Run one backward pass through several wrapped models, such as an encoder and a decoder.

    Every model's window gets `weight` times the gradient of `loss`. For one model this is
    `DistributedDataParallel.backward`. Each model has its own window: `no_sync`, `accumulate` and `microbatches` of one
    model don't delay another's gradients. Collective unless all models accumulate. After an error the gradients of this
    step are lost, and the models are unchanged.

    Args:
        models: All wrapped models through which the loss goes, or whose parameters it uses, in the same order on all
            ranks. Name a model with 16-bit gradients first, because large weights could make these overflow. If the
            models span different ranks, name the model with the most ranks first.
        loss: One number, the *mean* over `weight` samples (or tokens).
        weight: The number of samples or tokens over which the loss was averaged; see
            `DistributedDataParallel.backward`.
        scaler: See `DistributedDataParallel.backward`.
        retain_graph: As in `Tensor.backward`.
        create_graph: As in `Tensor.backward`.

    Raises:
        ConfigurationError: A model isn't wrapped, or is named twice; also as in `DistributedDataParallel.backward`.
        UsageError: The loss goes through a wrapped model that isn't named; also as in
            `DistributedDataParallel.backward`.
    """
    listed = list(models) if isinstance(models, Sequence) else [models]
    rank = next((each.world.rank for each in listed if isinstance(each, DistributedDataParallel)), 0)
    wrong = next((each for each in listed if not isinstance(each, DistributedDataParallel)), None)
    if not listed or wrong is not None or len({id(each) for each in listed}) < len(listed):
        wanted = "a list of wrapped models (evenstep.DistributedDataParallel), each of them once"
        raise checks.refuse(f"backward on rank {rank}: models", listed if wrong is None else wrong, wanted)
    _backward(listed, loss, weight, scaler=scaler, retain_graph=retain_graph, create_graph=create_graph)


def _backward(
    models: Sequence[DistributedDataParallel],
    loss: Tensor,
    weight: float | Tensor | None,
    *,
    scaler: torch.amp.GradScaler | None,
    retain_graph: bool | None,
    create_graph: bool,
) -> None:
    rank = models[0].world.rank
    engines = [each.engine for each in models]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"{list(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
        raise ConfigurationError(
            f"backward on rank {rank}: the loss is {found}, not a tensor of one number. Pass the criterion's result: "
            f"the mean over this rank's samples."
        )
    if loss.grad_fn is None and not loss.requires_grad:
        raise ConfigurationError(
            f"backward on rank {rank}: the loss has no gradient: it was computed under torch.no_grad(), "
            f"was detached, or depends on nothing that is trained."
        )
    if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
        wanted = "a torch.amp.GradScaler, or None"
        raise checks.refuse(f"backward on rank {rank}: scaler", scaler, wanted)
    only_dummies = [engine.is_over_dummies(loss) for engine in engines]
    empty = any(only_dummies)
    checked = validate_weight((0.0 if empty else 1.0) if weight is None else weight, rank=rank)
    if empty and isinstance(checked, float) and checked > 0:
        raise UsageError(
            f"backward on rank {rank}: weight={checked} for an empty share. Pass what the loss was "
            f"averaged over, weight=len(x) for example, which is 0 here."
        )
    if scaler is not None and scaler.is_enabled() and not is_scaled(loss, scaler, rank=rank):
        loss = scaler.scale(loss)
    has_scaler = scaler is not None and scaler.is_enabled()
    passes = weighted_passes(engines, checked, only_dummies=only_dummies, dtype=loss.dtype, is_scaled=has_scaler)
    with passes as scale:
        if isinstance(checked, Tensor):
            share = (checked.to(loss.device) / scale).to(loss.dtype).reshape(loss.shape)
        else:
            share = loss.new_full(loss.shape, checked / scale)
            if loss.dtype is torch.float16 and checked / scale > torch.finfo(torch.float16).max:
                raise ConfigurationError(
                    f"backward on rank {rank}: a float16 loss can't be multiplied by weight={checked:g}. Compute the "
                    f"loss in float32: criterion(outputs.float(), targets)."
                )
        torch.autograd.backward(loss, share, retain_graph=retain_graph, create_graph=create_graph)


def is_scaled(loss: Tensor, scaler: torch.amp.GradScaler, *, rank: int) -> bool:
    """Whether a loss is a result of `scaler.scale`, or a sum of such results, perhaps divided or multiplied afterwards.

    Raises:
        UsageError: The loss is a sum in which some terms with a gradient were scaled and others weren't.
    """
    scale = getattr(scaler, "_scale", None)
    found: set[bool] = set()
    pending: list[Any] = [loss.grad_fn]
    for _ in range(_MOST_NODES):
        if scale is None or not pending:
            break
        node = pending.pop()
        name = None if node is None else node.name()
        if name == "MulBackward0" and _is_by(node, scale):
            found.add(True)
        elif name in _SUMS:
            pending += [each for each, _ in node.next_functions if each is not None]  # None: a constant
        elif name in _PRODUCTS:
            pending.append(next((each for each, _ in node.next_functions if each is not None), None))
        else:
            found.add(False)
    if len(found) > 1:
        raise UsageError(
            f"backward on rank {rank}: some terms of the loss were scaled by scaler.scale and others weren't, so the "
            f"scaled ones would count {scaler.get_scale():g} times as much. Add the unscaled terms first (loss = loss "
            f"+ penalty) and pass the sum to model.backward(loss, scaler=scaler), which scales it."
        )
    return found == {True}


def _is_by(node: Any, scale: Tensor) -> bool:
    """Whether the other factor of a product is the scaler's scale."""
    # Don't read `_saved_other`: it would recompute tensors that an activation checkpoint has dropped.
    other = getattr(getattr(node, "_raw_saved_other", None), "data", None)
    return isinstance(other, Tensor) and other.data_ptr() == scale.data_ptr()


def _watch_registrations() -> int:
    """Make torch count registrations from now on; return the count so far."""
    if not _registration_hooks:
        _registration_hooks.append(register_module_parameter_registration_hook(_count_registration))
        _registration_hooks.append(register_module_module_registration_hook(_count_registration))
    return _num_registered


def _count_registration(*_: object) -> None:
    global _num_registered
    _num_registered += 1


@untraced
def _compilation_is_in_use() -> bool:
    """Whether anything was or will be compiled: then torch.compile must know which module runs.

    Naming the running module sets an attribute of torch's class. That costs 5 microseconds, because it
    invalidates python's attribute caches for the class and its subclasses.
    """
    if keep_out_of_graphs():
        mark_compilations()
    return any_compiled()
