"""Who shares a host with whom, and which rank carries which slice."""

import random
from typing import Any

import pytest

from evenstep.transport.host_plan import HostPlan, plan_hosts


def seen(boot: str, **changed: Any) -> dict[str, Any]:
    return {"problem": None, "boot": boot, "namespaces": ["pid", "user"], "user": 0, "machine": "m"} | changed


def test_ranks_that_say_the_same_share_a_host() -> None:
    plan = plan_hosts([seen("a"), seen("b"), seen("a"), seen("a", user=1), seen("b"), seen("a", namespaces=["x", "y"])])
    assert plan.hosts == ((0, 2), (1, 4), (3,), (5,))
    assert plan.num_lanes == 1
    assert plan.lane(0) == [0, 1, 3, 5]
    assert [plan.has_idle_ranks(host) for host in range(4)] == [True, True, False, False]


def test_a_rank_without_memfd_is_alone() -> None:
    problem = {"problem": "Darwin has no memfd"}
    assert plan_hosts([problem, seen("a"), problem, seen("a")]).hosts == ((0,), (1, 3), (2,))


@pytest.mark.parametrize(
    ("hosts", "is_regular"),
    [(((0, 1), (2, 3)), True), (((0, 2), (1, 3)), False), (((0, 1), (2,)), False), (((0, 1, 2),), True)],
)
def test_regular_are_hosts_of_equally_many_consecutive_ranks(hosts: Any, is_regular: bool) -> None:
    assert HostPlan(hosts).is_regular is is_regular


def test_every_rank_has_one_place_and_lanes_have_one_rank_per_host(fresh_seed: int) -> None:
    random.seed(fresh_seed)
    for _ in range(50):
        num_hosts = random.randint(1, 5)
        plan = plan_hosts([seen(str(random.randrange(num_hosts))) for _ in range(random.randint(1, 12))])
        places = [plan.place_of(rank) for rank in range(plan.world_size)]
        assert sorted(places) == [(h, i) for h, ranks in enumerate(plan.hosts) for i in range(len(ranks))]
        for number in range(plan.num_lanes):
            assert [plan.place_of(rank) for rank in plan.lane(number)] == [(h, number) for h in range(len(plan.hosts))]
    with pytest.raises(ValueError, match="rank 99"):
        plan.place_of(99)
