"""A ShardedOptimizer in a world of one: the bare optimizer's step, and nothing is packed, moved or hidden."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import evenstep
from evenstep.errors import ConfigurationError, UsageError
from evenstep.replica.gradients.exchange.base import Exchange

KINDS = ["SGD", "AdamW", "Adam", "Adagrad", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adamax"]


@pytest.fixture(autouse=True)
def world():
    with evenstep.World.alone() as world:
        yield world


def build(seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, *, steps: int = 4) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step != 2)
        model(torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"shard_gradients": True}])
def test_the_bits_of_the_bare_optimizer(fresh_seed: int, world: evenstep.World, kind: str, options: dict) -> None:
    bare = build(fresh_seed)
    model = evenstep.DistributedDataParallel(copy.deepcopy(bare), world=world)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    fused = {"fused": True} if kind in ("SGD", "AdamW", "Adam", "Adagrad") else {}
    plain = getattr(torch.optim, kind)(bare.parameters(), lr=0.01, **fused)
    sharded = evenstep.ShardedOptimizer(model, getattr(torch.optim, kind), lr=0.01, **options)
    train(bare, plain, fresh_seed)
    train(model, sharded, fresh_seed)
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.grad, theirs.grad)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert type(model.engine.exchange) is Exchange


def test_a_state_dict_is_a_snapshot_and_is_taken_up_exactly(fresh_seed: int, world: evenstep.World) -> None:
    """NAdam's product is a number of 32 bits, which torch's loading would round to the parameter's dtype."""
    trained = []
    for is_interrupted in (False, True):
        model = evenstep.DistributedDataParallel(build(fresh_seed), world=world)
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.NAdam, lr=0.01)
        train(model, optimizer, fresh_seed)
        if is_interrupted:
            state = optimizer.state_dict()
            kept = copy.deepcopy(state)
            parameters = [parameter.detach().clone() for parameter in model.parameters()]
            train(model, optimizer, fresh_seed + 1)
            assert repr(state) == repr(kept)
            with torch.no_grad():
                for parameter, before in zip(model.parameters(), parameters, strict=True):
                    parameter.copy_(before)
            optimizer.load_state_dict(state)
        train(model, optimizer, fresh_seed + 2)
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("master", [False, True])
def test_gradients_can_be_read_with_a_reduce_dtype(fresh_seed: int, world: evenstep.World, master: bool) -> None:
    bare = build(fresh_seed, torch.bfloat16)
    model = evenstep.DistributedDataParallel(copy.deepcopy(bare), world=world)
    optimizer = evenstep.ShardedOptimizer(
        model, torch.optim.AdamW, lr=0.01, reduce_dtype=torch.float32, master_weights=master
    )
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    for each in (bare, model):
        each(x).square().mean().backward()
    for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        assert ours.grad.dtype == torch.bfloat16
        assert torch.equal(ours.grad, theirs.grad)
    optimizer.step()


