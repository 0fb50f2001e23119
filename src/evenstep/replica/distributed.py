"""The class that users see: a module whose replicas on all ranks take the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from evenstep import randomness
from evenstep import world as worlds
from evenstep.errors import ConfigurationError, UsageError
from evenstep.replica.agreement import validate_same_model
from evenstep.replica.batches import StandIn, batch_length, split
from evenstep.replica.engine import Engine
from evenstep.replica.layout import DEFAULT_BUCKET_BYTES, DEFAULT_FIRST_BUCKET_BYTES, BucketPolicy
from evenstep.replica.module_buffers import finish_broadcast, start_broadcast, untouched
from evenstep.replica.sync_batchnorm import replace_torchs
from evenstep.replica.sync_layers import SyncLayers
from evenstep.replica.weighting import validate_weight
from evenstep.world import World

Batch = TypeVar("Batch")


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

    Unlike torch's class: parameters that receive no gradient need no flag; whether gradients travel is decided by the
    state at *backward* and not at forward; module buffers are made equal at the end of a synchronised backward pass
    (with the gradients) and not at the beginning of the next forward; an empty batch is allowed.

    It derives from torch's class, because torch asks `isinstance` in its checkpoint and compile code; none of that
    class's machinery is set up.

    Args:
        module: The model. Moved to `world.device` if `evenstep.init` made the world and `device_ids` isn't given.
        device_ids: None, or the one device where the module already is.
        output_device: As `device_ids`.
        dim: The batch dimension; 0.
        broadcast_buffers: Keep module buffers equal to rank 0's.
        init_sync: Compare the models of all ranks and make them equal at the start.
        process_group: None. Sub-groups are not supported by this version.
        bucket_cap_mb: Size of a bucket in MiB; None: 25.
        find_unused_parameters: Accepted and ignored: unused parameters need no flag.
        check_reduction: Accepted and ignored, as torch does.
        gradient_as_bucket_view: Accepted and ignored: gradients always are views of their bucket.
        static_graph: Accepted and ignored.
        first_bucket_cap_mb: Size of the first bucket in MiB; None: 1, or `bucket_cap_mb` if that is smaller.
        world: Who takes part; None: the current world.

    Raises:
        MismatchError: The ranks' models differ; raised on every rank with the first difference.
        ConfigurationError: An argument is wrong, or nothing in the module is trained.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        first_bucket_cap_mb: float | None = None,
        world: World | None = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        world = worlds.current() if world is None else world
        _validate_arguments(module, device_ids, output_device, dim, process_group)
        policy = _bucket_policy(bucket_cap_mb, first_bucket_cap_mb)
        if world.is_initialised and device_ids is None:
            module.to(world.device)
        self.module = module = replace_torchs(module)
        self.world = world
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.device = next(module.parameters()).device
        if init_sync:
            validate_same_model(module, world)
            tensors = [parameter.data for parameter in module.parameters()]
            if broadcast_buffers:
                tensors.extend(module.buffers())
            finish_broadcast(start_broadcast(tensors, world.transport))
        self.engine = Engine(module, world, policy, broadcast_buffers=broadcast_buffers)
        self.sync_layers = SyncLayers(module, world, self.engine.contribution)
        self.engine.shares_statistics = bool(self.sync_layers)
        self._frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._stand_in = StandIn()

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's share of the batch.

        An empty share (the first tensor has length 0) is allowed: the module runs on one remembered sample, module
        buffers and random streams are restored, and the outputs have length 0. Its gradients count for nothing.

        Raises:
            UsageError: The replicas are no longer in step (an earlier backward pass failed), or a parameter that was
                frozen when the model was wrapped is trained now.
        """
        if torch.is_grad_enabled():
            self.engine.begin_forward()
            self._validate_frozen()
            if self.training:
                self.world.diverge_random_streams()
        # The usual case is told apart without flattening a nest: a call of 10 microseconds.
        first = inputs[0] if inputs else None
        has_rows = isinstance(first, Tensor) and first.dim() > 0 and first.shape[0] > 0
        is_empty = not has_rows and batch_length((inputs, kwargs)) == 0
        if is_empty:
            outputs = self._forward_stand_in(inputs, kwargs)
        else:
            if not self._stand_in.has_sample:
                self._stand_in.remember((inputs, kwargs))
            if self.sync_layers:
                with self.sync_layers.forward_pass(over_stand_in=False):
                    outputs = self.module(*inputs, **kwargs)
            else:
                outputs = self.module(*inputs, **kwargs)
        if torch.is_grad_enabled():
            self.engine.watch_outputs(outputs, over_stand_in=is_empty)
        return outputs

    def _forward_stand_in(self, inputs: Any, kwargs: Any) -> Any:
        inputs, kwargs = self._stand_in.build((inputs, kwargs))
        with (
            randomness.preserved(),
            untouched(self.module, but=self.sync_layers.buffers()),
            self.sync_layers.forward_pass(over_stand_in=True),
        ):
            outputs = self.module(*inputs, **kwargs)
        return StandIn.empty_outputs(outputs)

    def _validate_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name!r} was frozen when the model was wrapped and is trained now; its gradient would "
                    f"not be averaged. Unfreeze it before wrapping, or wrap the module again."
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
        `p.grad` holds this rank's undivided sum. After an error the gradients of this step are lost; the model is as
        before it.

        Args:
            loss: One number, the *mean* over `weight` samples (or tokens).
            weight: What the loss was averaged over: a number, or a 0-dim tensor, which is not read on the host. With
                0 the loss is ignored, even if it is NaN. None: 1, or 0 for an empty share.
            scaler: A `torch.amp.GradScaler`: the loss is scaled by it, unless it is a product of `scaler.scale`
                already.
            retain_graph: As in `Tensor.backward`.
            create_graph: As in `Tensor.backward`.

        Raises:
            ConfigurationError: The loss is no single number, or the weight is no finite number of at least 0.
            UsageError: `loss.backward()` was called in this window; an empty share has a weight.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigurationError(f"backward on rank {self.world.rank}: the loss is {shape}, not one number.")
        empty = self.engine.only_stand_ins
        checked = validate_weight((0.0 if empty else 1.0) if weight is None else weight, rank=self.world.rank)
        if empty and isinstance(checked, float) and checked > 0:
            raise UsageError(
                f"backward on rank {self.world.rank}: weight={checked} for an empty share. Pass what the loss was "
                f"averaged over, weight=len(x) for example, which is 0 here."
            )
        if scaler is not None and scaler.is_enabled() and not _is_scaled(loss, scaler):
            loss = scaler.scale(loss)
        with self.engine.weighted_pass(checked) as scale:
            share = torch.as_tensor(checked, dtype=torch.float64, device=loss.device) / scale
            torch.autograd.backward(
                loss, share.to(loss.dtype).reshape(loss.shape), retain_graph=retain_graph, create_graph=create_graph
            )

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

    def microbatches(self, batch: Batch, n: int) -> Iterator[Batch]:
        """Iterate over a batch in parts; communication is held back on all but the last.

            for x, y in model.microbatches(batch, 4):
                model.backward(loss_of(model(x), y), weight=len(x))
            optimizer.step()

        Collective: every rank runs the loop to its end, once per step. An empty batch has no parts, so the loop runs
        zero times, and its end takes part in the exchange all the same. With a `SyncBatchNorm` in the model, which
        exchanges statistics in every part, all ranks get equally many parts, and some of them may be empty.

        Args:
            batch: A nest of tensors [n_samples, ...], divided along the first dimension.
            n: Number of parts; fewer if there are fewer samples.

        Raises:
            ConfigurationError: `n` is no positive number, or the batch can't be divided.
            UsageError: The last part was not followed by a backward pass.
        """
        parts = split(batch, n)
        if self.sync_layers and self.training:
            parts = self.sync_layers.pad(parts, batch)
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

    # ------------------------------------------------------------------ torch's interface that this version lacks

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "this method of torch's DistributedDataParallel is not part of this version of evenstep; "
            "see docs/architecture.md for what is."
        )

    join = register_comm_hook = register_join_hook = join_hook = _refuse
    _register_builtin_comm_hook = _register_fused_optim = _set_static_graph = _refuse
    _get_ddp_logging_data = __getstate__ = _refuse

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """As `nn.Module.train`."""
        nn.Module.train(self, mode)
        return self

    def extra_repr(self) -> str:
        """What stands beside the module when this is printed."""
        return f"rank {self.world.rank}/{self.world.world_size}, {len(self.engine.buckets)} buckets"


