"""What programs do between a backward pass and a step, and around optimizers, on 1 to 3 ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import MismatchError


def build(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5)).double()


def wrap(seed: int, **options: Any) -> evenstep.DistributedDataParallel:
    return evenstep.DistributedDataParallel(build(seed), bucket_cap_mb=5e-4, **options)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def backward(model: evenstep.DistributedDataParallel, seed: int) -> None:
    world = model.world
    x = batch(seed)[world.rank :: world.world_size]
    dtype = next(model.parameters()).dtype
    model.backward(model(x.to(dtype)).square().mean(), weight=len(x))


# ---------------------------------------------------------------------- complex parameters, hooks of state dicts


# ---------------------------------------------------------------------- a loss with more in it than the model's outputs


NUM_STEPS, NUM_ROUNDINGS = 5, 32  # of a step: sums of at most 24 numbers and 3 ranks, products, the step itself


# ---------------------------------------------------------------------- values beside 16-bit parameters


# ---------------------------------------------------------------------- clipping


# ---------------------------------------------------------------------- LocalSGD


# ---------------------------------------------------------------------- what only some ranks do


def alone(seed: int) -> str:
    """What this rank is told when rank 0 alone saves the optimizer."""
    world = evenstep.init(quiet=True)
    model = wrap(seed)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.1)
    backward(model, seed)
    optimizer.step()
    with pytest.raises(MismatchError) as caught:
        optimizer.state_dict() if world.is_main else world.gather(torch.ones(2))
    optimizer.state_dict()  # nobody waits for anybody
    return str(caught.value)


def test_a_state_dict_of_one_rank_alone_is_told_to_all(ranks, fresh_seed):
    """The others' next values were taken for state: an error about unpacking."""
    told = ranks.run(alone, 2, fresh_seed)
    assert told[0] == told[1]
    assert told[0].startswith(
        "the ranks make different calls. rank 0: a state_dict of an optimizer; rank 1: world.gather. Every rank"
    )


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


def state_of_other_dtypes(seed: int, elementwise: bool) -> list[str]:
    """What differs from the optimizer that isn't divided, when a group was added between two steps."""
    evenstep.init(quiet=True)
    torch.manual_seed(seed)
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
    wrong = [name for (name, ours), theirs in named if not torch.equal(ours, theirs)]
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for number, state in theirs.items():
        for key, value in state.items():
            other = ours[number][key]
            is_same = value == other if key == "told" else value.dtype is other.dtype and torch.equal(value, other)
            if not is_same:
                wrong.append(f"{key} of {number}")
    return wrong


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize("nproc", [1, 2])
def test_state_keeps_the_dtype_that_its_optimizer_chose_when_a_group_is_added(ranks, fresh_seed, nproc, elementwise):
    assert ranks.run(state_of_other_dtypes, nproc, fresh_seed, elementwise) == [[]] * nproc


# ---------------------------------------------------------------------- gradients that aren't in memory of their own
