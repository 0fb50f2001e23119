"""Optimizers' steps beside a model's windows: on gradients that weren't averaged, and of ranks that are out of step.

[Note: gradients that weren't averaged]

`model.module.compute_loss(x).backward()` and a pass under `no_sync` leave this rank's own gradients in `p.grad`. A step
on them is right in local SGD, and where the script averages by hand; else replicas drift apart. So a warning is due
where an optimizer steps a parameter whose gradient such a pass has left, in the tensor in which it was left
(`zero_grad` drops it, or makes it zero), and where no process group has made a call since. A script that logs with a
collective between pass and step gets no warning: a wrong one would be worse.

[Note: slipped steps]

A rank that leaves out a backward pass (`if loss != 0:`) meets the others one step later, and when each has left out one
the numbers of their exchanges are equal: nothing hangs, replicas stay equal, and gradients of different steps are
averaged. So ranks compare, from one window to the next, how often they have stepped, how many training batches they
have drawn, and how many training forward passes no backward pass has reached (`Engine.end_forward`). What differs from
the beginning, such as a forward pass on one rank before the loop, is no slip; nor are unequal micro-batches, or a cell
that is called once for each part of a sequence. A rank whose share is empty runs less of a step than others do, so a
window with such a rank isn't judged.
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

# What is counted: as it is told.
_COUNTED = ("optimizer steps", "training batches drawn", "forward passes without a backward pass")


@dataclass(frozen=True)
class _Left:
    """A gradient that this rank alone has left, and how many calls process groups had made then."""

    parameter: nn.Parameter
    gradient: Tensor
    num_collectives: int
    is_held_back: bool


class StepWatch(Observer):
    """Warns of steps on gradients that weren't averaged, and of ranks that are out of step; each once.

    Args:
        parameters: Those that are trained.
        world: The ranks that take part, several of them.
        control: Carries messages on the CPU, in order with what belongs to the model's passes.
        others: Observers of the model that are told of steps.
    """

    num_numbers = 2 * len(_COUNTED) + 1

    def __init__(
        self, parameters: Sequence[nn.Parameter], world: World, control: Transport, others: Sequence[Observer] = ()
    ) -> None:
        self._parameters = parameters
        self._world, self._control, self._others = world, control, others
        self._left: _Left | None = None
        self._has_warned_of_gradients = self._has_warned_of_slips = False
        # Of an optimizer that has no parameter of the model: how many groups it had then, below 0.
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_apart = False
        self._num_steps = 0  # the most of one optimizer
        self._num_forgotten = 0  # forward passes
        self._before: tuple[int, ...] | None = None  # counts at the last window's end; None: nothing to compare with
        count_optimizer_steps(self.optimizer_steps)

    # ------------------------------------------------------------------ what happens

    def begin_pass(self) -> None:
        """See `Observer`: what it adds to is averaged with it, or noted again."""
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
            if count is None or not_counted != count < 0:  # a new optimizer, or a new group of one
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
            "they come from a backward pass under no_sync or accumulate, and none has ended that window. Run the last "
            "backward pass before the step outside"
            if left.is_held_back
            else "the backward pass went past the wrapper, which averages what a call of it began: call model(...) and "
            "not model.module or a method of it, or give the loss to model.backward(loss)"
        )
        warn(
            f"rank {self._world.rank}: {type(optimizer).__name__}.step at {user_site()} uses gradients that were not "
            f"averaged over ranks, so replicas drift apart: {why}. This warning comes once.",
        )

    # ------------------------------------------------------------------ slipped steps

    def _counts(self) -> tuple[int, ...]:
        return self._num_steps, batches_drawn(), self._num_forgotten

    def header_numbers(self, window: Window) -> Sequence[float] | Tensor:
        """See `Observer`: of each count what has been added since the last window, and its square; an empty share."""
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
        """See `Observer`: equal numbers, and only those, have squares whose sum is that of the mean's."""
        size, num_empty = self._world.world_size, sums[-1]
        if num_empty:
            return
        for which in range(len(_COUNTED)):
            if size * sums[2 * which + 1] != sums[2 * which] ** 2:
                self.found = which
                return

    def conclude(self, found: int) -> bool:
        """Warn of the number of what is counted. Collective."""
        if not self._has_warned_of_slips:  # on a GPU numbers of the next window travel before these are judged
            self._has_warned_of_slips = True
            everybody = exchange(self._control, self._counts())
            if self._world.is_main:
                warn(_story(found, everybody))
        return False


def _story(which: int, everybody: Sequence[Sequence[int]]) -> str:
    """What differs, for all ranks' counts. Pure."""
    counts = [each[which] for each in everybody]
    low, high = counts.index(min(counts)), counts.index(max(counts))
    found = f"rank {high} has {counts[high]} {_COUNTED[which]}, rank {low} has {counts[low]}"
    if low == high:
        found = f"ranks have {counts[low]} {_COUNTED[which]}, in other steps"
    return (
        f"ranks are out of step: since the last average of gradients some have gone further than others ({found}), so "
        f"gradients of different steps are averaged. A rank has probably left out a backward pass, a batch or a step. "
        f"It takes part without adding anything by model.backward(loss, weight=0), or by an empty share. This warning "
        f"comes once."
    )
