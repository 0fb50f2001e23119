"""A running average of parameters, for evaluation (Polyak and Juditsky, 1992; as used in Mean Teacher, 2017)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import checks
from evenstep.compat.torch_ddp import reshard
from evenstep.compat.torch_tensors import local_part
from evenstep.errors import ConfigurationError, UsageError
from evenstep.optim.consistency import abort_peers, keep_note, model_of
from evenstep.replica.gradients.buckets.bucket import HALF_PRECISION
from evenstep.replica.wrapper.distributed import DistributedDataParallel

_NUM_STEPS = "num_steps"


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

    Replicas are equal, so every rank averages for itself and nothing travels; all averages are equal too. Averages of
    16-bit parameters have 32 bits, which a small share of a step would otherwise be lost in. Names are those of the
    wrapped module, so that averages load into a plain model.

    One rank alone may have an average. Where all ranks of a wrapped model have equally many, they have them with the
    same arguments: the end of the next backward pass compares those, unless ranks are meant to differ
    (`compare_every=0`).

    Args:
        model: Its parameters are averaged, and its module buffers copied.
        decay: At least 0 and less than 1.
        ramp_up: Begin with a smaller decay, min(decay, (1 + steps) / (10 + steps)): the start is soon forgotten.

    Raises:
        ConfigurationError: No module, or the decay is out of its range.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, ramp_up: bool = True) -> None:
        who = "ExponentialMovingAverage"
        with abort_peers(model):
            if not isinstance(model, nn.Module):
                raise checks.refuse(f"{who}: model", model, "a torch.nn.Module")
            self.decay = checks.number(f"{who}: decay", decay, least=0, below=1)
            self.ramp_up = checks.switch(f"{who}: ramp_up", ramp_up)
        keep_note(model_of(model.parameters()), self, who, [("decay", self.decay), ("ramp_up", self.ramp_up)])
        self.num_steps = 0
        self._is_applied = False
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        reshard(self._model)
        with torch.inference_mode(False):  # else they could never be written to
            self._averages = {
                name: p.detach().to(torch.float32 if p.dtype in HALF_PRECISION else p.dtype, copy=True)
                for name, p in self._model.named_parameters()
            }
            self._buffers = {name: b.detach().clone() for name, b in self._model.named_buffers()}
        self._before: dict[str, Tensor] = {}  # inside `applied`: parameters of another dtype than their average

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are now into the average. Call it once per optimizer step.

        Raises:
            UsageError: Inside `applied`, where the parameters are the average; or the model has other parameters now.
        """
        self._validate_not_applied("update")
        parameters, buffers = self._current("update")
        decay = min(self.decay, (1 + self.num_steps) / (10 + self.num_steps)) if self.ramp_up else self.decay
        self.num_steps += 1
        averages: list[Tensor] = []
        current: list[Tensor] = []
        for name, average in self._averages.items():
            now = parameters[name].detach().to(average.dtype)
            average, now = local_part(average), local_part(now)
            if average.is_complex():
                average, now = torch.view_as_real(average), torch.view_as_real(now)
            if average.is_floating_point():
                averages.append(average)
                current.append(now)
            else:
                average.copy_(now)
        if averages:
            torch._foreach_lerp_(averages, current, 1 - decay)
        for name, buffer in buffers.items():
            self._buffers[name].copy_(buffer)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages; afterwards what it had before. Values are exchanged in place.

        Raises:
            UsageError: Inside `applied`; or the model has other parameters than when the average was made.
        """
        self._validate_not_applied("applied")
        self._current("applied")
        self._is_applied = True
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            self._is_applied = False

    def _validate_not_applied(self, what: str) -> None:
        if self._is_applied:
            raise UsageError(f"ExponentialMovingAverage.{what} inside `with average.applied()`. Leave the block first.")

    def _current(self, what: str) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """The model's parameters and module buffers, if they are those that there were."""
        reshard(self._model)
        parameters, buffers = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        for now, kept in ((parameters, self._averages), (buffers, self._buffers)):
            found = {name: (each.shape, each.device) for name, each in now.items()}
            before = {name: (each.shape, each.device) for name, each in kept.items()}
            if found != before:
                name = min(n for n in found.keys() | before.keys() if found.get(n) != before.get(n))
                raise UsageError(
                    f"ExponentialMovingAverage.{what}: {name!r} was {_told(before.get(name))} when the average "
                    f"was made, and "
                    f"is {_told(found.get(name))} now. Make the average when the model is complete and on its device."
                )
        return parameters, buffers

    @torch.no_grad()
    def _exchange(self) -> None:
        reshard(self._model)
        pairs = [(buffer, self._buffers[name]) for name, buffer in self._model.named_buffers()]
        for name, parameter in self._model.named_parameters():
            average = self._averages[name]
            if name in self._before:
                parameter.copy_(self._before.pop(name))
            elif average.dtype is not parameter.dtype:  # exchanged, it would lose what the other dtype can't hold
                self._before[name] = parameter.detach().clone()
                parameter.copy_(average)
            else:
                pairs.append((parameter, average))
        for one, other in pairs:
            before = one.detach().clone()
            one.copy_(other)
            other.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter name, and the number of steps.

        Raises:
            UsageError: Inside `applied`, where the averages are in the model: save them there, or here outside.
        """
        self._validate_not_applied("state_dict")
        return {_NUM_STEPS: self.num_steps, "parameters": dict(self._averages), "buffers": dict(self._buffers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from averages that `state_dict` gave.

        Raises:
            ConfigurationError: They are of another model; nothing was changed.
            UsageError: Inside `applied`.
        """
        self._validate_not_applied("load_state_dict")
        where = "ExponentialMovingAverage.load_state_dict"
        if not isinstance(state, Mapping):
            raise checks.refuse(f"{where}: state", state, "what state_dict() returned")
        num_steps = checks.whole(f"{where}: {_NUM_STEPS}", state.get(_NUM_STEPS), least=0)
        loaded: dict[str, dict[str, Tensor]] = {}
        for kind, own in (("parameters", self._averages), ("buffers", self._buffers)):
            given = state.get(kind)
            if not isinstance(given, Mapping) or not all(isinstance(each, Tensor) for each in given.values()):
                raise checks.refuse(f"{where}: {kind}", given, "tensors by name, as state_dict() gives them")
            if given.keys() != own.keys():  # saved of a wrapped model, by its names
                given = {name.removeprefix("module."): tensor for name, tensor in given.items()}
            differing = sorted(own.keys() ^ given.keys()) or [n for n in own if own[n].shape != given[n].shape]
            if differing:
                raise ConfigurationError(
                    f"{where}: {kind} differ, first in {differing[0]!r}; the average is of another model."
                )
            loaded[kind] = dict(given)
        self.num_steps = num_steps
        for kind, own in (("parameters", self._averages), ("buffers", self._buffers)):
            for name, tensor in own.items():
                tensor.copy_(loaded[kind][name])


def _told(what: tuple[torch.Size, torch.device] | None) -> str:
    return "not there" if what is None else f"{list(what[0])} on {what[1]}"
