"""`fuse` in one process: the same parameters and the same state as torch's optimizer, over few tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import evenstep
from evenstep.errors import ConfigurationError, UsageError

KINDS = ["SGD", "AdamW", "Adam", "Adagrad", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adamax"]


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(45, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def twins(kind: str, dtype: torch.dtype = torch.float64, **options: object):
    """(model, plain optimizer), (the same model, the same optimizer fused)."""
    models = [build(dtype)]
    models.append(copy.deepcopy(models[0]))
    optimizers = []
    for model in models:
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest}]
        optimizers.append(getattr(torch.optim, kind)(groups, **{"lr": 0.01, **options}))
    return (models[0], optimizers[0]), (models[1], optimizers[1])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, set_to_none: bool = True) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for step in range(5):
        x = torch.randn(4, 3, 5, 5, dtype=dtype, generator=generator)
        out = model[:3](x) if step == 2 else model(x)  # one step leaves the last layer unused
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_elementwise_optimizer_steps_as_torchs(kind: str, set_to_none: bool):
    seed = torch.seed() % (1 << 31)
    print(f"seed {seed}")  # noqa: T201
    (model, plain), (other, optimizer) = twins(kind)
    flat = evenstep.fuse(optimizer)
    train(model, plain, seed, set_to_none=set_to_none)
    train(other, flat, seed, set_to_none=set_to_none)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    got, expected = flat.state_dict(), plain.state_dict()
    assert got["param_groups"] == expected["param_groups"]
    assert got["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        torch.testing.assert_close(got["state"][number], state, rtol=1e-12, atol=1e-13)


def test_the_state_is_taken_over_and_given_back():
    """In the middle of a training, with a scheduler that was made for the plain optimizer; bit by bit."""
    (model, plain), (other, optimizer) = twins("AdamW", torch.float32, foreach=False)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (plain, optimizer)]
    train(model, plain, 1)
    train(other, optimizer, 1)
    flat = evenstep.fuse(optimizer)
    for scheduler in schedulers:
        scheduler.step()
    assert flat.param_groups[0]["lr"] == 0.005
    train(model, plain, 2)
    train(other, flat, 2)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    plain.load_state_dict(flat.state_dict())
    flat.load_state_dict(plain.state_dict())
    for scheduler in schedulers:
        scheduler.step()
    assert flat.param_groups[0]["lr"] == 0.0025
    train(model, plain, 3)
    train(other, flat, 3)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_few_tensors_are_stepped():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    flat = evenstep.fuse(torch.optim.AdamW(model.parameters()))
    model(torch.randn(2, 8)).sum().backward()
    flat.step()
    assert flat._divided.num_segments == 1
    assert flat.state_bytes <= 2.5 * sum(p.nbytes for p in model.parameters())
    with pytest.raises(UsageError, match="isn't kept by parameter"):
        flat.state[model[0].weight]


class Calls(TorchDispatchMode):
    """Counts the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_zeroing_costs_a_call_and_not_one_per_parameter():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50)))
    flat = evenstep.fuse(torch.optim.SGD(model.parameters(), lr=0.1))
    for set_to_none, most in ((False, 1), (True, 0), (False, 1)):
        model(torch.randn(2, 8)).sum().backward()
        flat.step()
        with Calls() as calls:
            flat.zero_grad(set_to_none)
        assert calls.num <= most
        assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
    grads = [p.grad.data_ptr() for p in model.parameters()]
    model(torch.randn(2, 8)).sum().backward()  # autograd adds where the zeros are: nothing has to be copied
    assert [p.grad.data_ptr() for p in model.parameters()] == grads
    flat.step()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_one_to_hooks_and_profilers(kind: str):
    """The optimizer inside would else call everybody's hooks once more, before values are where they belong."""
    _, (model, optimizer) = twins(kind)
    flat = evenstep.fuse(optimizer)
    told: list[object] = []
    handles = [
        register_optimizer_step_pre_hook(lambda stepped, *_: told.append(stepped)),
        register_optimizer_step_post_hook(lambda stepped, *_: told.append(stepped)),
    ]
    try:
        train(model, flat, 0)
    finally:
        for handle in handles:
            handle.remove()
    assert [each is flat for each in told] == [True] * 2 * 5


