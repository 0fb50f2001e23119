"""`DataParallel`: one process with several devices; simpler than `DistributedDataParallel`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep import checks
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.c_library.heap import keep_freed_memory
from evenstep.ground.computing.pytrees import flatten_tensors
from evenstep.ground.health import excepthook
from evenstep.replica.batches import has_rows, split
from evenstep.replica.data_parallel.replicas import Replicas, sent


class DataParallel(nn.DataParallel[nn.Module]):
    """Divides a batch over devices of one process, with a thread for each, and gathers the outputs on one device.

    A drop-in for `torch.nn.DataParallel`. Devices may also be the CPU, and may be named more than once: two replicas on
    `"cpu"` share the parameters and run at the same time, forward and backward. Gradients arrive in the module's own
    parameters, summed over the batch as in one process.

    Threads, and copies of parameters on other devices, stay alive between steps. Parameters are copied again only when
    they have changed: by an operation that autograd's version counter sees, or by getting other memory. An in-place
    change through `p.data` is visible to replicas that share the memory; call `refresh` to copy it to other devices.

    If the forward pass changes module buffers (running statistics), the first replica's changes are kept. Plain
    attributes that the forward pass sets are lost, as with torch's class. Several CPU replicas draw random numbers from
    one generator, in the order in which their threads call it. Gradients can't be differentiated again: use
    `model.module` for that.

    Args:
        module: The model; moved to the first device.
        device_ids: Devices, one per replica: indices, names or `torch.device` objects; None: all GPUs, or without GPUs
            one replica on the CPU.
        output_device: The device on which outputs are gathered; None: the first device.
        dim: The batch dimension.

    Raises:
        ConfigurationError: There is no such device.
    """

    @excepthook.for_users
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        nn.Module.__init__(self)
        if device_ids is None:
            device_ids = list(range(torch.cuda.device_count())) or ["cpu"]
        if isinstance(device_ids, str) or not isinstance(device_ids, Sequence) or not device_ids:
            raise checks.refuse("device_ids", device_ids, "a list of at least one device, or None for all GPUs")
        dim = checks.whole("DataParallel: dim", dim)
        self.devices = [_device(asked) for asked in device_ids]
        self.device_ids: list[Any] = [each.index if each.type == "cuda" else each for each in self.devices]
        self.output_device: Any = self.devices[0] if output_device is None else _device(output_device)
        self.src_device_obj = self.devices[0]
        self.dim = dim
        self.module = module.to(self.devices[0])
        if self.devices[0].type == "cpu":
            keep_freed_memory()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the parts of a batch, at the same time.

        Args:
            *inputs: Pytrees of tensors, divided along `dim`. Tensors without that dimension and other values go to
                every replica.
            **kwargs: Keyword arguments, divided in the same way.

        Returns:
            The outputs, joined along `dim`, on the output device; 0-dim tensors become [replicas]. Outputs that aren't
            tensors are the first replica's.

        Raises:
            UsageError: The batch is empty.
            ConfigurationError: The batch's tensors have different lengths, or a parameter has left the first device.
            Exception: An exception of a replica, with the replica's device in the message.
        """
        return self._run(self.module, inputs, kwargs)

    def loss(self, criterion: Callable[[Any, Any], Tensor], inputs: Any, targets: Any, **kwargs: Any) -> Tensor:
        """`criterion(model(inputs), targets)`, computed on the outputs' devices, so that only numbers are sent.

        Args:
            criterion: A function of outputs and targets. Its value is a mean, a sum (`criterion.reduction == "sum"`),
                or one number per sample. Means of parts are weighted by the number of samples, or, for a criterion with
                `ignore_index` or class weights, by the sum of the weights of the targets that aren't ignored. This also
                works for torch's `F.cross_entropy` and `F.nll_loss`, and for a `functools.partial` of them. A criterion
                that is a module is replicated with the model; its tensors are on the first device.
            inputs: The module's input; if it is a tuple, the module's positional arguments.
            targets: A pytree of tensors, divided like the inputs.
            **kwargs: The module's keyword arguments.

        Returns:
            The loss of the whole batch, on the output device.
        """
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        value: Tensor
        value, weights, is_number = self._run(
            _Scored(self.module, criterion, self.dim), (arguments, kwargs, targets), {}
        )
        if not is_number or value.dim() == 0:
            return value  # one number per sample, or one replica
        if _setting(criterion, "reduction") == "sum":
            return value.sum()
        # A part in which all targets are ignored has a mean of NaN and a weight of 0: leave it out.
        mean: Tensor = (torch.where(weights > 0, value, 0.0) * weights).sum() / weights.sum()
        return mean.to(value.dtype)

    def refresh(self) -> None:
        """Copy all parameters and buffers again before the next pass, even if their versions haven't changed."""
        self.__dict__.pop("_replicas", None)

    def extra_repr(self) -> str:
        """The text added to the module's when this is printed."""
        return f"devices={[str(device) for device in self.devices]}, output_device={self.output_device}, dim={self.dim}"

    @functools.cached_property
    def _replicas(self) -> Replicas:
        return Replicas(self.devices)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_replicas"}

    def _run(self, module: nn.Module, inputs: Any, kwargs: Any) -> Any:
        tensors, rebuild = flatten_tensors((inputs, kwargs))
        tensors = [sent(tensor, self.devices[0]) if tensor.requires_grad else tensor for tensor in tensors]
        parts = [tensors]
        if any(has_rows(tensor, self.dim) for tensor in tensors):
            parts = split(tensors, len(self.devices), self.dim)
        if not parts:
            raise UsageError("DataParallel was called with an empty batch.")
        if len(parts) == 1:
            arguments, options = rebuild([sent(tensor, self.devices[0]) for tensor in tensors])
            outputs, rebuild = flatten_tensors(module(*arguments, **options))
            return rebuild([tensor.to(self.output_device) for tensor in outputs])
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device != self.devices[0]:
                raise ConfigurationError(
                    f"DataParallel: a parameter or buffer of the module or criterion is on {tensor.device}; all of "
                    f"them must stay on the first device, {self.devices[0]}."
                )
        outputs, rebuild = self._replicas.forward(module, parts, rebuild)
        return rebuild([self._joined(row) for row in zip(*outputs, strict=True)])

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        there = [part.to(self.output_device) for part in parts]
        return torch.stack(there) if there[0].dim() == 0 else torch.cat(there, self.dim)


