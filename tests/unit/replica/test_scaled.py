"""Recognising what a GradScaler has scaled already."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.replica.wrapper.distributed import is_scaled

Scale = Callable[[Tensor], Tensor]


def found(made: Callable[[Scale, Tensor], Tensor]) -> bool:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    parameter = torch.ones(3, requires_grad=True)
    return is_scaled(made(scaler.scale, parameter.square().mean()), scaler, rank=1)


SCALED = {
    "itself": lambda scale, loss: scale(loss),
    "divided and multiplied": lambda scale, loss: scale(loss) * 2 / 3,
    "negative": lambda scale, loss: -scale(loss),
    "a sum": lambda scale, loss: scale(loss) + scale(0.5 * loss),
    "a difference": lambda scale, loss: scale(loss) - scale(0.5 * loss),
    "python's sum": lambda scale, loss: sum([scale(loss), scale(loss)]),
    "stacked": lambda scale, loss: torch.stack([scale(loss), scale(loss)]).sum(),
    "a mean of several": lambda scale, loss: scale(torch.stack([loss, loss])).mean(),
    "with a constant": lambda scale, loss: 1.0 + scale(loss),
    "another shape": lambda scale, loss: scale(loss[None]).squeeze().reshape(1),
}
UNSCALED = {
    "itself": lambda _, loss: loss,
    "divided": lambda _, loss: loss / 2,
    "a sum": lambda _, loss: loss + 0.1 * loss.sqrt(),
}
MIXED = {
    "a penalty": lambda scale, loss: scale(loss) + 0.1 * loss.sqrt(),
    "the other way round": lambda scale, loss: 0.1 * loss - scale(loss),
    "divided behind it": lambda scale, loss: (scale(loss) + loss) / 4,
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_loss_is_recognised(name):
    assert found(SCALED[name])


@pytest.mark.parametrize("name", UNSCALED)
def test_an_unscaled_loss_is_recognised(name):
    assert not found(UNSCALED[name])


@pytest.mark.parametrize("name", MIXED)
def test_a_sum_of_scaled_and_unscaled_terms_is_refused(name):
    with pytest.raises(UsageError, match=r"rank 1: some terms of the loss were scaled .* 1024 times as much"):
        found(MIXED[name])


def test_nothing_that_a_checkpoint_has_put_away_is_computed_again():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight, num_forwards = torch.nn.Parameter(torch.ones(4)), 0
    scaler.scale(weight.sum())  # so that it has a scale

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        return x * x * torch.ones(4)

    loss = torch.utils.checkpoint.checkpoint(forward, weight, use_reentrant=False).sum()
    assert not is_scaled(loss, scaler, rank=0)
    assert num_forwards == 1


def test_many_terms_are_all_looked_at():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weight = torch.nn.Parameter(torch.ones(4))
    terms = [scaler.scale((weight * index).sum()) for index in range(100)]
    assert is_scaled(sum(terms[1:], terms[0]), scaler, rank=0)
    with pytest.raises(UsageError, match="some terms of the loss were scaled"):
        is_scaled(sum(terms, (weight * weight).sum()), scaler, rank=0)
