"""One process, several devices, one line: the simple sibling of `DistributedDataParallel`."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from evenstep import checks
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.c_library.heap import keep_freed_memory
from evenstep.ground.compat.torch_autograd import keeps_graph
from evenstep.pytrees import flatten_tensors
from evenstep.replica.data_parallel.replicas import Call, Replica, Run, batch_size
from evenstep.replica.data_parallel.worker_threads import WorkerThreads


class DataParallel(nn.DataParallel[nn.Module]):
    """Divides a batch over devices of one process, one thread each, and puts the outputs together on one of them.

    A drop-in for `torch.nn.DataParallel`, whose devices may also be the CPU, and may be named more than once: two
    replicas on `"cpu"` share the parameters and run side by side, forward and backward. Gradients arrive in the
    module's own parameters, summed over the batch as in one process.

    Replicas stay alive between steps. Parameters are copied to other devices only when they have changed: by an
    operation that autograd's version counter sees, or by getting other memory. A change through `p.data`, in place, is
    seen by replicas that share its memory; to those on other devices `refresh` brings it.

    Module buffers that the forward pass changes (running statistics) are those of the first replica. Plain attributes
    that it sets stay in the replicas. Random numbers on several CPU replicas come from one generator, in the order in
    which the threads ask. Gradients can't be differentiated again: use `model.module` for that.

    Args:
        module: The model; moved to the first device.
        device_ids: Devices, one per replica: indices, names or `torch.device` objects. None: all GPUs, or one replica
            on the CPU where there are none.
        output_device: Where outputs are put together; None: the first device.
        dim: The batch dimension.

    Raises:
        ConfigurationError: There is no such device.
    """

    # Made when first needed, and no part of a copy or of a file.
    _replicas: list[Replica] | None = None
    _workers: WorkerThreads | None = None

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
    ) -> None:
        nn.Module.__init__(self)
        if not isinstance(module, nn.Module):
            raise ConfigurationError(f"DataParallel wraps a torch.nn.Module, not a {type(module).__name__}.")
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
        if any(each.type == "cpu" for each in self.devices):
            keep_freed_memory()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on the parts of a batch, at the same time.

        Args:
            *inputs: Nests of tensors, divided along `dim`; what has no such dimension goes to every replica.
            **kwargs: The same.

        Returns:
            The outputs, joined along `dim`, on the output device; numbers (0-dim) become [replicas]. What is no
            tensor is the first replica's.

        Raises:
            UsageError: The batch is empty.
            ConfigurationError: Its tensors are of different lengths; a parameter has left the first device.
            Exception: What a replica raised, with its device in the message.
        """
        return self._run(lambda module, batch: module(*batch[0], **batch[1]), (inputs, kwargs))

    def loss(self, criterion: Callable[[Any, Any], Tensor], inputs: Any, targets: Any, **kwargs: Any) -> Tensor:
        """`criterion(model(inputs), targets)`, computed where the outputs are, so that only numbers travel.

        Args:
            criterion: Of outputs and targets. Its value is a mean, a sum (`criterion.reduction == "sum"`), or one
                number per sample. Means of parts are weighted by what they were taken over: the samples, or for a
                criterion with `ignore_index` and class weights the weights of the targets that count. torch's
                `F.cross_entropy` and `F.nll_loss` and a `functools.partial` of them are known as its modules are.
            inputs: The module's input; a tuple: its positional arguments.
            targets: A pytree of tensors, divided like the inputs.
            **kwargs: The module's keyword arguments.

        Returns:
            The loss of the whole batch, on the output device.
        """
        checks.function("DataParallel.loss: criterion", criterion)
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        on_device = {device: _criterion_on(criterion, device) for device in dict.fromkeys(self.devices)}

        def call(module: nn.Module, batch: Any) -> tuple[Tensor, Tensor, bool]:
            part, options, goals = batch
            outputs = module(*part, **options)
            tensors, _ = flatten_tensors(goals)
            here = on_device[tensors[0].device] if tensors and tensors[0].device in on_device else criterion
            value = here(outputs, goals)
            return value, _weight_of(here, goals, self.dim, value.device), value.dim() == 0

        value: Tensor
        value, weights, is_number = self._run(call, (arguments, kwargs, targets))
        if not is_number or value.dim() == 0:
            return value  # one number per sample, or one replica
        if _setting(criterion, "reduction", "mean") == "sum":
            return value.sum()
        # A part in which nothing counted has a mean of NaN, which counts for nothing.
        mean: Tensor = (torch.where(weights > 0, value, 0.0) * weights).sum() / weights.sum()
        return mean.to(value.dtype)

    def refresh(self) -> None:
        """Copy all parameters and buffers anew before the next pass, however they were changed."""
        self._replicas = None

    def extra_repr(self) -> str:
        """The text beside the module when this is printed."""
        return f"devices={[str(device) for device in self.devices]}, output_device={self.output_device}, dim={self.dim}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_replicas", "_workers")}

    # ------------------------------------------------------------------ running

    def _run(self, call: Call, batch: Any) -> Any:
        tensors, rebuild = flatten_tensors(batch)
        length = batch_size(tensors, self.dim)
        if length == 0:
            raise UsageError("DataParallel was called with an empty batch.")
        if len(self.devices) == 1 or length is None or length == 1:
            there = rebuild([tensor.to(self.devices[0], non_blocking=True) for tensor in tensors])
            outputs, rebuild = flatten_tensors(call(self.module, there))
            return rebuild([tensor.to(self.output_device, non_blocking=True) for tensor in outputs])
        run = self._prepared(call, tensors, rebuild, length)
        differentiated = [tensors[index] for index in run.inputs] + list(run.parameters)
        if torch.is_grad_enabled() and differentiated:
            joined = _Replicated.apply(run, *differentiated)  # type: ignore[no-untyped-call]
        else:
            joined = run.forward(grad=False)
        return run.rebuild(joined)

    def _prepared(self, call: Call, tensors: Sequence[Tensor], rebuild: Any, length: int) -> Run:
        parameters = list(self.module.parameters())
        for tensor in (*parameters, *self.module.buffers()):
            if tensor.device != self.devices[0]:
                raise ConfigurationError(
                    f"DataParallel: a parameter or buffer of the module is on {tensor.device}; all of them stay on the "
                    f"first device, {self.devices[0]}."
                )
        if self._replicas is None:
            self._replicas = [Replica(device, is_first=i == 0) for i, device in enumerate(self.devices)]
        if self._workers is None:
            self._workers = WorkerThreads(self.devices)
        for replica in self._replicas[:length]:
            replica.refresh(self.module)
        return Run(
            self._replicas,
            self._workers,
            dim=self.dim,
            home=self.output_device,
            call=call,
            tensors=tensors,
            rebuild=rebuild,
            length=length,
            parameters=[parameter for parameter in parameters if parameter.requires_grad],
        )


