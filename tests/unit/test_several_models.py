"""Several wrapped models in one process: what the backward pass of one does to the others."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import evenstep
from evenstep.replica import multiplied


@pytest.fixture
def world():
    with evenstep.World.alone(device="cpu") as world:
        yield world


def wrap(world: evenstep.World) -> evenstep.DistributedDataParallel:
    torch.manual_seed(0)
    return evenstep.DistributedDataParallel(nn.Linear(4, 1, bias=False).double(), world=world)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_an_open_window_of_another_model_is_left_alone(world: evenstep.World, is_weighted: bool) -> None:
    first, other = wrap(world), wrap(world)
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)

    def backward() -> None:
        if is_weighted:
            other.backward(other(x).mean(), weight=2)
        else:
            other(x).mean().backward()

    with other.no_sync():
        backward()
    first.backward(first(x).mean(), weight=32)
    first.zero_grad()
    backward()
    once = x.mean(0)
    torch.testing.assert_close(other.module.weight.grad[0], once if is_weighted else 2 * once)


def test_a_pass_in_another_thread_ends_nothing_here(world: evenstep.World) -> None:
    """While a loss uses another model's parameter, a third model is trained in a thread."""
    first, other, third = wrap(world), wrap(world), wrap(world)
    x = torch.ones(2, 4, dtype=torch.float64)

    class Meanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            thread = threading.Thread(target=lambda: third.backward(third(x).mean(), weight=2))
            thread.start()
            thread.join()
            return gradient

    direct = other.module.weight.square().sum()
    loss = Meanwhile.apply(first(x).mean()) + direct  # of which autograd reaches the first term first
    expected = 2 * other.module.weight.detach()
    before = other.engine.num_reductions
    first.backward(loss, weight=2)
    assert other.engine.num_reductions == before + 1
    torch.testing.assert_close(other.module.weight.grad, expected)
    assert third.module.weight.grad is not None


def test_models_are_told_in_the_order_of_wrapping(world: evenstep.World) -> None:
    """What they do when told may be collective."""
    models = [wrap(world) for _ in range(20)]
    told = [model for model in multiplied._alive() if model in [each.engine for each in models]]
    assert told == [each.engine for each in models]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_an_optimizer_that_is_gone_owns_nothing(world: evenstep.World, kind: type[torch.optim.Optimizer]) -> None:
    model = wrap(world)
    optimizer = evenstep.ShardedOptimizer(model, kind, lr=0.01)
    assert optimizer.param_groups
    del optimizer
    evenstep.ShardedOptimizer(model, kind, lr=0.01)
