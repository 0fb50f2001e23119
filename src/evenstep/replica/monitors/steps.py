"""Checks of optimizers' steps: steps on gradients that weren't averaged, and ranks that are out of step.

[Note: gradients that weren't averaged]

`model.module.compute_loss(x).backward()` and a pass under `no_sync` leave this rank's own gradients in `p.grad`. A step
on such gradients is right in local SGD, and if the script averages by hand; else replicas drift apart. So there is a
warning if an optimizer steps a parameter with a gradient from such a pass, if the gradient is still the same tensor and
not zero (`zero_grad` drops it, or makes it zero), and if no process group has made a call since. A script that logs
with a collective between pass and step gets no warning: a wrong warning would be worse.

[Note: slipped steps]

If a rank skips a backward pass (`if loss != 0:`), its next exchange is matched with the other ranks' exchange of the
step before. When each rank has skipped one pass, all have made equally many exchanges: nothing hangs and replicas stay
equal, but gradients of different steps are averaged. So ranks compare, from one window to the next, the numbers of
optimizer steps, of training batches drawn, and of training forward passes that no backward pass has reached
(`Engine.end_forward`). A difference from before the first window, such as a forward pass on one rank before the loop,
is no slip. Neither are unequal micro-batches, or a cell that is called once for each part of a sequence. A rank with an
empty share makes fewer of these calls in a step, so a window with such a rank isn't judged.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.ground.compat.torch_distributed import num_collectives
from evenstep.ground.compat.torch_tensors import local_part
from evenstep.ground.health.steps import batches_drawn, count_optimizer_steps
from evenstep.ground.health.users_code import user_site, warn
from evenstep.replica.gradients.observer import Observer
from evenstep.replica.gradients.window import Window
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport
from evenstep.world import World

# The counted events, as named in messages.
_COUNTED = ("optimizer steps", "training batches drawn", "forward passes without a backward pass")


@dataclass(frozen=True)
class _Left:
    """A gradient of this rank alone, and the number of calls that process groups had made when it was left."""

    parameter: nn.Parameter
    gradient: Tensor
    num_collectives: int
    is_held_back: bool


class StepWatch(Observer):
    """Warns of steps on gradients that weren't averaged, and of ranks that are out of step; each once.

    Args:
        parameters: The trained parameters.
        world: The ranks that take part; more than one.
        control: Carries messages on the CPU, in order with those of the model's passes.
        others: Observers of the model whose `stepped` is called.
    """

    num_numbers = 2 * len(_COUNTED) + 1

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, control: Transport, others: Sequence[Observer] = ()
    ) -> None:
        self._parameters = parameters
        self._world, self._control, self._others = world, control, others
        self._left: _Left | None = None
        self._has_warned_of_gradients = self._has_warned_of_slips = False
        # The number of steps of each optimizer. For an optimizer without a parameter of the model: minus its number of
        # groups.
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_apart = False
        self._num_steps = 0  # the largest count of an optimizer
        self._num_forgotten = 0  # forward passes without a backward pass
        self._before: tuple[int, ...] | None = None  # counts at the last window's end; None: nothing to compare with
        count_optimizer_steps(self.optimizer_steps)

    # ------------------------------------------------------------------ events

    def begin_pass(self) -> None:
        """See `Observer`. The gradient that was noted is averaged with this pass, or noted again at its end."""
        self._left = None

    def passed_by(self, parameter: nn.Parameter) -> None:
        """See `Observer`."""
        self._note(parameter, is_held_back=False)

    def end_local_pass(self) -> None:
        """See `Observer`."""
        held = next((each for each in self._parameters if each.grad is not None), None)
        if held is not None:
            self._note(held, is_held_back=True)

    def forget_forwards(self, number: int) -> None:
        """See `Observer`."""
        self._num_forgotten += number

    def set_apart(self, is_apart: bool) -> None:
        """See `Observer`."""
        self._is_apart, self._before = is_apart, None

    def optimizer_steps(self, optimizer: Optimizer, has_ended: bool) -> None:
        """Called before and after each step of any optimizer."""
        if has_ended:
            count, not_counted = self._steps.get(optimizer), -len(optimizer.param_groups)
            if count is None or not_counted != count < 0:  # a new optimizer, or an optimizer with a new group
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                count = not_counted if held.isdisjoint(map(id, self._parameters)) else 0
            if count < 0:
                self._steps[optimizer] = count
                return
            self._steps[optimizer] = count + 1
            self._num_steps = max(self._num_steps, count + 1)
            for other in self._others:
                other.stepped(optimizer)
        elif self._left is not None and not self._has_warned_of_gradients:
            self._judge_step(optimizer, self._left)

    def has_stateful_optimizer(self) -> bool:
        """Whether an optimizer that has stepped the model has state, such as momenta."""
        return any(count > 0 and optimizer.state for optimizer, count in self._steps.items())

    # ------------------------------------------------------------------ steps on gradients that weren't averaged

    def _note(self, parameter: nn.Parameter, *, is_held_back: bool) -> None:
        gradient = parameter.grad
        if gradient is not None and not self._has_warned_of_gradients:
            self._left = _Left(parameter, gradient, num_collectives(), is_held_back)

    def _judge_step(self, optimizer: Optimizer, left: _Left) -> None:
        if not any(p is left.parameter for group in optimizer.param_groups for p in group["params"]):
            return
        self._left = None
        values = left.gradient._values() if left.gradient.is_sparse else local_part(left.gradient)
        is_its_own = left.parameter.grad is left.gradient and num_collectives() == left.num_collectives
        if not (is_its_own and values.any()):
            return
        self._has_warned_of_gradients = True
        why = (
            "they come from a backward pass under no_sync or accumulate, and no later pass has averaged them. Run the "
            "last backward pass before the step outside of no_sync and accumulate"
            if left.is_held_back
            else "the backward pass bypassed the wrapper. Call model(...) instead of model.module or a method of it, "
            "or pass the loss to model.backward(loss)"
        )
        warn(
            f"rank {self._world.rank}: {type(optimizer).__name__}.step at {user_site()} uses gradients that were not "
            f"averaged over ranks, so replicas drift apart: {why}. This warning comes once.",
        )

    # ------------------------------------------------------------------ slipped steps

    def _counts(self) -> tuple[int, ...]:
        return self._num_steps, batches_drawn(), self._num_forgotten

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """See `Observer`: each count's increase since the last window, its square, and whether the share is empty."""
        self.sent = None
        before, self._before = self._before, None if self._is_apart else self._counts()
        if self._before is None or before is None or self._has_warned_of_slips:
            return (0.0,) * self.num_numbers
        self.sent = True
        numbers = []
        for now, then in zip(self._before, before, strict=True):
            numbers += [float(now - then), float(now - then) ** 2]
        return [*numbers, float(window.kind is None)]

    def judge(self, sent: Any, sums: Sequence[float]) -> None:
        """See `Observer`. All numbers are equal if and only if n * (sum of squares) equals the square of their sum."""
        size, num_empty = self._world.world_size, sums[-1]
        if num_empty:
            return
        for which in range(len(_COUNTED)):
            if size * sums[2 * which + 1] != sums[2 * which] ** 2:
                self.found = which
                return

    def conclude(self, found: int) -> bool:
        """Warn of the count that differs. Collective."""
        if not self._has_warned_of_slips:  # on a GPU the next window's numbers are sent before these are judged
            self._has_warned_of_slips = True
            everybody = exchange(self._control, self._counts())
            if self._world.is_main:
                warn(_story(found, everybody))
        return False


def _story(which: int, everybody: Sequence[Sequence[int]]) -> str:
    """The message for one of the counts of all ranks. Pure."""
    counts = [each[which] for each in everybody]
    low, high = counts.index(min(counts)), counts.index(max(counts))
    found = f"rank {high} has {counts[high]} {_COUNTED[which]}, rank {low} has {counts[low]}"
    if low == high:
        found = f"all ranks have {counts[low]} {_COUNTED[which]}, but not in the same steps"
    return (
        f"ranks are out of step: since the last average of gradients some ranks have gone further than others "
        f"({found}), so gradients of different steps are averaged. A rank has probably skipped a backward pass, a "
        f"batch or a step. A rank takes part without contributing by model.backward(loss, weight=0), or with an empty "
        f"share. This warning comes once."
    )
