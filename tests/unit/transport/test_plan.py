"""Who shares a node with whom, and which rank carries which slice."""

import random
from typing import Any

import pytest

from evenstep.transport.core.header import REPORT_BYTES
from evenstep.transport.internode.plan import NodePlan, plan_nodes
from evenstep.transport.internode.steps import PAYLOAD_AT, plan_payload_bytes


def seen(boot: str, **changed: Any) -> dict[str, Any]:
    return {"problem": None, "boot": boot, "namespaces": ["pid", "user"], "user": 0, "machine": "m"} | changed


@pytest.mark.parametrize("changed", [{"boot": "b"}, {"user": 1}, {"namespaces": ["x", "y"]}, {"machine": "n"}])
def test_ranks_that_say_something_else_share_none(changed: dict[str, Any]) -> None:
    """Of two ranks."""
    assert plan_nodes([seen("a"), seen("a") | changed]).nodes == ((0,), (1,))


@pytest.mark.parametrize(
    ("nodes", "is_regular"),
    [(((0, 1), (2, 3)), True), (((0, 2), (1, 3)), False), (((0, 1), (2,)), False), (((0, 1, 2),), True)],
)
def test_regular_are_nodes_of_equally_many_consecutive_ranks(nodes: Any, is_regular: bool) -> None:
    assert NodePlan(nodes).is_regular is is_regular


def test_every_rank_has_one_place_and_groups_have_one_rank_per_node(fresh_seed: int) -> None:
    """Random worlds, of which most have nodes of different sizes."""
    random.seed(fresh_seed)
    for _ in range(50):
        num_nodes, num_ranks = random.randint(1, 5), random.randint(1, 12)
        plan = plan_nodes([seen(str(random.randrange(num_nodes))) for _ in range(num_ranks)])
        places = [plan.node_and_local_rank(rank) for rank in range(num_ranks)]
        assert sorted(places) == [(h, i) for h, ranks in enumerate(plan.nodes) for i in range(len(ranks))]
        assert plan.is_even
        for number in range(len(plan.nodes[0])):
            assert [plan.node_and_local_rank(rank) for rank in plan.inter_node_group(number)] == [
                (h, number) for h in range(len(plan.nodes))
            ]
    with pytest.raises(ValueError, match="rank 99"):
        plan.node_and_local_rank(99)


@pytest.mark.parametrize("num_nodes", range(2, 20))
def test_messages_hold_a_report_and_can_be_viewed_as_numbers_of_any_dtype(num_nodes: int) -> None:
    """A row of a message begins where a complex number may."""
    assert plan_payload_bytes(num_nodes) >= REPORT_BYTES
    assert plan_payload_bytes(num_nodes) % 16 == PAYLOAD_AT % 16 == 0
