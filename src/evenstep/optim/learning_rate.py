"""Learning rates for larger batches.

The linear rule with warm-up is that of Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour"
(2017); the square root is Krizhevsky's, "One weird trick for parallelizing convolutional neural networks" (2014), and
what Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (2022) find for Adam.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal

from torch import Tensor, optim

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import UsageError
from evenstep.optim.consistency import abort_peers, model_of, note
from evenstep.optim.kinds import validate_optimizer
from evenstep.world import World

Rule = Literal["linear", "sqrt"]
_EARLY = 0.1  # the largest factor behind which a rate that was set anew is told from one that was multiplied


def scale_learning_rate(
    optimizer: optim.Optimizer,
    *,
    base_batch_size: int,
    global_batch_size: int,
    rule: Rule = "linear",
    accumulation_steps: int = 1,
    world: World | None = None,
) -> float:
    """Scale the rates of all parameter groups from the batch that they were found for to the one that is used.

    Every rank calls it once, with the same arguments, before schedulers are made. Rank 0 prints what was decided.
    No rank waits: ranks whose arguments differ are found in the first backward pass, if the model was wrapped before,
    and else by their rates.

    Args:
        optimizer: Its rates are those that suit `base_batch_size`.
        base_batch_size: Samples per step that the rates were found for.
        global_batch_size: Samples per optimizer step of all ranks together, accumulation included.
        rule: "linear": rates grow with the batch; "sqrt": with its square root.
        accumulation_steps: Micro-batches per step on each rank; only for the message.
        world: The ranks that take part; None: the current world.

    Returns:
        What rates were multiplied by.

    Raises:
        ConfigurationError: No optimizer, a size that is no positive integer, or an unknown rule.
        UsageError: A scheduler was made for the optimizer already, or its rates have been scaled before.
    """
    sizes = {
        "base_batch_size": base_batch_size,
        "global_batch_size": global_batch_size,
        "accumulation_steps": accumulation_steps,
    }
    who = "scale_learning_rate"
    with abort_peers(optimizer):
        validate_optimizer(f"{who}: optimizer", optimizer)
        given = [(name, checks.whole(f"{who}: {name}", size, least=1)) for name, size in sizes.items()]
        checks.choice(f"{who}: rule", rule, ("linear", "sqrt"))
        for group in optimizer.param_groups:
            if "initial_lr" in group:
                raise UsageError(
                    "scale_learning_rate after a scheduler was made, which would go on from the old rates. Scale first."
                )
            if "unscaled_lr" in group:
                raise UsageError("scale_learning_rate: the rates of this optimizer have been scaled before.")
        world = worlds.chosen(world, who)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    note(model_of(parameters), who, [*given, ("rule", rule)])
    base_batch_size, global_batch_size, accumulation_steps = (size for _, size in given)  # plain numbers from here on
    ratio = global_batch_size / base_batch_size
    factor = ratio if rule == "linear" else math.sqrt(ratio)
    received = []
    scaled: list[Tensor] = []  # groups without a rate of their own have one tensor between them, and the defaults
    for group in optimizer.param_groups:
        before = group["lr"]
        if not isinstance(before, Tensor):
            group["unscaled_lr"], group["lr"] = before, before * factor
        elif any(before is other for other in scaled):
            group["unscaled_lr"] = before / factor
        else:
            scaled.append(before)
            group["unscaled_lr"] = before.clone()
            before.mul_(factor)
        received.append(f"{float(group['unscaled_lr']):.4g} to {float(group['lr']):.4g}")
    default = optimizer.defaults.get("lr")
    if isinstance(default, int | float):
        optimizer.defaults["lr"] = default * factor  # of groups that are added later
    world.print(
        f"learning rate: {', '.join(dict.fromkeys(received))} ({rule} rule, times {factor:.4g}); global batch "
        f"{global_batch_size} (base {base_batch_size}), about {global_batch_size / world.data_size:.4g} per rank, "
        f"{accumulation_steps} micro-batch{'es' if accumulation_steps > 1 else ''} each"
    )
    return factor


class LinearWarmup(optim.lr_scheduler.LRScheduler):
    """Rates that grow linearly from `start_factor` of themselves over the first steps, and stay then.

    Call `step` once per optimizer step, on every rank: ranks take steps together, so it isn't called once per process
    and sample more often than in one process. Chain it with another scheduler by `torch.optim.lr_scheduler`'s
    `SequentialLR`. Or simply make both, if the other multiplies what it finds, as this one does and most of torch's do.
    LambdaLR, OneCycleLR, CyclicLR and CosineAnnealingWarmRestarts set rates whatever they were, which undoes a warm-up
    or multiplies it in one step: that is warned of once, by rank 0.

    Args:
        optimizer: Whose rates.
        num_steps: Optimizer steps until the full rate; 0: none.
        start_factor: Greater than 0, at most 1.
        last_epoch: As in torch.

    Raises:
        ConfigurationError: A number out of its range.
    """

    def __init__(
        self, optimizer: optim.Optimizer, num_steps: int, *, start_factor: float = 0.001, last_epoch: int = -1
    ) -> None:
        who = "LinearWarmup"
        with abort_peers(optimizer):
            validate_optimizer(f"{who}: optimizer", optimizer)
            self.num_steps = checks.whole(f"{who}: num_steps", num_steps, least=0)
            self.start_factor = checks.number(f"{who}: start_factor", start_factor, above=0, most=1)
            last_epoch = checks.whole(f"{who}: last_epoch", last_epoch, least=-1)
        self._left: list[float] = []  # rates behind this one's last step
        self._has_warned = False
        super().__init__(optimizer, last_epoch)

    def factor(self, step: int) -> float:
        """What the full rate is multiplied by before optimizer step `step`, counted from 0. Pure."""
        if step >= self.num_steps:
            return 1.0
        return self.start_factor + (1.0 - self.start_factor) * step / self.num_steps

    def get_lr(self) -> list[float | Tensor]:
        """See torch."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        change = self.factor(self.last_epoch)
        if self.last_epoch > 0 and self._is_initial:
            change = 1.0  # made again for an optimizer whose rates are those of this step already
        elif self.last_epoch > 0:
            before = self.factor(self.last_epoch - 1)
            self._look_at(rates, before)
            change /= before
        made = [rate * change for rate in rates]
        self._left = [float(rate) for rate in made] if self.last_epoch < self.num_steps and not self._has_warned else []
        return made

    def _look_at(self, rates: list[float | Tensor], before: float) -> None:
        """Warn if rates were overwritten early in the warm-up, and not multiplied by another scheduler.

        Args:
            rates: As they are found.
            before: The factor that they had.
        """
        if before > _EARLY or not self._left:
            return
        for rate, left in zip(rates, self._left, strict=False):  # there may be a new group
            if float(rate) > left / math.sqrt(before) > 0:
                self._has_warned = True
                world = worlds.initialised()
                if world is None or world.is_main:
                    warnings.warn(
                        f"LinearWarmup: a rate that it had made {left:.4g} was {float(rate):.4g} a step later: "
                        f"another scheduler overwrites rates, and the warm-up has no effect, or a wrong one. Of "
                        f"torch's schedulers LambdaLR, OneCycleLR, CyclicLR and CosineAnnealingWarmRestarts do. Put "
                        f"one behind the other: torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, other], "
                        f"milestones=[{self.num_steps}]).",
                        stacklevel=5,
                    )
                return
