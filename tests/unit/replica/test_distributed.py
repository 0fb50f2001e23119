"""The wrapper in a world of one: torch's habits, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import ConfigurationError
from evenstep.ground.compat import torch_dynamo


@pytest.fixture
def alone():
    return evenstep.World.alone(device="cpu")


def test_it_is_torchs_class_with_torchs_keys(alone):
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = evenstep.DistributedDataParallel(module, world=alone)
    assert isinstance(model, TorchDistributedDataParallel)
    assert model.module is module
    assert list(model.state_dict()) == [f"module.{key}" for key in module.state_dict()]
    assert "rank 0/1, 0 buckets" in repr(model)
    model.eval()
    assert not module.training
    assert model.train() is model


def test_one_process_computes_what_the_bare_module_computes(alone):
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    x = torch.randn(5, 2, 6, 6).to(memory_format=torch.channels_last)
    bare(x)
    model = evenstep.DistributedDataParallel(bare.to(memory_format=torch.channels_last), world=alone)
    for backward in (lambda loss: loss.backward(), lambda loss: model.backward(loss, weight=torch.tensor(5))):
        bare.zero_grad()
        bare(x).square().mean().backward()
        expected = [p.grad.clone() for p in bare.parameters()]
        strides = [p.grad.stride() for p in bare.parameters()]
        model.zero_grad()
        backward(model(x).square().mean())
        assert strides == [p.grad.stride() for p in bare.parameters()]
        for p, e in zip(bare.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, e, rtol=1e-6, atol=1e-7)


def test_in_one_process_autograd_grad_is_counted_as_a_backward_pass_and_changes_nothing_else(alone):
    """Whether a pass will accumulate anything would have to be asked of autograd in every pass."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    model = evenstep.DistributedDataParallel(bare, world=alone)
    x = torch.randn(5, 3)
    given = torch.autograd.grad(model(x).square().sum(), list(bare.parameters()))
    assert all(p.grad is None for p in bare.parameters())
    assert model.engine.num_reductions == len(model.engine.recorder.steps()) == 1
    for number in (1, 2):  # within a window it isn't
        with model.accumulate():
            model.backward(model(x).square().sum(), weight=1)
        torch.autograd.grad(model(x).square().sum(), list(bare.parameters()))
        assert model.engine.num_reductions == number
        model.backward(3 * model(x).square().sum(), weight=3)
        assert model.engine.num_reductions == number + 1
        for p, g in zip(bare.parameters(), given, strict=True):
            torch.testing.assert_close(p.grad, g * 10 / 4)
        model.zero_grad()


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("is_chained", [True, False])
def test_windows_of_any_length_with_and_without_zero_grad_equal_plain_autograd(
    alone, is_weighted, is_chained, fresh_seed
):
    """Windows of one pass take a short cut in a world of one; longer ones and those of two models don't."""
    draw = random.Random(fresh_seed)
    torch.manual_seed(fresh_seed)
    modules = [nn.Linear(3, 4).double(), nn.Linear(4, 1).double()]
    first = evenstep.DistributedDataParallel(modules[0], world=alone) if is_chained else modules[0]
    last = evenstep.DistributedDataParallel(modules[1], world=alone)
    parameters = [p for module in modules for p in module.parameters()]
    expected = [torch.zeros_like(p) for p in parameters]
    for _ in range(30):
        weights = [float(draw.choice([0, 1, 3, 2.5, 7])) for _ in range(draw.choice([1, 1, 2, 3]))]
        if sum(weights) == 0 or not is_weighted:
            weights = [1.0] * len(weights)
        sums = [torch.zeros_like(p) for p in parameters]
        for index, weight in enumerate(weights):
            x = torch.randn(5, 3, dtype=torch.float64)
            share = weight / sum(weights) if is_weighted else 1.0
            grads = torch.autograd.grad(modules[1](modules[0](x).tanh()).square().mean(), parameters)
            sums = [total + share * grad for total, grad in zip(sums, grads, strict=True)]
            is_end = index == len(weights) - 1
            held = [contextlib.nullcontext() if is_end else m.accumulate() for m in (first, last) if m not in modules]
            with contextlib.ExitStack() as stack:
                for context in held:
                    stack.enter_context(context)
                loss = last(first(x).tanh()).square().mean()
                if is_weighted:
                    evenstep.backward([last, first] if is_chained else [last], loss, weight=weight)
                else:
                    loss.backward()
        expected = [old + new for old, new in zip(expected, sums, strict=True)]
        for p, e in (
            zip(parameters, expected, strict=True)
            if is_chained or not is_weighted
            else zip(parameters[2:], expected[2:], strict=True)
        ):
            torch.testing.assert_close(p.grad, e, rtol=1e-9, atol=1e-11)
        if draw.random() < 0.6:
            for p in parameters:
                p.grad = None
            expected = [torch.zeros_like(p) for p in parameters]


