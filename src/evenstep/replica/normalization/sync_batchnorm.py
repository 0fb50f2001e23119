"""Batch normalisation over the rows of all ranks: the result of one process on the whole batch.

[Note: what is exchanged]

    forward    each rank sends (count, mean, M2) per channel, M2 being the sum of squared distances from its own mean;
               all ranks combine them in order of rank with the formula of Chan, Golub and LeVeque ("Updating formulae
               and a pairwise algorithm for computing sample variances", 1979), which cancels nothing
    backward   the sums of dy and of dy * xhat over this rank's rows are added over ranks

Each is one collective of float64 numbers, for every input dtype: counts stay whole numbers, and means of unequal counts
are combined without loss. A rank without rows sends zeros and takes part. The gradients of weight and bias are this
rank's own: `DistributedDataParallel` averages them with all other gradients.

[Note: rows that don't count]

The module runs on a dummy batch of a few rows for an empty share (`batches.DummyBatch`). These rows have the count 0:
they are normalised with the other ranks' statistics, and contribute nothing to the exchanges, forward or backward.

[Note: the recorded sequence]

A rank that has left its loop takes part in the others' exchanges with count 0. It replays the exchanges of the last
*window*: all forward and backward passes since gradients were last averaged. The active ranks announce a window before
its first exchange. Every exchange carries a code of the layer and the direction. So if a rank replays an exchange that
the others no longer make, an error names the layers; one layer's sums are never added to another's.

    forward   forward   backward   backward   forward   ...
    norm 1    norm 2    norm 2     norm 1     norm 1
    |--------------- a window --------------| |- the next
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parameter import UninitializedParameter

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import ConfigurationError, EvenstepError, MismatchError
from evenstep.ground.compat.torch_autograd import graph_task_id
from evenstep.ground.compat.torch_dynamo import outside_graphs
from evenstep.ground.compat.torch_modules import BatchNorm
from evenstep.ground.health import excepthook
from evenstep.replica.batches import pad_parts
from evenstep.replica.channels import channel, channel_of
from evenstep.replica.gradients.engine import Engine
from evenstep.replica.normalization.arithmetic import combine, local_statistics, update_running_statistics
from evenstep.transport.core.staged import for_messages
from evenstep.transport.core.transport import Transport
from evenstep.transport.core.validation import validate_group
from evenstep.world import World


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalisation over the batches of all ranks, on CPU and CUDA. torch's constructor and attributes.

    In training all ranks run the layer, in the same order; forward and backward are collective. Counts are the weights,
    so uneven and empty batches give the same outputs, gradients and running statistics as one process on the whole
    batch. Statistics of float16 and bfloat16 inputs are float32. In evaluation, and in a world of one, the layer is
    torch's own batch normalisation.

    Within `DistributedDataParallel` the gradient is that of the summed (weighted) loss of all ranks, as everywhere.
    It can be differentiated once.

    Args:
        num_features: Channels, dimension 1 of the input [n, num_features, ...].
        eps: Added to the variance.
        momentum: Weight of a batch in the running statistics; None: they are the plain average over batches.
        affine: Learn a weight and a bias.
        track_running_stats: Keep running statistics.
        process_group: The ranks that normalise together, a `torch.distributed` group; None: all of the current world.
        device: As in torch.
        dtype: As in torch.
        bias: As in torch; torch 2.11 has no such argument.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    overseer: SyncLayers | None = None

    @excepthook.for_users
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        who = "SyncBatchNorm: "
        checks.whole(f"{who}num_features", num_features, least=1)
        checks.number(f"{who}eps", eps, least=0)
        if momentum is not None:
            checks.number(f"{who}momentum", momentum, least=0, most=1, otherwise="None for a plain average")
        checks.switches(who, affine=affine, track_running_stats=track_running_stats)
        validate_group(f"{who}process_group", process_group)
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, process_group, device, dtype, **others
        )

    def forward(self, input: Tensor) -> Tensor:
        """Normalise [n, num_features, ...]. Collective in training.

        Raises:
            ValueError: There is only one value per channel on all ranks together, so there is no variance; or the input
                has no channels or the wrong number of channels.
            MismatchError: Another rank runs another layer. Raised on every rank that takes part in the exchange.
        """
        if not self.training:
            return BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected input with {self.num_features} channels, and this is {list(input.shape)}")
        # The exchange isn't a tensor operation: a compiled graph ends here. (The decorated method imports dynamo.)
        return self._train_uncompiled(input) if torch.compiler.is_compiling() else self._train(input)

    def _train(self, input: Tensor) -> Tensor:
        layers = self.overseer or SyncLayers(self, worlds.current())
        counts = input.numel() > 0 and layers.counts_rows()
        if counts and layers.channel(input.device, self.process_group).world_size == 1:
            return BatchNorm.forward(self, input)
        return _Normalise.apply(input, self.weight, self.bias, self, layers, counts)  # type: ignore[no-any-return, no-untyped-call]

    _train_uncompiled = outside_graphs(_train)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace every batch normalisation in a module, including torch's `SyncBatchNorm`, by a layer of this class.

        The new layers have the old ones' parameters, buffers and hooks, so optimizers and references to them stay
        valid.

        Args:
            module: The module; changed in place, unless it is itself a batch normalisation.
            process_group: As in the constructor.

        Returns:
            The module, or the layer that replaces it.

        Raises:
            ConfigurationError: A lazy layer doesn't know its number of channels yet, or an argument isn't a module or a
                group.
        """
        if not isinstance(module, nn.Module):
            raise checks.refuse("convert_sync_batchnorm: module", module, "a torch.nn.Module")
        validate_group("convert_sync_batchnorm: process_group", process_group)
        return _with_replaced(
            module,
            {each: _converted(cls, each, process_group) for each in module.modules() if isinstance(each, BatchNorm)},
        )

    def __getstate__(self) -> dict[str, Any]:
        # The overseer belongs to a running world, so it isn't copied or saved.
        return {name: value for name, value in self.__dict__.items() if name != "overseer"}


