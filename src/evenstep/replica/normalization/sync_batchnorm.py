"""Batch normalisation over the rows of all ranks: what one process would compute on the whole batch.

[Note: what is exchanged]

    forward    each rank sends (count, mean, M2) per channel, M2 being the sum of squared distances from its own mean;
               all ranks combine them in order of rank with the formula of Chan, Golub and LeVeque ("Updating formulae
               and a pairwise algorithm for computing sample variances", 1979), which cancels nothing
    backward   the sums of dy and of dy * xhat over this rank's rows are added over ranks

One collective each, of float64 numbers whatever the input's dtype: counts stay whole, and means of unequal counts are
combined without a loss. A rank without rows sends zeros and takes part. The gradients of weight and bias are this
rank's own: `DistributedDataParallel` averages them with all others.

[Note: rows that don't count]

The module runs on a dummy batch of a few rows for an empty share (`batches.DummyBatch`). Those rows count 0: they
are normalised with the other ranks' statistics, and nothing of them travels, forward or backward. The layer's
`overseer`, which the wrapper sets (`layers.SyncLayers`), knows when that is so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parameter import UninitializedParameter

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import ConfigurationError, EvenstepError, MismatchError
from evenstep.ground.compat.torch_dynamo import outside_graphs
from evenstep.ground.compat.torch_modules import BatchNorm
from evenstep.replica.channels import channel
from evenstep.transport.core.transport import Transport
from evenstep.transport.core.validation import validate_group
from evenstep.world import World

PURPOSE = "batch normalisation"  # of the channels; see `replica.channels`


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Of the rows of all ranks.

    Attributes:
        count: 0-dim float64: values per channel.
        mean: [num_features].
        var: [num_features], biased; 1 where there was no row at all.
    """

    count: Tensor
    mean: Tensor
    var: Tensor


