"""The slow, obvious engine: after backward, one all-reduce per parameter. The oracle of the fast one.

The two engines have only the world in common. This one has no hooks, no buckets, no header and no learned order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evenstep.world import World


class ReferenceReplica:
    """Weighted gradient averaging, in the simplest form.

        replica = ReferenceReplica(module, world)
        replica.add(loss, weight=len(x))     # once per micro-batch
        replica.average()                    # p.grad is the global weighted mean

    Args:
        module: The model, equal on all ranks.
        world: The ranks that take part.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._world = world
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self._weight = 0.0

    def add(self, loss: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the gradient of `loss` to this rank's sum; a weight of 0 adds nothing."""
        if weight == 0:
            return
        self._weight += weight
        grads = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        for index, grad in enumerate(grads):
            if grad is not None:
                before = self._sums[index]
                self._sums[index] = grad * weight if before is None else before + grad * weight

    def average(self, *, over_ranks: bool = False) -> None:
        """Collective: give every parameter its global mean gradient; None where no rank has one.

        Args:
            over_ranks: Divide by the number of ranks (as torch does) instead of the sum of the weights.
        """
        device = self._parameters[0].device
        divisor = float(self._world.world_size) if over_ranks else self._weight
        total = torch.tensor(divisor, dtype=torch.float64, device=device)
        if not over_ranks:
            self._world.transport.all_reduce(total).wait()
        for parameter, local in zip(self._parameters, self._sums, strict=True):
            num_users = torch.tensor(0.0 if local is None else 1.0, device=device)
            self._world.transport.all_reduce(num_users).wait()
            summed = torch.zeros_like(parameter.detach()) if local is None else local.detach().clone()
            self._world.transport.all_reduce(summed).wait()
            parameter.grad = summed / total.to(summed.dtype) if num_users > 0 else None
        self._sums = [None] * len(self._parameters)
        self._weight = 0.0
