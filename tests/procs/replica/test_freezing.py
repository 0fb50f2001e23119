"""Fine-tuning: layers that are frozen at first, and trained later, beside one process with torch's optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evenstep
from tests.ranks import on_ranks

# Which layers are trained, from which step on.
GRADUALLY = {0: {4}, 2: {2, 4}, 4: {0, 2, 4}}
IN_TURNS = {0: {2, 4}, 2: {0, 4}, 4: {0, 2}, 6: {0, 2, 4}}
KINDS: dict[str, dict[str, Any]] = {
    "stage 1": {},
    "stage 2": {"shard_gradients": True},
    "at boundaries": {"elementwise": False},
}


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def choose(net: nn.Sequential, layers: set[int]) -> list[nn.Parameter]:
    """Train these layers only; their parameters."""
    for number in (0, 2, 4):
        net[number].requires_grad_(number in layers)
    return [parameter for number in sorted(layers) for parameter in net[number].parameters()]


def fine_tune(net: nn.Sequential, model: Any, kind: str, plan: dict[int, set[int]], *, adds: bool, seed: int) -> Tensor:
    """[numel], float64: the parameters in the end, of one process if `model` is None."""
    chosen = choose(net, plan[0])  # after wrapping
    given = chosen if adds else list(net.parameters())
    if model is None:
        optimizer: Any = torch.optim.AdamW(given, lr=1e-2)
    else:
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, given, lr=1e-2, **KINDS[kind])
    known = {id(parameter) for parameter in given}
    for step in range(9):
        if step in plan:
            late = [parameter for parameter in choose(net, plan[step]) if id(parameter) not in known]
            if late:
                optimizer.add_param_group({"params": late, "lr": 3e-3})
                known |= {id(parameter) for parameter in late}
        x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + step))
        if model is None:
            net(x).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        else:
            x = x[model.world.rank :: model.world.world_size]
            model.backward(model(x).square().mean(), weight=len(x))
            evenstep.clip_grad_norm_(optimizer, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


@pytest.mark.extended(beyond=12)
@pytest.mark.parametrize("adds", [True, False], ids=["groups are added", "all from the start"])
@pytest.mark.parametrize("plan", [GRADUALLY, IN_TURNS], ids=["gradually", "in turns"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 1, 3)
def test_layers_that_are_frozen_when_an_optimizer_is_made_are_trained_later(world, fresh_seed, kind, plan, adds):
    net = build(fresh_seed)
    got = fine_tune(net, evenstep.DistributedDataParallel(net), kind, plan, adds=adds, seed=fresh_seed)
    expected = fine_tune(build(fresh_seed), None, kind, plan, adds=adds, seed=fresh_seed)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


class Checkpointed(nn.Module):
    """Layers in reentrant checkpoints; some may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 2)
        self.left_out: set[int] = set()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for number, layer in enumerate(self.layers):
            if number not in self.left_out:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
        return self.head(x)


@pytest.mark.parametrize("layers", [{0, 1, 2, 3}, {2}], ids=["all", "one"])
@pytest.mark.parametrize("how", ["frozen", "left out"])
@on_ranks(2)
def test_a_reentrant_checkpoint_reaches_layers_that_had_no_gradient_before(world, fresh_seed, how, layers):
    """Autograd can't tell that it will reach them, and they weren't seen when gradients were counted."""
    if how == "left out" and len(layers) == 4:
        layers = {0, 1, 2}
    torch.manual_seed(fresh_seed)
    single = Checkpointed()
    model = evenstep.DistributedDataParallel(copy.deepcopy(single), bucket_cap_mb=1e-4)
    for step in range(4):
        for module in (single, model.module):
            module.left_out = layers if how == "left out" and step == 0 else set()
            for number in layers:
                module.layers[number].requires_grad_(how == "left out" or step > 0)
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(fresh_seed + step))
        single(x.clone()).square().mean().backward()
        own = x[world.rank :: world.world_size].clone()
        model.backward(model(own).square().mean(), weight=len(own))
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
            ours.grad = theirs.grad = None
