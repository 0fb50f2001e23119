"""Plans of inter-node collectives: ranks by node, and chunks of vectors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.transport.core.reduction import round_up
from evenstep.transport.shm.segment import PAGE_BYTES

_MIN_CHUNK_BYTES = 1 << 20  # a shorter chunk takes longer to start than to send
_MAX_CHUNK_BYTES = 4 << 20
_CHUNKS_IN_FLIGHT = 4


@dataclass(frozen=True)
class NodePlan:
    """The ranks of every node.

    Attributes:
        nodes: The ranks of each node, in order; nodes are in order of their first rank. Every rank is on one node.
    """

    nodes: tuple[tuple[int, ...], ...]

    @property
    def is_even(self) -> bool:
        """Whether every node has equally many ranks."""
        return len(set(map(len, self.nodes))) == 1

    @property
    def is_regular(self) -> bool:
        """Whether every node has equally many ranks, with consecutive numbers."""
        in_order = [rank for node in self.nodes for rank in node]
        return self.is_even and in_order == sorted(in_order)

    def node_and_local_rank(self, rank: int) -> tuple[int, int]:
        """(number of a rank's node, number of the rank within the node)."""
        for index, node in enumerate(self.nodes):
            if rank in node:
                return index, node.index(rank)
        raise ValueError(f"rank {rank} is on no node of {self}")

    def inter_node_group(self, number: int) -> list[int]:
        """The ranks that exchange the same slice, one per node."""
        return [node[number] for node in self.nodes]


def plan_nodes(seen: Sequence[dict[str, Any]]) -> NodePlan:
    """Group ranks by their descriptions (`describe_this_process`). Pure.

    If nodes have different numbers of ranks, every rank is treated as a separate node.
    """
    nodes: dict[object, list[int]] = {}
    for rank, each in enumerate(seen):
        key = each["boot"], tuple(each["namespaces"]), each["user"], each["machine"]
        nodes.setdefault(key, []).append(rank)
    plan = NodePlan(tuple(map(tuple, nodes.values())))
    return plan if plan.is_even else NodePlan(tuple((rank,) for rank in range(len(seen))))


def plan_chunk_bytes(num_bytes: int) -> int:
    """The length of a vector's chunks. Pure.

    Several chunks are in flight at once, but no chunk is so short that its start takes longer than the transfer.
    """
    return min(max(round_up(num_bytes // _CHUNKS_IN_FLIGHT, PAGE_BYTES), _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
