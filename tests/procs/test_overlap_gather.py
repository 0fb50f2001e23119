"""New parameters that arrive while the next forward pass runs: whoever reads one waits for it, whatever way it reads.

Over Gloo, with gathers that arrive when somebody waits for them, and not before: what a rank doesn't own is not a
number in memory until then.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import io
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import evenstep
from evenstep.errors import UsageError
from evenstep.replica import torch_interface
from evenstep.replica.sharded_exchange import ShardedExchange

WIDTH = 6


class Late:
    """A gather whose result is there when somebody has waited for it."""

    def __init__(self, work: Any, received: Tensor, out: Tensor) -> None:
        self._work, self._received, self._out = work, received, out

    def wait(self) -> None:
        self._work.wait()
        self._out.copy_(self._received)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def hold_back(model: evenstep.DistributedDataParallel) -> None:
    """From now on gathers over a model's transport are `Late`."""
    transport: Any = model.engine.transport
    gather = transport.all_gather

    def late(out: Tensor, tensor: Tensor) -> Late:
        received = torch.empty_like(out)
        work = gather(received, tensor)
        for rank, part in enumerate(out.view(transport.world_size, -1)):
            if rank != transport.rank:
                part.fill_(float("nan") if out.is_floating_point() else 77)
        return Late(work, received, out)

    transport.all_gather = late


def over_gloo() -> evenstep.World:
    evenstep.init(quiet=True)
    if "torch._dynamo" in sys.modules:  # an earlier test in this process has compiled something
        torch._dynamo.reset()
        torch_interface._has_compiled = False
    world = evenstep.World.from_process_group(transport="gloo", device="cpu")
    assert world.transport_name == "gloo"
    return world


def exchange_of(model: evenstep.DistributedDataParallel) -> ShardedExchange:
    assert isinstance(model.engine.exchange, ShardedExchange)
    return model.engine.exchange


# ---------------------------------------------------------------------- models that read parameters in many ways


class Tied(nn.Module):
    """The first layer's weight is read by the root, before that layer and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.first(F.linear(x, self.second.weight))), self.first.weight)


class Rooted(nn.Module):
    """Parameters of the root's own, among them one number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, self.scale, torch.tanh(self.inner(x)))


class Hooked(nn.Module):
    """A hook reads the last layer's weight before the first layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.layers[0].register_forward_pre_hook(lambda _, given: (given[0] * self.layers[2].weight.detach().norm(),))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Checkpointed(nn.Module):
    """Activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda y: torch.tanh(self.first(y)), x, use_reentrant=False)
        return checkpoint(lambda y: torch.tanh(self.second(y)), inner, use_reentrant=False)


class Attentive(nn.Module):
    """Attention reads its output projection's weight without calling it; layers of their own kinds of a fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[:, 0]


class Recurrent(nn.Module):
    """All weights of a recurrent layer go to one function, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[:, None])[0][:, 0]


class Parametrised(nn.Module):
    """The weight that a layer uses is computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Functional(nn.Module):
    """A layer runs with values that are computed from another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values = {name: 0.5 * value for name, value in self.second.named_parameters()}
        return self.first(torch.func.functional_call(self.first, values, (x,)))


class Custom(torch.autograd.Function):
    """A matrix product that autograd is told of by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class WithFunction(nn.Module):
    """A parameter goes to an autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(Custom.apply(x, self.weight)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))),
    "tied": Tied,
    "rooted": Rooted,
    "hooked": Hooked,
    "checkpointed": Checkpointed,
    "attentive": Attentive,
    "recurrent": Recurrent,
    "parametrised": Parametrised,
    "functional": Functional,
    "autograd function": WithFunction,
}


# ---------------------------------------------------------------------- what may come between two steps


def values_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def evaluate(model: Any, optimizer: Any, x: Tensor) -> Any:
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    model.train()
    return outputs


def saved(model: Any, optimizer: Any, x: Tensor) -> Any:
    into = io.BytesIO()
    torch.save(model.state_dict(), into)
    into.seek(0)
    return torch.load(into)


def in_place(model: Any, optimizer: Any, x: Tensor) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def interrupted(model: Any, optimizer: Any, x: Tensor) -> Any:
    def hook(*_: Any) -> None:
        raise KeyError("in the middle of a forward pass")

    handle = next(iter(model.module.children())).register_forward_hook(hook)
    with pytest.raises(KeyError):
        model(x)
    handle.remove()


