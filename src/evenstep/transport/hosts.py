"""Which ranks share a host, and the transport that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.transport.arrivals import plan_waiting
from evenstep.transport.base import Transport
from evenstep.transport.exchange import exchange
from evenstep.transport.host import connect_shared_memory, describe_this_process
from evenstep.transport.local import LocalTransport


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


def connect_ranks(
    control: Transport, subgroup: Callable[[Sequence[int]], Transport], *, timeout_s: float
) -> Transport | str:
    """Join ranks through memory that they share, as far as they share a host.

    Collective: every rank calls this, in the same order.

    Args:
        control: Carries the few messages that this needs, over Gloo. Part of the new transport if that spans several
            hosts, else still the caller's.
        subgroup: Opens Gloo between some ranks of `control`; called by these ranks alone.
        timeout_s: Deadline of the new transport's calls.

    Returns:
        The transport on every rank, or on every rank the same reason why there is none.
    """
    seen = exchange(control, describe_this_process(control.rank))
    plan = plan_hosts(seen)
    if len(plan.hosts) == 1 or max(map(len, plan.hosts)) == 1:
        policy = plan_waiting(control.world_size, timeout_s=timeout_s)
        return connect_shared_memory(control, policy)  # has words for it, if that can't be
    # Only here, and so only in a world of several hosts, that module's imports cost time.
    from evenstep.transport.several_hosts import SeveralHostsTransport

    host, number = plan.place_of(control.rank)
    ranks = plan.hosts[host]
    meeting = subgroup(ranks) if len(ranks) > 1 else None
    inside: Transport | str = LocalTransport()
    if meeting is not None:
        # Gloo's threads need cores as well.
        inside = connect_shared_memory(meeting, plan_waiting(2 * len(ranks), timeout_s=timeout_s))
        meeting.close()
    problems = exchange(control, inside if isinstance(inside, str) else None)
    for rank, problem in enumerate(problems):
        if problem is not None:
            if not isinstance(inside, str):
                inside.close()
            return f"on the host of rank {rank}: {problem}"
    assert not isinstance(inside, str)
    lane = subgroup(plan.lane(number)) if number < plan.num_lanes else None
    return SeveralHostsTransport(
        plan, inside=inside, lane=lane, everybody=control, rank=control.rank, timeout_s=timeout_s
    )
