"""Replicas that drift apart are named; those that are meant to differ, and those that don't, are left alone."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

import evenstep
from evenstep.errors import DriftError
from evenstep.replica.monitors.checks import DEFAULT_EVERY
from evenstep.testing import faults
from tests.ranks import on_ranks


def build(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 11), nn.BatchNorm1d(11), nn.Tanh(), nn.Linear(11, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def drifting(seed: int, victims: list[int], at: int, sharded: bool, every: int | None) -> tuple[str, int]:
    """(what is raised, how many steps after the fault)."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed + world.rank)
    model = evenstep.DistributedDataParallel(build(seed), compare_every=every)
    if sharded:
        optimizer: torch.optim.Optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    remove = faults.install([faults.Fault("drift", rank, at) for rank in victims], rank=world.rank)
    try:
        for step in range(at + 3 * DEFAULT_EVERY):
            try:
                train(model, optimizer, 1)
            except DriftError as error:
                return str(error), step - at
    finally:
        remove()
    return "", -1


@pytest.mark.parametrize(("nproc", "victims"), [(2, [1]), (3, [1]), (3, [0]), (3, [0, 2])])
def test_drift_is_named_on_all_ranks(ranks, fresh_seed, nproc, victims):
    for at, every in ((3, None), (0, 5)):
        told = ranks.run(drifting, nproc, fresh_seed, victims, at, False, every)
        assert len(set(told)) == 1
        text, after = told[0]
        assert DriftError.exit_code == 73
        assert after <= (every or DEFAULT_EVERY) + 2
        assert "'0.weight'" in text
        assert "'0.bias'" not in text or at > 0, "nothing else has drifted yet"
        if nproc == 2:
            assert "with two ranks it is undecidable which" in text
        elif victims == [0, 2]:  # both by the same factor: they are two of three
            assert "rank 1 differs from the other ranks" in text
        else:
            assert f"rank {victims[0]} differs from the other ranks" in text
    assert ranks.run(drifting, nproc, fresh_seed, victims, 3, False, 0) == [("", -1)] * nproc