def loaded(model: Any, optimizer: Any, x: Tensor) -> Any:
    half = {name: value * 0.5 for name, value in model.state_dict().items()}
    optimizer_state = optimizer.state_dict()
    model.load_state_dict(half)
    optimizer.load_state_dict(optimizer_state)


def averaged(model: Any, optimizer: Any, x: Tensor) -> Any:
    average = evenstep.ExponentialAverage(model, decay=0.5)
    average.update()
    with average.applied():
        return evaluate(model, optimizer, x)


def mapped(model: Any, optimizer: Any, x: Tensor) -> Any:
    return [torch.cat([p.reshape(-1) for p in model.parameters()]), nn.utils.parameters_to_vector(model.parameters())]


BETWEEN: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "nothing": lambda model, optimizer, x: None,
    "no forward before the next step": lambda model, optimizer, x: optimizer.step(),
    "evaluation": evaluate,
    "evaluation of the module": lambda model, optimizer, x: model.module(x).detach(),
    "state dict": lambda model, optimizer, x: {k: v.clone() for k, v in model.module.state_dict().items()},
    "saved": saved,
    "optimizer's state": lambda model, optimizer, x: optimizer.state_dict()["state"],
    "changed in place": in_place,
    "interrupted": interrupted,
    "loaded": loaded,
    "averaged": averaged,
    "a copy": lambda model, optimizer, x: values_of(copy.deepcopy(model.module)),
    "one by one": lambda model, optimizer, x: [float(p.norm()) for p in model.parameters()],
    "all at once": mapped,
    "foreach": lambda model, optimizer, x: torch._foreach_norm([p.detach() for p in model.parameters()]),
    "printed": lambda model, optimizer, x: repr([*model.module.parameters()]),
}


def assert_same(one: Any, other: Any, context: str) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), context
    elif isinstance(one, dict):
        for key in one:
            assert_same(one[key], other[key], f"{context}, {key}")
    elif isinstance(one, list | tuple):
        for first, second in zip(one, other, strict=True):
            assert_same(first, second, context)
    else:
        assert one == other, context


def random_training(seed: int, name: str, num_steps: int) -> tuple[int, set[str]]:
    """Two models in turns, with and without; (in how many steps something was on its way, what came between)."""
    world = over_gloo()
    shared, own = random.Random(seed), random.Random(seed * 1000 + world.rank)
    models, optimizers = [], []
    stage2, kind = shared.random() < 0.5, shared.choice([torch.optim.AdamW, torch.optim.SGD])
    for overlap in (True, False):
        torch.manual_seed(seed)
        module = MODELS[name]().double()
        model = evenstep.DistributedDataParallel(module, bucket_cap_mb=4e-4, first_bucket_cap_mb=1e-4, world=world)
        options = {"lr": 0.01, "shard_gradients": stage2, "overlap_gather": overlap}
        models.append(model)
        optimizers.append(evenstep.ShardedOptimizer(model, kind, **options))
        hold_back(model)
    num_overlapped, came = 0, set()
    for step in range(num_steps):
        between = shared.choice(list(BETWEEN)) if shared.random() < 0.7 else "nothing"
        context = f"seed {seed}, {name}, step {step}, then {between}"
        clip, set_to_none, num_parts = shared.random() < 0.3, shared.random() < 0.7, shared.randint(1, 2)
        x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(own.randrange(1 << 30)))
        found = []
        for model, optimizer in zip(models, optimizers, strict=True):
            for part in model.microbatches(x, num_parts):
                loss = model(part).square().mean()
                model.backward(loss, weight=len(part))
            if clip:
                evenstep.clip_grad_norm_(optimizer, 0.1)
            optimizer.step()
            if between != "no forward before the next step":
                optimizer.zero_grad(set_to_none)
            arriving = exchange_of(model).num_arriving
            assert model is models[0] or arriving == 0
            num_overlapped += arriving > 0
            found.append(BETWEEN[between](model, optimizer, x))
            optimizer.zero_grad(set_to_none)
        came.add(between)
        assert_same(found[0], found[1], context)
        if shared.random() < 0.3:  # in the other steps the next forward pass is the first that reads
            assert_same(values_of(models[0]), values_of(models[1]), context)
    assert_same(values_of(models[0]), values_of(models[1]), context)
    assert all(type(parameter) is nn.Parameter for parameter in models[0].parameters())
    world.close()
    return num_overlapped, came


@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_whoever_reads_gets_the_new_values(ranks, fresh_seed, name, nproc):
    for num_overlapped, _ in ranks.run(random_training, nproc, fresh_seed, name, 16, timeout_s=150):
        assert num_overlapped > 3


