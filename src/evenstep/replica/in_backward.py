"""Optimizers that step within the backward pass: torch's `_apply_optimizer_in_backward`.

It has autograd step as soon as a parameter's gradient is there, which on several ranks is before it has been averaged.
torch's class takes its hooks away and steps when the average is there; so does this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from torch import Tensor

_TORCHS = (
    "torch.distributed.optim.apply_optimizer_in_backward"  # imported if any are there; else it would take a second
)


def take_over(parameters: Sequence[Tensor]) -> Callable[[], None] | None:
    """Take torch's hooks off parameters that have such optimizers.

    Args:
        parameters: Those that are trained.

    Returns:
        What steps these parameters, once gradients are averaged, and makes their gradients None; None if there are
        none.
    """
    stepped = [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
    if not stepped:
        return None
    torchs = sys.modules[_TORCHS]
    for parameter in stepped:
        for handle in torchs.param_to_optim_hook_handle_map.pop(parameter, ()):
            handle.remove()

    def step() -> None:
        for parameter in stepped:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None

    return step