@on_ranks(2)
def test_a_zero_grad_that_one_rank_forgets_is_drift_and_among_its_causes(world, fresh_seed):
    """Rank 1 adds the average of the step before to the next. `loss.backward()` would average that, too."""
    torch.manual_seed(fresh_seed + world.rank)
    model = evenstep.DistributedDataParallel(build(fresh_seed), compare_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(DriftError, match="a step or a zero_grad that some ranks skipped"):  # noqa: PT012
        for _ in range(20):
            model.backward(model(torch.randn(4, 6)).square().mean())
            optimizer.step()
            if world.rank == 0:
                optimizer.zero_grad()


def test_a_sharded_optimizer_makes_its_own_peace_with_drift(ranks, fresh_seed):
    """Its gather gives every rank the owners' values: what drifted between two steps is gone with the next."""
    assert set(ranks.run(drifting, 2, fresh_seed, [1], 3, True, 4)) == {("", -1)}


@on_ranks(2)
def test_rounding_is_said_once_and_ends_nothing(world, fresh_seed):
    model = evenstep.DistributedDataParallel(build(fresh_seed), compare_every=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 2)
        if world.rank == 1:
            model.module[3].weight.data.mul_(1 + 2**-22)
        train(model, optimizer, 12)
    told = [str(each.message) for each in caught if "drifted" in str(each.message)]
    assert len(told) == (world.rank == 0)
    assert all("'3.weight'" in text and "That is rounding" in text for text in told)


# ---------------------------------------------------------------------- what is no drift


def in_step(model: evenstep.DistributedDataParallel, steps: int = DEFAULT_EVERY + 3) -> bool:
    """Trains for more than a round; whether comparing goes on."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.5)
    train(model, optimizer, steps)
    return model.monitors.drift.is_on


def changed_alike(seed: int) -> None:
    """On all ranks in the same way: loaded, swapped, written; also to what isn't a number."""
    model = evenstep.DistributedDataParallel(build(seed))
    other = {name: value * 1.5 for name, value in model.state_dict().items()}
    assert in_step(model, 5)
    model.load_state_dict(other)
    assert in_step(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert in_step(model)
    with torch.no_grad():
        model.module[0].weight[0, 0] = torch.nan
    assert in_step(model)


def kept_for_themselves(seed: int) -> None:
    """Ignored parameters, frozen ones, module buffers that aren't broadcast."""
    world = evenstep.init(quiet=True)
    for ignored, frozen in ((["0.weight"], ""), ([], "0.weight")):
        module = build(seed)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name != frozen)
        module._ddp_params_and_buffers_to_ignore = ignored
        model = evenstep.DistributedDataParallel(module, broadcast_buffers=False)
        module[0].weight.data.mul_(1 + world.rank)
        assert in_step(model)
        assert len(set(world.exchange(float(module[1].running_mean.sum())))) > 1
        assert len(set(world.exchange(float(module[0].weight.sum())))) > 1


def stepping_alone(seed: int) -> None:
    """By `LocalSGD`, in `no_sync`, and by a hook that averages within a rank."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(build(seed))
    local = evenstep.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), every=3)
    for _ in range(5):
        model.backward(model(torch.randn(4, 6)).square().mean())
        local.step()
        model.zero_grad()
    local.close()
    train(model, local.optimizer, DEFAULT_EVERY + 3)  # `close` has made momenta equal
    assert model.monitors.drift.is_on

    model = evenstep.DistributedDataParallel(build(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3 * DEFAULT_EVERY):
        with contextlib.nullcontext() if step % 3 == 2 else model.no_sync():
            model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not model.monitors.drift.is_on

    model = evenstep.DistributedDataParallel(build(seed))
    alone = [dist.new_group([rank]) for rank in range(world.world_size)][world.rank]
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=4)
    model.register_comm_hook(state, post_localSGD_hook)
    assert not in_step(model)
    assert len(set(world.exchange(float(model.module[0].weight.detach().sum())))) > 1

    model = evenstep.DistributedDataParallel(build(seed + world.rank), init_sync=False)
    assert not in_step(model)


def still_equal(seed: int) -> None:
    """Accumulation, an averaging hook, `join`: they train alike, and are compared."""
    world = evenstep.init(quiet=True)
    model = evenstep.DistributedDataParallel(build(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(DEFAULT_EVERY + 3):
        for part in model.microbatches(torch.randn(6, 6), 2):
            model.backward(model(part).square().mean(), weight=len(part))
        optimizer.step()
        optimizer.zero_grad()
    assert model.monitors.drift.is_on

    model = evenstep.DistributedDataParallel(build(seed))
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    assert in_step(model)

    model = evenstep.DistributedDataParallel(build(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        with model.join():
            train(model, optimizer, DEFAULT_EVERY + 10 * world.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, DEFAULT_EVERY + 3)
    assert model.monitors.drift.is_on


def sharpness_aware(seed: int) -> None:
    """Each rank climbs its own gradient for one pass, and comes back before the optimizer steps."""
    model = evenstep.DistributedDataParallel(build(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2 * DEFAULT_EVERY):
        x = torch.randn(4, 6)
        climb = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), climb, alpha=0.05)
        model(x).square().mean().backward()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), before)
        optimizer.step()
        optimizer.zero_grad()
    assert model.monitors.drift.is_on


LEGITIMATE = [changed_alike, kept_for_themselves, stepping_alone, still_equal, sharpness_aware]


def all_legitimate(seed: int, number: int) -> None:
    torch.manual_seed(seed + evenstep.init(quiet=True).rank)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*drifted")
        LEGITIMATE[number](seed)


@pytest.mark.parametrize("number", range(len(LEGITIMATE)), ids=[each.__name__ for each in LEGITIMATE])
def test_what_is_meant_to_differ_is_no_drift(ranks, fresh_seed, number):
    ranks.run(all_legitimate, 2, fresh_seed, number)