class _Normalise(torch.autograd.Function):
    """The autograd function that normalises over all ranks. Collective, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: SyncBatchNorm,
        layers: SyncLayers,
        counts: bool,
    ) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        own = local_statistics(x.to(dtype)) if counts else _nothing(layer, x.device, is_backward=False)
        layers.record(layer, is_backward=False)
        count, mean, var = layers.exchange_statistics(layer, own)
        mean, var = mean.to(dtype), var.to(dtype)
        ctx.save_for_backward(x, weight, mean, (var + layer.eps).rsqrt(), count)
        ctx.layer, ctx.layers, ctx.counts = layer, layers, counts
        scale, shift = (None if each is None else each.to(dtype) for each in (weight, bias))
        return nn.functional.batch_norm(x, mean, var, scale, shift, training=False, momentum=0.0, eps=layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        own = mean.new_zeros(2, len(mean))  # sums of dy, and of dy * xhat
        if ctx.counts:
            x, dy = x.to(mean.dtype), dy.to(mean.dtype)
            # The sums don't depend on the weight, but without a weight CUDA's kernel returns no sum of dy * xhat.
            _, own[1], own[0] = torch.ops.aten.native_batch_norm_backward(
                dy, x, invstd, None, None, mean, invstd, True, ctx.layer.eps, [False, True, True]
            )
        dx = None
        if needs_x:
            ctx.layers.record(ctx.layer, is_backward=True)
            sums = ctx.layers.exchange_gradients(ctx.layer, own.view(-1).double())
            mean_dy, mean_dy_xhat = (sums / count.clamp(min=1)).to(mean.dtype).view(2, -1)
            if ctx.counts:
                shape = (1, -1) + (1,) * (x.dim() - 2)
                scale = invstd if weight is None else invstd * weight.to(mean.dtype)
                dx = x - mean.view(shape)
                dx.mul_((-invstd * mean_dy_xhat).view(shape)).add_(dy).sub_(mean_dy.view(shape)).mul_(scale.view(shape))
            else:
                dx = torch.zeros_like(x)
        # Return gradients in the dtypes in which they were computed: autograd converts each to its input's dtype.
        return dx, own[1] if needs_weight else None, own[0] if needs_bias else None, None, None, None


class SyncLayers:
    """All SyncBatchNorms of a module, and their exchanges. False (`bool`) if there are none.

    Collective, except for copies: every rank makes one, for the same model.

    Args:
        module: The model, or a layer outside of any wrapped model, for one forward pass and its backward pass.
        world: The ranks that take part.
        engine: The model's engine, held weakly. None for a layer outside of any wrapped model.
        is_copy: Whether the model is a copy, which other ranks may not have made, so that no collective is possible
            now. A copy shares the channels of layers without a model.

    Attributes:
        layers: The layers by name.
        recorded: The exchanges of the last window, each as (layer, is_backward). A layer of None is the agreement on
            the number of micro-batches.
    """

    def __init__(self, module: nn.Module, world: World, engine: Engine | None = None, *, is_copy: bool = False) -> None:
        self.layers = {name: each for name, each in module.named_modules() if isinstance(each, SyncBatchNorm)}
        self.recorded: list[tuple[SyncBatchNorm | None, bool]] = []
        self._index = {layer: index for index, layer in enumerate(self.layers.values())}
        self._world = world
        self._engine = (lambda: None) if engine is None else weakref.ref(engine)
        self._has_channels = engine is not None and not is_copy
        self._channels: dict[tuple[torch.device, dist.ProcessGroup | None], Transport] = {}
        self._window = -1  # the window to which `recorded` belongs
        self._over_dummy = self._running = False
        for layer in self.layers.values() if engine is not None else ():
            layer.overseer = self
            # Open the channel now, while all ranks are here: a rank without a batch would be missing when a layer first
            # needs it.
            if self._has_channels:
                self.channel(self._device_of(layer), layer.process_group)

    def __bool__(self) -> bool:
        return bool(self.layers)

    def __repr__(self) -> str:
        return f"<SyncLayers {len(self.layers)} layers, {len(self.recorded)} exchanges recorded>"

    # ------------------------------------------------------------------ called by the wrapper

    @contextmanager
    def forward_pass(self, *, over_dummy: bool) -> Iterator[None]:
        """Context of the module's forward pass.

        Args:
            over_dummy: The module runs on a dummy batch for an empty share. Its rows count 0, forward and backward.
        """
        for layer in self.layers.values():
            layer.overseer = self  # a module may have been wrapped twice
        self._over_dummy, self._running = over_dummy, True
        try:
            yield
        finally:
            self._running = False

    def buffers(self) -> list[Tensor]:
        """The running statistics. They are the same on all ranks, even on ranks whose share was empty."""
        return [buffer for layer in self.layers.values() for buffer in layer.buffers(recurse=False)]

    def pad(self, parts: Sequence[Any], batch: Any, dim: int = 0) -> list[Any]:
        """Add empty parts in front, so that all ranks have the same number of parts.

        Collective. Statistics are exchanged in every part, so every rank has to run the module equally often.

        Args:
            parts: The parts of this rank's share.
            batch: The share, for its structure.
            dim: The batch dimension.
        """
        self.record(None)
        return pad_parts(parts, self._most_parts(len(parts)), batch, dim)

    def _most_parts(self, num_parts: int) -> int:
        device = self._device_of(next(iter(self.layers.values())))
        most = torch.tensor([num_parts], device="cpu")
        for_messages(self.channel(device, None), device).all_reduce(most, "max").wait()
        return int(most)

    def shadow(self) -> None:
        """Collective: take part with count 0 in all exchanges of a window. Updates running statistics.

        Without a record, it takes part in every layer's exchange once, in the order of `named_modules`, and then
        backward in the reverse order.

        Raises:
            MismatchError: The other ranks make other exchanges than in the recorded window.
        """
        forward = [(layer, False) for layer in self.layers.values()]
        for layer, is_backward in self.recorded or forward + [(layer, True) for layer, _ in reversed(forward)]:
            if layer is None:
                self._most_parts(0)
            else:
                exchange = self.exchange_gradients if is_backward else self.exchange_statistics
                exchange(layer, _nothing(layer, self._device_of(layer), is_backward=is_backward))

    # ------------------------------------------------------------------ called by layers

    def channel(self, device: torch.device, group: dist.ProcessGroup | None) -> Transport:
        """The transport for exchanges of inputs on a device. Collective the first time.

        Each model has its own, because exchanges of two models may come in different orders.
        """
        if (device, group) not in self._channels:
            args = self._world, "batch normalisation", device, group
            self._channels[device, group] = channel_of(self, *args) if self._has_channels else channel(*args)
        return self._channels[device, group]

    def counts_rows(self) -> bool:
        """Whether the rows that a layer now processes are samples, not dummies.

        Rows count outside the wrapper's forward pass, and so also inside `model.module(x)`.
        """
        contribution = self._contribution()
        is_dropped = not isinstance(contribution, Tensor) and contribution == 0
        # An activation checkpoint runs the layer again inside the backward pass; rows must count as in the forward
        # pass.
        runs_again = graph_task_id() != -1 and is_dropped
        return not (self._over_dummy and (self._running or runs_again))

    def _contribution(self) -> float | Tensor:
        engine = self._engine()
        return 1.0 if engine is None else engine.contribution()

    def record(self, layer: SyncBatchNorm | None, *, is_backward: bool = False) -> None:
        """Record an exchange before it is made. Collective, including ranks that have left their loop.

        Args:
            layer: The layer; None: the ranks agree on the number of micro-batches.
            is_backward: Whether the layer's gradients are exchanged, not its statistics.
        """
        engine = self._engine()
        if engine is not None:
            if engine.num_reductions != self._window:
                self._window, self.recorded = engine.num_reductions, []
            engine.announce()
            self.recorded.append((layer, is_backward))

    def exchange_statistics(self, layer: SyncBatchNorm, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Collective: the statistics of all ranks' rows, as `combine` returns them. Updates running statistics.

        Args:
            layer: One of these layers.
            own: [1 + 2 * num_features], float64: the result of `local_statistics`.

        Raises:
            ValueError: There is only one value per channel on all ranks. Raised on every rank, but not on CUDA: there
                the running variance uses the biased variance instead of waiting for the device.
            MismatchError: Another rank is in another exchange.
        """
        rows = self._exchange(layer, own, is_backward=False)
        if rows.device.type == "cpu" and rows[:, 0].sum() == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got 1 on all ranks together "
                f"(in {self._describe(2 * self._index[layer])})"
            )
        combined = combine(rows.to(own.device))
        update_running_statistics(layer, *combined)
        return combined

    def exchange_gradients(self, layer: SyncBatchNorm, own: Tensor) -> Tensor:
        """Collective: add the sums of dy and of dy * xhat, [2 * num_features], float64, over ranks.

        Raises:
            MismatchError: Another rank is in another exchange.
        """
        part = self._contribution()
        if isinstance(part, Tensor):
            own = torch.where(part.to(own.device) == 0, 0.0, own)
        elif part == 0:
            own = torch.zeros_like(own)
        return self._exchange(layer, own, is_backward=True)[0].to(own.device)

    def _exchange(self, layer: SyncBatchNorm, own: Tensor, *, is_backward: bool) -> Tensor:
        """Collective: returns the rows of all ranks, or their sum, [1, n], on the transport's device."""
        transport = self.channel(own.device, layer.process_group)
        code = float(2 * self._index[layer] + is_backward)
        # All codes are equal if and only if n * (sum of squares) equals the square of the sum. Codes are whole numbers,
        # so this is exact. (`new_tensor` would wait for a GPU.)
        sent = torch.cat([own.new_full((1,), code), own.new_full((1,), code * code), own])
        sent = sent if transport.name == "nccl" else sent.cpu()
        received = sent if is_backward else sent.new_empty(transport.world_size * len(sent))
        try:
            (transport.all_reduce(sent) if is_backward else transport.all_gather(received, sent)).wait()
        except EvenstepError as error:
            # Raise the same error with the layer's name: a transport knows only numbers and lengths.
            raise type(error)(f"{self._describe(code)}: {error}") from error
        received = received.view(-1, len(sent))
        if received.device.type == "cpu":
            first, second = received[:, :2].sum(0).tolist()
            if transport.world_size * second != first * first:
                codes = sent.new_empty(transport.world_size)
                transport.all_gather(codes, sent.new_tensor([code])).wait()
                all_codes = "; ".join(f"rank {rank} is in {self._describe(c)}" for rank, c in enumerate(codes.tolist()))
                raise MismatchError(
                    f"the ranks run different batch normalisations at the same time: {all_codes}. Every rank must run "
                    f"the same layers in the same order, for every batch."
                )
        return received[:, 2:]

    def _describe(self, code: float) -> str:
        index, is_backward = divmod(int(code), 2)
        known = [
            f"SyncBatchNorm {name!r}" if name else f"a SyncBatchNorm of {layer.num_features} channels"
            for name, layer in self.layers.items()
        ]
        which = known[index] if index < len(known) else f"SyncBatchNorm number {index}"
        return f"{'backward' if is_backward else 'forward'} of {which}"

    def _device_of(self, layer: SyncBatchNorm) -> torch.device:
        """The device of a layer's inputs."""
        return next((tensor.device for tensor in _tensors(layer)), self._world.device)


