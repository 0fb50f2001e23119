"""Parameters without elements, such as a head of no classes, have a state like all others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep.optim.sharded.flat_segments import Shard


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


def states(seed: int, kind: str, way: str) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """(before the first step, behind the last)."""
    evenstep.init(quiet=True)
    model, optimizer = make(seed, kind, way)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    train(model, optimizer, seed)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return before, saved["state"]


@pytest.mark.parametrize("nproc", [1, 2, 3])
@pytest.mark.parametrize("way", ["sharded", "sharded 2"])
@pytest.mark.parametrize("kind", ["Adagrad", "AdamW", "SGD"])
def test_parameters_without_elements_have_a_state(ranks, fresh_seed, nproc, way, kind):
    expected = ranks.run(states, nproc, fresh_seed, kind, "plain")[0]
    for found in ranks.run(states, nproc, fresh_seed, kind, way):
        for got, plain in zip(found, expected, strict=True):
            assert got.keys() == plain.keys()
            for number, state in plain.items():
                assert got[number].keys() == state.keys()
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        torch.testing.assert_close(got[number][key], value, rtol=1e-12, atol=1e-13)


def pieces(seed: int) -> list[Shard]:
    evenstep.init(quiet=True)
    model, optimizer = make(seed, "AdamW", "sharded")
    train(model, optimizer, seed)
    return optimizer.state_shards()[1]  # type: ignore[attr-defined,no-any-return]


def test_a_piece_of_nothing_is_there_once(ranks, fresh_seed):
    found = [shard for each in ranks.run(pieces, 3, fresh_seed) for shard in each]
    nothing = [shard.path for shard in found if 0 in shard.shape]
    assert len(nothing) == 3 * 2
    assert len(set(nothing)) == len(nothing)


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
