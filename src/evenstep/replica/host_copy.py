"""One physical copy of parameters for all CPU ranks of a host.

[Note: who may write]

    rank 0    forward, backward ──┐          ┌ steps its shard ┐          ┌ forward, backward
                                  │ all here │                 │ all done │
    rank 1    forward, backward ──┘          └ steps its shard ┘          └ forward, backward

Between the two meetings every rank writes its own shard and reads nothing else; outside of them nobody writes. What a
program does to a parameter in place outside of them is done once per rank, and while others read.

Of several hosts each has a copy. A rank's shard then travels to the ranks that have the same place on the other hosts,
and these write it there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, UsageError
from evenstep.transport.base import Transport, Work
from evenstep.transport.common import map_in_common, ranks_in_reach
from evenstep.transport.local import LocalTransport
from evenstep.world import World


class HostCopy:
    """The ranks of a host around the parameters that they have in common: see [Note: who may write].

    Args:
        world: All ranks.
        transport: Carries what belongs to the model's passes.
    """

    def __init__(self, world: World, transport: Transport) -> None:
        self._world = world
        self._transport = transport
        self._ranks = ranks_in_reach(transport)

    @property
    def is_writer(self) -> bool:
        """Whether this rank puts the parameters there at the beginning, for all of its host."""
        return self._world.rank == self._ranks[0]

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Collective: [numel], memory that the ranks of this host have in common, zeroed.

        Raises:
            ConfigurationError: There isn't enough memory. Raised on all ranks, when all have done what came before.
        """
        rank, exchange, num_bytes = self._world.rank, self._world.exchange, numel * dtype.itemsize
        mapping = map_in_common(exchange, self._ranks, rank, num_bytes, what="parameters in common")
        return mapping.tensor(0, dtype, numel)

    def open(self, replaced: str | None) -> None:
        """Collective: from here on every rank may write its own shards, and none reads another's.

        Args:
            replaced: Name of a parameter that isn't where it was put any more; None: all are.

        Raises:
            UsageError: There is one, on some rank. Raised on all of them; nothing was written.
        """
        flag = torch.tensor([replaced is not None], dtype=torch.int32, device="cpu")
        self._transport.all_reduce(flag, "max").wait()
        if not flag.item():
            return
        for rank, name in enumerate(self._world.exchange(replaced)):
            if name is not None:
                raise UsageError(
                    f"rank {rank}: the memory of parameter {name!r} was replaced (p.data = ..., a conversion, "
                    f"load_state_dict(assign=True), or a step inside ExponentialAverage.applied), and with "
                    f"share_parameters=True it is that of all ranks of the host. Copy into parameters instead, or "
                    f"leave share_parameters out."
                )

    def close(self) -> None:
        """Collective: all have written; from here on everybody may read."""
        self._transport.barrier().wait()

    def start_gather(self, values: Tensor, own: Tensor) -> Work:
        """Collective: begin to write other hosts' shards into this host's copy; one host has them all.

        Args:
            values: [numel], in common.
            own: [numel / world_size], this rank's part of it.
        """
        if len(self._ranks) == self._world.world_size:
            return LocalTransport().barrier()
        return _FromOtherHosts(self._transport, values, own, num_local=len(self._ranks))

    def __repr__(self) -> str:
        return f"<HostCopy of ranks {', '.join(map(str, self._ranks))}>"


class _FromOtherHosts:
    """The shards of the ranks that have this one's place on other hosts (see `transport.base.Work`)."""

    def __init__(self, transport: Transport, values: Tensor, own: Tensor, *, num_local: int) -> None:
        self._shards = values.view(-1, num_local, own.numel())  # by host and place
        self._received = own.new_empty(self._shards.shape[0] * own.numel())
        self._host, self._place = divmod(transport.rank, num_local)
        self._work: Work = transport.all_gather_over_hosts(self._received, own)  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Return when they are written."""
        self._work.wait()
        for host, shard in enumerate(self._received.view(self._shards.shape[0], -1)):
            if host != self._host:
                self._shards[host, self._place].copy_(shard)

    def is_completed(self) -> bool:
        """Whether they are there, if not yet written."""
        return self._work.is_completed()


def validate_host_copy(world: World, transport: Transport, devices: Sequence[torch.device]) -> None:
    """Raise unless the ranks of each host can have one copy of parameters. Local; one rank has nothing to share.

    Args:
        world: All ranks.
        transport: Of the model's buckets.
        devices: Where the parameters are.

    Raises:
        ConfigurationError: Why they can't.
    """
    if world.world_size == 1:
        return
    elsewhere = [device for device in devices if device.type != "cpu"]
    if elsewhere:
        raise ConfigurationError(
            f"share_parameters=True is for ranks on the CPU, and this model is on {elsewhere[0]}. Leave it out."
        )
    if len(ranks_in_reach(transport)) < 2:
        why = "" if world.why_gloo is None else f" ({world.why_gloo})"
        raise ConfigurationError(
            f"share_parameters=True is for ranks that share memory, and these have {transport.name}{why}. Leave it out."
        )
    if len(ranks_in_reach(transport)) < world.world_size and not getattr(transport, "is_regular", False):
        raise ConfigurationError(
            "share_parameters=True over several hosts is for as many ranks, with consecutive numbers, on each of them. "
            "Leave it out."
        )
