"""A model may change while it trains: what is unfrozen or added later is averaged, on any number of ranks."""

from __future__ import annotations

import contextlib
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import evenstep
from evenstep.errors import EvenstepError, UsageError
from tests.ranks import on_ranks

ROWS = 12  # of a batch, over all ranks


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=None).eval(), nn.Tanh(), nn.Linear(6, 2)).double()
    made[0].requires_grad_(False)
    return made


def change(module: nn.Sequential, step: int, optimizer: torch.optim.Optimizer, seed: int) -> None:
    if step == 2:
        module[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(module[0].parameters())})
    elif step == 3:
        torch.manual_seed(seed)
        module.append(nn.Linear(2, 2).double())
        optimizer.add_param_group({"params": list(module[4].parameters())})
    elif step == 4:
        module[3].weight.requires_grad_(False)
    elif step == 5:
        prune.l1_unstructured(module[4], "weight", amount=1)
        module[3].weight.requires_grad_(True)


def train(model: nn.Module, module: nn.Sequential, seed: int, share: slice, way: str) -> None:
    """Eight steps on this process's rows of each batch, and changes between them.

    With micro-batches the first rank has all rows in some steps, also where layers are unfrozen or added.
    """
    drawn = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    is_wrapped = isinstance(model, evenstep.DistributedDataParallel)
    for step in range(8):
        change(module, step, optimizer, seed + (model.world.rank if is_wrapped else 0))
        x, y = torch.randn(ROWS, 4, generator=drawn).double(), torch.randn(ROWS, 2, generator=drawn).double()
        mine = share
        if way == "micro-batches" and step % 3 != 1:
            mine = slice(0, ROWS if share.start == 0 else 0)
        x, y = x[mine], y[mine]
        optimizer.zero_grad()
        if not is_wrapped or way == "plain":
            nn.functional.mse_loss(model(x), y).backward()
        elif way == "weighted":
            model.backward(nn.functional.mse_loss(model(x), y), weight=len(x))
        else:
            for part_x, part_y in model.microbatches((x, y), 2):
                model.backward(nn.functional.mse_loss(model(part_x), part_y), weight=len(part_x))
        optimizer.step()


