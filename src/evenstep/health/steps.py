"""Optimizer steps for the progress page, counted by torch's global hooks: of every script, whatever wraps its model."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evenstep.health.page import Phase, mark


def count_optimizer_steps() -> None:
    """From now on the page says when an optimizer steps, and how often the busiest of them has. Once a process."""
    counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def before(*_: object) -> None:
        mark(Phase.OPTIMIZER)

    def after(optimizer: Any, *_: object) -> None:
        counts[optimizer] = counts.get(optimizer, 0) + 1
        mark(Phase.BETWEEN_STEPS, step=max(counts.values()))

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
