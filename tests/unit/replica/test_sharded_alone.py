"""A ShardedOptimizer in a world of one: the bare optimizer's step, and nothing is packed, moved or hidden."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError
from evenstep.replica.gradients.exchange.base import Exchange

KINDS = ["SGD", "AdamW", "Adam", "Adagrad", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adamax"]


@pytest.fixture(autouse=True)
def world():
    with evenstep.World.alone() as world:
        yield world


def build(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step != 2)
        model(torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"shard_gradients": True}])
def test_the_bits_of_the_bare_optimizer(fresh_seed: int, world: evenstep.World, kind: str, options: dict) -> None:
    bare = build(fresh_seed)
    model = evenstep.DistributedDataParallel(copy.deepcopy(bare), world=world)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    fused = {"fused": True} if kind in ("SGD", "AdamW", "Adam", "Adagrad") else {}
    plain = getattr(torch.optim, kind)(bare.parameters(), lr=0.01, **fused)
    sharded = evenstep.ShardedOptimizer(model, getattr(torch.optim, kind), lr=0.01, **options)
    train(bare, plain, fresh_seed)
    train(model, sharded, fresh_seed)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.grad, theirs.grad)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert type(model.engine.exchange) is Exchange


def test_a_state_dict_is_a_snapshot_and_is_taken_up_exactly(fresh_seed: int, world: evenstep.World) -> None:
    """NAdam's product is a number of 32 bits, which torch's loading would round to the parameter's dtype."""
    trained = []
    for is_interrupted in (False, True):
        model = evenstep.DistributedDataParallel(build(fresh_seed), world=world)
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.NAdam, lr=0.01)
        train(model, optimizer, fresh_seed)
        if is_interrupted:
            state = optimizer.state_dict()
            kept = copy.deepcopy(state)
            parameters = [parameter.detach().clone() for parameter in model.parameters()]
            train(model, optimizer, fresh_seed + 1)
            assert repr(state) == repr(kept)
            with torch.no_grad():
                for parameter, before in zip(model.parameters(), parameters, strict=True):
                    parameter.copy_(before)
            optimizer.load_state_dict(state)
        train(model, optimizer, fresh_seed + 2)
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("master", [False, True])
def test_gradients_can_be_read_with_a_reduce_dtype(fresh_seed: int, world: evenstep.World, master: bool) -> None:
    bare = build(fresh_seed, torch.bfloat16)
    model = evenstep.DistributedDataParallel(copy.deepcopy(bare), world=world)
    optimizer = evenstep.ShardedOptimizer(
        model, torch.optim.AdamW, lr=0.01, reduce_dtype=torch.float32, master_weights=master
    )
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    for each in (bare, model):
        each(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert ours.grad.dtype == torch.bfloat16
        assert torch.equal(ours.grad, theirs.grad)
    optimizer.step()


def test_values_kept_in_full_precision_are_taken_over(fresh_seed: int, world: evenstep.World) -> None:
    """By an optimizer that keeps none: its parameters have their values, and its state dict has no stale ones."""
    models = [evenstep.DistributedDataParallel(build(fresh_seed + i, torch.bfloat16), world=world) for i in range(2)]
    first = evenstep.ShardedOptimizer(models[0], torch.optim.AdamW, lr=0.01, master_weights=True)
    second = evenstep.ShardedOptimizer(models[1], torch.optim.AdamW, lr=0.01)
    train(models[0], first, fresh_seed)
    second.load_state_dict(first.state_dict())
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in second.state_dict()["state"].values())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_a_parameter_has_one_sharded_optimizer(world: evenstep.World, kind: type[torch.optim.Optimizer]) -> None:
    model = evenstep.DistributedDataParallel(build(0), world=world)
    first = evenstep.ShardedOptimizer(model, kind, model.module[0].parameters(), lr=0.01)
    with pytest.raises(ConfigurationError, match=r"parameter '0.weight' belongs to another ShardedOptimizer"):
        evenstep.ShardedOptimizer(model, kind, lr=0.01)
    second = evenstep.ShardedOptimizer(model, kind, model.module[2].parameters(), lr=0.01)
    with pytest.raises(ConfigurationError, match=r"parameter '0.bias' belongs to another ShardedOptimizer"):
        second.add_param_group({"params": [model.module[0].bias]})
    del first, second
    gc.collect()
    evenstep.ShardedOptimizer(model, kind, lr=0.01)


def test_momentum_that_begins_later_for_some(fresh_seed: int, world: evenstep.World) -> None:
    """torch's fused SGD knows only parameters that all have a momentum, or none; and it is chosen here."""
    bare = build(fresh_seed)
    model = evenstep.DistributedDataParallel(copy.deepcopy(bare), world=world)
    plain = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    sharded = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    x = torch.randn(4, 6, dtype=torch.float64)
    for use in (1, 3, 3):
        for layers, optimizer in ((bare[:use], plain), (model.module[:use], sharded)):
            layers(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_a_state_of_another_shape_is_refused(world: evenstep.World) -> None:
    model = evenstep.DistributedDataParallel(build(0), world=world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    train(model, optimizer, 0)
    state = optimizer.state_dict()
    state["state"][1]["exp_avg"] = torch.zeros(4)
    with pytest.raises(ConfigurationError, match=r"'exp_avg' of parameter '0.bias' has the shape \[4\]"):
        optimizer.load_state_dict(state)