def replace_torchs(module: nn.Module) -> nn.Module:
    """Replace every `torch.nn.SyncBatchNorm` on the CPU, where torch's class refuses to run, by this class.

    The new layers have the old ones' parameters, buffers and hooks. Subclasses of torch's class aren't replaced.

    Args:
        module: The module; changed in place, unless it is itself such a layer.

    Returns:
        The module, or the layer that replaces it.
    """
    return _with_replaced(
        module,
        {
            each: _converted(SyncBatchNorm, each, each.process_group)
            for each in module.modules()
            if type(each) is nn.SyncBatchNorm and all(tensor.device.type == "cpu" for tensor in _tensors(each))
        },
    )


def _nothing(layer: SyncBatchNorm, device: torch.device, *, is_backward: bool) -> Tensor:
    """The numbers that a rank without rows sends."""
    return torch.zeros(2 * layer.num_features + (not is_backward), dtype=torch.float64, device=device)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _with_replaced(module: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replaced:
                parent._modules[name] = replaced[child]
    return replaced.get(module, module)


def _converted(cls: type[SyncBatchNorm], module: BatchNorm, process_group: dist.ProcessGroup | None) -> SyncBatchNorm:
    """A layer of this class with another layer's settings, parameters, buffers and hooks."""
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters(recurse=False)):
        raise ConfigurationError(
            f"{type(module).__name__} doesn't know its number of channels yet; run one batch before converting it."
        )
    new = cls.__new__(cls)
    new.__dict__.update(module.__dict__ | {"process_group": process_group, "overseer": None})
    return new
