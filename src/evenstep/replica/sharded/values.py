"""Parameters in one flat tensor with the layout of their gradients' bucket. Each rank steps its shard of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from evenstep.errors import UsageError
from evenstep.replica.gradients.buckets.bucket import begin_range, views_of
from evenstep.replica.gradients.buckets.layout import BucketLayout
from evenstep.transport.core.transport import Transport


class ShardedValues:
    """The values of a bucket's parameters: see [Note: what lies where] in `bucket`.

    Args:
        layout: The place of each parameter.
        parameters: The parameters by slot. They are moved into `whole`.
        names: The parameters' names, for messages.
        transport: Connects the ranks over which the parameters are divided.
        allocator: Allocates the memory.

    Attributes:
        whole: [numel]; parameters are views of it.
        own: [numel / n], this rank's shard of `whole`.
        homes: For each slot, the view of `whole` that is the parameter's memory.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        transport: Transport,
        allocator: Transport,
    ) -> None:
        self._layout, self._parameters, self._names, self._transport = layout, parameters, names, transport
        self.whole = allocator.allocate(layout.numel, dtype=parameters[0].dtype, device=layout.device)
        self.own = self.whole.chunk(transport.world_size)[transport.rank]
        self.homes = views_of(self.whole, layout, parameters)
        for parameter, home in zip(parameters, self.homes, strict=True):
            home.copy_(parameter.detach())
            parameter.data = home
        self._addresses = [home.data_ptr() for home in self.homes]

    def keep_hold(self) -> bool:
        """Move parameters back into `whole` if `load_state_dict(assign=True)` or `p.data = ...` has moved them.

        Returns:
            Whether parameters had been moved.

        Raises:
            UsageError: A parameter now has another dtype, device or shape.
        """
        if [parameter.data_ptr() for parameter in self._parameters] == self._addresses:
            return False
        for parameter, home, name in zip(self._parameters, self.homes, self._names, strict=True):
            if parameter.data_ptr() == home.data_ptr():
                continue
            found = (parameter.dtype, parameter.device, parameter.shape)
            if found != (home.dtype, home.device, home.shape):
                raise UsageError(
                    f"rank {self._transport.rank}: parameter {name!r} is {str(found[0])[6:]} {list(found[2])} on "
                    f"{found[1]} now, and was {str(home.dtype)[6:]} {list(home.shape)} on {home.device} when its "
                    f"ShardedOptimizer was made. Convert or move the model before wrapping it."
                )
            home.copy_(parameter.detach())
            parameter.data = home
        return True

    def start_gather(self) -> Callable[[], None]:
        """Collective: begin to gather the values of all shards on every rank.

        Returns:
            A function that waits for the values and increases the parameters' versions; call it once.
        """
        changed = partial(torch.autograd.graph.increment_version, self._parameters)
        if self._transport.world_size == 1:
            return changed  # the values are there
        end_range = begin_range("parameters of bucket", self._layout, self.whole)
        work = self._transport.all_gather(self.whole, self.own)

        def finish_gather() -> None:
            changed()
            work.wait()
            end_range()

        return finish_gather
