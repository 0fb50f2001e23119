"""Several wrapped models in one process: what the backward pass of one does to the others."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import UsageError
from evenstep.replica.gradients.buckets.comm_hooks import CommHook, hook_order


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


class Meanwhile(torch.autograd.Function):
    """Passes a value on, and calls a function in the midst of the backward pass."""

    @staticmethod
    def forward(ctx, value, do):
        ctx.do = do
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.do()
        return gradient, None


def test_a_pass_in_another_thread_ends_nothing_here(world: evenstep.World) -> None:
    """While a loss uses another model's parameter, a third model is trained in a thread."""
    first, other, third = wrap(world), wrap(world), wrap(world)
    x = torch.ones(2, 4, dtype=torch.float64)

    def train_third() -> None:
        thread = threading.Thread(target=lambda: third.backward(third(x).mean(), weight=2))
        thread.start()
        thread.join()

    direct = other.module.weight.square().sum()
    loss = Meanwhile.apply(first(x).mean(), train_third) + direct  # of which autograd reaches the first term first
    expected = 2 * other.module.weight.detach()
    before = other.engine.num_reductions
    evenstep.backward([first, other], loss, weight=2)
    assert other.engine.num_reductions == before + 1
    torch.testing.assert_close(other.module.weight.grad, expected)
    assert third.module.weight.grad is not None


def test_a_model_that_is_forgotten_is_named(world: evenstep.World) -> None:
    """Its gradients would be averaged without the weight."""
    encoder, decoder = wrap(world), wrap(world)
    x = torch.ones(2, 4, dtype=torch.float64)

    def loss() -> torch.Tensor:
        return decoder(encoder(x).expand(2, 4)).mean()

    with pytest.raises(evenstep.errors.UsageError, match=r"a wrapped Linear.*evenstep\.backward\(\[encoder, decoder\]"):
        decoder.backward(loss(), weight=2)
    for model in (encoder, decoder):
        model.zero_grad()
    evenstep.backward([encoder, decoder], loss(), weight=2)
    assert all(model.module.weight.grad is not None for model in (encoder, decoder))


def test_a_frozen_model_need_not_be_named(world: evenstep.World) -> None:
    """Such as a critic while its generator is trained."""
    generator, critic = wrap(world), wrap(world)
    critic.requires_grad_(False)
    x = torch.ones(2, 4, dtype=torch.float64)
    generator.backward(critic(generator(x).expand(2, 4)).mean(), weight=2)
    assert generator.module.weight.grad is not None
    assert critic.module.weight.grad is None
    critic.requires_grad_(True)
    critic.backward(critic(x).mean(), weight=2)
    torch.testing.assert_close(critic.module.weight.grad[0], x.mean(0))


@pytest.mark.parametrize("which", ["nothing", "no list", "a bare module", "twice"])
def test_models_that_cannot_be_meant_are_refused(world: evenstep.World, which: str) -> None:
    model = wrap(world)
    given = {"nothing": [], "no list": 3, "a bare module": [model, model.module], "twice": [model, model]}[which]
    with pytest.raises(evenstep.errors.ConfigurationError, match="a list of wrapped models"):
        evenstep.backward(given, model(torch.ones(2, 4, dtype=torch.float64)).mean())


def test_a_pass_without_weights_in_the_midst_of_another_threads_weighted_one_is_an_error(world: evenstep.World) -> None:
    """Whose gradients come isn't known then."""
    first, other = wrap(world), wrap(world)
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4)

    def train_other() -> None:
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(UsageError, match=r"another thread is in model\.backward"),
        ):
            pool.submit(lambda: other(x).mean().backward()).result()

    first.backward(Meanwhile.apply(first(x), train_other).mean(), weight=2)
    torch.testing.assert_close(first.module.weight.grad[0], x.mean(0))
    other.zero_grad()
    other(x).mean().backward()
    torch.testing.assert_close(other.module.weight.grad[0], x.mean(0))


@pytest.mark.parametrize("way", ["behind", "is the loss", "reentrant"])
def test_a_model_that_was_not_named_is_wherever_its_outputs_are(world: evenstep.World, way: str) -> None:
    first, other = wrap(world), wrap(world)
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    y = first(x).expand(1, 4)
    out = checkpoint(other, y, use_reentrant=True) if way == "reentrant" else other(y)
    with pytest.raises(UsageError, match="the loss also goes through a wrapped Linear"):
        first.backward(out if way == "is the loss" else out.mean(), weight=2)


def test_hooks_of_two_threads_at_the_same_time_are_an_error(world: evenstep.World) -> None:
    """Ranks would begin their collectives in different orders."""
    pending: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    bucket = SimpleNamespace(flat=torch.ones(3), layout=SimpleNamespace(index=0), parameters=[], views=[])
    first, other = (CommHook(None, lambda state, bucket: pending) for _ in range(2))
    submit = partial(hook_order(world).submit, is_last=True)
    work = submit(first, bucket)
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(submit, other, bucket)
        with pytest.raises(UsageError, match=r"hooks of models in two threads .* in one thread"):
            refused.result()
        pending.set_result(torch.zeros(3))
        work.wait()
        pool.submit(lambda: submit(other, bucket).wait()).result()
