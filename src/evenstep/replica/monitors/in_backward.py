"""Steps optimizers within the backward pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from evenstep.replica.gradients.observer import Observer

# Read in `sys.modules`: where nobody has imported it no optimizer is there, and importing it takes a second.
_TORCH_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"
_OPTIMIZERS = "_in_backward_optimizers"  # torch's attribute of a parameter


class InBackward(Observer):
    """Steps optimizers that torch's `_apply_optimizer_in_backward` has attached to parameters.

    Autograd would step as soon as a parameter's gradient is there, which on several ranks is before it has been
    averaged. torch's class takes those hooks away when it wraps a module, and steps when the average is there. So does
    this class, also where the hooks have come later.

    Args:
        parameters: Those that are trained.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._stepped: list[Any] = [each for each in parameters if hasattr(each, _OPTIMIZERS)]
        self.begin_pass()

    def begin_pass(self) -> None:
        """Take torch's hooks off the parameters, while any parameter in the process has some."""
        module = sys.modules.get(_TORCH_MODULE)
        if module is not None and len(module.param_to_optim_hook_handle_map):
            for parameter in self._parameters:
                for handle in module.param_to_optim_hook_handle_map.pop(parameter, ()):
                    handle.remove()
            self._stepped = [each for each in self._parameters if hasattr(each, _OPTIMIZERS)]

    def step(self) -> None:
        """Step their parameters with averaged gradients, and set those to None."""
        for parameter in self._stepped:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None
