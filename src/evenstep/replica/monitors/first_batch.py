"""Warns once if ranks train on the same samples because the script still uses torch's `DataLoader`.

The warning has two conditions: the first batches of ranks 0 and 1 are equal, and an iterator of torch's loader exists
that draws from the whole data set. So there is no warning for a script that divides its data itself, by a sampler or
beforehand, nor for an evaluation's loader. Ranks that shuffle with different seeds (`init` without a seed) have
different first batches, so they aren't noticed.

No rank waits: rank 1 puts a digest into the store before its first backward pass, and rank 0 reads it after its first
optimizer step, which needs that pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.compat.torch_data import draws_from_whole_data_set
from evenstep.ground.health.steps import batches_drawn, count_optimizer_steps
from evenstep.ground.health.users_code import warn
from evenstep.replica.monitors.digests import digest
from evenstep.world import World

_KEY = "evenstep/first-batch"


def compare_first_batches(world: World, inputs: Any) -> None:
    """Compare the first batches of ranks 0 and 1, unless evenstep's loader has drawn them.

    Args:
        world: A world whose ranks should have different samples.
        inputs: Inputs of the first training forward pass in that world, any pytree.
    """
    global _judge
    if not world.is_initialised or world.store is None or world.world_size == 1 or world.rank > 1 or batches_drawn():
        return
    leaves = pytree.tree_leaves(inputs)
    first = next((leaf for leaf in leaves if type(leaf) in (Tensor, nn.Parameter) and leaf.numel()), None)
    if first is None or first.is_sparse:
        return
    text = str(int(digest([first.detach()])))
    if world.rank == 1:
        world.store.set(_KEY, text)
    else:
        _judge = _Judge(world, text)


class _Judge:
    """Compares the digests, on rank 0 after the first optimizer step."""

    def __init__(self, world: World, text: str) -> None:
        self._world, self._text = world, text
        count_optimizer_steps(self._stepped)

    def _stepped(self, _: Optimizer, has_ended: bool) -> None:
        global _judge
        if not has_ended or _judge is not self:
            return
        _judge, store = None, self._world.store
        if batches_drawn() or store is None or not store.check([_KEY]) or store.get(_KEY).decode() != self._text:
            return
        if draws_from_whole_data_set():
            warn(
                "ranks 0 and 1 train on the same samples: their first batches are equal, and come from a torch "
                "DataLoader that draws from the whole data set on each rank. Use evenstep.DataLoader(dataset, "
                "global_batch_size=..., shuffle=True), or give torch's sampler=evenstep.DistributedSampler(dataset). "
                "This warning comes once."
            )


_judge: _Judge | None = None
