"""Which ranks are workers, and which are servers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from evenstep.checks import counted
from evenstep.errors import ConfigurationError
from evenstep.ground.environment import Placement


@dataclass(frozen=True)
class Roles:
    """The first ranks are workers, so that rank 0 is one; the last are servers.

    Attributes:
        rank: This process's.
        num_workers: At least 1.
        num_servers: 0 only in a world of one, where the worker is its own server.
    """

    rank: int
    num_workers: int
    num_servers: int

    @property
    def is_alone(self) -> bool:
        """One process: worker and server at once."""
        return self.num_servers == 0

    @property
    def is_server(self) -> bool:
        """Whether this process is a server, and nothing else."""
        return self.rank >= self.num_workers

    @property
    def name(self) -> str:
        """This process's name: "worker 0", "server 1"."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """A rank's name."""
        return f"worker {rank}" if rank < self.num_workers else f"server {rank - self.num_workers}"


def assign_roles(placement: Placement, num_servers: int) -> Roles:
    """The roles of a run's ranks.

    Args:
        placement: This rank's place.
        num_servers: How many of the ranks are servers.

    Raises:
        ConfigurationError: Several ranks without a server, or without a worker.
    """
    world_size = placement.world_size
    if world_size == 1:
        return Roles(0, 1, 0)
    if num_servers == 0:
        raise ConfigurationError(
            f"evenstep.parameter_server: there is no server among {world_size} ranks. Start some beside the workers: "
            f"`evenstep run --servers 1 --nproc-per-node {world_size}`, `evenstep.launch(servers=1)`, or, with another "
            f"launcher, EVENSTEP_SERVERS=1 for all ranks, the last of which is then a server."
        )
    if num_servers >= world_size:
        raise ConfigurationError(
            f"evenstep.parameter_server: {counted(num_servers, 'server')} among {counted(world_size, 'rank')} leave no "
            f"worker. EVENSTEP_SERVERS counts the servers among the launcher's ranks: start more ranks, or fewer "
            f"servers."
        )
    return Roles(placement.rank, world_size - num_servers, num_servers)
