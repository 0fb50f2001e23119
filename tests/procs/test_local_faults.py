"""Ranks that step on their own: a gradient that isn't finite is named, a scaler taken, complex numbers averaged."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, NonFiniteError, UsageError


def build(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def poisoned(seed: int, policy: str | None, odd: int, gloo: bool) -> tuple[str, list[str], int, bool, list[float]]:
    """(what was raised, warnings, skipped steps, whether all is finite, parameters) with one NaN on one rank."""
    world = evenstep.init(quiet=True)
    if gloo:
        world = evenstep.World.from_process_group(transport="gloo", device="cpu")
    raised = ""
    try:
        model = evenstep.DistributedDataParallel(build(seed), on_nonfinite=policy, world=world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = evenstep.LocalUpdates(model, optimizer, every=2)
        generator = torch.Generator().manual_seed(seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for step in range(6):
                    model.backward(model(torch.randn(4, 6, dtype=torch.float64, generator=generator)).square().mean())
                    if step == 2 and world.rank == odd:
                        model.module[2].weight.grad[1, 3] = math.nan
                    local.step()
                    optimizer.zero_grad()
            except NonFiniteError as error:
                raised = str(error)
        values = [float(p.detach().sum()) for p in model.parameters()]
        told = [str(each.message) for each in caught if "not a number" in str(each.message)]
        return raised, told, model.skipped_steps, all(map(math.isfinite, values)), values
    finally:
        if gloo:
            world.close()


@pytest.mark.parametrize(("nproc", "odd", "gloo"), [(1, 0, False), (2, 1, False), (3, 0, False), (2, 0, True)])
def test_a_gradient_that_isnt_finite_is_named_when_parameters_are_averaged(ranks, fresh_seed, nproc, odd, gloo):
    where = f"on rank {odd}: '2.weight'."
    for policy in ("warn", "skip", "raise", None):
        found = ranks.run(poisoned, nproc, fresh_seed, policy, odd, gloo)
        raised, told, _, is_finite, values = found[0]
        if policy == "raise":
            assert where in raised
            assert all(each[0] == raised and each[3] for each in found)
            continue
        assert raised == ""
        assert len(told) == (policy is not None)
        assert all(each[1] == [] for each in found[1:]), "rank 0 says it"
        assert all(where in each for each in told)
        assert is_finite == (policy == "skip")
        assert {each[2] for each in found} == {1 if policy == "skip" else 0}
        if is_finite:
            assert all(each[4] == values for each in found)
    assert NonFiniteError.exit_code == 73


def scaled(seed: int) -> tuple[list[float], list[float], float, list[float]]:
    """(parameters, those of an oracle, the largest difference of scales, the scale after each step)."""
    world = evenstep.init(quiet=True)
    model, oracle = evenstep.DistributedDataParallel(build(seed, torch.float32)), build(seed, torch.float32)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, oracle))
    local = evenstep.LocalUpdates(model, optimizer, every=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    generator, scales = torch.Generator().manual_seed(seed + world.rank), []
    for step in range(6):
        x = torch.randn(4, 6, generator=generator)
        overflows = step == 1 and world.rank == world.world_size - 1
        model.backward(scaler.scale(model(x).square().mean()), scaler=scaler)
        if overflows:
            model.module[0].weight.grad[0, 0] = math.inf
        else:
            oracle(x).square().mean().backward()
            plain.step()
            plain.zero_grad()
        if local.step(scaler=scaler):
            for parameter in oracle.parameters():
                parameter.data = world.mean(parameter.detach())
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    told = world.exchange(scaler.get_scale())
    model.backward(scaler.scale(model(x).square().mean()), scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UsageError, match=r"local\.step\(scaler=scaler\)"):
        local.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(ConfigurationError, match="scaler=5"):
        local.step(scaler=5)
    optimizer.zero_grad()
    local.step()  # what was scaled is gone
    flat = [torch.cat([p.detach().reshape(-1) for p in each.parameters()]).tolist() for each in (model, oracle)]
    return flat[0], flat[1], max(told) - min(told), scales


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_a_scaler_leaves_out_steps_of_a_rank_and_is_agreed_on_with_parameters(ranks, fresh_seed, nproc):
    for got, expected, spread, scales in ranks.run(scaled, nproc, fresh_seed):
        assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert spread == 0.0
        assert scales[-1] == 512.0


def rotating(seed: int) -> float:
    """The largest difference of a complex parameter from its mean over ranks, behind an average."""
    world = evenstep.init(quiet=True)
    torch.manual_seed(seed)
    module = nn.Linear(3, 2).to(torch.complex128)
    model = evenstep.DistributedDataParallel(module)
    local = evenstep.LocalUpdates(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    model.backward((model(torch.full((1, 3), 1.0 + world.rank, dtype=torch.complex128)).abs() ** 2).sum())
    local.step()
    own = torch.view_as_real(module.weight.detach()).reshape(1, -1)
    told = world.gather(own)
    return float((told - told[0]).abs().max())


def test_complex_parameters_are_averaged(ranks, fresh_seed):
    assert ranks.run(rotating, 2, fresh_seed) == [0.0, 0.0]


def sums_taken(seed: int) -> tuple[int, int]:
    """How often a step adds up gradients to look at them; of a model of many small parameters."""
    evenstep.init(quiet=True)
    torch.manual_seed(seed)
    module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(40)], nn.Linear(3, 20_000))
    model = evenstep.DistributedDataParallel(module)
    local = evenstep.LocalUpdates(model, torch.optim.SGD(model.parameters(), lr=0.0), every=5)
    model(torch.randn(2, 3)).mean().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        local.step()
    found = {each.key: each.count for each in profile.key_averages()}
    model(torch.randn(2, 3)).mean().backward()
    with torch.no_grad():
        module[7].bias.grad[1] = -math.inf
    local.step()
    assert list(local._bad) == ["7.bias"]
    local._bad.clear()
    return found["aten::sum"], found.get("aten::isfinite", 0)


def test_small_gradients_are_looked_at_together(ranks, fresh_seed):
    for num_sums, num_looks in ranks.run(sums_taken, 2, fresh_seed):
        assert num_looks == 1
        assert num_sums == 4  # small ones together, two large ones, and these three
