"""Ranks whose nodes keep generations on disks of their own resume from what these hold between them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import evenstep
from evenstep.checkpoint.checkpointer import Checkpointer
from tests.checkpoint_runs import is_same, world_for_this_test
from tests.mesh_runs import LAYOUTS, Model, divided, mesh_of, whole_of

# ---------------------------------------------------------------------- saved by the ranks themselves


def train(root: Path, kind: str, nodes: list[int], upto: int, resumes: bool):
    """The step from which a rank has begun, the end, and the next random numbers.

    Checkpoints are of steps 3 and 6, local copies of 2, 4 and 6.

    Args:
        root: Of the durable checkpoints and of the nodes' disks.
        kind: "replicas", "sharded", or a layout that torch divides the model by.
        nodes: Of each rank.
        upto: The last step; nothing is saved then.
        resumes: Whether it is a later attempt.
    """
    world = world_for_this_test()
    node = nodes[world.rank]
    local = {
        "node_rank": node,
        "num_nodes": max(nodes) + 1,
        "local_rank": nodes[: world.rank].count(node),
        "local_world_size": nodes.count(node),
    }
    with mock.patch.multiple(world, **local):
        torch.manual_seed(1 + resumes)
        model: Any = Model().double()
        if kind in LAYOUTS:
            model = divided(model, mesh_of(kind))
        else:
            model = evenstep.DistributedDataParallel(model, world=world)
        if kind == "sharded":
            optimizer: Any = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-2)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpoint = Checkpointer(
            root / "durable",
            world=world,
            every_minutes=None,
            every_steps=3,
            local=root / f"node{node}",
            local_every_steps=2,
            model=model,
            optimizer=optimizer,
        )
        begun = checkpoint.resume() if resumes else 0
        for step in range(begun, upto):
            model(torch.arange(12).view(3, 4).add(step) % 13).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.rand(1)
            checkpoint.step()
        checkpoint.wait()
        checkpoint._tier.finish()
        state = whole_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        checkpoint._world_ended(RuntimeError("a rank is lost"))
        checkpoint._release()
    return begun, state, torch.rand(2).tolist()


@pytest.mark.extended(beyond=4)
@pytest.mark.parametrize(
    ("kind", "nodes", "lost", "nodes_then", "begins"),
    [
        ("replicas", [0, 1, 2], [1], [0, 1, 2], 4),
        ("replicas", [0, 1, 2], [0, 2], [0, 1, 2], 4),
        ("replicas", [0, 1, 2], [2], [0, 1], 4),
        ("replicas", [0, 0, 1, 1], [1], [0, 0, 0, 0], 4),
        ("sharded", [0, 1, 2], [], [0, 1, 2], 4),
        ("sharded", [0, 1, 2], [1], [0, 1, 2], 3),
        ("shard 3", [0, 1, 2], [], [0, 1, 2], 4),
        ("shard 3", [0, 1, 2], [1], [0, 1, 2], 3),
        ("replicate 2 x shard 2", [0, 0, 1, 1], [0], [0, 0, 1, 1], 4),
        ("replicate 2 x shard 2", [0, 0, 1, 1], [1], [0, 0, 0, 0], 4),
        ("shard 4", [0, 0, 1, 1], [], [1, 1, 0, 0], 4),
    ],
)
def test_a_lost_node_costs_the_steps_since_a_copy_where_its_state_is_on_a_peer(
    ranks, tmp_path, kind, nodes, lost, nodes_then, begins
):
    """Nodes are lost, or all processes; there are fewer nodes then, or each has other ranks."""
    undisturbed = ranks.run(train, len(nodes), tmp_path / "undisturbed", kind, nodes, 7, False)
    ranks.run(train, len(nodes), tmp_path / "run", kind, nodes, 5, False)
    for node in lost:
        shutil.rmtree(tmp_path / f"run/node{node}")
    resumed = ranks.run(train, len(nodes_then), tmp_path / "run", kind, nodes_then, 7, True)
    for rank, (begun, state, drawn) in enumerate(resumed):
        assert begun == begins
        assert is_same(state, undisturbed[rank][1], 0.0 if len(resumed) == len(undisturbed) else 1e-12)
        assert drawn == undisturbed[rank][2] or len(resumed) != len(undisturbed)
