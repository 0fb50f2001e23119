"""Learning rates for larger batches.

The linear rule is that of Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour"
(2017). The square root rule is Krizhevsky's, "One weird trick for parallelizing convolutional neural networks" (2014).
For Adam it is the result of Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (2022).
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, optim

from evenstep import checks
from evenstep import world as worlds
from evenstep.errors import UsageError
from evenstep.ground.health import excepthook
from evenstep.optim.consistency import abort_peers, model_of, note
from evenstep.optim.kinds import validate_optimizer
from evenstep.world import World

Rule = Literal["linear", "sqrt"]


@excepthook.for_users
def scale_learning_rate(
    optimizer: optim.Optimizer,
    *,
    base_batch_size: int,
    global_batch_size: int,
    rule: Rule = "linear",
    accumulation_steps: int = 1,
    world: World | None = None,
) -> float:
    """Scale the rates of all parameter groups from the batch size for which they were tuned to the actual one.

    Every rank calls it once, with the same arguments, before schedulers are made. Rank 0 prints the new rates. No rank
    waits. If arguments differ, the first backward pass reports them if the model was wrapped before this call, or else
    the different rates.

    Args:
        optimizer: An optimizer with rates for `base_batch_size`.
        base_batch_size: Samples per step for which the rates were tuned.
        global_batch_size: Samples per optimizer step of all ranks together, accumulation included.
        rule: "linear": rates grow with the batch; "sqrt": with its square root.
        accumulation_steps: Micro-batches per step on each rank; only for the message.
        world: The ranks that take part; None: the current world.

    Returns:
        The factor by which rates were multiplied.

    Raises:
        ConfigurationError: `optimizer` isn't an optimizer, a size isn't a positive integer, or the rule is unknown.
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
                    "scale_learning_rate after a scheduler was made: the scheduler would continue from the old rates. "
                    "Scale first."
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
    scaled: list[Tensor] = []  # groups without their own rate share one tensor with each other and with the defaults
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
        optimizer.defaults["lr"] = default * factor  # for groups that are added later
    world.print(
        f"learning rate: {', '.join(dict.fromkeys(received))} ({rule} rule, times {factor:.4g}); global batch "
        f"{global_batch_size} (base {base_batch_size}), about {global_batch_size / world.data_size:.4g} per rank, "
        f"{accumulation_steps} micro-batch{'es' if accumulation_steps > 1 else ''} each"
    )
    return factor