def test_master_weights_keep_their_digits_but_where_a_program_writes(fresh_seed: int, world: evenstep.World) -> None:
    """Behind a step, and behind loading a state that doesn't fit the parameters."""
    model = evenstep.DistributedDataParallel(build(fresh_seed, torch.bfloat16), world=world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01, master_weights=True)
    train(model, optimizer, fresh_seed)

    def masters() -> list[torch.Tensor]:
        return [state["master_weights"].clone() for state in optimizer.state_dict()["state"].values()]

    def written(number: int, value: float) -> torch.Tensor:
        parameter = list(model.parameters())[number]
        with torch.no_grad():
            parameter.fill_(value)
        return parameter.detach().float()

    before = masters()
    assert all(not torch.equal(each, each.bfloat16().float()) for each in before)
    expected = [written(0, 0.3), *before[1:]]
    assert all(torch.equal(a, b) for a, b in zip(masters(), expected, strict=True))
    state = optimizer.state_dict()
    expected[1] = written(1, 0.7)
    optimizer.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(masters(), expected, strict=True))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_a_parameter_has_one_sharded_optimizer(world: evenstep.World, kind: type[torch.optim.Optimizer]) -> None:
    model = evenstep.DistributedDataParallel(build(0), world=world)
    first = evenstep.ShardedOptimizer(model, kind, model.module[0].parameters(), lr=0.01)
    with pytest.raises(ConfigurationError, match=r"parameter '0.weight' belongs to another ShardedOptimizer"):
        evenstep.ShardedOptimizer(model, kind, lr=0.01)
    second = evenstep.ShardedOptimizer(model, kind, model.module[2].parameters(), lr=0.01)
    with pytest.raises(ConfigurationError, match=r"parameter '0.bias' belongs to another ShardedOptimizer"):
        second.add_param_group({"params": [model.module[0].bias]})
    del first, second
    gc.collect()
    evenstep.ShardedOptimizer(model, kind, lr=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_one_to_hooks_and_profilers(world: evenstep.World, kind: str) -> None:
    """The optimizer inside would else call everybody's hooks once more, before values are where they belong."""
    model = evenstep.DistributedDataParallel(build(0), world=world)
    sharded = evenstep.ShardedOptimizer(model, getattr(torch.optim, kind), lr=0.01)
    told: list[object] = []
    handles = [
        register_optimizer_step_pre_hook(lambda stepped, *_: told.append(stepped)),
        register_optimizer_step_post_hook(lambda stepped, *_: told.append(stepped)),
    ]
    try:
        train(model, sharded, 0)
    finally:
        for handle in handles:
            handle.remove()
    assert [each is sharded for each in told] == [True] * 2 * 4


def test_hooks_of_state_dicts_see_the_state_and_may_change_it(world: evenstep.World) -> None:
    model = evenstep.DistributedDataParallel(build(5), world=world)
    sharded = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.01, momentum=0.9)
    train(model, sharded, 5)
    before = sharded.state_dict()
    seen: list[int] = []
    handle = sharded.register_state_dict_post_hook(lambda _, state: seen.append(len(state["state"])))
    sharded.register_load_state_dict_pre_hook(
        lambda _, given: {
            **given,
            "state": {n: {k: v * 2 for k, v in each.items()} for n, each in given["state"].items()},
        }
    )
    sharded.load_state_dict(before)
    doubled = sharded.state_dict()
    assert seen == [len(before["state"])] == [len(list(model.parameters()))]
    for number, state in before["state"].items():
        assert torch.equal(doubled["state"][number]["momentum_buffer"], 2 * state["momentum_buffer"])
    handle.remove()
    with pytest.raises(UsageError, match=r"not stored by parameter.*state_dict"):
        sharded.state[next(model.parameters())]
    torch.optim.SGD(build(6).parameters(), lr=0.01, momentum=0.9).load_state_dict(doubled)


@pytest.mark.parametrize("given", [None, "x", [1], {}, {"state": {}}, {"state": {0: 5}, "param_groups": []}])
def test_what_is_no_state_dict_is_named_and_changes_nothing(world: evenstep.World, given: object) -> None:
    model = evenstep.DistributedDataParallel(build(6), world=world)
    sharded = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    train(model, sharded, 6)
    before = copy.deepcopy(sharded.state_dict())
    with pytest.raises(ConfigurationError, match="load_state_dict: "):
        sharded.load_state_dict(given)  # type: ignore[arg-type]
    torch.testing.assert_close(sharded.state_dict(), before, rtol=0, atol=0)


class Calls(TorchDispatchMode):
    """Counts the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


def test_of_parameters_that_lie_together_few_tensors_are_stepped_and_zeroed(world: evenstep.World) -> None:
    """As on several ranks. In a world of one only what is stepped in another precision lies together."""
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(50))).bfloat16()
    model = evenstep.DistributedDataParallel(layers, world=world)
    sharded = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, master_weights=True)
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    for set_to_none, most in ((False, 1), (True, 0), (False, 1)):
        model(x).sum().backward()
        sharded.step()
        with Calls() as calls:
            sharded.zero_grad(set_to_none)
        assert calls.num <= most
        assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
    assert sharded._divided.num_segments == 1
    grads = [p.grad.data_ptr() for p in model.parameters()]
    model(x).sum().backward()  # autograd adds where the zeros are: nothing has to be copied
    assert [p.grad.data_ptr() for p in model.parameters()] == grads
    sharded.step()


def test_gradients_that_a_window_without_any_has_kept_outlast_another_layout(world: evenstep.World) -> None:
    """They are no views of the bucket then; a new parameter group lays buckets out again."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
    model = evenstep.DistributedDataParallel(layers, world=world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, layers[0].parameters(), lr=0.1, master_weights=True)
    x = torch.randn(2, 8).half()
    model.backward(model(x).float().square().mean(), weight=2)
    expected = [p.grad.clone() for p in model.parameters()]
    model.backward(model(x).float().square().mean(), weight=0.0)
    optimizer.add_param_group({"params": layers[1].parameters()})
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert grad.any()
        assert torch.equal(parameter.grad, grad)
