"""Backward passes that no forward pass of the wrapper began, compared with torch's class over Gloo, step by step.

Each program is a generator: it runs with a wrapped model, and yields its gradients wherever they are compared. What
one rank does alone meets nobody, or the test hangs.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import UsageError
from tests.ranks import on_ranks


class Opaque:
    """An output of a class that no pytree knows."""

    def __init__(self, value):
        self.value = value


class Net(nn.Module):
    def __init__(self, *, is_opaque=False, use_reentrant=None):
        super().__init__()
        self.first, self.second, self.penalised = nn.Linear(6, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(5))
        self.is_opaque, self.use_reentrant = is_opaque, use_reentrant
        self.aside = None

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if self.use_reentrant is None:
            out = self.second(hidden)
        else:
            out = checkpoint(lambda h: self.second(torch.tanh(h)), hidden, use_reentrant=self.use_reentrant)
        self.aside = out.square().mean() + self.penalised.sum()
        out = out + self.penalised.sum()
        return Opaque(out) if self.is_opaque else out


def batch(seed, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def loss_of(out):
    return out.square().mean()


def look(model, x):
    """A look at gradients past the wrapper."""
    loss_of(value_of(model.module(x))).backward()


# ---------------------------------------------------------------------- programs that torch's class runs the same


def value_of(out):
    return out.value if isinstance(out, Opaque) else out


ACTIONS = [
    "a pass",
    "several forwards",
    "both ways",
    "past the outputs",
    "aside",
    "looked at",
    "directly",
    "accumulated",
    "evaluated",
    "forward in no_sync",
    "forward without gradients",
    *["alone"] * 4,
    "alone, directly",
    *["zeroed"] * 3,
]


def drawn(seed):
    """A random program; what one rank does alone comes where no forward pass has prepared a pass."""

    def program(model, x, rank):
        chance, module = random.Random(seed), model.module
        for _ in range(16):
            action, who, y = chance.choice(ACTIONS), chance.randrange(dist.get_world_size()), x * chance.uniform(0.5, 2)
            if action == "zeroed":
                model.zero_grad(set_to_none=chance.random() < 0.5)
            elif action.startswith("alone"):
                if rank == who:
                    look(model, y) if action == "alone" else squares(module).backward()
            elif action == "forward without gradients":
                with torch.no_grad():
                    model(y)
            elif action == "forward in no_sync":
                with model.no_sync():
                    model(y)
            elif action == "accumulated":
                with model.no_sync():
                    loss_of(value_of(model(y))).backward()
                    if rank == who:
                        look(model, y)
            else:
                model.train(action != "evaluated")
                collectively(action, model, y)
                model.train()
            yield

    return program


def squares(module):
    return sum((p * p).sum() for p in module.parameters())


def collectively(action, model, x):
    """A pass that all ranks make, however its loss comes about."""
    out = value_of(model(x))
    if action == "several forwards":
        loss_of(out + value_of(model(x + 1)) + value_of(model(2 * x))).backward()
    elif action == "both ways":
        (loss_of(out) + loss_of(value_of(model.module(x + 1)))).backward()
    elif action == "past the outputs":
        look(model, 2 * x)  # counts: the forward pass has prepared it
    elif action == "aside":
        model.module.aside.backward()
    elif action == "looked at":
        torch.autograd.grad(loss_of(out), list(model.parameters()), retain_graph=True)
        torch.autograd.grad(loss_of(value_of(model.module(x))), list(model.parameters()))
        loss_of(out).backward()
    elif action == "directly":
        (loss_of(out) + squares(model.module)).backward()
    else:
        loss_of(out).backward()


def joined(model, x, rank):
    with model.join():
        for step in range(rank + 1):
            model.zero_grad()
            look(model, x + step)
            model.zero_grad()
            loss_of(model(x * step)).backward()
            yield
            if rank == 1:
                look(model, x)
            yield
    model.zero_grad()
    if rank == 0:
        look(model, x)
    yield


def gradients_of(case, wrap, x, rank, *, net=None, is_compiled=False, **options):
    torch.manual_seed(3)
    module = Net(**(net or {})).double()
    model = wrap(module, **options)
    called = torch.compile(model, backend="eager") if is_compiled else model
    found = []
    for _ in case(called, x, rank):
        found.append([None if p.grad is None else p.grad.detach().clone() for p in module.parameters()])
    return found


def compared(seed):
    world = evenstep.init(quiet=True)
    x = batch(seed, world.rank)
    gloo = dist.new_group(backend="gloo")
    told = []
    programs = {"joined": (joined, {})} | {
        f"{number}, opaque {is_opaque}": (drawn(f"{seed} {number}"), {"net": {"is_opaque": is_opaque}})
        for number in range(6)
        for is_opaque in (False, True)
    }
    for name, (case, options) in programs.items():
        torchs = gradients_of(case, TorchDistributedDataParallel, x, world.rank, process_group=gloo, **options)
        for caps in ({}, {"bucket_cap_mb": 2e-4}):
            ours = gradients_of(case, evenstep.DistributedDataParallel, x, world.rank, **caps, **options)
            told += [f"{name}, {caps}: {text}" for text in differences(ours, torchs)]
    return told


def differences(ours, torchs):
    assert len(ours) == len(torchs)
    for place, (left, right) in enumerate(zip(ours, torchs, strict=True)):
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            a, b = (torch.zeros(()) if each is None else each for each in (a, b))
            if not torch.allclose(a, b, rtol=1e-9, atol=1e-12):
                yield f"at yield {place} parameter {index} differs: {a.flatten()[:3]} and {b.flatten()[:3]}"


@pytest.mark.parametrize("nproc", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_passes_that_no_forward_began_are_a_ranks_own(ranks, fresh_seed, nproc):
    assert ranks.run(compared, nproc, fresh_seed) == [[]] * nproc


# ---------------------------------------------------------------------- checkpoints, compiled models, static graphs


def ordinary(model, x, rank):
    for step in range(3):
        model.zero_grad()
        loss_of(model(x + step)).backward()
        yield
        if rank == step % 2:
            look(getattr(model, "_orig_mod", model), x - step)
        yield
        loss_of(model(x - step)).backward()
        yield


@pytest.mark.extended
@on_ranks(2)
def test_a_ranks_own_passes_in_models_of_many_kinds(world, fresh_seed):
    x = batch(fresh_seed, world.rank)
    gloo = dist.new_group(backend="gloo")
    kinds = {
        "checkpoints": {"net": {"use_reentrant": False}},
        "reentrant checkpoints": {"net": {"use_reentrant": True}, "static_graph": True},
        "compiled": {"is_compiled": True},
        "search for unused parameters": {"find_unused_parameters": True},
        "views": {"gradient_as_bucket_view": True},
    }
    for name, options in kinds.items():
        torchs = gradients_of(ordinary, TorchDistributedDataParallel, x, world.rank, process_group=gloo, **options)
        ours = gradients_of(ordinary, evenstep.DistributedDataParallel, x, world.rank, **options)
        assert list(differences(ours, torchs)) == [], name


# ---------------------------------------------------------------------- what ours averages, and torch's doesn't


def kept_graph(model, x, rank):
    loss = loss_of(model(x))
    loss.backward(retain_graph=True)
    loss.backward()
    yield


def one_backward_per_forward(model, x, rank):
    outs = [model(x), model(x + 1)]
    for out in outs:
        loss_of(out).backward()
    yield


def forward_in_no_sync(model, x, rank):
    with model.no_sync():
        out = model(x)
    loss_of(out).backward()
    yield


MORE = {"kept_graph": [0, 0], "one_backward_per_forward": [0, 1], "forward_in_no_sync": [0]}  # what is added to x


@pytest.mark.extended
@on_ranks(2)
def test_every_pass_through_the_wrappers_outputs_is_averaged(world, fresh_seed):
    x = batch(fresh_seed, world.rank)
    gloo = dist.new_group(backend="gloo")
    for name, shifts in MORE.items():
        case = globals()[name]
        torchs = gradients_of(case, TorchDistributedDataParallel, x, world.rank, process_group=gloo)
        ours = gradients_of(case, evenstep.DistributedDataParallel, x, world.rank)
        assert any(differences(ours, torchs)), f"{name}: torch's class does the same now"
        torch.manual_seed(3)
        module = Net().double()
        for shift in shifts:
            losses = [loss_of(module(batch(fresh_seed, rank) + shift)) for rank in range(world.world_size)]
            torch.stack(losses).mean().backward()
        assert list(differences(ours, [[p.grad for p in module.parameters()]])) == [], name


# ---------------------------------------------------------------------- beside weights, shards and virtual ranks


@pytest.mark.extended
@on_ranks(2, 3)
def test_a_ranks_own_passes_beside_weights(world, fresh_seed):
    x = batch(fresh_seed, world.rank)
    torch.manual_seed(3)
    model = evenstep.DistributedDataParallel(Net().double(), bucket_cap_mb=2e-4)
    for step in range(3):
        if world.rank == step % 2:
            look(model, x)
        model.zero_grad()
        model.backward(loss_of(model.module(x)), weight=2 + world.rank)  # an explicit call counts, whatever it is of
    averaged = [p.grad.clone() for p in model.parameters()]
    if world.rank == 0:
        look(model, x)
    torch.manual_seed(3)
    module = Net().double()
    total = sum(2.0 + rank for rank in range(world.world_size))
    losses = [loss_of(module(batch(fresh_seed, rank))) * (2 + rank) / total for rank in range(world.world_size)]
    torch.stack(losses).sum().backward()
    for got, parameter in zip(averaged, module.parameters(), strict=True):
        if parameter.grad is not None:
            torch.testing.assert_close(got, parameter.grad)
    model.zero_grad()
    with model.accumulate():
        model.backward(loss_of(model(x)), weight=3)
        with pytest.raises(UsageError, match="in the same accumulation window"):
            look(model, x)


@pytest.mark.extended
@pytest.mark.parametrize("stage2", [False, True])
@on_ranks(2)
def test_a_ranks_own_passes_beside_shards(world, fresh_seed, stage2):
    x = batch(fresh_seed, world.rank)
    models = []
    for kind in ("sharded", "whole"):
        torch.manual_seed(3)
        model = evenstep.DistributedDataParallel(Net().double(), bucket_cap_mb=2e-4)
        if kind == "sharded":
            optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, shard_gradients=stage2)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            if world.rank == step % 2:
                look(model, x)  # counts in the next average, once it is zeroed no more
            if step % 2:
                optimizer.zero_grad(set_to_none=step == 1)
            if world.rank == step % 2:
                look(model, 2 * x)
            loss_of(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    loss_of(models[0](x)).backward()
    if world.rank == 0:
        with pytest.raises(UsageError, match="would add this rank's own"):
            look(models[0], x)
    loss_of(models[0](x)).backward()
