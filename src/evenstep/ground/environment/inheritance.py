"""Whether a launcher's variables are this process's own, or were inherited from the rank that they describe. Pure.

[Note: a rank's children]

Children inherit the variables of a rank: a subprocess that calls `evenstep.init` would join the world a second time
under the same rank, and its failure would count as the rank's. So a rank that joins a world exports its process, with
what its variables say. Another process that finds these unchanged is a child; one whose launcher has set others is not.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from evenstep.ground.environment.placement import Placement


@dataclass(frozen=True)
class RankProcess:
    """The process that is a rank.

    Attributes:
        pid: Its process.
        start_ticks: When that started, which tells it from a later process with the same number.
        identity: What its variables say: `identity` of its placement.
    """

    pid: int
    start_ticks: int
    identity: str

    @classmethod
    def parse(cls, text: str) -> RankProcess | None:
        """From the text of `str`; None if it is none."""
        pid, _, rest = text.partition(" ")
        ticks, _, identity = rest.partition(" ")
        return cls(int(pid), int(ticks), identity) if pid.isdigit() and ticks.isdigit() and identity else None

    def __str__(self) -> str:
        return f"{self.pid} {self.start_ticks} {self.identity}"


def identity(placement: Placement) -> str:
    """A short text that two placements share only if they are the same rank of the same world."""
    told = (
        placement.launcher,
        placement.rank,
        placement.world_size,
        placement.local_rank,
        placement.restart_count,
        str(placement.rendezvous_file),
        placement.master_address,
        placement.master_port,
        placement.rendezvous_id,
        placement.job,
    )
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def is_inherited(exported: RankProcess | None, placement: Placement, *, pid: int, start_ticks: int) -> bool:
    """Whether a process has the variables of another one, which is that rank.

    Args:
        exported: What the rank has exported; None: no rank has.
        placement: What this process's variables say.
        pid: This process.
        start_ticks: When it started.
    """
    if exported is None or exported.identity != identity(placement):
        return False
    return (exported.pid, exported.start_ticks) != (pid, start_ticks)