def test_what_cant_be_fused_is_named():
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(ConfigurationError, match="Adafactor"):
        evenstep.fuse(torch.optim.Adafactor(parameters))
    with pytest.raises(ConfigurationError, match="LBFGS"):
        evenstep.fuse(torch.optim.LBFGS(parameters))
    flat = evenstep.fuse(torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(ConfigurationError, match="plain optimizer"):
        flat.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_parameters_that_no_fused_step_takes_are_stepped_as_torchs(kind: str):
    """Complex ones, beside real ones in one group."""
    torch.manual_seed(3)
    values = torch.randn(3, 4, dtype=torch.complex128), torch.randn(5, dtype=torch.float64)
    for order in (1, -1):
        pairs = []
        for wrap in (False, True):
            parameters = [nn.Parameter(value.clone()) for value in values[::order]]
            plain = getattr(torch.optim, kind)(parameters, lr=0.1)
            pairs.append((parameters, evenstep.fuse(plain) if wrap else plain))
        for _ in range(3):
            for parameters, optimizer in pairs:
                sum((p * p.conj()).real.sum() for p in parameters).backward()
                optimizer.step()
                optimizer.zero_grad()
        for ours, theirs in zip(pairs[1][0], pairs[0][0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_a_rate_that_is_a_tensor_is_rounded_as_torch_rounds_it(kind: str):
    """torch's fused steps read it as a number, and differ from the others by what float32 has of it."""
    (model, plain), (other, optimizer) = twins(kind, lr=torch.tensor(0.01))
    flat = evenstep.fuse(optimizer)
    for each in (plain, flat):  # a group has a tensor of its own after that
        torch.optim.lr_scheduler.ExponentialLR(each, 0.9)
    train(model, plain, 4)
    train(other, flat, 4)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_hooks_of_state_dicts_see_the_state_and_may_change_it():
    (_, plain), (other, optimizer) = twins("SGD", momentum=0.9)
    flat = evenstep.fuse(optimizer)
    train(other, flat, 5)
    before = flat.state_dict()
    seen: list[int] = []
    handle = flat.register_state_dict_post_hook(lambda _, state: seen.append(len(state["state"])))
    flat.register_load_state_dict_pre_hook(
        lambda _, given: {
            **given,
            "state": {n: {k: v * 2 for k, v in each.items()} for n, each in given["state"].items()},
        }
    )
    flat.load_state_dict(before)
    doubled = flat.state_dict()
    assert seen == [len(before["state"])] == [len(list(other.parameters()))]
    for number, state in before["state"].items():
        assert torch.equal(doubled["state"][number]["momentum_buffer"], 2 * state["momentum_buffer"])
    handle.remove()
    with pytest.raises(UsageError, match="state_dict"):
        flat.state[next(other.parameters())]
    plain.load_state_dict(doubled)


@pytest.mark.parametrize("given", [None, "x", [1], {}, {"state": {}}, {"state": {0: 5}, "param_groups": []}])
def test_what_is_no_state_dict_is_named_and_changes_nothing(given: object):
    _, (other, optimizer) = twins("AdamW")
    flat = evenstep.fuse(optimizer)
    train(other, flat, 6)
    before = copy.deepcopy(flat.state_dict())
    with pytest.raises(ConfigurationError, match="load_state_dict: "):
        flat.load_state_dict(given)  # type: ignore[arg-type]
    torch.testing.assert_close(flat.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_parameters_of_16_bits_are_stepped(kind, dtype):
    """torch's own fused SGD of a CPU leaves all of them as they are, but for the last few."""
    torch.manual_seed(0)
    start, grad = torch.randn(100).to(dtype), torch.randn(100).to(dtype)
    models = [nn.Parameter(start.clone()) for _ in range(2)]
    made = getattr(torch.optim, kind)
    plain, flat = made(models[:1], lr=0.05, foreach=False), evenstep.fuse(made(models[1:], lr=0.05))
    for _ in range(2):
        for parameter, optimizer in zip(models, (plain, flat), strict=True):
            parameter.grad = grad.clone()
            optimizer.step()
    assert bool((models[0] != start).float().mean() > 0.9)
    torch.testing.assert_close(models[1].detach(), models[0].detach(), rtol=0.02, atol=0.02)
