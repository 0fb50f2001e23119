"""Rules for learning rates, and the running average of parameters."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, UsageError
from tests import pages


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0)


@pytest.mark.parametrize(
    ("rule", "factor", "size"),
    [("linear", 16.0, 256), ("sqrt", 4.0, numpy.int64(256)), ("linear", 16.0, torch.tensor(256))],
)
def test_rates_are_scaled_by_the_rule_and_what_was_decided_is_printed(rule, factor, size, capsys):
    optimizer = optimizer_of(0.1, 0.02)
    world = evenstep.World.alone(device="cpu")
    got = evenstep.scale_learning_rate(
        optimizer, rule=rule, base_batch_size=size, global_batch_size=16 * size, accumulation_steps=4, world=world
    )
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [0.1 * factor, 0.02 * factor, 1.0 * factor], "the last is the default, scaled"
    assert {type(each) for each in (got, *rates)} == {float}
    told = capsys.readouterr().out
    assert told.count("\n") == 1
    for what in (rule, "4096", "base 256", "4 micro-batches", f"0.1 to {0.1 * factor:.4g}"):
        assert what in told
    with pytest.raises(UsageError, match="before"):
        evenstep.scale_learning_rate(optimizer, base_batch_size=1, global_batch_size=1, world=world)


def test_a_rate_that_groups_have_in_common_is_scaled_once_and_later_groups_get_it_too():
    rate, parameters = torch.tensor(0.5), [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    optimizer = torch.optim.SGD([{"params": [each]} for each in parameters[:3]], lr=rate)
    world = evenstep.World.alone(device="cpu")
    assert evenstep.scale_learning_rate(optimizer, base_batch_size=8, global_batch_size=32, world=world) == 4.0
    optimizer.add_param_group({"params": [parameters[3]]})
    assert [float(group["lr"]) for group in optimizer.param_groups] == [2.0] * 4
    assert [float(group["unscaled_lr"]) for group in optimizer.param_groups[:3]] == [0.5] * 3


def test_wrong_arguments_are_named():
    world = evenstep.World.alone(device="cpu")
    for wrong in ({"base_batch_size": 0}, {"global_batch_size": 2.5}, {"rule": "cubic"}, {"accumulation_steps": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            evenstep.scale_learning_rate(
                optimizer_of(1.0), **{"base_batch_size": 8, "global_batch_size": 8, "world": world, **wrong}
            )
    optimizer = optimizer_of(1.0)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(UsageError, match="scheduler"):
        evenstep.scale_learning_rate(optimizer, base_batch_size=1, global_batch_size=8, world=world)
    for decay in (1.0, -0.1):
        with pytest.raises(ConfigurationError, match="decay"):
            evenstep.ExponentialMovingAverage(nn.Linear(1, 1), decay)


@pytest.mark.parametrize("least", [0, 0.03])
def test_the_recipe_of_the_page_is_its_formula(least):
    """Of one scheduler behind the other, in every step of a training with another length, also down to a least rate."""
    program = pages.programs("how-to/learning-rates.md")["rates.py"]
    usual = "T_max=num_steps - num_warmup"
    assert usual in program
    program = program.replace(usual, f"{usual}, eta_min={least}")
    for num_steps, num_warmup in ((60, 10), (23, 7), (9, 1)):
        given = f"num_steps, num_warmup = {num_steps}, {num_warmup}"
        found: dict[str, Any] = {}
        exec(compile(program.replace("num_steps, num_warmup = 60, 10", given), "rates.py", "exec"), found)
        assert (found["num_steps"], found["num_warmup"]) == (num_steps, num_warmup)
        expected = [0.4 * (0.01 + 0.99 * step / num_warmup) for step in range(num_warmup)]
        num_left = num_steps - num_warmup
        expected += [least + (0.4 - least) / 2 * (1 + math.cos(math.pi * step / num_left)) for step in range(num_left)]
        assert found["rates"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert found["optimizer"].param_groups[0]["lr"] == pytest.approx(least, abs=1e-12)


def test_the_average_follows_its_formula_and_is_applied_for_a_while(fresh_seed):
    torch.manual_seed(fresh_seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    average = evenstep.ExponentialMovingAverage(model, 0.9)
    expected = [p.detach().clone() for p in model.parameters()]
    for step in range(6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        model(torch.randn(5, 3, dtype=torch.float64))
        average.update()
        decay = min(0.9, (1 + step) / (10 + step))
        expected = [decay * e + (1 - decay) * p.detach() for e, p in zip(expected, model.parameters(), strict=True)]
    before = [p.detach().clone() for p in model.parameters()]
    addresses = [p.data_ptr() for p in model.parameters()]
    with average.applied():
        for parameter, value in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-13)
    with pytest.raises(KeyError), average.applied():
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert addresses == [p.data_ptr() for p in model.parameters()]
    other = evenstep.ExponentialMovingAverage(copy.deepcopy(model), 0.9)
    other.load_state_dict(average.state_dict())
    assert other.num_steps == 6
    assert other.state_dict()["averages"].keys() == average.state_dict()["averages"].keys()
    assert all(torch.equal(v, other.state_dict()["averages"][k]) for k, v in average.state_dict()["averages"].items())
    with pytest.raises(ConfigurationError, match=r"'0.weight'"):
        evenstep.ExponentialMovingAverage(nn.Sequential(nn.Linear(2, 2))).load_state_dict(
            {"num_steps": 1, "averages": {"0.weight": torch.zeros(3, 3), "0.bias": torch.zeros(2)}}
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_average_of_16_bit_parameters_doesnt_stand_still(dtype):
    model = nn.Linear(3, 2, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    average = evenstep.ExponentialMovingAverage(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    for _ in range(2):
        for _ in range(500):
            average.update()
        for _ in range(3):  # what is evaluated loses nothing
            with average.applied():
                inside = model.weight.detach().clone()
                assert inside.dtype is dtype
            assert torch.equal(model.weight, torch.full_like(model.weight, 2.0))
    expected = 2.0 - math.prod(min(0.999, (1 + step) / (10 + step)) for step in range(1000))
    assert float(inside[0, 0]) == pytest.approx(expected, rel=torch.finfo(dtype).eps)
    assert float(average.state_dict()["averages"]["weight"][0, 0]) == pytest.approx(expected, rel=1e-4)


def test_an_average_loads_into_one_of_the_plain_model():
    world = evenstep.World.alone(device="cpu")
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    average = evenstep.ExponentialMovingAverage(evenstep.DistributedDataParallel(model, world=world))
    state = average.state_dict()
    assert state["averages"].keys() == model.state_dict().keys()
    nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).load_state_dict(state["averages"])
    other = evenstep.ExponentialMovingAverage(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    other.load_state_dict({"num_steps": 3, "averages": {name: each + 1 for name, each in state["averages"].items()}})
    assert torch.equal(other.state_dict()["averages"]["0.weight"], state["averages"]["0.weight"] + 1)
    for wrong in (None, {}, {"num_steps": 3, "averages": {"0.weight": 5}}):
        with pytest.raises(ConfigurationError, match="state="):
            other.load_state_dict(wrong)
    with pytest.raises(ConfigurationError, match="num_steps="):
        other.load_state_dict({**state, "num_steps": -1})
    assert other.num_steps == 3


class Caching(nn.Module):
    """Statistics, and a cache that grows with its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("positions", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.positions) < len(x):
            self.positions = torch.arange(len(x))
        self.count += 1
        return self.layer(x)


