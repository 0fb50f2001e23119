"""Parameters without elements, such as a head of no classes, have a state like all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import evenstep


class Headless(nn.Module):
    """With parameters that have no elements, before, between and behind those that have."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Parameter(torch.zeros(0))
        self.layer = nn.Linear(6, 5)
        self.head = nn.Parameter(torch.zeros(3, 0))
        self.out = nn.Linear(5, 2)
        self.last = nn.Parameter(torch.zeros(0, 2))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(torch.tanh(self.layer(x)))
        return y + self.first.sum() + self.head.sum() + self.last.sum()


def make(seed: int, kind: str, way: str) -> tuple[evenstep.DistributedDataParallel, torch.optim.Optimizer]:
    model = evenstep.DistributedDataParallel(Headless(seed), bucket_cap_mb=3e-4, first_bucket_cap_mb=1e-4)
    chosen = getattr(torch.optim, kind)
    if way == "plain":
        return model, chosen(model.parameters(), lr=0.1)
    return model, evenstep.ShardedOptimizer(model, chosen, lr=0.1, shard_gradients=way == "sharded 2")


def train(model: evenstep.DistributedDataParallel, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + model.world.rank)
    for _ in range(3):
        model.backward(model(torch.randn(4, 6, dtype=torch.float64, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def resumed(seed: int, directory: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """(the state that was saved, what was loaded)."""
    world = evenstep.init(quiet=True)
    found = []
    for turn in range(2):
        model, optimizer = make(seed + turn, "Adagrad", "sharded")
        checkpoint = evenstep.Checkpointer(directory, model=model, optimizer=optimizer)
        checkpoint.resume()
        if turn == 0:
            train(model, optimizer, seed)
            checkpoint.save()
        found.append(optimizer.state_dict()["state"])
        checkpoint.close()
    world.barrier()
    return found[0], found[1]


def test_they_are_saved_and_loaded(ranks, fresh_seed, tmp_path):
    for saved, loaded in ranks.run(resumed, 2, fresh_seed, str(tmp_path / "runs")):
        assert len(saved) == 7
        assert loaded.keys() == saved.keys()
        for number, state in saved.items():
            assert all(torch.equal(loaded[number][key], value) for key, value in state.items())
