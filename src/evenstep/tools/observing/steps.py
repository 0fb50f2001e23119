"""The steps of a script's optimizers, seen through the hooks that torch has for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenstep.tools.observing.patching import Patches


def watch_steps(patches: Patches, begins: Callable[[Any], object], ended: Callable[[Any], object]) -> None:
    """Call back before and after every step of an optimizer.

    A step inside another one is a part of that: a sharded optimizer steps with a plain one inside.

    Args:
        patches: Removes the hooks.
        begins: Called with the optimizer.
        ended: Called with the optimizer.
    """
    depth = 0

    def before(optimizer: Any, *_: object) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            begins(optimizer)

    def after(optimizer: Any, *_: object) -> None:
        nonlocal depth
        depth = max(0, depth - 1)
        if depth == 0:
            ended(optimizer)

    for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
        patches.later(handle.remove)
