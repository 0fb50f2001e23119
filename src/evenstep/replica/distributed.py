"""The class that users see: a module whose replicas on all ranks take the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from sys import modules
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils import _pytree as pytree

from evenstep import checks, randomness
from evenstep import world as worlds
from evenstep.errors import ConfigurationError, UsageError
from evenstep.health import page
from evenstep.replica import lane_loop, registrations
from evenstep.replica.agreement import validate_same_model
from evenstep.replica.batches import StandIn, batch_length, split
from evenstep.replica.channels import bucket_transport
from evenstep.replica.mixed_precision import LowPrecision
from evenstep.replica.module_buffers import finish_broadcast, start_broadcast, untouched
from evenstep.replica.nonfinite import Policy
from evenstep.replica.scaled import is_scaled as is_scaled_already
from evenstep.replica.settings import group_of, settle
from evenstep.replica.sync_batchnorm import replace_torchs
from evenstep.replica.torch_interface import TorchInterface, compilation_is_in_use, compiled_backends
from evenstep.replica.weighting import validate_weight
from evenstep.world import World

Batch = TypeVar("Batch")


class DistributedDataParallel(TorchInterface):
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

    Unlike torch's class: parameters that receive no gradient need no flag; whether gradients travel is decided by the
    state at *backward* and not at forward; module buffers are made equal at the end of a synchronised backward pass
    (with the gradients) and not at the beginning of the next forward; an empty batch is allowed.

    It derives from torch's class and has its interface (`torch_interface`): docs/ddp-compatibility.md has a line for
    each of torch's arguments and methods.

    Args:
        module: The model. Moved to `world.device` if `evenstep.init` made the world and `device_ids` isn't given.
        device_ids: None, or the one GPU where the module already is; inputs are moved there.
        output_device: As `device_ids`.
        dim: The batch dimension of inputs and outputs.
        broadcast_buffers: Keep module buffers equal to rank 0's; None: True.
        init_sync: Compare the models of all ranks and make them equal at the start.
        process_group: Average over this group's ranks only.
        bucket_cap_mb: Size of a bucket in MiB; None: 25.
        find_unused_parameters: Accepted and ignored: unused parameters need no flag.
        check_reduction: Accepted and ignored, as torch does.
        gradient_as_bucket_view: Accepted and ignored: gradients always are views of their bucket.
        static_graph: Accepted and ignored: nothing is assumed of the graph.
        delay_all_reduce_named_params: Accepted and checked: a bucket goes when its gradients are there.
        param_to_hook_all_reduce: As `delay_all_reduce_named_params`.
        mixed_precision: torch's `_MixedPrecision`.
        device_mesh: The one-dimensional mesh along which the model is replicated, instead of `process_group`.
        skip_all_reduce_unused_params: Accepted and ignored.
        bucket_cap_mb_list: Sizes of the first bucket, the second, ... in MiB; the last is that of all that follow.
        batched_grad_copy: Accepted and ignored: copies always are batched.
        forward_sync_buffers: torch 2.13's name for `broadcast_buffers`; buffers are made equal at the start in any
            case.
        first_bucket_cap_mb: Size of the first bucket in MiB; None: 1, or `bucket_cap_mb` if that is smaller.
        reduce_dtype: The dtype in which gradients are added over ranks and divided, such as float32 where parameters
            have 16 bits; None: that of the parameters. `p.grad` keeps the parameters' dtype.
        on_nonfinite: What happens when a gradient is infinite or not a number on some rank, unless its loss was scaled
            by the `scaler` of `backward`. "warn": rank and parameter are said once, on CPUs (on GPUs as None), and not
            where a GradScaler is in use; "skip": every `p.grad` becomes None on all ranks, with a warning that names
            rank and parameter, and `skipped_steps` counts; "raise": a NonFiniteError on every rank; None: as torch.
        compare_every: In so many synchronised backward passes every trained parameter is compared between ranks once,
            some in each; where one isn't the same, a DriftError on every rank. None: 64, as long as ranks are surely
            meant to have the same (see docs/faults.md); a number: always; 0: never.
        world: Who takes part; None: the current world.

    Raises:
        MismatchError: The ranks' models or arguments differ; raised on every rank with the first difference.
        ConfigurationError: An argument is wrong, or nothing in the module is trained. Raised on every rank.
    """

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
        delay_all_reduce_named_params: Iterable[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: _MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        first_bucket_cap_mb: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        on_nonfinite: Policy | None = "warn",
        compare_every: int | None = None,
        world: World | None = None,
    ) -> None:
        nn.Module.__init__(self)
        group = group_of(process_group, device_mesh, module)
        everybody = worlds.chosen(world, "DistributedDataParallel")
        world = everybody.of_group(group)
        settings = settle(
            world,
            module,
            dim=dim,
            devices=(device_ids, output_device),
            buffers=(broadcast_buffers, forward_sync_buffers),
            buckets=(bucket_cap_mb, first_bucket_cap_mb, bucket_cap_mb_list),
            delayed=(delay_all_reduce_named_params, param_to_hook_all_reduce),
            init_sync=init_sync,
            on_nonfinite=on_nonfinite,
            compare_every=compare_every,
            mixed_precision=mixed_precision,
            reduce_dtype=reduce_dtype,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
        )
        if everybody.lanes is not None:
            per_rank = everybody.lanes.per_rank
            lane_loop.validate_model(module, settings, is_of_group=world is not everybody, lanes_per_rank=per_rank)
        if world.is_initialised and device_ids is None:
            module.to(world.device)
        self.module = module = replace_torchs(module)
        self.dim = settings.dim
        self.device = next(p for _, p in settings.kept(module)).device
        self.device_type = self.device.type
        self.device_ids = None if settings.inputs_to is None else [settings.inputs_to.index]
        self.output_device = None if settings.inputs_to is None else settings.inputs_to.index
        # Remembered for those who ask; nothing depends on them.
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = mixed_precision
        if settings.init_sync:
            buffers = settings.kept_buffers(module) if settings.init_sync_buffers else []
            validate_same_model(settings.kept(module), buffers, world)
            tensors = [*(p.data for _, p in settings.kept(module)), *(buffer for _, buffer in buffers)]
            finish_broadcast(start_broadcast(tensors, world.transport))
        self._set_up(world, settings, bucket_transport(world, self))
        self._stand_in = StandIn(self.dim)
        self._low_precision = None
        if mixed_precision is not None:
            self._low_precision = LowPrecision(module, mixed_precision)
            hook = self._low_precision.comm_hook
            if hook is not None:
                self.register_comm_hook(self.process_group, hook)

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's share of the batch.

        An empty share (the first tensor has length 0) is allowed: the module runs on one remembered sample, module
        buffers and random streams are restored, and the outputs have length 0. Its gradients count for nothing.

        Raises:
            UsageError: The replicas are no longer in step (an earlier backward pass failed), or a parameter that was
                frozen when the model was wrapped is trained now.
        """
        # Has anything been imported or compiled? First, because torch.compile is not to trace what follows.
        if len(modules) != self._num_modules or len(self._backends) != self._num_backends:
            return self._forward_with_care(inputs, kwargs)
        first = inputs[0] if inputs else None
        if not (
            isinstance(first, Tensor)
            and first.numel() > 0
            and first.dim() > self.dim >= 0
            and torch.is_grad_enabled()
            and registrations.counted == self._num_registrations
            and self.world.has_diverged
        ):
            return self._forward_with_care(inputs, kwargs)
        # The usual case: whatever it asks for costs a small model more than it computes meanwhile, because torch's work
        # has driven it out of the processor's caches. See `_settle`.
        engine = self.engine
        engine.begin_forward()
        began_ns = perf_counter_ns()
        if page.current is not None:
            page.mark(page.Phase.FORWARD)
        outputs = self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]  # not by way of `__getattr__`
        engine.end_forward(outputs, began_ns, over_stand_in=False)
        return outputs

    def _forward_with_care(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_compiled = compilation_is_in_use()
        engine = self.engine
        with_grad = torch.is_grad_enabled()
        if with_grad:
            engine.begin_forward()
            self._validate_parameters()
            if self.training:
                if not self.world.has_diverged:
                    self.world.diverge_random_streams()
                if engine.lanes is not None:
                    engine.lanes.validate_open("the model was called in training")
        began_ns = perf_counter_ns()
        page.mark(page.Phase.FORWARD if with_grad else page.Phase.EVALUATING)
        if self.settings.inputs_to is not None:
            inputs, kwargs = pytree.tree_map_only(Tensor, self._moved, (inputs, kwargs))
        # The usual case is told apart without flattening a nest: a call of 10 microseconds.
        first = inputs[0] if inputs else None
        has_rows = isinstance(first, Tensor) and first.numel() > 0 and first.dim() > self.dim >= 0
        is_empty = not has_rows and batch_length((inputs, kwargs), self.dim) == 0
        if not (is_empty or self._stand_in.has_sample):
            self._stand_in.remember((inputs, kwargs))
        if is_empty or self.sync_layers.layers or self._low_precision is not None or is_compiled:
            run = self._forward_stand_in if is_empty else self._run_module
            with self._seen_by_dynamo() if is_compiled else contextlib.nullcontext():
                outputs = run(inputs, kwargs)
        else:
            outputs = self.module(*inputs, **kwargs)
        if with_grad:  # passes of an evaluation are no part of a step
            engine.end_forward(outputs, began_ns, over_stand_in=is_empty)
        self._settle()
        return outputs

    def _settle(self) -> None:
        """Note that calls may take the short way from now on, if nothing asks for more; see `_num_modules`."""
        asks_for_care = (
            self._frozen
            or self.sync_layers.layers
            or self._low_precision is not None
            or self.settings.inputs_to is not None
            or self.engine.lanes is not None
            or not self._stand_in.has_sample
        )
        if not (asks_for_care or compilation_is_in_use()):
            self._backends = compiled_backends()
            self._num_modules, self._num_backends = len(modules), len(self._backends)

    def _run_module(self, inputs: Any, kwargs: Any, *, over_stand_in: bool = False) -> Any:
        exchanging = self.sync_layers.forward_pass(over_stand_in=over_stand_in)
        with exchanging if self.sync_layers.layers else contextlib.nullcontext():
            if self._low_precision is None:
                return self.module(*inputs, **kwargs)
            return self._low_precision.run(self.module, inputs, kwargs)

    def _forward_stand_in(self, inputs: Any, kwargs: Any) -> Any:
        inputs, kwargs = self._stand_in.build((inputs, kwargs))
        with randomness.preserved(), untouched(self.module, but=self.sync_layers.buffers()):
            outputs = self._run_module(inputs, kwargs, over_stand_in=True)
        return self._stand_in.empty_outputs(outputs)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.settings.inputs_to, non_blocking=True)

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
        `p.grad` holds this rank's undivided sum. After an error the gradients of this step are lost; the model is as
        before it.

        Another wrapped model that the loss goes through takes part with the same weight; its window is its own
        (`no_sync`, `accumulate` and `microbatches` of this model don't hold back the other's gradients).

        Args:
            loss: One number, the *mean* over `weight` samples (or tokens).
            weight: What the loss was averaged over: a number, or a 0-dim tensor, which is not read on the host. With
                0 the loss is ignored, even if it is NaN. None: 1, or 0 for an empty share.
            scaler: A `torch.amp.GradScaler`: the loss is scaled by it, unless it is a product of `scaler.scale`
                already, or a sum of such.
            retain_graph: As in `Tensor.backward`.
            create_graph: As in `Tensor.backward`.

        Raises:
            ConfigurationError: The loss is no single number, or has no gradient; the weight is no finite number of at
                least 0; the scaler is none.
            UsageError: `loss.backward()` was called in this window; an empty share has a weight; of the terms of the
                loss some were scaled by the scaler, and others not.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"{list(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
            raise ConfigurationError(
                f"backward on rank {self.world.rank}: the loss is {found}, not a tensor of one number. Pass what the "
                f"criterion returned: the mean over this rank's samples."
            )
        if loss.grad_fn is None and not loss.requires_grad:
            raise ConfigurationError(
                f"backward on rank {self.world.rank}: the loss has no gradient: it was computed under torch.no_grad(), "
                f"was detached, or depends on nothing that is trained."
            )
        if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
            wanted = "a torch.amp.GradScaler, or None"
            raise checks.refuse(f"backward on rank {self.world.rank}: scaler", scaler, wanted)
        empty = self.engine.only_stand_ins
        checked = validate_weight((0.0 if empty else 1.0) if weight is None else weight, rank=self.world.rank)
        if empty and isinstance(checked, float) and checked > 0:
            raise UsageError(
                f"backward on rank {self.world.rank}: weight={checked} for an empty share. Pass what the loss was "
                f"averaged over, weight=len(x) for example, which is 0 here."
            )
        if scaler is not None and scaler.is_enabled() and not is_scaled_already(loss, scaler, rank=self.world.rank):
            loss = scaler.scale(loss)
        is_scaled = scaler is not None and scaler.is_enabled()
        with self.engine.weighted_pass(checked, is_scaled=is_scaled) as scale:
            if isinstance(checked, Tensor):
                share = (checked.to(loss.device, torch.float64) / scale).to(loss.dtype).reshape(loss.shape)
            else:
                share = loss.new_full(loss.shape, checked / scale)
            torch.autograd.backward(loss, share, retain_graph=retain_graph, create_graph=create_graph)

    # ------------------------------------------------------------------ accumulation

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside only add to `p.grad`; the first one outside averages the sum over ranks."""
        before = self.engine.synchronise
        self.engine.synchronise = False
        try:
            yield
        finally:
            self.engine.synchronise = before

    def no_sync(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """torch's name for `accumulate`."""
        return self.accumulate()

    def microbatches(self, batch: Batch, n: int = 1) -> Iterator[Batch]:
        """Iterate over a batch in parts; communication is held back on all but the last.

            for x, y in model.microbatches(batch, 4):
                model.backward(loss_of(model(x), y), weight=len(x))
            optimizer.step()

        Collective: every rank runs the loop to its end, once per step. An empty batch has no parts, so the loop runs
        zero times, and its end takes part in the exchange all the same. With a `SyncBatchNorm` in the model, which
        exchanges statistics in every part, all ranks get equally many parts, and some of them may be empty.

        In reproducible mode the parts are this rank's lanes, and training has no other way: see docs/reproducible.md.
        There `loss.backward()` is averaged over lanes, as over so many ranks.

        Args:
            batch: A nest of tensors [n_samples, ...], divided along the first dimension.
            n: Number of parts; fewer if there are fewer samples. In reproducible mode: of each lane.

        Raises:
            ConfigurationError: `n` is no positive number, or the batch can't be divided.
            UsageError: The last part was not followed by a backward pass.
        """
        exchanging = self.sync_layers if self.sync_layers and self.training else None
        if self.engine.lanes is not None:
            yield from lane_loop.loop(batch, n, self.dim, self.engine, self.world, self._lane_buffers, exchanging)
            return
        parts = split(batch, n, self.dim)
        if exchanging is not None:
            parts = exchanging.pad(parts, batch, self.dim)
        before = self.engine.synchronise
        num_reductions = self.engine.num_reductions
        completed = False
        try:
            for index, part in enumerate(parts):
                self.engine.synchronise = before and index == len(parts) - 1
                yield part
            completed = True
        finally:
            self.engine.synchronise = before
            if before and not completed:
                self.engine.leave_early("a loop over micro-batches was left before its end")
        if before and not parts:
            self.engine.reduce_without_backward()
        elif before and self.engine.num_reductions == num_reductions:
            self.engine.leave_early("a loop over micro-batches ended without a backward pass for its last part")
            raise UsageError(
                f"microbatches on rank {self.world.rank}: the last part was not followed by a backward pass, so the "
                f"gradients have not been averaged. Call backward inside the loop, once per part."
            )

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped because a gradient was not finite (`on_nonfinite="skip"`)."""
        return 0 if self.engine.guard is None else self.engine.guard.num_skipped

    def extra_repr(self) -> str:
        """What stands beside the module when this is printed."""
        return f"rank {self.world.rank}/{self.world.world_size}, {len(self.engine.buckets)} buckets"
