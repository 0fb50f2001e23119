"""Transports that are made of others."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evenstep.transport.core.staged import StagedMessages
from evenstep.transport.core.transport import Transport
from evenstep.transport.local import LocalTransport
from evenstep.transport.tree_order import OrderedTransport


@pytest.mark.parametrize("kind", ["ordered", "staged"])
def test_a_deadline_is_that_of_all_parts(kind: str) -> None:
    """Else the short one at the end of a run wouldn't be kept."""
    parts = [LocalTransport(), LocalTransport()]
    made: Transport = OrderedTransport(parts[0], parts[1:])
    if kind == "staged":
        made = StagedMessages(made, torch.device("cpu"))
    made.set_timeout(3.5)
    assert [each.timeout_s for each in (made, *parts)] == [3.5] * 3
    made.close()


class Level:
    """The ranks of one level in this process, each in its own thread; they meet in every call."""

    def __init__(self, rank: int, tensors: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.world_size, self._rank, self._tensors, self._barrier = len(tensors), rank, tensors, barrier

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._tensors[self._rank] = tensor.clone()
        self._barrier.wait(20)
        seen = list(self._tensors)
        self._barrier.wait(20)
        return seen

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        out.copy_(torch.cat([each.view(self.world_size, -1)[self._rank] for each in self._exchange(tensor)]))
        return SimpleNamespace(wait=lambda: None)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Any:
        out.copy_(torch.cat(self._exchange(tensor)).view(out.shape))
        return SimpleNamespace(wait=lambda: None)

    def close(self) -> None:
        self._barrier.abort()


def test_a_sum_on_two_nodes_is_the_tree_and_each_rank_gets_its_own_part(fresh_seed: int) -> None:
    """Ranks 0 and 1 are on one node, 2 and 3 on the other."""
    torch.manual_seed(fresh_seed)
    vectors = [torch.randn(12) * 1e4 ** torch.rand(12) for _ in range(4)]
    expected = (vectors[0] + vectors[1]) + (vectors[2] + vectors[3])
    nodes, slices = ([([torch.empty(0)] * 2, threading.Barrier(2)) for _ in range(2)] for _ in range(2))
    ranks = []
    for rank in range(4):
        inner: Any = LocalTransport()
        inner.rank, inner.world_size = rank, 4
        node, local_rank = divmod(rank, 2)
        levels: list[Any] = [Level(local_rank, *nodes[node]), Level(node, *slices[local_rank])]
        ranks.append(OrderedTransport(inner, levels))
    parts, wholes = [torch.empty(3) for _ in ranks], [vector.clone() for vector in vectors]
    calls = [each.reduce_scatter(part, vector) for each, part, vector in zip(ranks, parts, vectors, strict=True)]
    calls += [each.all_reduce(whole) for each, whole in zip(ranks, wholes, strict=True)]
    for call in calls:
        call.wait()
    assert torch.equal(torch.cat(parts), expected)
    assert all(torch.equal(whole, expected) for whole in wholes)
    for each in ranks:
        each.close()