def test_caches_are_no_part_of_an_average():
    model = Caching()
    average = evenstep.ExponentialMovingAverage(model)
    model(torch.ones(5, 3))
    average.update()
    with average.applied():
        assert len(model.positions) == 5
        model(torch.ones(7, 3))
    assert len(model.positions) == 7
    Caching().load_state_dict(average.state_dict()["averages"])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_parameters_that_are_complex_or_no_floats_are_in_an_average(dtype):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    average = evenstep.ExponentialMovingAverage(module, decay=0.5)
    module.weight.fill_(4 + 2j if dtype.is_complex else 4)
    average.update()
    expected = 0.9 * torch.full((2,), 4 + 2j) if dtype.is_complex else torch.full((2,), 4)
    torch.testing.assert_close(average.state_dict()["averages"]["weight"], expected)
    evenstep.ExponentialMovingAverage(nn.Tanh()).update()  # nothing to average


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: model.append(nn.Linear(3, 3)), "'2.bias'"),
        (lambda model: model.pop(1), "'1.bias'"),
        (lambda model: model[1].register_buffer("mask", torch.zeros(2)), "'1.mask'"),
    ],
)
def test_an_average_of_a_model_that_has_changed_is_an_error(change, told):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    average = evenstep.ExponentialMovingAverage(model)
    change(model)
    with pytest.raises(UsageError, match=rf"update: {told}.*complete"):
        average.update()
    assert average.num_steps == 0
    with pytest.raises(UsageError, match=rf"applied: {told}"), average.applied():
        pass
    average.load_state_dict(average.state_dict())  # it isn't left inside


def test_an_average_is_saved_as_it_is_while_it_is_applied_and_not_updated():
    model = nn.Linear(2, 2)
    with torch.inference_mode():  # what is made there could never be written to
        average = evenstep.ExponentialMovingAverage(model)
    expected = average.state_dict()["averages"]["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1)
    with average.applied():
        assert torch.equal(average.state_dict()["averages"]["weight"], expected)
        with pytest.raises(UsageError, match="update inside"):
            average.update()
        with pytest.raises(UsageError, match="applied inside"), average.applied():
            pass
        assert torch.equal(model.weight, expected)
    assert torch.equal(model.weight, expected + 1)
    average.update()
