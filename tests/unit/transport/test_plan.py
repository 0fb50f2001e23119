"""Who shares a node with whom, and which rank carries which slice."""

import random
from typing import Any

import pytest

from evenstep.transport.internode.plan import NodePlan, plan_nodes


def seen(boot: str, **changed: Any) -> dict[str, Any]:
    return {"problem": None, "boot": boot, "namespaces": ["pid", "user"], "user": 0, "machine": "m"} | changed


def test_ranks_that_say_the_same_share_a_host() -> None:
    plan = plan_nodes([seen("a"), seen("b"), seen("a"), seen("a", user=1), seen("b"), seen("a", namespaces=["x", "y"])])
    assert plan.nodes == ((0, 2), (1, 4), (3,), (5,))
    assert plan.num_inter_node_groups == 1
    assert plan.inter_node_group(0) == [0, 1, 3, 5]
    assert [plan.has_idle_ranks(node) for node in range(4)] == [True, True, False, False]


def test_a_rank_without_memfd_is_alone() -> None:
    problem = {"problem": "Darwin has no memfd"}
    assert plan_nodes([problem, seen("a"), problem, seen("a")]).nodes == ((0,), (1, 3), (2,))


@pytest.mark.parametrize(
    ("nodes", "is_regular"),
    [(((0, 1), (2, 3)), True), (((0, 2), (1, 3)), False), (((0, 1), (2,)), False), (((0, 1, 2),), True)],
)
def test_regular_are_nodes_of_equally_many_consecutive_ranks(nodes: Any, is_regular: bool) -> None:
    assert NodePlan(nodes).is_regular is is_regular


def test_every_rank_has_one_place_and_lanes_have_one_rank_per_host(fresh_seed: int) -> None:
    random.seed(fresh_seed)
    for _ in range(50):
        num_nodes = random.randint(1, 5)
        plan = plan_nodes([seen(str(random.randrange(num_nodes))) for _ in range(random.randint(1, 12))])
        places = [plan.place_of(rank) for rank in range(plan.world_size)]
        assert sorted(places) == [(h, i) for h, ranks in enumerate(plan.nodes) for i in range(len(ranks))]
        for number in range(plan.num_inter_node_groups):
            assert [plan.place_of(rank) for rank in plan.inter_node_group(number)] == [
                (h, number) for h in range(len(plan.nodes))
            ]
    with pytest.raises(ValueError, match="rank 99"):
        plan.place_of(99)
