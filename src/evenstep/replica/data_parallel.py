"""One process, several devices, one line: the simple sibling of `DistributedDataParallel`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evenstep.errors import ConfigurationError, UsageError
from evenstep.replica.batches import split


class DataParallel(nn.Module):
    """Divides a batch over devices of one process, one thread each, and puts the outputs together on one of them.

    A drop-in for `torch.nn.DataParallel`, whose devices may also be the CPU, and may be named more than once: two
    replicas on `"cpu"` share the parameters and run side by side. Gradients arrive in the module's own parameters.
    Module buffers that the forward pass changes (running statistics) are those of the first replica.

    Args:
        module: The model; moved to the first device.
        device_ids: Devices, one per replica: indices, names or `torch.device`s. None: all GPUs, or one replica on
            the CPU where there are none.
        output_device: Where outputs are put together; None: the first device.
        dim: The batch dimension; 0.

    Raises:
        ConfigurationError: There is no such device, or `dim` isn't 0.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        if dim != 0:
            raise ConfigurationError(f"dim={dim}: this version divides batches along dimension 0.")
        if device_ids is None:
            device_ids = list(range(torch.cuda.device_count())) or ["cpu"]
        if not device_ids:
            raise ConfigurationError("device_ids=[]: name at least one device, or pass None for all GPUs.")
        self.devices = [_device(asked) for asked in device_ids]
        self.output_device = self.devices[0] if output_device is None else _device(output_device)
        self.dim = dim
        self.module = module.to(self.devices[0])

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the parts of a batch, at the same time.

        Args:
            *inputs: Nests of tensors [n, ...], divided along the first dimension; other values go to every replica.
            **kwargs: The same.

        Returns:
            The outputs, joined along the first dimension, on the output device; numbers (0-dim) become [replicas].
        """
        if len(self.devices) == 1:
            inputs, kwargs = _to((inputs, kwargs), self.devices[0])
            return _to(self.module(*inputs, **kwargs), self.output_device)
        parts = split((inputs, kwargs), len(self.devices))
        if not parts:
            raise UsageError("DataParallel was called with an empty batch.")
        jobs = [
            (self._replica(device, is_first=index == 0), *_to(part, device))
            for index, (part, device) in enumerate(zip(parts, self.devices, strict=False))
        ]
        if len(jobs) == 1:
            replica, part_inputs, part_kwargs = jobs[0]
            return _to(replica(*part_inputs, **part_kwargs), self.output_device)
        with_grad, autocast_state = torch.is_grad_enabled(), _autocast_state()
        with ThreadPoolExecutor(len(jobs), thread_name_prefix="evenstep-replica") as pool:
            futures = [pool.submit(_run, job, with_grad, autocast_state) for job in jobs]
            outputs = [future.result() for future in futures]
        return self._join([_to(output, self.output_device) for output in outputs])

    def _replica(self, device: torch.device, *, is_first: bool) -> nn.Module:
        """The module, or a likeness of it with the parameters brought to a device (through autograd)."""
        return self.module if is_first else _likeness(self.module, device)

    def _join(self, outputs: Sequence[Any]) -> Any:
        leaves = [pytree.tree_flatten(output) for output in outputs]
        joined = [
            torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])
            if isinstance(parts[0], Tensor)
            else parts[0]
            for parts in zip(*(flat for flat, _ in leaves), strict=True)
        ]
        return pytree.tree_unflatten(joined, leaves[0][1])


def _device(asked: int | str | torch.device) -> torch.device:
    try:
        device = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    except RuntimeError:
        raise ConfigurationError(f"{asked!r} is no device; use 0, 'cuda:0' or 'cpu'.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"{asked!r}: this host has {torch.cuda.device_count()} GPUs that torch can use.")
    return device


def _to(nest: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), nest)


def _autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    """What `torch.autocast` is set to here; threads don't inherit it."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


def _run(job: tuple[nn.Module, Any, Any], with_grad: bool, autocast_state: list[tuple[str, bool, torch.dtype]]) -> Any:
    module, inputs, kwargs = job
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(with_grad))
        for kind, enabled, dtype in autocast_state:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        return module(*inputs, **kwargs)


def _likeness(module: nn.Module, device: torch.device, seen: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """A module of the same structure: parameters of the original (copies through autograd on another device), and
    buffers of its own."""
    seen = {} if seen is None else seen
    if module in seen:
        return seen[module]
    copy = module.__new__(type(module))
    copy.__dict__ = dict(module.__dict__)
    seen[module] = copy
    copy._buffers = {
        name: None if b is None else b.detach().to(device, copy=True) for name, b in module._buffers.items()
    }
    copy._modules = {name: None if m is None else _likeness(m, device, seen) for name, m in module._modules.items()}
    copy._parameters = dict(module._parameters)
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.device != device:
            # No longer a leaf, so it can't be a registered parameter; plain attributes are found all the same.
            del copy._parameters[name]
            copy.__dict__[name] = parameter.to(device)
    return copy
