"""Modules of TorchScript's, in whole or in part, train as those of python do."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import evenstep


class Normed(nn.Module):
    """A layer and a normalisation, so that there are parameters and buffers, one of which isn't floating."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5, bias=False)  # which a normalisation would take out again
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.layer(x)))


def build(seed: int, scripted: str) -> nn.Module:
    torch.manual_seed(seed)
    parts = [Normed(), nn.Linear(5, 3)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        if scripted == "part":
            parts[0] = torch.jit.script(parts[0])
        module = nn.Sequential(*parts).double()
        return torch.jit.script(module) if scripted == "whole" else module


def trained(seed: int, scripted: str, kind: str) -> dict[str, Any]:
    """The state of a model behind three steps on this rank's rows."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(build(seed, scripted))
    if kind == "sharded":
        optimizer: torch.optim.Optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(seed + world.rank)
    for _ in range(3):
        model.backward(model(torch.randn(4, 6, dtype=torch.float64, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(dict(model.state_dict()))


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("scripted", ["part", "whole"])
@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_scripted_modules_train_as_others_do(ranks, fresh_seed, nproc, scripted, kind):
    expected = ranks.run(trained, nproc, fresh_seed, "", kind)[0]
    for found in ranks.run(trained, nproc, fresh_seed, scripted, kind):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
