"""The optimizer of the user's class that steps for one whose parameters are divided: how it hears of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import optim

from evenstep import world as worlds
from evenstep.optim.kinds import choose_fused


def copy_options(kind: type[optim.Optimizer], group: Mapping[str, Any], own: dict[str, Any]) -> None:
    """Give a group of the inner optimizer the options of the user's group, and the fused step if nobody has chosen.

    Args:
        kind: Of the inner optimizer.
        group: The user's.
        own: The inner optimizer's; it has `params` of its own already.
    """
    own.update((key, value) for key, value in group.items() if key not in ("params", "param_names"))
    world = worlds.initialised()
    in_lanes = world is not None and world.lanes is not None
    if own["params"] and choose_fused(kind, group, own["params"], in_lanes=in_lanes):
        own["fused"], own["foreach"] = True, False


def update_options(groups: Sequence[Mapping[str, Any]], inner: optim.Optimizer) -> None:
    """Before a step: give all groups of the inner optimizer the options that the user's groups have now."""
    for group, own in zip(groups, inner.param_groups, strict=True):
        copy_options(type(inner), group, own)
        if own.get("fused") and own.get("momentum") and not group.get("fused") and _begins_in_part(own, inner):
            own["fused"] = False  # torch's fused SGD knows only parameters that all begin, or none


def _begins_in_part(own: Mapping[str, Any], inner: optim.Optimizer) -> bool:
    """Whether some tensors of a group have a momentum already, and others will get theirs in this step."""
    has = {inner.state[p].get("momentum_buffer") is not None for p in own["params"] if p.grad is not None}
    return len(has) > 1
