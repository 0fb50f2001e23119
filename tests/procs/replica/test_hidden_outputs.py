"""Losses that reach no output which the wrapper can see, against one process, step by step, in float64."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import UsageError
from tests.procs.replica.test_own_passes import Opaque
from tests.ranks import on_ranks


@dataclasses.dataclass
class Result:
    value: torch.Tensor


class Hiding(nn.Module):
    """Four layers and a head; hands out its result in one of several ways."""

    def __init__(self, how, *, use_reentrant):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 2)
        self.how, self.use_reentrant, self.trains_head_only, self.result = how, use_reentrant, False, None

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.use_reentrant else layer(x))
        result = self.head(x.detach() if self.trains_head_only else x)
        if self.how == "attribute":
            self.result = result
            return None
        return {"dataclass": Result, "opaque": Opaque}[self.how](result)

    def loss_of(self, outputs):
        return (self.result if outputs is None else outputs.value).square().mean()


def batch(seed, step, rank, rows):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1000 * seed + 10 * step + rank)).double()


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("how", ["dataclass", pytest.param("opaque", marks=pytest.mark.extended), "attribute"])
@on_ranks(2)
def test_a_loss_that_reaches_no_output_is_averaged(world, fresh_seed, how, use_reentrant, is_weighted):
    """Frozen from the first step on by hooks on a few parameters only, and in passes inside the pass.

    Steps through all layers, through the head alone, and with an empty share on the last rank.
    """
    torch.manual_seed(fresh_seed)
    module = Hiding(how, use_reentrant=use_reentrant).double()
    model = evenstep.DistributedDataParallel(module, bucket_cap_mb=2e-4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    last = world.world_size - 1
    for step in range(6):
        module.trains_head_only = step in (2, 3)
        rows = [0 if (step == 5 and rank == last) else 3 + rank * is_weighted for rank in range(world.world_size)]
        batches = [batch(fresh_seed, step, rank, n).requires_grad_() for rank, n in enumerate(rows)]
        module.result = None  # a graph can't be copied
        alone = copy.deepcopy(module)
        for x in batches:
            if len(x):
                share = len(x) / sum(rows) if is_weighted else 1 / world.world_size
                (alone.loss_of(alone(x)) * share).backward()
        x = batches[world.rank]
        loss = module.loss_of(model(x))
        model.backward(loss, weight=len(x)) if is_weighted else loss.backward()
        for (name, ours), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
            expected = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
            found = torch.zeros_like(ours) if ours.grad is None else ours.grad
            torch.testing.assert_close(
                found, expected, rtol=1e-10, atol=1e-13, msg=lambda m, at=(step, name): f"{at}: {m}"
            )
        optimizer.step()
        optimizer.zero_grad()


class Alternating(nn.Module):
    """A parameter that odd steps don't use, and two outputs, nested, one behind the other."""

    def __init__(self):
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, step):
        y = torch.tanh(self.first(x))
        z = y if step % 2 else self.sometimes(y)
        v = torch.tanh(self.last(z))
        return {"a": [v, {"b": (z.square().mean(1) + v.square().mean(1),)}]}


@on_ranks(2)
def test_two_outputs_await_the_same_parameters_once(world, fresh_seed):
    """A bucket whose watched parameter isn't used in a step waits for the others, whichever output is reached first."""
    torch.manual_seed(fresh_seed)
    module = Alternating().double()
    model = evenstep.DistributedDataParallel(module)
    for step in range(4):
        alone = copy.deepcopy(module)
        alone.zero_grad()
        for part in range(2):
            for rank in range(world.world_size):
                x = batch(fresh_seed, 2 * step + part, rank, 2)[:, :3]
                outputs = alone(x, step)
                ((outputs["a"][0].square().mean() + outputs["a"][1]["b"][0].mean()) / world.world_size).backward()
                if rank == world.rank:
                    outputs = model(x, step)
                    loss = outputs["a"][0].square().mean() + outputs["a"][1]["b"][0].mean()
                    if part == 0:
                        with model.no_sync():
                            loss.backward()
                    else:
                        loss.backward()
        for (name, ours), theirs in zip(module.named_parameters(), alone.parameters(), strict=True):
            assert (ours.grad is None) is (theirs.grad is None), (step, name)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-13)
        model.zero_grad()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=True)


@on_ranks(2)
def test_an_error_of_autograd_grad_that_is_caught_leaves_replicas_in_step(world, fresh_seed):
    """`torch.autograd.grad` through a reentrant checkpoint raises, and no gradient has come."""
    torch.manual_seed(fresh_seed)
    model = evenstep.DistributedDataParallel(Hiding("opaque", use_reentrant=True), bucket_cap_mb=2e-4)
    plain = evenstep.DistributedDataParallel(nn.Sequential(nn.Linear(6, 6), Checkpointed()))
    for step in range(3):
        x = batch(fresh_seed, step, world.rank, 2).float().requires_grad_()
        for each in (model, plain):
            outputs = each(x)
            value = outputs if each is plain else outputs.value
            with pytest.raises(RuntimeError):
                torch.autograd.grad(value.mean(), x)
            outputs = each(x)
            each.backward((outputs if each is plain else outputs.value).mean(), weight=2)
            each.zero_grad()


@on_ranks(1, 2)
def test_a_parameter_of_two_models_is_refused(world):
    """It would be divided twice."""
    shared = nn.Linear(4, 4)
    first = evenstep.DistributedDataParallel(nn.Sequential(shared))
    second = evenstep.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), shared))
    x = torch.ones(2, 4)
    with pytest.raises(UsageError, match=r"parameter '1\.weight' is in two of the wrapped models"):
        evenstep.backward([first, second], first(x).mean() + second(x).mean(), weight=2)


def behind_an_empty_batch(seed: int, is_weighted: bool, has_pass: bool) -> None:
    """A forward pass over an empty batch, perhaps with a backward pass, then steps over samples."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    net = Hiding("opaque", use_reentrant=False).double()
    plain = copy.deepcopy(net)
    model = evenstep.DistributedDataParallel(net)
    x = torch.randn(world.world_size, 4, 6, dtype=torch.float64)

    def backward(samples: torch.Tensor, weight: float) -> None:
        loss = model(samples).value.square().mean()
        model.backward(loss, weight=weight) if is_weighted else loss.backward()

    backward(x[world.rank], 4)
    model.zero_grad()
    if has_pass:
        backward(x[0][:0] if world.rank == 0 else x[world.rank], 0 if world.rank == 0 else 4)
    else:
        model(x[0][:0])
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        backward(x[world.rank], 4)
        plain(x.reshape(-1, 6)).value.square().mean().backward()
        for ours, wanted in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, wanted.grad)


@pytest.mark.parametrize("has_pass", [True, False])
@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("nproc", [1, 2])
def test_an_empty_batch_mutes_no_later_pass(ranks, fresh_seed, nproc, is_weighted, has_pass):
    ranks.run(behind_an_empty_batch, nproc, fresh_seed, is_weighted, has_pass)
