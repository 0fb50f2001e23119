"""Options of optimizers that come to differ between ranks: named on all of them, before another step is made."""

from __future__ import annotations

import contextlib
import gc
import math
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import DriftError, MismatchError
from evenstep.replica.gradients.window import Window
from evenstep.replica.monitors import checks
from evenstep.replica.monitors.checks import DEFAULT_EVERY
from tests.ranks import on_ranks

BETAS = {"lr": 0.01, "betas": (0.9, 0.99)}


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3)).double()


def window(model: evenstep.DistributedDataParallel, *, weighted: bool = False) -> None:
    loss = model(torch.randn(4, 6, dtype=torch.float64)).square().mean()
    model.backward(loss, weight=4) if weighted else loss.backward()


def step(model: evenstep.DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    window(model)
    optimizer.step()
    optimizer.zero_grad()


def other_rate(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.02


def other_tensor(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"].mul_(2)  # type: ignore[union-attr]


def fewer_groups(optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[1]


CHANGES: dict[str, tuple[Any, Any, str, str]] = {
    "rate": (other_rate, torch.optim.AdamW, "lr of parameter group 0", "is 0.01 on rank 0 and 0.02 on rank 1"),
    "tensor": (other_tensor, torch.optim.AdamW, "lr of parameter group 0", "is 0.5 on rank 0 and 1.0 on rank 1"),
    "groups": (fewer_groups, torch.optim.AdamW, "the number of parameter groups", "is 2 on rank 0 and 1 on rank 1"),
    "whole": (other_rate, torch.optim.Adafactor, "lr of parameter group 0", "is 0.01 on rank 0 and 0.02 on rank 1"),
}


def changed(seed: int, what: str, odd: int, gloo: bool, weighted: bool) -> str:
    """What the backward pass behind a change on one rank raises."""
    world = evenstep.init(quiet=True)
    if gloo:
        world = evenstep.World.from_process_group(transport="gloo", device="cpu")
    change, kind, _, _ = CHANGES[what]
    try:
        model = evenstep.DistributedDataParallel(build(seed), world=world)
        first, last = list(model.module[0].parameters()), list(model.module[2].parameters())
        given = BETAS if kind is torch.optim.AdamW else {"lr": 0.01}
        if what == "tensor":
            given = {"lr": torch.tensor(0.5), "foreach": False}
        groups = [{"params": first}, {"params": last, "weight_decay": 0.1}]
        optimizer = evenstep.ShardedOptimizer(model, kind, groups, **given)
        for _ in range(2):
            step(model, optimizer)
        if world.rank == odd:
            change(optimizer)
        with pytest.raises(MismatchError) as raised:
            window(model, weighted=weighted)
        return str(raised.value)
    finally:
        if gloo:
            world.close()


@pytest.mark.parametrize("what", CHANGES)
def test_options_that_differ_are_named_before_the_next_step(ranks, fresh_seed, what):
    for gloo, weighted in ((False, False), (what == "rate", True)):
        told = ranks.run(changed, 2, fresh_seed, what, 1, gloo, weighted)
        assert told[0] == told[1]
        assert CHANGES[what][2] in told[0]
        assert CHANGES[what][3] in told[0]
        assert "(noticed in backward pass 3)" in told[0]
    assert MismatchError.exit_code == 72


@on_ranks(2)
def test_options_that_change_alike_are_no_fault(world, fresh_seed):
    """Options that change alike, in all ways; what isn't the optimizer's; optimizers that go on some ranks first."""
    asked = mock.Mock(wraps=checks.exchange)
    model = evenstep.DistributedDataParallel(build(fresh_seed))
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, list(model.module[0].parameters()), lr=0.01)
    optimizer.param_groups[0]["log"] = f"rank {world.rank}"
    other = evenstep.ShardedOptimizer(model, torch.optim.SGD, list(model.module[2].parameters()), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)]
    schedulers.append(torch.optim.lr_scheduler.ExponentialLR(other, 0.9))
    with mock.patch.object(checks, "exchange", asked):
        for _ in range(20):
            window(model)
            for each, scheduler in zip((optimizer, other), schedulers, strict=True):
                each.step()
                scheduler.step()
            model.zero_grad()
    other.load_state_dict(other.state_dict())
    optimizer.param_groups[0]["weight_decay"] = 0.3
    step(model, optimizer)
    kept = other if world.rank == 0 else None  # alive on this rank only
    kept_groups = None if kept is None else kept.param_groups
    del other, schedulers, scheduler, each, kept
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(model, optimizer)
    assert kept_groups is None or len(kept_groups) == 1
    assert asked.call_count == 0


@pytest.mark.parametrize("apart", [4e-16, 1e-7])
@on_ranks(2)
def test_options_that_hosts_round_otherwise_are_no_fault(world, fresh_seed, apart):
    """Rates as hosts compute them whose cosine differs in the last bit; or further apart."""
    asked = mock.Mock(wraps=checks.exchange)
    model = evenstep.DistributedDataParallel(build(fresh_seed))
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    fault = (
        pytest.raises(MismatchError, match="lr of parameter group 0 is") if apart > 1e-8 else contextlib.nullcontext()
    )
    with fault, mock.patch.object(checks, "exchange", asked):
        for number in range(1, 12):
            rate = 0.0123456785 if number == 11 else 0.005 * (1 + math.cos(0.3 * number))
            rate *= 1 + apart * world.rank
            optimizer.param_groups[0] |= {"lr": rate, "betas": (0.9, rate)}
            step(model, optimizer)
        assert asked.call_count <= 1  # where what is compared is rounded to another digit


@on_ranks(2)
def test_where_replicas_drift_by_another_rate_the_rate_is_named(world, fresh_seed):
    """A plain optimizer has another rate on one rank."""
    model = evenstep.DistributedDataParallel(build(fresh_seed), compare_every=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + world.rank), weight_decay=0.1)
    told = "drifted apart.*lr of parameter group 0 is 0.1 on rank 0 and 0.2 on rank 1"
    with pytest.raises(DriftError, match=told):  # noqa: PT012
        for _ in range(DEFAULT_EVERY):
            step(model, optimizer)


def test_a_checksum_is_made_once_where_nothing_changes():
    watch = checks.OptionsWatch(mock.Mock(world_size=2, rank=1), mock.Mock(), lambda: True)
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(300)]  # python makes such a number anew each time
    optimizer = torch.optim.AdamW(parameters)
    watch.add(optimizer)
    with mock.patch.object(checks, "checksum", wraps=checks.checksum) as made:
        first = watch.header_numbers(Window())
        assert watch.header_numbers(Window()) == first
        assert made.call_count == 1
        optimizer.param_groups[0]["params"].pop()
        assert watch.header_numbers(Window()) != first
