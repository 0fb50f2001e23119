"""Two tiers on several ranks and nodes: what a local copy holds, what a resume takes, and one outcome for all ranks."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import evenstep
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.directory import checkpoints_in
from evenstep.checkpoint.lock import place_of
from evenstep.checkpoint.store import LocalDirectory
from evenstep.checkpoint.tier import LocalTier
from tests.checkpoint_runs import Training, world_for_this_test


@contextlib.contextmanager
def on_nodes(ranks_each: int) -> Iterator[evenstep.World]:
    """The world, as if every so many ranks were on a node of their own."""
    world = world_for_this_test()
    kept = {name: getattr(world, name) for name in ("node_rank", "num_nodes", "local_rank", "local_world_size")}
    world.node_rank, world.local_rank = divmod(world.rank, ranks_each)
    world.num_nodes, world.local_world_size = world.world_size // ranks_each, ranks_each
    try:
        yield world
    finally:
        vars(world).update(kept)


def generations(root: Path, node: int) -> dict[int, Path]:
    """Those of a node that are whole, by step."""
    folders = (root / f"node{node}").glob("*/*/step-*/manifest.json")
    return {place_of(path.parent.name).step: path.parent for path in folders}


def save_often(root: Path, delay_s: float):
    """Local copies of each step, whose leader removes the one before late; what was printed."""
    told = io.StringIO()
    remove = LocalTier._remove

    def late(tier: LocalTier, *keeps: Any) -> None:
        time.sleep(delay_s)
        remove(tier, *keeps)

    with on_nodes(2) as world, contextlib.redirect_stderr(told), mock.patch.object(LocalTier, "_remove", late):
        kinds = {"every_steps": 10, "every_minutes": None, "local": root / "node0", "local_every_steps": 1}
        run = Training(root / "saved", world, **kinds)
        tier, num_keys = run.run_to(1).checkpoint._tier, set[int]()
        assert tier is not None
        for step in (3, 9):
            run.run_to(step)
            tier.finish()
            world.barrier()
            num_keys.add(world.store.num_keys())
            world.barrier()
        assert len(num_keys) == 1, "the store does not grow with saves"
        held = sorted(generations(root, 0))
        run.checkpoint._release()
    return held, told.getvalue()


def test_what_other_ranks_write_already_is_not_removed_with_the_copies_before(ranks, tmp_path):
    for held, told in ranks.run(save_often, 2, tmp_path, 0.05):
        assert held == [9]
        assert "could not be written" not in told


def local_steps(root: Path, upto: int, resumes: bool):
    """With LocalSGD, steps are counted and copies are due where ranks exchange."""
    world, told = world_for_this_test(), io.StringIO()
    torch.manual_seed(7 + resumes)
    model = evenstep.DistributedDataParallel(nn.Linear(3, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    local = evenstep.LocalSGD(model, optimizer, every=3)
    checkpoint = Checkpointer(
        root / "saved",
        model=model,
        local_sgd=local,
        every_minutes=None,
        every_steps=2,
        local=root / "local",
        local_every_steps=1,
    )
    began = checkpoint.resume()
    for step in range(began, 3 * upto):
        generator = torch.Generator().manual_seed(10 * step + world.rank)
        optimizer.zero_grad()
        model.backward(model(torch.randn(5, 3, dtype=torch.float64, generator=generator)).square().mean())
        local.step()
        with contextlib.redirect_stderr(told):
            checkpoint.step()
    checkpoint._tier.finish()
    checkpoint.wait()
    assert ("a lost process costs at most 3 + 3 steps" in told.getvalue()) == world.is_main
    kept = [p.detach().clone() for p in model.parameters()]
    kept += [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    checkpoint._release()
    local.close()
    return began, kept


def test_local_sgd_goes_on_from_the_last_exchange(ranks, tmp_path):
    straight = ranks.run(local_steps, 2, tmp_path / "a", 4, False)
    ranks.run(local_steps, 2, tmp_path / "b", 2, False)
    assert list(checkpoints_in(LocalDirectory(tmp_path / "b" / "saved"))) == [3, 6], "due behind steps 2, 4 and 6"
    second = ranks.run(local_steps, 2, tmp_path / "b", 4, True)
    for rank in range(2):
        assert second[rank][0] == 6
        assert all(map(torch.equal, second[rank][1], straight[rank][1]))
