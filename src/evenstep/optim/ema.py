"""A running average of parameters, for evaluation (Polyak and Juditsky, 1992; used in Mean Teacher, 2017)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import checks
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.torch_autograd import outside_inference_mode
from evenstep.ground.compat.torch_ddp import reshard
from evenstep.ground.compat.torch_tensors import local_part
from evenstep.ground.health import excepthook
from evenstep.optim.consistency import abort_peers
from evenstep.replica.gradients.buckets.bucket import HALF_PRECISION
from evenstep.replica.module_buffers import places_of
from evenstep.replica.wrapper.distributed import DistributedDataParallel


class ExponentialMovingAverage:
    """Parameters averaged over steps with exponentially falling weights: `average = decay * average + (1 - decay) * p`.

    Example::

        average = evenstep.ExponentialMovingAverage(model, decay=0.999)
        ...
        optimizer.step()
        average.update()
        ...
        with average.applied():
            evaluate(model)

    Replicas are equal, so every rank averages independently, without communication, and all averages are equal, too.
    With a divided model a rank averages its own parts. Averages of 16-bit parameters have 32 bits, because 16 bits
    would round the small change of a step away. Names are those of the wrapped module, so that averages load into a
    plain model.

    At first the decay is smaller, min(decay, (1 + steps) / (10 + steps)), so that the initial values soon lose their
    weight.

    Args:
        model: The model whose parameters are averaged. Its persistent module buffers are copied; others are caches.
        decay: The weight of the old average in a step, at least 0 and less than 1; the same on all ranks.

    Raises:
        ConfigurationError: `model` isn't a module, or the decay is out of its range.
    """

    @excepthook.for_users
    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        who = "ExponentialMovingAverage"
        with abort_peers(model):
            if not isinstance(model, nn.Module):
                raise checks.refuse(f"{who}: model", model, "a torch.nn.Module")
            self.decay = checks.number(f"{who}: decay", decay, least=0, below=1)
        self.num_steps = 0
        self._is_applied = False
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        with outside_inference_mode():  # else the averages could never be written to
            self._averages = {name: _copy_of(tensor) for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the current parameters to the average. Call it once per optimizer step.

        Raises:
            UsageError: Called inside `applied`, where the parameters are the average; or the model has other parameters
                now.
        """
        if self._is_applied:
            raise UsageError("ExponentialMovingAverage.update inside `with average.applied()`. Leave the block first.")
        current = self._validated("update")
        decay = min(self.decay, (1 + self.num_steps) / (10 + self.num_steps))
        self.num_steps += 1
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for name, average in self._averages.items():
            if not isinstance(current[name], nn.Parameter) or not (average.is_floating_point() or average.is_complex()):
                average.copy_(current[name])
                continue
            averages.append(local_part(average))
            values.append(local_part(current[name].detach()).to(average.dtype))
        if averages:
            torch._foreach_lerp_(averages, values, 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the model has the averages; afterwards, and after an error, it has its own values again.

        Raises:
            UsageError: Called inside `applied`; or the model has other parameters than when the average was made.
        """
        if self._is_applied:
            raise UsageError("ExponentialMovingAverage.applied inside itself. Leave the block first.")
        before = {name: tensor.detach().clone() for name, tensor in self._validated("applied").items()}
        self._is_applied = True
        try:
            self._write(self._averages)
            yield
        finally:
            self._write(before)
            self._is_applied = False

    def state_dict(self) -> dict[str, Any]:
        """The averages and module buffers by name, and the number of steps."""
        return {"num_steps": self.num_steps, "averages": dict(self._averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load averages from a result of `state_dict`.

        Raises:
            ConfigurationError: The state is another model's, or not a result of `state_dict`; nothing was changed.
        """
        where = "ExponentialMovingAverage.load_state_dict"
        given = state.get("averages") if isinstance(state, Mapping) else None
        if not isinstance(given, Mapping) or not all(isinstance(each, Tensor) for each in given.values()):
            raise checks.refuse(f"{where}: state", state, "what state_dict() returned")
        num_steps = checks.whole(f"{where}: num_steps", state.get("num_steps"), least=0)
        own = self._averages
        differing = sorted(own.keys() ^ given.keys()) or [name for name in own if own[name].shape != given[name].shape]
        if differing:
            raise ConfigurationError(
                f"{where}: the averages belong to another model; the first difference is in {differing[0]!r}."
            )
        self.num_steps = num_steps
        for name, average in own.items():
            average.copy_(given[name])

    def _tensors(self) -> dict[str, Tensor]:
        reshard(self._model)
        cached = {
            full
            for owner, name, full in places_of(self._model)
            if name in getattr(owner, "_non_persistent_buffers_set", ())
        }
        buffers = {name: buffer for name, buffer in self._model.named_buffers() if name not in cached}
        return {**dict(self._model.named_parameters()), **buffers}

    def _validated(self, what: str) -> dict[str, Tensor]:
        """The model's tensors, if names, shapes and devices are the same as when the average was made."""
        current = self._tensors()
        found, before = _kinds_of(current), _kinds_of(self._averages)
        if found != before:
            name = min(name for name in found.keys() | before.keys() if found.get(name) != before.get(name))
            raise UsageError(
                f"ExponentialMovingAverage.{what}: {name!r} was {before.get(name, 'missing')} when the average was "
                f"made, and is {found.get(name, 'missing')} now. Make the average when the model is complete and on "
                f"its device."
            )
        return current

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(values[name])


def _copy_of(tensor: Tensor) -> Tensor:
    is_half = isinstance(tensor, nn.Parameter) and tensor.dtype in HALF_PRECISION
    return tensor.detach().to(torch.float32 if is_half else tensor.dtype, copy=True)


def _kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{list(tensor.shape)} on {tensor.device}" for name, tensor in tensors.items()}