# ---------------------------------------------------------------------- who can't be seen


class Replayed(nn.Module):
    """Its layer's weight is read by address, from some step on: what a CUDA graph does."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.first, self.num_calls = first, 0
        self.address = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls < self.first:
            return self.last(self.layer(x))
        return self.last(ByAddress.apply(x, self.layer.weight, self.address))


class ByAddress(torch.autograd.Function):
    """A product with what lies at an address."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, address: int) -> Tensor:
        ctx.save_for_backward(x)
        found = (ctypes.c_double * WIDTH**2).from_address(address)
        return x @ torch.frombuffer(found, dtype=torch.float64).view(WIDTH, WIDTH).T.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.T @ ctx.saved_tensors[0], None


def read_by_address(seed: int, first: int) -> tuple[list[Tensor], str]:
    """(parameters, the error that there was)."""
    world = over_gloo()
    torch.manual_seed(seed)
    module = Replayed(first).double()
    model = evenstep.DistributedDataParallel(module, bucket_cap_mb=1e-4, first_bucket_cap_mb=1e-4, world=world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, overlap_gather=True)
    hold_back(model)
    told = ""
    try:
        for step in range(6):
            buckets = exchange_of(model).sharded_buckets
            module.address = next(b.values for b in buckets if b.parameters[0] is module.layer.weight).data_ptr()
            x = torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            model.backward(model(x).square().mean(), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
    except UsageError as error:
        told = str(error)
    found = values_of(module)
    world.close()
    return found, told


def test_a_parameter_that_is_read_by_address_is_not_put_off(ranks, fresh_seed):
    """It is never seen to be read."""
    plain = [found for found, _ in ranks.run(read_by_address, 2, fresh_seed, 99)]
    for (found, told), expected in zip(ranks.run(read_by_address, 2, fresh_seed, 1), plain, strict=True):
        assert told == ""
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_who_begins_to_read_by_address_later_is_told(ranks, fresh_seed):
    for _, told in ranks.run(read_by_address, 2, fresh_seed, 5):
        assert "'layer.weight' has a gradient, and nobody was seen to read it" in told
        assert "overlap_gather=False" in told


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


class Scripted(nn.Module):
    """A TorchScript function is given a parameter, which it reads without asking."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.product = torch.jit.script(product)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.product(x, self.weight))


def scripted(seed: int, overlap: bool) -> tuple[list[Tensor], int]:
    """(parameters, in how many steps something was on its way) of a model in which a function is TorchScript."""
    world = over_gloo()
    torch.manual_seed(seed)
    module = Scripted().double()
    model = evenstep.DistributedDataParallel(module, bucket_cap_mb=4e-4, first_bucket_cap_mb=1e-4, world=world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, overlap_gather=overlap)
    hold_back(model)
    num_overlapped = 0
    for _ in range(5):
        model(torch.ones(2, WIDTH, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        num_overlapped += exchange_of(model).num_arriving > 0
    found = values_of(module)
    world.close()
    return found, num_overlapped


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_not_put_off_and_what_is_beside_it_is(ranks, fresh_seed):
    for (found, num), (expected, none) in zip(
        ranks.run(scripted, 2, fresh_seed, True), ranks.run(scripted, 2, fresh_seed, False), strict=True
    ):
        assert (num > 0, none) == (True, 0)
        assert_same(found, expected, "scripted")


def beside_another(seed: int) -> list[int]:
    """How much was on its way when the backward pass of another wrapped model had ended, step by step."""
    world = over_gloo()
    torch.manual_seed(seed)
    first, other = (evenstep.DistributedDataParallel(MODELS["layers"]().double(), world=world) for _ in range(2))
    optimizer = evenstep.ShardedOptimizer(first, torch.optim.SGD, lr=0.1, overlap_gather=True)
    hold_back(first)
    arriving = []
    for _ in range(6):
        for model in (first, other):
            model.backward(model(torch.ones(2, WIDTH, dtype=torch.float64)).square().mean(), weight=2)
            if model is first:
                optimizer.step()
                optimizer.zero_grad()
        arriving.append(exchange_of(first).num_arriving)
    world.close()
    return arriving


def test_another_models_backward_does_not_wait_for_them(ranks, fresh_seed):
    for arriving in ranks.run(beside_another, 2, fresh_seed):
        assert min(arriving[2:]) > 0


def kept_memory(seed: int) -> tuple[list[int], list[bool]]:
    """(how much was on its way, whether what was kept was new at once), step by step."""
    world = over_gloo()
    torch.manual_seed(seed)
    model = evenstep.DistributedDataParallel(MODELS["layers"]().double(), world=world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, overlap_gather=True)
    hold_back(model)
    arriving, are_new = [], []
    kept: Tensor | None = None
    for step in range(8):
        if step == 3:
            kept = model.module[0].weight.detach()
        if step == 6:
            kept = None
        model(torch.ones(2, WIDTH, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        arriving.append(exchange_of(model).num_arriving)
        if kept is not None:
            seen = kept.clone()
            are_new.append(torch.equal(seen, model.module[0].weight))
    world.close()
    return arriving, are_new


def test_while_somebody_keeps_a_view_nothing_is_put_off(ranks, fresh_seed):
    for arriving, are_new in ranks.run(kept_memory, 2, fresh_seed):
        assert [count > 0 for count in arriving[2:]] == [True, False, False, False, True, True]
        assert are_new == [True] * 3


def compiled(seed: int) -> tuple[int, list[Tensor], list[Tensor]]:
    """(how much was on its way behind a compilation, parameters, those of the plain module)."""
    world = over_gloo()
    torch.manual_seed(seed)
    plain = MODELS["layers"]().double()
    model = evenstep.DistributedDataParallel(copy.deepcopy(plain), world=world)
    optimizers = [
        evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, overlap_gather=True),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    ]
    hold_back(model)
    run, arriving = model, 0
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for step in range(7):
        if step == 4:  # the last step's values are still on their way
            assert exchange_of(model).num_arriving > 0
            run = torch.compile(model, backend="eager") if seed % 2 else model
            if run is model:
                model.module[1].compile(backend="eager")
        run(x).square().mean().backward()
        plain(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step > 4:
            arriving += exchange_of(model).num_arriving
    world.close()
    return arriving, values_of(model), values_of(plain)


@pytest.mark.parametrize("what", [0, 1])
def test_compiled_code_reads_what_is_there(ranks, what):
    for arriving, found, expected in ranks.run(compiled, 2, what, timeout_s=120):
        assert arriving == 0
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------------- the end, and what is given


class Delayed:
    """A gather that begins when somebody waits for it."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        self._begin: Callable[[], Any] | None = begin

    def wait(self) -> None:
        begin, self._begin = self._begin, None
        if begin is not None:
            begin().wait()

    def is_completed(self) -> bool:
        return self._begin is None


def leaving(seed: int) -> list[Tensor]:
    """Rank 0 closes its world behind a step; rank 1 looks at the parameters."""
    world = over_gloo()
    torch.manual_seed(seed)
    model = evenstep.DistributedDataParallel(MODELS["layers"]().double(), world=world)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, overlap_gather=True)
    for step in range(4):
        if step == 3:
            transport: Any = model.engine.transport
            begin = functools.partial(functools.partial, transport.all_gather)
            transport.all_gather = lambda *given, begin=begin: Delayed(begin(*given))
        model(torch.ones(2, WIDTH, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert exchange_of(model).num_arriving == 1
    if world.is_main:
        world.close()
    found = values_of(model)
    world.close()
    return found


def test_a_rank_that_ends_has_sent_its_part(ranks, fresh_seed):
    one, other = ranks.run(leaving, 2, fresh_seed, timeout_s=60)
    assert_same(one, other, "left")


def given(seed: int) -> list[str]:
    """What different arguments come to."""
    world = evenstep.init(quiet=True)

    def refused(**options: Any) -> str:
        model = evenstep.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(evenstep.errors.EvenstepError) as caught:
            evenstep.ShardedOptimizer(model, **{"kind": torch.optim.SGD, "lr": 0.1, **options})
        return str(caught.value)

    told = [
        refused(overlap_gather="yes"),
        refused(overlap_gather=world.is_main),
        refused(kind=torch.optim.Adafactor, overlap_gather=True),
        refused(kind=torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)),
    ]
    for overlap in (True, False):  # over shared memory nothing is put off
        model = evenstep.DistributedDataParallel(nn.Linear(2, 2))
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.SGD, lr=0.1, overlap_gather=overlap)
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            assert exchange_of(model).num_arriving == 0
    return told


def test_arguments(ranks, fresh_seed):
    for told in ranks.run(given, 2, fresh_seed):
        assert "overlap_gather='yes'" in told[0]
        assert "overlap_gather" in told[1]
        assert "False on rank 1" in told[1] or "True on rank 0" in told[1]
        assert "Adafactor is divided at parameter boundaries" in told[2]
        assert "an optimizer that has been made already (SGD). Pass the class and its arguments" in told[3]