class _Scored(nn.Module):
    """A model and a criterion, replicated together."""

    def __init__(self, module: nn.Module, criterion: Callable[[Any, Any], Tensor], dim: int) -> None:
        super().__init__()
        self.module, self.criterion, self.dim = module, criterion, dim

    def forward(self, arguments: Any, options: Any, targets: Any) -> tuple[Tensor, Tensor, bool]:
        value = self.criterion(self.module(*arguments, **options), targets)
        return value, self._weight(targets, value.device).double(), value.dim() == 0

    def _weight(self, targets: Any, device: torch.device) -> Tensor:
        """The weight of a mean over targets, up to a factor common to all replicas: 0-dim."""
        ignored = _setting(self.criterion, "ignore_index")
        if not isinstance(ignored, int) or not isinstance(targets, Tensor) or targets.is_floating_point():
            tensors, _ = flatten_tensors(targets)
            lengths = [each.shape[self.dim] for each in tensors if has_rows(each, self.dim)]
            return torch.tensor(max(lengths, default=1), device=device)
        counts = targets != ignored
        weights = _setting(self.criterion, "weight")
        return counts.sum() if weights is None else weights[torch.where(counts, targets, 0)].double().mul(counts).sum()


def _setting(criterion: Any, name: str) -> Any:
    """A criterion's setting. The criterion may be a module, a function of torch, or a `functools.partial` of it."""
    if isinstance(criterion, functools.partial):
        return criterion.keywords.get(name, _setting(criterion.func, name))
    is_known = criterion in (functional.cross_entropy, functional.nll_loss)
    return getattr(criterion, name, -100 if is_known and name == "ignore_index" else None)


def _device(asked: int | str | torch.device) -> torch.device:
    try:
        device = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    except (RuntimeError, TypeError):
        raise ConfigurationError(f"{asked!r} isn't a device; use 0, 'cuda:0' or 'cpu'.") from None
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigurationError(f"{asked!r}: torch can use {torch.cuda.device_count()} GPUs on this host.")
        return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    return device
