"""The place of a rank in the world: plain data, the same for every launcher. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.errors import ConfigurationError


@dataclass(frozen=True)
class Placement:
    """A rank's place in the world, and the way to find the other ranks.

    Attributes:
        launcher: "evenstep run", "evenstep.launch", "torchrun", "Open MPI", "MPICH", "Intel MPI", "PALS", "srun", or
            "none" for a process without a launcher.
        rendezvous_file: File of the rendezvous of one node's ranks; None: over the network.
        master_address: The address of rank 0; None if unknown.
        master_port: The port at that address.
        makes_store: Whether rank 0 opens a store at that port; otherwise torch or its launcher does.
        job: Identifies this job among all others; "" if the launcher has no such variable.
        restart_count: How many times the launcher has restarted the ranks.
        rendezvous_id: Name of this rendezvous of several nodes, the same on all; "" if the launcher sets none.
        pages: Paths of the heartbeat pages of this node's ranks, if evenstep's launcher made them.
        device: The device from the launcher's command line.
        announced: The line that the launcher printed at start.
        has_one_gpu_of_its_own: Whether the launcher makes only one GPU visible to each rank, its own.
        why: The variables by which the launcher was recognised, for people.
        remark: A line to print at start, if variables look like several ranks but there is one process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    launcher: str = "none"
    rendezvous_file: Path | None = None
    master_address: str | None = None
    master_port: int | None = None
    makes_store: bool = False
    job: str = ""
    restart_count: int = 0
    rendezvous_id: str = ""
    pages: tuple[str, ...] = ()
    device: str | None = None
    announced: str | None = None
    has_one_gpu_of_its_own: bool = False
    why: str = field(default="", compare=False)
    remark: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for index, count, names in (
            (self.rank, self.world_size, "RANK and WORLD_SIZE"),
            (self.local_rank, self.local_world_size, "LOCAL_RANK and LOCAL_WORLD_SIZE"),
            (self.node_rank, self.num_nodes, "GROUP_RANK and GROUP_WORLD_SIZE"),
        ):
            if not 0 <= index < count:
                raise ConfigurationError(
                    f"{names} are inconsistent: {index} of {count}. A rank is from 0 to the size less one; unset the "
                    f"variables to run as one process, or start with `evenstep run`."
                )


def placement_from_nodes(nodes: Sequence[str], rank: int) -> Placement:
    """Compute local ranks and node ranks from the node of each rank, in order of rank. Pure."""
    distinct = list(dict.fromkeys(nodes))
    return Placement(
        rank=rank,
        world_size=len(nodes),
        local_rank=sum(node == nodes[rank] for node in nodes[:rank]),
        local_world_size=Counter(nodes)[nodes[rank]],
        node_rank=distinct.index(nodes[rank]),
        num_nodes=len(distinct),
        launcher="none",
    )