def _validate_arguments(
    module: nn.Module,
    device_ids: list[int | torch.device] | None,
    output_device: int | torch.device | None,
    dim: int,
    process_group: dist.ProcessGroup | None,
) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"DistributedDataParallel wraps a torch.nn.Module, not a {type(module).__name__}.")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigurationError(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to keep in step; "
            f"use the module as it is."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ConfigurationError(f"device_ids={device_ids}: one process drives one device; pass at most one.")
    if dim != 0:
        raise ConfigurationError(f"dim={dim}: this version divides batches along dimension 0.")
    if process_group is not None:
        raise ConfigurationError("process_group: this version averages over all ranks; pass None.")
    if device_ids or output_device is not None:
        devices = {parameter.device for parameter in module.parameters()}
        asked = device_ids[0] if device_ids else output_device
        index = asked.index if isinstance(asked, torch.device) else asked
        if any(device.type == "cpu" or device.index != index for device in devices):
            found = ", ".join(sorted(map(str, devices)))
            raise ConfigurationError(
                f"device_ids={device_ids}, output_device={output_device}, but the module is on {found}. Move it there "
                f"first, or leave both out."
            )


def _bucket_policy(bucket_cap_mb: float | None, first_bucket_cap_mb: float | None) -> BucketPolicy:
    cap = DEFAULT_BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * (1 << 20))
    if first_bucket_cap_mb is None:
        return BucketPolicy(min(cap, DEFAULT_FIRST_BUCKET_BYTES), cap)
    return BucketPolicy(int(first_bucket_cap_mb * (1 << 20)), cap)


def _is_scaled(loss: Tensor, scaler: torch.amp.GradScaler) -> bool:
    """Whether a loss is a product of `scaler.scale`, perhaps divided or multiplied afterwards."""
    scale = getattr(scaler, "_scale", None)
    node: Any = loss.grad_fn
    for _ in range(16):
        if scale is None or node is None:
            return False
        if node.name() == "MulBackward0":
            other = getattr(node, "_saved_other", None)
            if isinstance(other, Tensor) and other.data_ptr() == scale.data_ptr():
                return True
        if node.name() not in ("MulBackward0", "DivBackward0", "ToCopyBackward0"):
            return False
        node = node.next_functions[0][0]
    return False
