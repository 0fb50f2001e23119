"""Optimizers that step within the backward pass: torch's `_apply_optimizer_in_backward`.

It has autograd step as soon as a parameter's gradient is there, which on several ranks is before it has been averaged.
torch's class takes its hooks away when it wraps a module, and steps when the average is there; so does this, also where
the hooks have come later.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

_TORCHS = (
    "torch.distributed.optim.apply_optimizer_in_backward"  # imported if any are there; else it would take a second
)


class InBackward:
    """Such optimizers of a wrapped module.

    Args:
        parameters: Those that are trained.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._stepped: list[Any] = [each for each in parameters if hasattr(each, "_in_backward_optimizers")]
        self.take_over()

    def take_over(self) -> None:
        """Take torch's hooks off the parameters. They are looked at while any in the process have some."""
        torchs = sys.modules.get(_TORCHS)
        if torchs is None or not len(torchs.param_to_optim_hook_handle_map):
            return
        hooked = torchs.param_to_optim_hook_handle_map
        known = set(map(id, self._stepped))
        for parameter in self._parameters:
            handles = hooked.pop(parameter, ())
            for handle in handles:
                handle.remove()
            if handles and id(parameter) not in known:
                self._stepped.append(parameter)

    def step(self) -> None:
        """Step their parameters with gradients that have been averaged, and make those None."""
        for parameter in self._stepped:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None
