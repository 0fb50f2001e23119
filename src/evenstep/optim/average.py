"""A running average of parameters, for evaluation (Polyak and Juditsky, 1992; as used in Mean Teacher, 2017)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import checks
from evenstep.errors import ConfigurationError, UsageError
from evenstep.transport.common import is_in_common

_NUM_STEPS = "num_steps"


class ExponentialAverage:
    """Parameters averaged over steps with exponentially falling weights: `average = decay * average + (1 - decay) * p`.

        average = evenstep.ExponentialAverage(model, decay=0.999)
        ...
        optimizer.step()
        average.update()
        ...
        with average.applied():
            evaluate(model)

    Replicas are equal, so every rank averages for itself and nothing travels; all averages are equal too.

    Args:
        model: Its parameters are averaged, and its floating-point module buffers copied.
        decay: At least 0 and less than 1.
        ramp_up: Begin with a smaller decay, min(decay, (1 + steps) / (10 + steps)): the start is soon forgotten.

    Raises:
        ConfigurationError: No module, or the decay is out of its range.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, ramp_up: bool = True) -> None:
        if not isinstance(model, nn.Module):
            raise checks.refuse("ExponentialAverage: model", model, "a torch.nn.Module")
        self.decay = checks.number("ExponentialAverage: decay", decay, least=0, below=1)
        self.ramp_up = checks.switch("ExponentialAverage: ramp_up", ramp_up)
        self.num_steps = 0
        self._is_applied = False
        self._model = model
        self._averages = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._buffers = {name: b.detach().clone() for name, b in model.named_buffers()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are now into the average. Call it once per optimizer step.

        Raises:
            UsageError: Inside `applied`, where the parameters are the average.
        """
        self._validate_not_applied("update")
        decay = min(self.decay, (1 + self.num_steps) / (10 + self.num_steps)) if self.ramp_up else self.decay
        self.num_steps += 1
        current = {name: p.detach() for name, p in self._model.named_parameters()}
        floating = [name for name, average in self._averages.items() if average.is_floating_point()]
        torch._foreach_lerp_([self._averages[n] for n in floating], [current[n] for n in floating], 1 - decay)
        for name, buffer in self._model.named_buffers():
            self._buffers[name].copy_(buffer)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averages; afterwards what it had before. Values are exchanged in place.

        Parameters that ranks have in common (`ShardedOptimizer(share_parameters=True)`) get this rank's averages as
        their memory instead, so that each rank may evaluate when it likes.

        Raises:
            UsageError: Inside `applied`.
        """
        self._validate_not_applied("applied")
        self._is_applied = True
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            self._is_applied = False

    def _validate_not_applied(self, what: str) -> None:
        if self._is_applied:
            raise UsageError(f"ExponentialAverage.{what} inside `with average.applied()`. Leave the block first.")

    @torch.no_grad()
    def _exchange(self) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, parameter in self._model.named_parameters():
            average = self._averages[name]
            if is_in_common(parameter) or is_in_common(average):
                parameter.data, self._averages[name] = average, parameter.data
            else:
                pairs.append((parameter, average))
        pairs += [(buffer, self._buffers[name]) for name, buffer in self._model.named_buffers()]
        for one, other in pairs:
            before = one.detach().clone()
            one.copy_(other)
            other.copy_(before)

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter name, and the number of steps."""
        return {_NUM_STEPS: self.num_steps, "parameters": dict(self._averages), "buffers": dict(self._buffers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from averages that `state_dict` gave.

        Raises:
            ConfigurationError: They are of another model; nothing was changed.
            UsageError: Inside `applied`.
        """
        self._validate_not_applied("load_state_dict")
        where = "ExponentialAverage.load_state_dict"
        if not isinstance(state, Mapping):
            raise checks.refuse(f"{where}: state", state, "what state_dict() returned")
        num_steps = checks.whole(f"{where}: {_NUM_STEPS}", state.get(_NUM_STEPS), least=0)
        for kind, own in (("parameters", self._averages), ("buffers", self._buffers)):
            given = state.get(kind)
            if not isinstance(given, Mapping):
                raise checks.refuse(f"{where}: {kind}", given, "tensors by name, as state_dict() gives them")
            differing = sorted(own.keys() ^ given.keys()) or [n for n in own if own[n].shape != given[n].shape]
            if differing:
                raise ConfigurationError(
                    f"{where}: {kind} differ, first in {differing[0]!r}; the average is of another model."
                )
        self.num_steps = num_steps
        for kind, own in (("parameters", self._averages), ("buffers", self._buffers)):
            for name, tensor in own.items():
                tensor.copy_(state[kind][name])