def changed(seed: int, way: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        world = evenstep.init(quiet=True)
        warnings.simplefilter("always")
        torch.manual_seed(seed)
        alone, module = net(), net()
        module.load_state_dict(alone.state_dict())
        model = evenstep.DistributedDataParallel(module)
        rows = ROWS // world.world_size
        train(model, module, seed, slice(world.rank * rows, (world.rank + 1) * rows), way)
        train(alone, alone, seed, slice(0, ROWS), way)
    for (name, got), expected in zip(module.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    gc.collect()  # what is left of earlier layouts may wait for the collector, and for nothing else
    assert len(world.telemetry.recorders) == 1 or world.world_size == 1
    return [str(each.message) for each in caught if "is trained now" in str(each.message)]


@pytest.mark.parametrize("way", ["plain", "weighted", "micro-batches"])
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_a_model_that_changes_steps_as_one_process(ranks, fresh_seed, nproc, way):
    first = ranks.run(changed, nproc, fresh_seed, way)[0]
    assert [text.split(" is trained")[0] for text in first] == [
        "parameter '0.weight' and 1 more",
        "parameter '4.weight' and 1 more",
    ]


@pytest.mark.parametrize(
    "kind",
    [
        "inside of an accumulation window",
        "with a communication hook",
        "with a ShardedOptimizer",
        "within LocalSGD",
        "within a join",
    ],
)
@on_ranks(2)
def test_where_a_model_cannot_be_followed_it_is_said(world: evenstep.World, kind: str) -> None:
    torch.manual_seed(0)
    held: list[object] = []
    module = net()
    model = evenstep.DistributedDataParallel(module)
    x = torch.randn(3, 4).double()
    if kind == "inside of an accumulation window":
        with model.no_sync():
            model(x).sum().backward()
    elif kind == "with a communication hook":
        model.register_comm_hook(None, lambda state, bucket: None)
    elif kind == "with a ShardedOptimizer":
        # Unreferenced it would be gone.
        held.append(evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1))
    elif kind == "within LocalSGD":
        evenstep.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    with model.join() if kind == "within a join" else contextlib.nullcontext():
        module[0].requires_grad_(True)
        for _ in range(2):  # told again
            with pytest.raises(UsageError, match=f"'0.weight' is trained now.*{kind} buckets can't be laid out again"):
                model(x)
        module[0].requires_grad_(False)
        if kind in ("inside of an accumulation window", "within a join"):
            model(x).sum().backward()
    if kind in ("inside of an accumulation window", "within a join"):
        module[0].requires_grad_(True)
        model(x).sum().backward()
        assert module[0].weight.grad is not None


class Part(nn.Module):
    """With buffers that each rank keeps for itself, of other lengths on each."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64), requires_grad=False)
        self.register_buffer("own", torch.full((2,), float(rank)))
        self.register_buffer("equal", torch.full((2,), float(rank)))
        self.register_buffer("cache", torch.full((3 + rank,), float(rank)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@on_ranks(2)
def test_buffers_that_are_each_ranks_own_stay_so(world: evenstep.World) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4).double(), Part(world.rank))
    module._ddp_params_and_buffers_to_ignore = {"1.cache"}
    model = evenstep.DistributedDataParallel(module, buffers={"1.own": "own"})
    assert module[1].own.tolist() == [world.rank] * 2
    assert module[1].equal.tolist() == [0.0] * 2
    x = torch.randn(3, 4).double()
    model(x).sum().backward()
    module[1].weight.requires_grad_(True)
    model(x).sum().backward()
    assert module[1].weight.grad is not None
    assert module[1].own.tolist() == [world.rank] * 2
    assert module[1].cache.tolist() == [world.rank] * (3 + world.rank)
    with model.join():
        pass
    assert module[1].own.tolist() == [world.rank] * 2


@on_ranks(2)
def test_a_wrapped_part_that_changes_is_followed(world: evenstep.World, fresh_seed: int) -> None:
    """An outer wrapper of the same ranks, and a wrapped part, to which a layer is added."""
    torch.manual_seed(fresh_seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inner = evenstep.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)).double())
        outer = evenstep.DistributedDataParallel(inner)
        whole = evenstep.DistributedDataParallel(
            nn.Sequential(
                nn.Linear(4, 4).double(), evenstep.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)).double())
            )
        )
    torch.manual_seed(fresh_seed + world.rank)
    x = torch.randn(3, 4).double()
    for model, part in ((outer, inner.module), (whole, whole.module[1].module)):
        part.append(nn.Linear(4, 4).double())
        for _ in range(2):
            model.zero_grad()
            model.backward(model(x).square().mean(), weight=1 + world.rank)
        for parameter in model.parameters():
            everybody = world.exchange(parameter.grad.sum().item())
            assert len(set(everybody)) == 1
    averaging = evenstep.LocalSGD(outer, torch.optim.SGD(outer.parameters(), lr=0.1), every=2)
    with torch.no_grad():
        for parameter in outer.parameters():
            parameter.add_(world.rank)
    averaging.average()
    for parameter in outer.parameters():
        assert len(set(world.exchange(parameter.sum().item()))) == 1, "the outer wrapper knows what was added"


@on_ranks(2)
def test_a_change_on_one_rank_alone_is_an_error_on_all(world: evenstep.World) -> None:
    torch.manual_seed(0)
    module = net()
    model = evenstep.DistributedDataParallel(module)
    model(torch.randn(3, 4).double()).sum().backward()
    if world.rank == 1:
        module[0].requires_grad_(True)
    with pytest.raises(EvenstepError):
        model(torch.randn(3, 4).double()).sum().backward()
    world.close()