class _Replicated(torch.autograd.Function):
    """All replicas as one node of the caller's graph."""

    @staticmethod
    def forward(ctx: Any, run: Run, *differentiated: Tensor) -> tuple[Tensor, ...]:
        outputs = run.forward(grad=True)
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(out for out, has_grad in zip(outputs, run.differentiable, strict=True) if not has_grad)
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        keep_graph = keeps_graph()
        return None, *ctx.run.backward(grads, keep_graph=keep_graph)


# ---------------------------------------------------------------------- criteria

_criteria: weakref.WeakKeyDictionary[nn.Module, dict[torch.device, nn.Module]] = weakref.WeakKeyDictionary()


def _criterion_on(criterion: Any, device: torch.device) -> Any:
    """The criterion, or a copy of it on a device if it has tensors elsewhere (class weights)."""
    if not isinstance(criterion, nn.Module):
        return criterion
    if any(parameter.requires_grad for parameter in criterion.parameters()):
        raise UsageError(
            f"DataParallel.loss: {type(criterion).__name__} has trained parameters, whose gradients would be lost. "
            f"Make the criterion a part of the module."
        )
    if all(tensor.device == device for tensor in (*criterion.parameters(), *criterion.buffers())):
        return criterion
    copies = _criteria.setdefault(criterion, {})
    if device not in copies:
        copies[device] = copy.deepcopy(criterion).to(device)
    return copies[device]


def _weight_of(criterion: Any, targets: Any, dim: int, device: torch.device) -> Tensor:
    """What a mean over targets was taken over, up to a factor that all replicas have: 0-dim, float64."""
    ignored = _setting(criterion, "ignore_index", -100)
    if isinstance(ignored, int) and isinstance(targets, Tensor) and not targets.is_floating_point():
        counts = targets != ignored
        weights = _setting(criterion, "weight", None)
        if weights is not None:
            of_targets: Tensor = weights[torch.where(counts, targets, 0)]
            return of_targets.double().mul(counts).sum()
        return counts.sum().double()
    tensors, _ = flatten_tensors(targets)
    length = batch_size(tensors, dim)
    return torch.tensor(float(1 if length is None else length), dtype=torch.float64, device=device)


def _setting(criterion: Any, name: str, usual: Any) -> Any:
    """A criterion's setting, also where it is torch's function, or a `functools.partial` of that."""
    given = {}
    if isinstance(criterion, functools.partial):
        given, criterion = criterion.keywords, criterion.func
    if criterion in (functional.cross_entropy, functional.nll_loss):
        return given.get(name, usual)
    return getattr(criterion, name, given.get(name))


def _device(asked: int | str | torch.device) -> torch.device:
    try:
        device = torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)
    except (RuntimeError, TypeError):
        raise ConfigurationError(f"{asked!r} is no device; use 0, 'cuda:0' or 'cpu'.") from None
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigurationError(f"{asked!r}: this host has {torch.cuda.device_count()} GPUs that torch can use.")
        return torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    return device
