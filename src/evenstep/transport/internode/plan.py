"""Plans of inter-node collectives: ranks by node, and chunks of vectors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evenstep.transport.core.reduction import round_up
from evenstep.transport.shm.segment import PAGE_BYTES

_MIN_CHUNK_BYTES = 1 << 20  # a shorter one takes longer to start than to send
_MAX_CHUNK_BYTES = 4 << 20
_CHUNKS_IN_FLIGHT = 4
# What may travel with a call's header: of two nodes each sends as much as otherwise, of more nodes more, in fewer
# steps. Never more than a chunk, so that all ranks of a node make the same intra-node calls, whichever way their groups
# go.
_MAX_PREDICTED_BYTES = _MIN_CHUNK_BYTES
_MAX_PREDICTED_RANK_BYTES = 64 << 10  # of more than two nodes, what a rank sends: its slice, and those it passes on


@dataclass(frozen=True)
class NodePlan:
    """The ranks of every node.

    Attributes:
        nodes: The ranks of each node in order; nodes in order of their first rank. Every rank is in one of them.
    """

    nodes: tuple[tuple[int, ...], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def num_inter_node_groups(self) -> int:
        """Number of inter-node groups: ranks of each node that carry a slice."""
        return min(map(len, self.nodes))

    @property
    def is_regular(self) -> bool:
        """Whether every node has equally many ranks, with consecutive numbers."""
        in_order = [rank for node in self.nodes for rank in node] == list(range(self.world_size))
        return in_order and len(set(map(len, self.nodes))) == 1

    def place_of(self, rank: int) -> tuple[int, int]:
        """(node, number within it)."""
        for index, node in enumerate(self.nodes):
            if rank in node:
                return index, node.index(rank)
        raise ValueError(f"rank {rank} is on no node of {self}")

    def inter_node_group(self, number: int) -> list[int]:
        """The ranks that carry the same slice, one per node."""
        return [node[number] for node in self.nodes]

    def has_idle_ranks(self, node: int) -> bool:
        """Whether some rank of the node carries nothing."""
        return len(self.nodes[node]) > self.num_inter_node_groups


def plan_nodes(seen: Sequence[dict[str, Any]]) -> NodePlan:
    """Group ranks by what they say of themselves (`describe_this_process`). Pure.

    Ranks that can't share memory at all are alone.
    """
    nodes: dict[object, list[int]] = {}
    for rank, each in enumerate(seen):
        alone = each["problem"] is not None
        key = rank if alone else (each["boot"], tuple(each["namespaces"]), each["user"], each["machine"])
        nodes.setdefault(key, []).append(rank)
    return NodePlan(tuple(map(tuple, nodes.values())))


def is_predictable(num_bytes: float, slice_bytes: float, num_nodes: int) -> bool:
    """Whether a vector's slices travel with the header of a predicted call. Pure."""
    is_short = num_nodes == 2 or (num_nodes - 1) * slice_bytes <= _MAX_PREDICTED_RANK_BYTES
    return num_bytes <= _MAX_PREDICTED_BYTES and is_short


def plan_chunk_bytes(num_bytes: int) -> int:
    """The length of a vector's chunks. Pure.

    Several are in flight at once, and none is too short to be worth its start.
    """
    return min(max(round_up(num_bytes // _CHUNKS_IN_FLIGHT, PAGE_BYTES), _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
