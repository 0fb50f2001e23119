"""Scripts that call `torch.set_default_device`: what evenstep makes for itself lies where it says, not there.

The default is "meta" here, whose tensors have no values: whatever took it by mistake fails at once.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import evenstep
from evenstep.testing import RankPool
from tests.procs.replica.test_engine import assert_same_grads, grads


def make_model() -> nn.Module:
    with torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).double()


def trained(directory: str, is_on_meta: bool) -> list[torch.Tensor]:
    """Parameters after an epoch with most of what there is, and two batches for the first rank alone."""
    with torch.device("meta" if is_on_meta else "cpu"):
        world = evenstep.init(quiet=True)
        model = evenstep.DistributedDataParallel(
            evenstep.SyncBatchNorm.convert_sync_batchnorm(make_model()),
            world=world,
            compare_every=2,
            bucket_cap_mb=1e-3,
        )
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
        average = evenstep.ExponentialMovingAverage(model, decay=0.9)
        with torch.device("cpu"):
            rows = torch.arange(240.0, dtype=torch.float64).sin().view(30, 8)
        loader = evenstep.DataLoader(
            torch.utils.data.TensorDataset(rows), global_batch_size=4, shuffle=True, seed=3, world=world
        )
        objects = {"model": model, "optimizer": optimizer, "loader": loader, "average": average}
        with evenstep.Checkpointer(directory, every_steps=3, world=world, **objects) as checkpointer:
            for (x,) in loader:
                for part in model.microbatches(x, 2):
                    model.backward(model(part).square().mean(), weight=len(part))
                evenstep.clip_grad_norm_(optimizer, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                average.update()
                checkpointer.step(loss=world.mean(1.0, weight=len(x)))
        with evenstep.Checkpointer(directory, world=world, **objects) as checkpointer:
            checkpointer.resume()
        plain = evenstep.DistributedDataParallel(make_model(), world=world)
        with plain.join():
            for _ in range(2 if world.rank == 0 else 0):
                plain(rows[:4]).square().mean().backward()
        assert world.exchange(world.rank) == list(range(world.world_size))
        world.barrier()
        return [p.detach() for p in model.parameters()] + [g for g in grads(plain) if g is not None]


def test_what_evenstep_makes_does_not_follow_the_default_device(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(trained, 2, str(tmp_path / "cpu"), False)
    for got, wanted in zip(ranks.run(trained, 2, str(tmp_path / "meta"), True), expected, strict=True):
        assert_same_grads(got, wanted)
