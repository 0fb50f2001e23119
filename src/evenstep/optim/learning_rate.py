"""Learning rates for larger batches.

The linear rule is that of Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour"
(2017); the square root is Krizhevsky's, "One weird trick for parallelizing convolutional neural networks" (2014), and
what Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (2022) find for Adam.
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
