"""What one rank alone is given for a step: all ranks raise, soon, and say what it is; nobody waits, nothing drifts."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, EvenstepError, MismatchError, UsageError
from tests.ranks import on_ranks

NORM = {"max_norm": 0.1}


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 3)).double()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    both = ([p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() <= 1])
    return [{"params": each} for each in both]


def optimizer_of(model: evenstep.DistributedDataParallel, way: str) -> torch.optim.Optimizer:
    if way in ("stage 1", "stage 2"):
        return evenstep.ShardedOptimizer(
            model, torch.optim.SGD, groups_of(model), lr=0.1, shard_gradients=way == "stage 2"
        )
    return torch.optim.SGD(groups_of(model), lr=0.1)


def steps(world: evenstep.World, seed: int, way: str, what: str, given: Any, compare_every: int | None = 4) -> int:
    """Five steps in which this rank calls `what` with `given`; the number of steps made."""
    model = evenstep.DistributedDataParallel(build(seed), world=world, compare_every=compare_every)
    optimizer = optimizer_of(model, way)
    kept: list[Any] = []
    if what == "scale":
        evenstep.scale_learning_rate(optimizer, **{"base_batch_size": 4, "global_batch_size": 8, **given}, world=world)
    if what == "average" and given is not None:
        kept.append(evenstep.ExponentialMovingAverage(model, **given))
    if what == "local":
        evenstep.LocalSGD(given.get("model", model), optimizer, every=2)
    if what == "sharded":
        evenstep.ShardedOptimizer(given.get("model", model), torch.optim.SGD, **{"lr": 0.1, **given.get("more", {})})
    for step in range(5):
        model.backward(100 * model(torch.randn(4, 6, dtype=torch.float64)).square().mean(), weight=4)
        if step and what == "norm":
            clipped = list(model.module[0].parameters()) if given.get("fewer") else optimizer
            evenstep.clip_grad_norm_(clipped, **{k: v for k, v in given.items() if k != "fewer"})
        if step and what == "value" and given is not None:
            evenstep.clip_grad_value_(model.parameters(), given)
        optimizer.step()
        for each in kept:
            each.update()
        optimizer.zero_grad()
    return 5


def told(seed: int, gloo: bool, odd: int, way: str, what: str, usual: Any, other: Any) -> tuple[str, str]:
    """What this rank raises; rank `odd` is given something else."""
    world = evenstep.init(quiet=True)
    if gloo:
        world = evenstep.World.from_process_group(transport="gloo", device="cpu")
    try:
        made = steps(world, seed, way, what, other if world.rank == odd else usual)
    except EvenstepError as error:
        return type(error).__name__, str(error)
    finally:
        gc.collect()
        world.close()
    return "", f"{made} steps"


# Optimizer, what is called, what all ranks but one give, what that one gives, and what is said of it.
ALIKE: dict[str, tuple[str, str, Any, Any, type[EvenstepError], str]] = {
    "another norm": ("stage 2", "norm", NORM, {"max_norm": 0.2}, MismatchError, "max_norm is 0.1 on rank 0 and 0.2 on"),
    "another type": (
        "stage 1",
        "norm",
        NORM,
        {**NORM, "norm_type": 1},
        MismatchError,
        "norm_type is 2.0 on rank 0 and 1",
    ),
    "fewer": ("stage 1", "norm", NORM, {**NORM, "fewer": True}, MismatchError, "the number of parameters is 4 on"),
    "negative": ("stage 1", "norm", NORM, {"max_norm": -1}, ConfigurationError, "max_norm=-1; a number, at least 0"),
    "a text": ("stage 2", "norm", NORM, {"max_norm": "x"}, ConfigurationError, "max_norm='x'; a number"),
    "none": ("stage 1", "norm", NORM, {"max_norm": None}, ConfigurationError, "max_norm=None; a number"),
    "nan": ("stage 1", "norm", NORM, {"max_norm": math.nan}, ConfigurationError, "max_norm=nan; a number"),
    "type 0": ("stage 1", "norm", NORM, {**NORM, "norm_type": 0}, ConfigurationError, "norm_type=0; a number, greater"),
    "nan of infinity": (
        "stage 1",
        "norm",
        {**NORM, "norm_type": "inf"},
        {"max_norm": math.nan, "norm_type": "inf"},
        ConfigurationError,
        "max_norm=nan; a number",
    ),
    "whole, another norm": (
        "plain",
        "norm",
        NORM,
        {"max_norm": 0.2},
        MismatchError,
        "max_norm is 0.1 on rank 0 and 0.2",
    ),
    "whole, infinity": (
        "plain",
        "norm",
        NORM,
        {**NORM, "norm_type": "inf"},
        MismatchError,
        "norm_type is 2.0 on rank 0",
    ),
    "another value": (
        "stage 1",
        "value",
        0.1,
        0.2,
        MismatchError,
        "clip_grad_value_: clip_value is 0.1 on rank 0 and 0.2",
    ),
    "no value": ("plain", "value", 0.1, None, MismatchError, "clip_grad_value_ was called on rank 0 and not on rank 1"),
    "a batch": ("plain", "scale", {}, {"base_batch_size": 8}, MismatchError, "base_batch_size is 4 on rank 0 and 8 on"),
    "a rule": (
        "plain",
        "scale",
        {},
        {"rule": "sqrt"},
        MismatchError,
        "rule is 'linear' on rank 0 and 'sqrt' on rank 1",
    ),
    "a rate": (
        "plain",
        "sharded",
        {},
        {"more": {"lr": 0.2}},
        MismatchError,
        "lr of parameter group 0 is 0.1 on rank 0",
    ),
}


OVER_GLOO_TOO = ["another norm", "negative", "whole, another norm"]


@pytest.mark.parametrize(
    ("case", "gloo"), [*((case, False) for case in ALIKE), *((case, True) for case in OVER_GLOO_TOO)]
)
def test_all_ranks_raise_the_same(ranks, fresh_seed, case, gloo):
    way, what, usual, other, kind, text = ALIKE[case]
    seen = ranks.run(told, 2, fresh_seed, gloo, 1, way, what, usual, other)
    assert seen[0] == seen[1]
    assert seen[0][0] == kind.__name__, seen[0]
    assert text in seen[0][1]


def test_of_three_ranks_the_one_is_named(ranks, fresh_seed):
    for odd in (0, 2):
        seen = ranks.run(told, 3, fresh_seed, False, odd, "stage 1", "norm", NORM, {"max_norm": -1})
        assert seen == [seen[0]] * 3
        assert f"clip_grad_norm_ on rank {odd}: max_norm=-1" in seen[0][1]


# As above; here one rank is refused, and the others learn of it in their next call.
REFUSED: dict[str, tuple[str, str, Any, Any, str]] = {
    "a norm": ("plain", "norm", NORM, {"max_norm": -1}, "clip_grad_norm_: max_norm=-1; a number, at least 0"),
    "a switch": (
        "stage 1",
        "norm",
        NORM,
        {**NORM, "error_if_nonfinite": "x"},
        "clip_grad_norm_: error_if_nonfinite='x'; True or False",
    ),
    "a value": ("stage 1", "value", 0.1, -1, "clip_grad_value_: clip_value=-1; a number, at least 0"),
    "a decay": (
        "stage 1",
        "average",
        {},
        {"decay": 2},
        "ExponentialMovingAverage: decay=2; a number, at least 0 and less",
    ),
    "a batch": ("plain", "scale", {}, {"base_batch_size": 0}, "scale_learning_rate: base_batch_size=0; a whole number"),
    "local model": ("plain", "local", {}, {"model": 5}, "LocalSGD: model=5; an evenstep.DistributedDataParallel"),
    "sharded model": (
        "plain",
        "sharded",
        {},
        {"model": 5},
        "ShardedOptimizer takes an evenstep.DistributedDataParallel",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_rank_is_refused_the_others_learn(ranks, fresh_seed, case):
    way, what, usual, other, text = REFUSED[case]
    seen = ranks.run(told, 2, fresh_seed, False, 1, way, what, usual, other)
    assert seen[0][0] == MismatchError.__name__, seen[0]
    assert "rank 1: no call, because its arguments were refused. Rank 1: " + text in seen[0][1]
    assert seen[1][0] == ConfigurationError.__name__
    assert seen[1][1].startswith(text)


def test_another_collective_says_what_was_given(ranks, fresh_seed):
    seen = ranks.run(told, 2, fresh_seed, False, 1, "stage 1", "norm", NORM, {**NORM, "norm_type": "inf"})
    for rank, (kind, text) in enumerate(seen):
        assert kind == MismatchError.__name__
        assert f"On rank {rank} clip_grad_norm_ was given max_norm=0.1, norm_type={'inf' if rank else '2.0'}" in text


def allowed(seed: int) -> tuple[int, list[float]]:
    """What ranks may do each for itself; and that they are in step behind a refusal that all have heard."""
    world = evenstep.init(quiet=True)
    first = world.rank == 0
    done = steps(world, seed, "plain", "average", {"decay": 0.9} if first else None)
    done += steps(world, seed, "plain", "average", {"decay": 0.9 if first else 0.8}, compare_every=0)
    done += steps(world, seed, "plain", "norm", {"max_norm": 0.1 if first else 0.2}, compare_every=0)
    model = evenstep.DistributedDataParallel(build(seed), world=world)
    optimizer = optimizer_of(model, "stage 1")
    norms = []
    for wrong in (-1.0, 1.0):
        model.backward(model(torch.ones(4, 6, dtype=torch.float64)).square().mean(), weight=4)
        with pytest.raises(EvenstepError, match="max_norm"):
            evenstep.clip_grad_norm_(optimizer, 0.5 if first else wrong)
        norms.append(float(evenstep.clip_grad_norm_(optimizer, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    other = nn.Linear(2, 2)  # nobody's
    other(torch.ones(1, 2)).sum().backward()
    if first:
        with pytest.raises(ConfigurationError):
            evenstep.clip_grad_norm_(other.parameters(), -1.0)
        evenstep.clip_grad_norm_(other.parameters(), 1.0)
    with pytest.raises(ConfigurationError):
        evenstep.clip_grad_value_(model.parameters(), -1.0)  # on all ranks
    plain = evenstep.DistributedDataParallel(build(seed), world=world)
    for _ in range(2):
        plain.backward(plain(torch.ones(4, 6, dtype=torch.float64)).square().mean(), weight=4)
        if first:  # for its log
            norms.append(0.0 * float(evenstep.clip_grad_norm_(plain, float("inf"))))
        plain.zero_grad()
    norms = norms[:2]
    for _ in range(2):
        model.backward(model(torch.ones(4, 6, dtype=torch.float64)).square().mean(), weight=4)
        optimizer.zero_grad()
    return done, norms


def test_what_is_each_ranks_own_is_left_alone(ranks, fresh_seed):
    seen = ranks.run(allowed, 2, fresh_seed)
    assert seen[0] == seen[1]
    assert seen[0][0] == 15


@pytest.mark.parametrize("late", [False, True])
@on_ranks(2)
def test_a_shape_that_the_class_refuses_is_said_on_all_ranks(world: evenstep.World, late: bool) -> None:
    """Muon is given a vector, which only one rank would step."""
    model = evenstep.DistributedDataParallel(torch.nn.Linear(8, 8))
    weight, bias = model.module.weight, model.module.bias
    told = pytest.raises(ConfigurationError, match="Muon: Muon only supports 2D parameters")
    if not late:
        with told:
            evenstep.ShardedOptimizer(model, torch.optim.Muon, [weight, bias], lr=0.1)
        return
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.Muon, [weight], lr=0.1)
    with told:
        optimizer.add_param_group({"params": [bias]})


@on_ranks(2)
def test_a_divided_optimizer_is_not_copied(world: evenstep.World) -> None:
    model = evenstep.DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"can't be copied or pickled.*state_dict\(\)"):
            copied(optimizer)


@pytest.mark.parametrize("stage2", [False, True])
@on_ranks(2)
def test_a_state_of_another_class_is_refused_where_it_is_loaded(world: evenstep.World, stage2: bool) -> None:
    """A state that an older torch has saved isn't."""
    plain = build(1)
    momentum = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.AdamW(plain.parameters(), lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=9)
    plain(torch.ones(2, 6, dtype=torch.float64)).square().mean().backward()
    momentum.step()
    adam.step()
    older = adam.state_dict()
    for option in ("decoupled_weight_decay", "fused"):
        del older["param_groups"][0][option]
    model = evenstep.DistributedDataParallel(build(2), world=world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.3, shard_gradients=stage2)
    wrong, strange = momentum, "dampening, momentum, nesterov"
    if world.rank == 1:
        wrong, strange = torch.optim.Adadelta(plain.parameters()), ".*rho"
    told = f"on rank {world.rank}: parameter group 0 has {strange}, and .*lacks betas.*another class of optimizer"
    with pytest.raises(ConfigurationError, match=told):
        optimizer.load_state_dict(wrong.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    optimizer.load_state_dict(older)
    loaded = optimizer.state_dict()["state"]
    for number, state in older["state"].items():
        assert torch.equal(loaded[number]["exp_avg"], state["exp_avg"])
