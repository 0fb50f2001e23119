"""Which ranks share a host, and how a vector is cut that travels between hosts: plain data and pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.transport.segment import PAGE_BYTES, round_up

_MIN_PIECE_BYTES = 1 << 20  # a shorter one takes longer to start than to send
_MAX_PIECE_BYTES = 4 << 20
_PIECES_IN_FLIGHT = 4
# What may travel with a call's first message: of two hosts each sends as much as otherwise, of more hosts more, in
# fewer steps. Never more than a piece, so that all ranks of a host call the same inside, whichever way their lanes go.
_MAX_FORESEEN_BYTES = _MIN_PIECE_BYTES
_MAX_FORESEEN_LANE_BYTES = 64 << 10  # of more than two hosts, what a rank sends: its slice, and those it passes on


@dataclass(frozen=True)
class HostPlan:
    """Which rank is on which host.

    Attributes:
        hosts: The ranks of each host in order; hosts in order of their first rank. Every rank is in one of them.
    """

    hosts: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def num_lanes(self) -> int:
        """How many ranks of each host carry a slice between hosts."""
        return min(map(len, self.hosts))

    @property
    def is_regular(self) -> bool:
        """Whether every host has equally many ranks, with consecutive numbers."""
        in_order = [rank for host in self.hosts for rank in host] == list(range(self.world_size))
        return in_order and len(set(map(len, self.hosts))) == 1

    def place_of(self, rank: int) -> tuple[int, int]:
        """(host, number within it)."""
        for index, host in enumerate(self.hosts):
            if rank in host:
                return index, host.index(rank)
        raise ValueError(f"rank {rank} is on no host of {self}")

    def lane(self, number: int) -> list[int]:
        """The ranks that carry the same slice, one per host."""
        return [host[number] for host in self.hosts]

    def has_idle_ranks(self, host: int) -> bool:
        """Whether some rank of the host carries nothing."""
        return len(self.hosts[host]) > self.num_lanes


def plan_hosts(seen: Sequence[dict[str, Any]]) -> HostPlan:
    """Group ranks by what they say of themselves (`describe_this_process`). Pure.

    Ranks that can't share memory at all are alone.
    """
    hosts: dict[object, list[int]] = {}
    for rank, each in enumerate(seen):
        alone = each["problem"] is not None
        key = rank if alone else (each["boot"], tuple(each["namespaces"]), each["user"], each["machine"])
        hosts.setdefault(key, []).append(rank)
    return HostPlan(tuple(map(tuple, hosts.values())))


def may_be_foreseen(num_bytes: float, slice_bytes: float, num_hosts: int) -> bool:
    """Whether a vector, of which each rank carries a slice, travels with the message of an expected call. Pure."""
    is_short = num_hosts == 2 or (num_hosts - 1) * slice_bytes <= _MAX_FORESEEN_LANE_BYTES
    return num_bytes <= _MAX_FORESEEN_BYTES and is_short


def plan_piece_bytes(num_bytes: int) -> int:
    """How long the pieces of a vector are: some are in flight at once, and none is too short to be worth it. Pure."""
    return min(max(round_up(num_bytes // _PIECES_IN_FLIGHT, PAGE_BYTES), _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
