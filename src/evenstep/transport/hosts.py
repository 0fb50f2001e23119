"""The transport that follows from which ranks share a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from evenstep.transport.arrivals import plan_waiting
from evenstep.transport.base import Transport
from evenstep.transport.exchange import exchange
from evenstep.transport.host import connect_shared_memory, describe_this_process
from evenstep.transport.host_plan import plan_hosts
from evenstep.transport.local import LocalTransport
from evenstep.transport.process_group import ProcessGroupTransport

if TYPE_CHECKING:
    from evenstep.transport.host_steps import Inside


def connect_ranks(
    control: Transport,
    subgroup: Callable[[Sequence[int]], ProcessGroupTransport],
    *,
    timeout_s: float,
    is_shared: bool = False,
) -> Transport | str:
    """Join ranks through memory that they share, as far as they share a host.

    Collective: every rank calls this, in the same order.

    Args:
        control: Carries the few messages that this needs, over Gloo. Part of the new transport if that spans several
            hosts, unless it is shared; else still the caller's.
        subgroup: Opens Gloo between some ranks of `control`; called by these ranks alone.
        timeout_s: Deadline of the new transport's calls.
        is_shared: Others call `control` as well, in threads of their own.

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
    inside: Inside | str = LocalTransport()
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
    everybody = subgroup(range(control.world_size)) if is_shared else control
    return SeveralHostsTransport(
        plan, inside=inside, lane=lane, everybody=everybody, rank=control.rank, timeout_s=timeout_s
    )
