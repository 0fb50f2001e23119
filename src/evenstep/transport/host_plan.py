"""Which ranks share a host, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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