def test_a_model_that_accumulates_behind_another_weights_its_passes(alone):
    """Every pass of the one behind is a window of the one in front, which divides by its own weight."""
    torch.manual_seed(0)
    modules = [nn.Linear(3, 4).double(), nn.Linear(4, 1).double()]
    behind, front = (evenstep.DistributedDataParallel(copy.deepcopy(module), world=alone) for module in modules)
    parts = [torch.randn(rows, 3, dtype=torch.float64) for rows in (3, 5, 2)]
    for own_pass in (False, True, False):
        for module in (*modules, behind, front):
            module.zero_grad()
        for index, part in enumerate(parts):
            with contextlib.nullcontext() if index == 2 else behind.accumulate():
                hidden, expected = behind(part), modules[0](part)
                if own_pass and index == 1:
                    behind.backward(hidden.square().mean(), weight=len(part))
                    expected = expected.square().mean(1)
                else:
                    evenstep.backward([front, behind], front(hidden).square().mean(), weight=len(part))
                    expected = modules[1](expected).square()
                (expected.sum() / 10).backward()
        for p, e in zip(behind.parameters(), modules[0].parameters(), strict=True):
            torch.testing.assert_close(p.grad, e.grad, rtol=1e-12, atol=1e-13)


class Meets(torch.autograd.Function):
    """Identity, in whose backward pass two threads wait for each other."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.barrier.wait(30)
        return grad, None


@pytest.mark.parametrize(("weights", "expected"), [((2, 6), 1.75), (None, 3.0)])
def test_two_threads_train_two_models(alone, weights, expected):
    """Both are in `model.backward` at the same time, or both in `loss.backward()`."""
    barrier = threading.Barrier(2)

    def train():
        model = evenstep.DistributedDataParallel(nn.Linear(2, 1, bias=False), world=alone)
        for index, weight in enumerate(weights or (1, 1)):
            with model.accumulate() if index == 0 else contextlib.nullcontext():
                loss = Meets.apply(model(torch.full((1, 2), index + 1.0)).sum(), barrier)
                model.backward(loss, weight=weight) if weights else loss.backward()
        return model.module.weight.grad.tolist()

    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(train) for _ in range(2)]:
            assert each.result() == [[expected, expected]]


def test_outputs_can_be_saved_and_have_hooks_of_the_users(alone, recwarn):
    """As if evenstep's own hook weren't there: no warning, and the user's hooks run, and end when they are removed."""
    model = evenstep.DistributedDataParallel(nn.Linear(2, 1, bias=False), world=alone)
    for num_kept in (0, 1, 2):
        out = model(torch.ones(1, 2))
        file = io.BytesIO()
        torch.save(out, file)
        file.seek(0)
        assert torch.equal(torch.load(file), out)
        handles = [out.register_hook(lambda grad: grad * 3) for _ in range(2)]
        for handle in handles[num_kept:]:
            handle.remove()
        out.mul_(5)
        model.zero_grad()
        model.backward(out.sum(), weight=4)
        assert model.module.weight.grad.tolist() == [[5.0 * 3**num_kept] * 2]
    assert not recwarn.list


