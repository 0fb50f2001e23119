"""Whether a launcher's variables are this process's own, or were inherited from the rank that they describe. Pure.

[Note: a rank's children]

Children inherit the variables of a rank: a subprocess that calls `evenstep.init` would join the world a second time
under the same rank, or wait for the others in vain, and its failure would count as the rank's. So a rank that joins a
world exports its process id and a summary of its variables. A different process with the same variables is a child of
that rank; a process with other variables from its launcher isn't. Until a rank has joined, a child may become the rank,
since a script may do its work in a child process.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from evenstep.ground.environment.placement import Placement


@dataclass(frozen=True)
class RankProcess:
    """The process that is a rank.

    Attributes:
        pid: The process's id.
        start_ticks: When the process started, which distinguishes it from a later process with the same number.
        rank: The rank's number.
        world_size: Number of ranks.
        identity: A summary of the rank's variables: the result of the function `identity`.
    """

    pid: int
    start_ticks: int
    rank: int
    world_size: int
    identity: str

    @classmethod
    def parse(cls, text: str) -> RankProcess | None:
        """Parse the text of `str`; None if it is malformed."""
        *numbers, identity = text.split(" ")
        if len(numbers) != 4 or not all(number.isdecimal() for number in numbers) or not identity:
            return None
        pid, start_ticks, rank, world_size = map(int, numbers)
        return cls(pid, start_ticks, rank, world_size, identity)

    def __str__(self) -> str:
        return f"{self.pid} {self.start_ticks} {self.rank} {self.world_size} {self.identity}"


def identity(placement: Placement | str) -> str:
    """A short text that is the same for two placements only if they are the same rank of the same world.

    Args:
        placement: The placement from the variables; or the error about them, whose text shows them.
    """
    if isinstance(placement, Placement):  # omits fields that a script may change, and texts for people
        placement = replace(placement, device=None, has_one_gpu_of_its_own=False, announced=None, why="", remark="")
    return hashlib.sha256(repr(placement).encode()).hexdigest()[:16]


def is_inherited(exported: RankProcess | None, placement: Placement | str, *, pid: int, start_ticks: int) -> bool:
    """Whether this process has only inherited the variables of a rank.

    Args:
        exported: The record that the rank has exported; None: there is no record.
        placement: The placement from this process's variables, or the error about them.
        pid: This process.
        start_ticks: When this process started.
    """
    if exported is None or exported.identity != identity(placement):
        return False
    return (exported.pid, exported.start_ticks) != (pid, start_ticks)
