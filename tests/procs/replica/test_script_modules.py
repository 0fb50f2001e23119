"""Modules of TorchScript's, in whole or in part, train as those of python do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import evenstep
from tests.ranks import on_ranks


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


@pytest.mark.parametrize("scripted", ["part", "whole"])
@pytest.mark.parametrize("kind", ["plain", "sharded"])
@on_ranks(1, 2)
def test_scripted_modules_train_as_others_do(world, fresh_seed, scripted, kind):
    models = [evenstep.DistributedDataParallel(build(fresh_seed, which)) for which in ("", scripted)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    if kind == "sharded":
        optimizers[1] = evenstep.ShardedOptimizer(models[1], torch.optim.AdamW, lr=0.01)
    generator = torch.Generator().manual_seed(fresh_seed + world.rank)
    for _ in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
        for model, optimizer in zip(models, optimizers, strict=True):
            model.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    expected, found = (model.state_dict() for model in models)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
