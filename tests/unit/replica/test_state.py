"""Where a model is between two steps: the table alone, and what scripts of one process make of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import NonFiniteError, UsageError
from evenstep.replica.gradients.window import State


@pytest.fixture
def world() -> Iterator[evenstep.World]:
    with evenstep.World.alone(device="cpu") as alone:
        yield alone


@pytest.fixture(params=[False, True], ids=["single", "followed"])
def model(request: pytest.FixtureRequest, world: evenstep.World) -> evenstep.DistributedDataParallel:
    wrapped = evenstep.DistributedDataParallel(nn.Linear(3, 1), world=world)
    wrapped.engine._may_be_single = not request.param
    return wrapped


def rows() -> torch.Tensor:
    return torch.randn(4, 3)


def test_what_autograd_reports_is_handled_under_the_lock(
    model: evenstep.DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs autograd has a thread for each device."""
    lock, handle, held = mock.MagicMock(), model.engine._outputs_reached, []

    def handled(grad: torch.Tensor, *, over_dummy: bool) -> torch.Tensor | None:
        held.append(lock.__enter__.call_count - lock.__exit__.call_count)
        return handle(grad, over_dummy=over_dummy)

    monkeypatch.setattr(model.engine.readiness, "lock", lock)
    monkeypatch.setattr(model.engine, "_outputs_reached", handled)
    for x in (rows(), rows()[:0]):
        model(x).sum().backward()
    assert held == [1, 1]


class Raises(torch.autograd.Function):
    """Its backward pass fails."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no gradient here")


@pytest.mark.parametrize("weighted", [False, True])
def test_a_failed_pass_is_dropped_by_the_next_forward_or_pass(
    model: evenstep.DistributedDataParallel, weighted: bool
) -> None:
    """On one rank; the gradient of what runs afterwards is what it is without the failure."""
    model.engine._may_be_single = False
    run: Callable[[torch.Tensor], None] = model.backward if weighted else torch.Tensor.backward
    kept = model(rows()).sum()
    with pytest.raises(RuntimeError, match="no gradient here"):
        run(Raises.apply(model.module.weight).sum() + model(rows()).sum())
    x = rows()
    loss = model(x).mean()
    assert model.engine.state is State.FORWARD
    assert model.module.weight.grad is None
    run(loss)
    torch.testing.assert_close(model.module.weight.grad, x.mean(0, keepdim=True))
    with pytest.raises(RuntimeError, match="no gradient here"):
        model.backward(Raises.apply(model.module.weight).sum())
    assert model.engine.state is State.FAILED
    model.backward(kept)  # without a forward pass between
    assert model.engine.state is State.IDLE


def test_a_pass_within_a_pass_is_refused(model: evenstep.DistributedDataParallel) -> None:
    inner = model(rows()).sum()
    outer = model(rows())
    outer.register_hook(lambda _: model.backward(inner))
    with pytest.raises(UsageError, match="a pass of a wrapped Linear begins within another one"):
        model.backward(outer.sum())


def test_random_scripts_end_where_they_should(model: evenstep.DistributedDataParallel, fresh_seed: int) -> None:
    """Forward passes, evaluations, accumulation, `autograd.grad` and steps in any order; the sum is what it is."""
    drawn = random.Random(fresh_seed)
    total = torch.zeros(1, 3)
    for _ in range(40):
        x, action = rows(), drawn.choice(("accumulate", "forward", "grad", "evaluate", "end"))
        if action == "accumulate":
            with model.no_sync():
                model(x).mean().backward()
            total += x.mean(0)
        elif action == "forward":
            model(x)
            assert model.engine.state is State.FORWARD
        elif action == "grad":
            torch.autograd.grad(model(x).sum(), model.module.weight)
            assert model.engine.state is State.FORWARD
        elif action == "evaluate":
            with torch.no_grad():
                model(x)
        else:
            model(x).mean().backward()
            torch.testing.assert_close(model.module.weight.grad, total + x.mean(0))
            total = torch.zeros(1, 3)
            model.zero_grad()
            assert not model.engine.is_in_window


@pytest.mark.parametrize("began", [State.STARTED, State.COUNTED])
def test_a_pass_of_loss_backward_that_has_failed_is_noticed_by_the_next(world: evenstep.World, began: State) -> None:
    """Autograd tells nobody that it has raised. Without a forward pass between, the next pass seemed a part of it."""
    model, x = evenstep.DistributedDataParallel(nn.Linear(3, 1), world=world), rows()
    model.engine._may_be_single = False
    for _ in range(2):
        model(x).mean().backward()
        model.zero_grad()
    kept = model(x).mean()
    broken = model(x).mean()
    weight = model.module.weight
    handle = weight.register_hook(lambda grad: explode()) if began is State.STARTED else None
    loss = broken if handle is not None else broken + Raises.apply(weight * 1).sum()
    with pytest.raises(RuntimeError):
        loss.backward()
    if handle is not None:
        handle.remove()
    kept.backward()
    assert not model.engine.is_in_pass
    assert model.engine.state is State.IDLE
    model(x)
    torch.testing.assert_close(weight.grad, x.mean(0, keepdim=True))


def explode() -> None:
    raise RuntimeError("boom")


def test_all_models_of_a_pass_end_it_also_where_one_finds_fault() -> None:
    with evenstep.World.alone(device="cpu") as world:
        first, second = (
            evenstep.DistributedDataParallel(torch.nn.Linear(2, 2), world=world, on_nonfinite="raise") for _ in range(2)
        )
        x = torch.ones(3, 2)
        with pytest.raises(NonFiniteError):
            evenstep.backward([first, second], (second(first(x)) * float("inf")).sum(), weight=1)
        assert [each.engine.state for each in (first, second)] == [State.IDLE] * 2
        for each in (first, second):
            each.zero_grad()
        evenstep.backward([first, second], second(first(x)).sum(), weight=1)
        assert [each.engine.state for each in (first, second)] == [State.IDLE] * 2
