"""The monitors of one model: built together, and handed to the engine as its observers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from evenstep.replica.gradients.observer import Observer
from evenstep.replica.monitors.drift import DEFAULT_EVERY, DriftWatch
from evenstep.replica.monitors.nonfinite import NonFiniteGuard, Policy, SumWatch, build_nonfinite_monitor
from evenstep.replica.monitors.options import OptionsWatch
from evenstep.transport.core.transport import Transport
from evenstep.world import World

# Read in `sys.modules`: where nobody has imported it no optimizer is there, and importing it takes a second.
_TORCH_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


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
        self._stepped: list[Any] = [each for each in parameters if hasattr(each, "_in_backward_optimizers")]
        self.begin_pass()

    def begin_pass(self) -> None:
        """Take torch's hooks off the parameters, while any parameter in the process has some."""
        module = sys.modules.get(_TORCH_MODULE)
        if module is None or not len(module.param_to_optim_hook_handle_map):
            return
        hooked = module.param_to_optim_hook_handle_map
        known = set(map(id, self._stepped))
        for parameter in self._parameters:
            handles = hooked.pop(parameter, ())
            for handle in handles:
                handle.remove()
            if handles and id(parameter) not in known:
                self._stepped.append(parameter)

    def step(self) -> None:
        """Step their parameters with averaged gradients, and set those to None."""
        for parameter in self._stepped:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:
                    optimizer.step()
                parameter.grad = None


@dataclass(frozen=True)
class Monitors:
    """What watches the steps of one model.

    Attributes:
        options: Compares options of optimizers and arguments of steps between ranks.
        drift: Compares parameters between ranks; None: nothing is compared.
        nonfinite: Finds gradients that aren't finite; None: nothing is checked.
        in_backward: Steps optimizers within the backward pass.
    """

    options: OptionsWatch
    drift: DriftWatch | None
    nonfinite: NonFiniteGuard | SumWatch | None
    in_backward: InBackward

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those that there are, in the order in which the engine calls them."""
        # Options first: where they differ, parameters may differ too.
        found = (self.options, self.drift, self.nonfinite, self.in_backward)
        return tuple(each for each in found if each is not None)

    @property
    def guard(self) -> NonFiniteGuard | None:
        """The monitor that leaves out steps or raises; None: there is none."""
        return self.nonfinite if isinstance(self.nonfinite, NonFiniteGuard) else None

    def are_replicas_alike(self) -> bool:
        """Return whether replicas are meant to be equal, as far as this rank knows."""
        return self.drift is not None and self.drift.is_on


def build_monitors(
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    world: World,
    transport: Transport,
    control: Transport,
    *,
    on_nonfinite: Policy | None,
    compare_every: int | None,
    starts_equal: bool,
) -> Monitors:
    """Build the monitors of a model.

    Args:
        names: Of the parameters.
        parameters: Those that are trained.
        world: The ranks that take part.
        transport: Carries what belongs to the model's passes.
        control: Carries messages on the CPU, in order with that.
        on_nonfinite: What happens to a step with a gradient that isn't finite; None: nothing is checked.
        compare_every: In so many windows parameters are compared between ranks once; None: where they are surely meant
            to be equal, in the usual number; 0: never.
        starts_equal: The replicas were made equal when the model was wrapped.
    """
    drift = None
    if world.world_size > 1 and compare_every != 0:
        every, is_vouched = compare_every or DEFAULT_EVERY, compare_every is not None
        drift = DriftWatch(names, parameters, world, transport, control, every=every, is_vouched=is_vouched)
        if not starts_equal:
            drift.doubt()
    options = OptionsWatch(world, control, parameters[0].device, lambda: drift is not None and drift.is_on)
    steps_late = world.world_size > 1 or world.virtual_ranks is not None
    nonfinite = build_nonfinite_monitor(on_nonfinite, world, transport, control)
    return Monitors(options, drift, nonfinite, InBackward(parameters if steps_late else ()))