class Repeated(nn.Module):
    """A layer that is checkpointed (reentrant) as often as asked."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, times):
        x = self.first(x)
        for _ in range(times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_reentrant_checkpoints_may_use_a_parameter_twice(alone):
    torch.manual_seed(0)
    bare = Repeated()
    x = torch.ones(1, 2)
    bare(x, 2).sum().backward()
    expected = [p.grad.clone() for p in bare.parameters()]
    model = evenstep.DistributedDataParallel(bare, first_bucket_cap_mb=1e-5, bucket_cap_mb=1e-5, world=alone)
    for _ in range(3):
        model.zero_grad()
        model(x, 2).sum().backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(bare.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"module": "text"}, "expected a torch.nn.Module, got a str"),
        ({"module": nn.ReLU()}, "ReLU has no parameter that requires a gradient"),
        ({"device_ids": [0, 1]}, "one process drives one device"),
        ({"device_ids": [0]}, "the module is on cpu"),
        ({"output_device": 0}, "the module is on cpu"),
        ({"process_group": object()}, "isn't a torch.distributed.ProcessGroup"),
        ({"module": nn.LazyLinear(3)}, "parameter 'weight' has no shape yet"),
        ({"bucket_cap_mb_list": [1, 0]}, r"bucket_cap_mb_list\[1\]=0; a number, greater than 0"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25'; a number, greater than 0"),
        ({"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, "= isn't supported: every bucket is sent when"),
        ({"delay_all_reduce_named_params": [("x", nn.Parameter(torch.ones(1)))]}, "every bucket is sent when its last"),
        (
            {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
            r"`with torch\.autocast\(device_type, dtype=",
        ),
        ({"bucket_cap_mb": 0}, "greater than 0"),
        ({"bucket_cap_mb": -3}, "greater than 0"),
    ],
)
def test_wrong_arguments_are_named(alone, arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        evenstep.DistributedDataParallel(**{"module": nn.Linear(1, 1), "world": alone, **arguments})


def test_torchs_arguments_that_need_nothing_are_accepted(alone):
    evenstep.DistributedDataParallel(
        nn.Linear(1, 1), None, None, 0, True, True, None, 25, True, False, True, True, world=alone
    )


def test_wrapping_in_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(ConfigurationError, match=r"Wrap the model outside\.$"):
        evenstep.DistributedDataParallel(torch.nn.Linear(1, 1), world=evenstep.World.alone())


@pytest.fixture
def careful(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with every forward pass that looks at everything."""
    seen: list[bool] = []
    with_care = evenstep.DistributedDataParallel._forward_with_care

    def noted(self, inputs, kwargs):
        seen.append(True)
        return with_care(self, inputs, kwargs)

    monkeypatch.setattr(evenstep.DistributedDataParallel, "_forward_with_care", noted)
    torch._dynamo.reset()  # of what an earlier test has compiled
    monkeypatch.setitem(torch_dynamo._state, "has_compiled", False)
    return seen


@pytest.fixture
def world(alone):
    """One that a constructor would make: `evenstep.init` wasn't called."""
    return alone


def settled(world, module=None, **arguments):
    model = evenstep.DistributedDataParallel(module or nn.Linear(3, 2), world=world, **arguments)
    torch.optim.SGD(model.parameters())  # imports dynamo when it is made
    for _ in range(2):
        model(torch.ones(2, 3))
    return model


def test_usual_calls_look_at_little(careful, world):
    model = settled(world)
    del careful[:]
    for _ in range(3):
        model(torch.randn(2, 3)).sum().backward()
    assert careful == []
    assert model.engine.num_reductions == 3


UNUSUAL = {
    "an empty share": lambda model, world: model(torch.ones(0, 3)),
    "no positional input": lambda model, world: model(input=torch.ones(2, 3)),
    "streams that are restored": lambda model, world: setattr(world, "has_diverged", False),
    "another module that is imported": lambda model, world: sys.modules.update({"imported by a test": sys}),
    "a parameter that is registered": lambda model, world: nn.Linear(1, 1),
    "torch.compile": lambda model, world: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_unusual_is_looked_at(careful, world, monkeypatch, what):
    model = settled(world)
    monkeypatch.setitem(sys.modules, "known before", sys)
    model(torch.ones(2, 3))
    del careful[:]
    UNUSUAL[what](model, world)
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.pop, "imported by a test", None)
        model(torch.ones(2, 3))
    assert careful


def test_an_evaluation_is_looked_at(careful, world):
    model = settled(world)
    del careful[:]
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert careful == [True]
