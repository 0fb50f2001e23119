"""Ranks that run out of data before the others: torch's `Join` protocol.

[Note: who tells whom]

torch's `Join` asks, in ranks that have left their loop, again and again how many ranks are still in theirs; each of
those answers once per step. torch's class answers at forward. This one answers right before the first collective of a
window's end, so that forward passes without a reduction (accumulation, evaluation) need no counterpart, and what a
rank that has joined owes the others is one window's end: it takes part with weight zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from evenstep.replica.module_buffers import finish_broadcast, start_broadcast
from evenstep.world import World


@dataclass
class Uneven:
    """What the exchange has to know while ranks may leave one by one.

    Attributes:
        announce: Says that this rank takes part in another reduction; what it returns has a `wait`, or is None.
        divide_by_initial_world_size: Average plain gradients over all ranks, also over those that have left.
        has_joined: This rank has left its loop.
    """

    announce: Callable[[], Any]
    divide_by_initial_world_size: bool
    has_joined: bool = False

    def lowest_active(self, world: World) -> int:
        """Collective: the first rank that is still in its loop; its module buffers are everybody's."""
        lowest = torch.tensor([world.world_size if self.has_joined else world.rank])
        world.control.all_reduce(lowest, "min").wait()
        return int(lowest)


class Joining(Protocol):
    """What the hook needs of the wrapped module."""

    module: nn.Module
    world: World
    _join_config: _JoinConfig

    def _take_part_without_data(self) -> None: ...
    def _set_uneven(self, uneven: Uneven | None) -> None: ...
    def _kept_tensors(self) -> list[Tensor]: ...


class UnevenJoinHook(JoinHook):
    """What a rank does for the others after it has left its loop, and what all do when the last has left.

    Args:
        model: The wrapped module.
        uneven: As the exchange knows it.
    """

    def __init__(self, model: Joining, uneven: Uneven) -> None:
        self._model = model
        self._uneven = uneven
        model._set_uneven(uneven)

    def main_hook(self) -> None:
        """Take part in one reduction of the others."""
        self._uneven.has_joined = True
        self._model._take_part_without_data()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Collective: parameters and module buffers become those of a rank that left last."""
        world = self._model.world
        src = world.exchange(is_last_joiner).index(True)
        finish_broadcast(start_broadcast(self._model._kept_tensors(), world.transport, src=src))
        self._model._set_uneven(None)
        disabled: _JoinConfig = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]
        self._model._join_config = disabled