class Overseer(Protocol):
    """Knows the pass and the model in which a layer runs."""

    world: World

    def counts_rows(self) -> bool:
        """Whether the rows that a layer sees now are samples, and no dummies."""

    def contribution(self) -> float | Tensor:
        """What the running backward pass counts for: 0 where it is dropped. A 0-dim tensor is not read."""

    def transport(self, layer: SyncBatchNorm, device: torch.device) -> Transport:
        """What carries the exchanges of a layer whose inputs are on a device. Collective the first time."""

    def report(self, layer: SyncBatchNorm, *, is_backward: bool) -> float:
        """An exchange begins. Returns a whole number below 2 ** 23 that is equal on all ranks if they do the same."""

    def describe(self, code: float) -> str:
        """What a number from `report` stands for."""


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalisation over the batches of all ranks, on CPU and CUDA. torch's constructor and attributes.

    In training all ranks run the layer, in the same order; forward and backward are collective. Counts are the
    weights, so uneven and empty batches give what one process gives on the whole batch: outputs, gradients and running
    statistics. Statistics of float16 and bfloat16 inputs are float32. In evaluation, and in a world of one, it is
    torch's own batch normalisation.

    Within `DistributedDataParallel` the gradient is that of the summed (weighted) loss of all ranks, as everywhere.
    It can be differentiated once.

    Args:
        num_features: Channels, dimension 1 of the input [n, num_features, ...].
        eps: Added to the variance.
        momentum: Of the running statistics; None: their plain average.
        affine: Learn a weight and a bias.
        track_running_stats: Keep running statistics.
        process_group: The ranks that normalise together, a `torch.distributed` group; None: all of the current world.
        device: As in torch.
        dtype: As in torch.
        bias: As in torch; 2.11 knows no such argument.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    overseer: Overseer | None = None

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
            ValueError: There is one value per channel on all ranks together, of which no variance can be had; or the
                input has no channels or the wrong number of them.
            MismatchError: Another rank runs another layer. Raised on every rank that is in the exchange.
        """
        if not self.training:
            return BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected input with {self.num_features} channels, and this is {list(input.shape)}")
        # The exchange is no tensor operation: a compiled graph ends here. (The decorated method imports dynamo.)
        return self._train_uncompiled(input) if torch.compiler.is_compiling() else self._train(input)

    def _train(self, input: Tensor) -> Tensor:
        counts = input.numel() > 0 and (self.overseer is None or self.overseer.counts_rows())
        if counts and self._transport(input.device).world_size == 1:
            return BatchNorm.forward(self, input)
        dtype = torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype
        with torch.no_grad():
            own = local_statistics(input.detach().to(dtype)) if counts else self.no_rows(input.device)
            statistics = self.exchange_statistics(own)
            self.update_running_statistics(statistics)
        output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input,
            self.weight,
            self.bias,
            statistics.mean.to(dtype),
            statistics.var.to(dtype),
            statistics.count,
            self,
            counts,
        )
        return output

    _train_uncompiled = outside_graphs(_train)

    # ------------------------------------------------------------------ exchanges

    def no_rows(self, device: torch.device) -> Tensor:
        """What a rank sends that has no rows: [1 + 2 * num_features], float64."""
        return torch.zeros(1 + 2 * self.num_features, dtype=torch.float64, device=device)

    def exchange_statistics(self, own: Tensor) -> Statistics:
        """Collective: the statistics of all ranks' rows.

        Args:
            own: [1 + 2 * num_features], float64, as `local_statistics` makes it.

        Raises:
            ValueError: There is one value per channel in all. Raised on every rank; not on CUDA, where the running
                variance takes the biased one instead of waiting for the device.
            MismatchError: See `forward`.
        """
        transport = self._transport(own.device)
        code = 0.0 if self.overseer is None else self.overseer.report(self, is_backward=False)
        sent = _to_carrier(torch.cat([own.new_full((1,), code), own]), transport)
        rows = sent.new_empty(transport.world_size * sent.numel())
        self._run(lambda: transport.all_gather(rows, sent).wait(), code)
        rows = rows.view(transport.world_size, -1)
        if rows.device.type == "cpu":
            self._check_codes(rows[:, 0].tolist())
            total = float(rows[:, 1].sum())
            if total == 1:
                raise ValueError(
                    f"Expected more than 1 value per channel when training, got 1 on all ranks together "
                    f"(in {self._describe(code)})"
                )
        return combine(rows[:, 1:].to(own.device))

    def exchange_gradients(self, own: Tensor) -> Tensor:
        """Collective: the sum over ranks of [2 * num_features], float64: sums of dy and of dy * xhat.

        Raises:
            MismatchError: See `forward`.
        """
        transport = self._transport(own.device)
        code = 1.0 if self.overseer is None else self.overseer.report(self, is_backward=True)
        # Equal codes are those for which n * sum of squares is the square of the sum; whole numbers, so this is exact.
        codes = own.new_full((1,), code), own.new_full((1,), code * code)  # `new_tensor` waits for a GPU
        summed = _to_carrier(torch.cat([*codes, own]), transport)
        self._run(lambda: transport.all_reduce(summed).wait(), code)
        if summed.device.type == "cpu":
            first, second = summed[:2].tolist()
            if transport.world_size * second != first * first:
                everybody = summed.new_empty(transport.world_size)
                transport.all_gather(everybody, summed.new_tensor([code])).wait()
                self._check_codes(everybody.tolist())
        return summed[2:].to(own.device)

    def _transport(self, device: torch.device) -> Transport:
        if self.overseer is None:
            return channel(worlds.current(), PURPOSE, device, self.process_group)
        return self.overseer.transport(self, device)

    def _run(self, exchange: Callable[[], None], code: float) -> None:
        try:
            exchange()
        except EvenstepError as error:
            # The same failure, and whose it was: a transport knows only of numbers and lengths.
            raise type(error)(f"{self._describe(code)}: {error}") from error

    def _describe(self, code: float) -> str:
        if self.overseer is not None:
            return self.overseer.describe(code)
        return f"{'backward' if code else 'forward'} of a SyncBatchNorm of {self.num_features} channels"

    def _check_codes(self, codes: list[float]) -> None:
        if len(set(codes)) > 1:
            received = "; ".join(f"rank {rank} is in {self._describe(code)}" for rank, code in enumerate(codes))
            raise MismatchError(
                f"the ranks run different batch normalisations at the same time: {received}. Every rank runs the same "
                f"layers in the same order, whatever its batch."
            )

    # ------------------------------------------------------------------ running statistics

    def update_running_statistics(self, statistics: Statistics) -> None:
        """Count one more batch, unless it had no rows; equal on all ranks."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        count, dtype = statistics.count, statistics.mean.dtype
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(count > 0)
        if self.momentum is None:
            factor = 1.0 / self.num_batches_tracked.to(dtype).clamp(min=1)
        else:
            factor = torch.full((), self.momentum, dtype=dtype, device=count.device)  # others wait for a GPU
        factor = torch.where(count > 0, factor, 0.0)
        unbiased = statistics.var * (count / (count - 1).clamp(min=1))
        for running, new in ((self.running_mean, statistics.mean), (self.running_var, unbiased)):
            running.copy_(running.to(dtype) * (1 - factor) + new * factor)

    # ------------------------------------------------------------------ conversion

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace every batch normalisation in a module, torch's `SyncBatchNorm` included, by one of this class.

        Parameters, buffers and hooks are taken over, so optimizers and references to them stay right.

        Args:
            module: Changed in place; a batch normalisation itself is not.
            process_group: As in the constructor.

        Returns:
            The module, or what replaces it.

        Raises:
            ConfigurationError: A lazy layer doesn't know its number of channels yet; no module, or no group.
        """
        if not isinstance(module, nn.Module):
            raise checks.refuse("convert_sync_batchnorm: module", module, "a torch.nn.Module")
        validate_group("convert_sync_batchnorm: process_group", process_group)
        return _replaced(module, lambda each: _converted(cls, each, process_group), {})

    def __getstate__(self) -> dict[str, Any]:
        # An overseer belongs to a running world; a copy or a file has none.
        return {name: value for name, value in self.__dict__.items() if name != "overseer"}


def replace_torchs(module: nn.Module) -> nn.Module:
    """A module in which this class stands for every `torch.nn.SyncBatchNorm` on the CPU, where torch's refuses to run.

    Parameters, buffers and hooks are taken over; classes derived from torch's are left alone.

    Args:
        module: Changed in place, unless it is such a layer itself.

    Returns:
        The module, or what replaces it.
    """

    def replacement(each: nn.Module) -> nn.Module | None:
        if type(each) is nn.SyncBatchNorm and all(tensor.device.type == "cpu" for tensor in _tensors(each)):
            return _converted(SyncBatchNorm, each, each.process_group)
        return None

    return _replaced(module, replacement, {})


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _replaced(
    module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None], seen: dict[nn.Module, nn.Module]
) -> nn.Module:
    """`module` with everything replaced for which `replacement` has something; what occurs twice stays one."""
    if module not in seen:
        new = replacement(module)
        seen[module] = module if new is None else new
        for name, child in list(module._modules.items()):
            if child is not None:
                seen[module]._modules[name] = _replaced(child, replacement, seen)
    return seen[module]


def _converted(
    cls: type[SyncBatchNorm], module: nn.Module, process_group: dist.ProcessGroup | None
) -> SyncBatchNorm | None:
    if not isinstance(module, BatchNorm):
        return None
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters(recurse=False)):
        raise ConfigurationError(
            f"{type(module).__name__} doesn't know its number of channels yet; run one batch before converting it."
        )
    new = cls.__new__(cls)
    new.__dict__.update({name: value for name, value in module.__dict__.items() if name != "overseer"})
    new.process_group = process_group
    return new


# ---------------------------------------------------------------------- arithmetic


def local_statistics(x: Tensor) -> Tensor:
    """(count, mean, M2) of one rank's rows: [1 + 2 * num_features], float64. Pure.

    Args:
        x: [n, num_features, ...], n > 0, float32 or float64.
    """
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    count = x.numel() // x.shape[1]
    own = torch.empty(1 + 2 * x.shape[1], dtype=torch.float64, device=x.device)
    own[:1].fill_(count)  # `own[0] = count` waits for a GPU
    own[1 : 1 + x.shape[1]] = mean
    own[1 + x.shape[1] :] = var
    own[1 + x.shape[1] :] *= count
    return own


def combine(rows: Tensor) -> Statistics:
    """The statistics of all rows out of those of each rank; in float64. Pure.

    Args:
        rows: [num_ranks, 1 + 2 * num_features]: (count, mean, M2) of each rank.
    """
    num_features = rows.shape[1] // 2
    counts, means, m2 = rows.tensor_split([1, 1 + num_features], dim=1)
    count = counts.sum()
    divisor = count.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    var = (m2 + counts * (means - mean).square()).sum(0) / divisor
    return Statistics(count, mean, torch.where(count > 0, var, 1.0))


class _Normalise(torch.autograd.Function):
    """Normalise with given statistics, which are differentiated through all the same."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        layer: SyncBatchNorm,
        counts: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, (var + layer.eps).rsqrt(), count)
        ctx.layer, ctx.counts, ctx.bias_dtype = layer, counts, None if bias is None else bias.dtype
        if x.numel() == 0:
            return torch.empty_like(x)
        scale = None if weight is None else weight.to(mean.dtype)
        shift = None if bias is None else bias.to(mean.dtype)
        return nn.functional.batch_norm(x, mean, var, scale, shift, training=False, momentum=0.0, eps=layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        layer: SyncBatchNorm = ctx.layer
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dtype, num_features = mean.dtype, len(mean)
        own = torch.zeros(2, num_features, dtype=dtype, device=x.device)  # sums of dy, and of dy * xhat
        has_rows = ctx.counts and x.numel() > 0
        if has_rows:
            values, dy = x.to(dtype), dy.to(dtype)
            # Sums don't depend on the weight; but without one CUDA's kernel returns none of dy * xhat.
            _, own[1], own[0] = torch.ops.aten.native_batch_norm_backward(
                dy, values, invstd, None, None, mean, invstd, True, layer.eps, [False, True, True]
            )
        dx = None
        if needs_x:
            part = 1.0 if layer.overseer is None else layer.overseer.contribution()
            sent = own.reshape(-1).double()
            if isinstance(part, Tensor):
                sent = torch.where(part.to(sent.device) == 0, 0.0, sent)
            elif part == 0:
                sent = torch.zeros_like(sent)
            mean_dy, mean_dy_xhat = (layer.exchange_gradients(sent) / count.clamp(min=1)).to(dtype).view(2, -1)
            if has_rows:
                shape = (1, -1) + (1,) * (x.dim() - 2)
                scale = invstd if weight is None else invstd * weight.to(dtype)
                dx = values - mean.view(shape)
                dx.mul_((-invstd * mean_dy_xhat).view(shape)).add_(dy).sub_(mean_dy.view(shape))
                dx = dx.mul_(scale.view(shape)).to(x.dtype)
            else:
                dx = torch.zeros_like(x)
        d_weight = own[1].to(weight.dtype) if needs_weight else None
        d_bias = own[0].to(ctx.bias_dtype) if needs_bias else None
        return dx, d_weight, d_bias, None, None, None, None, None


def _to_carrier(packed: Tensor, transport: Transport) -> Tensor:
    return packed if transport.name == "nccl" else packed.cpu()
