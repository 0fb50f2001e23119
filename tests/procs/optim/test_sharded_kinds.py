"""The sharded optimizer with many classes: fifty steps on 1, 2 and 3 ranks against one process, in float64."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import MismatchError
from tests.optimizers import Adapts, ScheduleFree

SIZES = pytest.mark.parametrize("nproc", [2, 1, 3])
GLOBAL_BATCH = 12


class Layouts(nn.Module):
    """Parameters that lie in memory in their usual order, channels_last, and transposed; no row or column is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.mix = nn.Parameter(torch.randn(8, 20).t())
        self.out = nn.Linear(8, 4)
        self.to(torch.float64)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(torch.tanh(self.conv(x)).flatten(1) @ self.mix))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() != 2]


def every(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


KINDS: dict[str, list[tuple]] = {
    "SGD, Nesterov": [(torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, every)],
    "Adam, AMSGrad": [(torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, every)],
    "AdamW": [(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, every)],
    "NAdam": [(torch.optim.NAdam, {"lr": 0.01}, every)],
    "RMSprop, centred": [(torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}, every)],
    "Adagrad": [(torch.optim.Adagrad, {"lr": 0.05}, every)],
    "Adafactor": [(torch.optim.Adafactor, {"lr": 0.02}, every)],
    "Muon beside AdamW": [(torch.optim.Muon, {"lr": 0.02}, matrices), (torch.optim.AdamW, {"lr": 0.01}, others)],
    "schedule-free": [(ScheduleFree, {"lr": 0.1}, every)],
    "schedule-free, by elements": [(ScheduleFree, {"lr": 0.1, "elementwise": True}, every)],
}
FROM_OTHERS: dict[str, list[tuple]] = {
    "AdamWScheduleFree": [("schedulefree", {"lr": 0.01, "warmup_steps": 5}, every)],
    "SGDScheduleFree": [("schedulefree", {"lr": 0.1, "warmup_steps": 5}, every)],
}


def fifty_steps(seed: int, which: str) -> tuple[list[dict], bytes]:
    """Training beside one process's, with an evaluation's weights after every tenth step; (saved groups, bits)."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    alone = Layouts()
    model = evenstep.DistributedDataParallel(Layouts(), bucket_cap_mb=1e-3, first_bucket_cap_mb=2e-4)
    model.module.load_state_dict(alone.state_dict())
    ours, theirs = [], []
    for kind, options, chosen in KINDS.get(which) or FROM_OTHERS[which]:
        made = getattr(importlib.import_module(kind), which) if isinstance(kind, str) else kind
        ours.append(evenstep.ShardedOptimizer(model, made, chosen(model), **options))
        theirs.append(made(chosen(alone), **{k: v for k, v in options.items() if k != "elementwise"}))
    moves = hasattr(theirs[0], "eval")
    for optimizer in [*ours, *theirs] if moves else []:
        optimizer.train()
    share = slice(world.rank * GLOBAL_BATCH // world.world_size, (world.rank + 1) * GLOBAL_BATCH // world.world_size)
    data = torch.Generator().manual_seed(seed)
    for step in range(50):
        x, y = (torch.randn(GLOBAL_BATCH, *shape, generator=data).double() for shape in ((3, 4, 4), (4,)))
        nn.functional.mse_loss(alone(x), y).backward()
        model.backward(nn.functional.mse_loss(model(x[share]), y[share]), weight=len(x[share]))
        for optimizer in [*ours, *theirs]:
            optimizer.step()
            optimizer.zero_grad()
        if moves and step % 10 == 9:
            for optimizer in [*ours, *theirs]:
                optimizer.eval()
            compare(model, alone, f"seed {seed}, step {step}, averaged")
            for optimizer in [*ours, *theirs]:
                optimizer.train()
        compare(model, alone, f"seed {seed}, step {step}")
    found = [optimizer.state_dict() for optimizer in ours]
    for one, other in zip(found, theirs, strict=True):
        expected = other.state_dict()
        assert one["state"].keys() == expected["state"].keys()
        assert one["param_groups"] == expected["param_groups"]
    return [group for each in found for group in each["param_groups"]], b"".join(
        p.detach().contiguous().numpy().tobytes() for p in model.parameters()
    )


def compare(model: nn.Module, alone: nn.Module, context: str) -> None:
    for (name, one), other in zip(alone.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{context}, {n}: {m}")


@pytest.mark.extended(beyond=12)
@pytest.mark.parametrize("which", KINDS)
@SIZES
def test_fifty_steps_are_those_of_one_process(ranks, fresh_seed, nproc, which):
    groups, bits = zip(*ranks.run(fifty_steps, nproc, fresh_seed, which), strict=True)
    assert len(set(bits)) == 1, "replicas differ"
    assert all(each == groups[0] for each in groups)


@pytest.mark.parametrize("which", FROM_OTHERS)
@SIZES
def test_classes_of_other_libraries(ranks, fresh_seed, nproc, which):
    pytest.importorskip("schedulefree")
    _, bits = zip(*ranks.run(fifty_steps, nproc, fresh_seed, which), strict=True)
    assert len(set(bits)) == 1, "replicas differ"


def adapts(seed: int, module: str) -> tuple[str, float]:
    """Steps whose rate follows all parameters: what is raised, and how far one process's weights are."""
    evenstep.init(quiet=True)
    kind, options = (Adapts, {}) if not module else (importlib.import_module(module).Prodigy, {"lr": 1.0})
    torch.manual_seed(seed)
    alone = Layouts()
    model = evenstep.DistributedDataParallel(Layouts())
    model.module.load_state_dict(alone.state_dict())
    ours, theirs = evenstep.ShardedOptimizer(model, kind, **options), kind(alone.parameters(), **options)
    data = torch.Generator().manual_seed(seed)
    try:
        for _ in range(20):
            x = torch.randn(GLOBAL_BATCH, 3, 4, 4, generator=data).double()
            alone(x).square().mean().backward()
            model(x).square().mean().backward()
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    except MismatchError as error:
        return str(error), 0.0
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    return "", max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("module", ["", "prodigyopt"], ids=["own", "of other_libraries"])
def test_a_rate_that_follows_all_parameters_is_exact_alone_and_refused_on_ranks(ranks, fresh_seed, module):
    if module:
        pytest.importorskip(module)
    ((problem, distance),) = ranks.run(adapts, 1, fresh_seed, module)
    assert (problem, distance) == ("", pytest.approx(0, abs=1e-12))
    problems = [problem for problem, _ in ranks.run(adapts, 2, fresh_seed, module)]
    assert problems[0] == problems[1]
    assert "the ranks step with different options: d" in problems[0]
    assert "can't be divided: use it without ShardedOptimizer" in problems[0]
