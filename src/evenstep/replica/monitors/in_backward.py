"""Steps optimizers within the backward pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from evenstep.replica.gradients.observer import Observer

# Look it up in `sys.modules`: if the module isn't imported, no optimizer is attached, and an import takes a second.
_TORCH_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"
_OPTIMIZERS = "_in_backward_optimizers"  # torch's attribute of a parameter


class InBackward(Observer):
    """Steps optimizers that torch's `_apply_optimizer_in_backward` has attached to parameters.

    torch's hooks step as soon as autograd has a parameter's gradient. With several ranks that is before the gradient is
    averaged. torch's `DistributedDataParallel` removes these hooks when it wraps a module, and steps when the average
    is complete. This class does the same, and also removes hooks that are attached later.

    Args:
        parameters: The trained parameters.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._stepped: list[Any] = [each for each in parameters if hasattr(each, _OPTIMIZERS)]
        self.begin_pass()

    def begin_pass(self) -> None:
        """Remove torch's hooks from the parameters, if any parameter in the process has them."""
        module = sys.modules.get(_TORCH_MODULE)
        if module is not None and len(module.param_to_optim_hook_handle_map):
            for parameter in self._parameters:
                for handle in module.param_to_optim_hook_handle_map.pop(parameter, ()):
                    handle.remove()
            self._stepped = [each for each in self._parameters if hasattr(each, _OPTIMIZERS)]

    def step(self) -> None:
        """Step the optimizers with averaged gradients, and set these gradients to None."""
        for parameter in self._stepped:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None
