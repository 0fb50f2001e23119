"""State of divided optimizers: of one rank alone, and in dtypes of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import MismatchError
from tests.ranks import on_ranks


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5)).double()


@on_ranks(2)
def test_a_state_dict_of_one_rank_alone_is_told_to_all(world, fresh_seed):
    """The others' next values were taken for state: an error about unpacking."""
    model = evenstep.DistributedDataParallel(build(fresh_seed), bucket_cap_mb=5e-4)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    model(torch.ones(2, 6, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    told = "^the ranks make different calls. rank 0: a state_dict of an optimizer; rank 1: world.gather. Every rank"
    with pytest.raises(MismatchError, match=told):
        optimizer.state_dict() if world.is_main else world.gather(torch.ones(2))
    optimizer.state_dict()  # nobody waits for anybody


class Wide(torch.optim.Optimizer):
    """Element-wise, with state in dtypes of its own beside parameters of 16 bits, and a text."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "sum": torch.zeros(p.shape),
                        "count": torch.zeros(p.shape, dtype=torch.int64),
                        "told": "x",
                    }
                state["count"].add_(1)
                state["sum"].mul_(0.9).add_(p.grad.float())
                p.copy_(p.float() - group["lr"] * state["sum"] / state["count"])


@pytest.mark.parametrize("elementwise", [False, True])
@on_ranks(1, 2)
def test_state_keeps_the_dtype_that_its_optimizer_chose_when_a_group_is_added(world, fresh_seed, elementwise):
    """Beside the optimizer that isn't divided."""
    torch.manual_seed(fresh_seed)
    first = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5)).bfloat16()
    models = [evenstep.DistributedDataParallel(copy.deepcopy(first), bucket_cap_mb=1e-4) for _ in range(2)]
    heads, bodies = ([list(model.module[n].parameters()) for model in models] for n in (0, 1))
    optimizers = [evenstep.ShardedOptimizer(models[0], Wide, heads[0], elementwise=elementwise), Wide(heads[1])]
    for step in range(5):
        x = torch.randn(4, 6).bfloat16()
        for model, optimizer, body in zip(models, optimizers, bodies, strict=True):
            if step == 3:
                optimizer.add_param_group({"params": body})
            model(x).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    named = zip(models[0].module.named_parameters(), models[1].module.parameters(), strict=True)
    assert [name for (name, ours), theirs in named if not torch.equal(ours, theirs)] == []
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for number, state in theirs.items():
        for key, value in state.items():
            other = ours[number][key]
            assert value == other if key == "told" else value.dtype is other.dtype and torch.equal(value, other)
