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


@pytest.mark.extended(beyond=8)
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("how", ["dataclass", "attribute", "opaque"])
@on_ranks(2, 1)
def test_a_loss_that_reaches_no_output_is_averaged(world, fresh_seed, how, use_reentrant, is_weighted):
    """Frozen from the first step on by hooks on a few parameters only, and in passes inside the pass.

    Steps through all layers, through the head alone, with an empty share on the last rank, and behind a forward pass
    over an empty batch without a backward pass.
    """
    torch.manual_seed(fresh_seed)
    module = Hiding(how, use_reentrant=use_reentrant).double()
    model = evenstep.DistributedDataParallel(module, bucket_cap_mb=2e-4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    last = world.world_size - 1
    for step in range(8):
        module.trains_head_only = step in (2, 3)
        rows = [
            0 if (step == 5 and rank == last and world.world_size > 1) else 3 + rank * is_weighted
            for rank in range(world.world_size)
        ]
        batches = [batch(fresh_seed, step, rank, n).requires_grad_() for rank, n in enumerate(rows)]
        module.result = None  # a graph can't be copied
        alone = copy.deepcopy(module)
        for x in batches:
            if len(x):
                share = len(x) / sum(rows) if is_weighted else 1 / world.world_size
                (alone.loss_of(alone(x)) * share).backward()
        x = batches[world.rank]
        if step == 6:
            model(x[:0])
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
