"""The one-line, one-process interface: replicas on the CPU side by side, against the bare module in float64."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import random
import threading

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, UsageError
from evenstep.replica.data_parallel import replicas
from evenstep.replica.data_parallel.replicas import Replica, carried

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)
        self.tied = self.last
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        assert torch.is_grad_enabled() == self.training
        return {"out": self.tied(torch.tanh(self.norm(self.first(x)))) * scale, "rows": x.sum()}


def on_cpus(module, num_replicas, **arguments):
    return evenstep.DataParallel(module, device_ids=["cpu"] * num_replicas, **arguments)


def assert_same_grads(module, expected):
    for (name, got), other in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert (got.grad is None) == (other.grad is None), name
        if got.grad is not None:
            got_grad, other_grad = (g.to_dense() if g.is_sparse else g for g in (got.grad, other.grad))
            torch.testing.assert_close(got_grad, other_grad, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_outputs_and_gradients_equal_the_bare_module(num_replicas):
    for rows in (1, 2, 5, 8):
        torch.manual_seed(rows)
        net = Net()
        plain, model = copy.deepcopy(net), on_cpus(net, num_replicas)
        inputs = [torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        bare, out = plain(inputs[0], scale=2.0), model(inputs[1], scale=2.0)
        torch.testing.assert_close(out["out"], bare["out"], rtol=1e-14, atol=0)
        assert out["rows"].shape == (() if num_replicas == 1 or rows == 1 else (min(rows, num_replicas),))
        for each in (bare, out):
            each["out"].square().sum().backward(retain_graph=True)
            each["out"].square().sum().backward()  # as often as the graph is kept
        assert_same_grads(net, plain)
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-12, atol=1e-13)
        assert net.calls == 1  # buffers are the first replica's
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        out["out"].sum().backward()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
        self.norm, self.unused = nn.LayerNorm(4), nn.Linear(2, 2)

    def forward(self, x):
        return self.norm(self.flat(x.flatten(1)))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.embedding(x.flatten(1).abs().long() % 7).sum(1))


@pytest.mark.parametrize("kind", [Recurrent, Parametrized, Embedded])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_training_equals_the_bare_module(kind, on_cpu, fresh_seed):
    """As on accelerators one call differentiates all graphs; parameters and gradients travel. Here from CPU to CPU."""
    shared = random.Random(fresh_seed)
    torch.manual_seed(fresh_seed)
    plain = kind().double()
    model = on_cpus(copy.deepcopy(plain), shared.randint(2, 4))
    model._replicas.on_cpu = on_cpu
    for replica in model._replicas.members[1:]:
        replica.shares_memory = on_cpu
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (plain, model)]
    for _ in range(4):
        x = 5 * torch.randn(shared.randint(2, 9), 2, 3, dtype=torch.float64)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for each, given in zip((plain, model), inputs, strict=True):
            each(given).sin().sum().backward()
        assert_same_grads(model, plain)
        if kind is not Embedded:
            torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-11, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@dataclasses.dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    name: str


Pair = collections.namedtuple("Pair", "left right")


class Nested(nn.Linear):
    def forward(self, batch, shift):
        out = super().forward(batch["x"]) + shift
        return Output(out, "net"), Pair(out.argmax(1), [out * 2, None]), collections.OrderedDict(count=3)


def test_nests_go_in_and_come_out():
    net = Nested(3, 2).double()
    x, shift = torch.randn(5, 3, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    expected, got = net({"x": x}, shift), on_cpus(net, 2)({"x": x}, shift=shift)
    assert type(got[0]) is Output
    assert got[0].name == "net"
    torch.testing.assert_close(got[0].logits, expected[0].logits)
    assert type(got[1]) is Pair
    assert torch.equal(got[1].left, expected[1].left)
    assert not got[1].left.requires_grad
    torch.testing.assert_close(got[1].right[0], expected[1].right[0])
    assert got[1].right[1] is None
    assert type(got[2]) is collections.OrderedDict
    assert got[2]["count"] == 3


def test_a_dataclass_goes_in_and_inputs_come_out():
    class Echo(nn.Linear):
        def forward(self, batch):
            out = super().forward(batch.logits)
            return out, out, batch.logits, batch.name

    net = Echo(3, 2).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    out, again, inputs, name = on_cpus(net, 2)(Output(x, "net"))
    assert torch.equal(out, again)
    assert torch.equal(inputs, x)
    assert name == "net"
    (out.sum() + 2 * again.sum() + inputs.sum()).backward()
    torch.testing.assert_close(x.grad, 3 * net.weight.sum(0).expand(5, 3) + 1)


def test_another_batch_dimension_and_a_number_for_all():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 1, dtype=torch.float64))

        def forward(self, x, scale):
            return [x * self.weight * scale] * (x.shape[1] if scale.dim() else 1)

    net = Scaled()
    x, scale = torch.randn(4, 7, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    (out,) = on_cpus(net, 3, dim=1)(x, scale)
    assert torch.equal(out, 3 * x)
    out.sum().backward()
    torch.testing.assert_close(net.weight.grad, 3 * x.sum(1, keepdim=True))
    torch.testing.assert_close(scale.grad, x.sum())
    with pytest.raises(UsageError, match=r"returned different numbers of tensors: \[3, 2, 2\]"):
        on_cpus(net, 3, dim=1)(x, torch.ones(4, 7))


def test_grad_mode_and_autocast_reach_the_replicas():
    model = on_cpus(Net().eval(), 2)
    with torch.no_grad():
        assert not model(torch.ones(4, 3, dtype=torch.float64))["out"].requires_grad
    linear = on_cpus(nn.Linear(3, 3), 2)
    with torch.inference_mode():
        assert linear(torch.ones(4, 3)).is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.ones(4, 3)).dtype == torch.bfloat16
    linear(torch.ones(4, 3)).sum().backward()
    assert linear.module.weight.grad is not None


# ---------------------------------------------------------------------- replicas that stay alive


def test_changes_of_the_module_reach_the_replicas():
    """Also buffers that it writes or replaces, which are those of the first replica."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model = on_cpus(net, 2)
    x = torch.randn(6, 3, dtype=torch.float64)
    weight = torch.randn(4, 3, dtype=torch.float64)
    changes = {
        "nothing": lambda: None,
        "an in-place change": lambda: net[0].weight.detach().mul_(2),
        "an in-place change of the data": lambda: net[0].weight.data.mul_(2),
        "other memory": lambda: setattr(net[0].weight, "data", weight),
        "another parameter": lambda: setattr(net[2], "weight", nn.Parameter(torch.randn(2, 4, dtype=torch.float64))),
        "a frozen parameter": lambda: net[0].bias.requires_grad_(False),
        "an unfrozen one": lambda: net[0].bias.requires_grad_(True),
        "another buffer": lambda: setattr(net[1], "running_mean", torch.ones(4, dtype=torch.float64)),
        "evaluation": model.eval,
        "a changed buffer": lambda: net[1].running_mean.add_(1),
        "another layer": lambda: net.__setitem__(2, nn.Linear(4, 5).double()),
        "one more layer": lambda: net.append(nn.Tanh()),
        "a changed attribute": lambda: setattr(net[1], "eps", 0.5),
    }
    for what, change in changes.items():
        change()
        net.zero_grad()
        first = copy.deepcopy(net)  # two parts are normalised for themselves
        expected = torch.cat([first(x[:3]), copy.deepcopy(net)(x[3:])])
        out = model(x)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12, msg=lambda m, w=what: f"{w}: {m}")
        out.square().sum().backward()
        assert [p.grad is not None for p in net.parameters()] == [p.requires_grad for p in net.parameters()], what
        for (name, a), b in zip(net.named_buffers(), first.buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, w=what, n=name: f"{w}, {n}: {m}")


def test_parameters_are_copied_only_when_they_have_changed(monkeypatch):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    replica = Replica(1, CPU, CPU)
    replica.shares_memory = False
    x = torch.ones(1, 3, dtype=torch.float64)
    copied = []
    monkeypatch.setattr(replicas, "carried", lambda tensors, device: copied.extend(tensors) or carried(tensors, device))

    def check(num_copied):
        copied.clear()
        assert torch.equal(replica.copy_of(net)[0](x), net(x))
        assert len(copied) == num_copied

    check(4)
    check(0)
    with torch.no_grad():
        net[1].weight.add_(1)
    check(1)
    net[0].bias.data = torch.ones(4, dtype=torch.float64)
    check(1)
    check(0)
    net[0].bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    check(1)
    check(0)


# ---------------------------------------------------------------------- threads


class WhereAmI(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        seen.append(("forward", threading.current_thread().name, torch.get_num_threads()))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(("backward", threading.current_thread().name, torch.get_num_threads()))
        return grad, None


class Watched(nn.Linear):
    def __init__(self, seen):
        super().__init__(3, 3)
        self.seen = seen

    def forward(self, x):
        return WhereAmI.apply(super().forward(x), self.seen)


def test_each_replicas_thread_drives_its_graph_forward_and_backward():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        seen = []
        model = on_cpus(Watched(seen), 2)
        model(torch.ones(4, 3)).sum().backward()
        assert sorted(seen) == [
            (what, f"evenstep-replica-{index}_0", 2) for what in ("backward", "forward") for index in (0, 1)
        ]
        assert torch.get_num_threads() == 4
        fresh = []
        thread = threading.Thread(target=lambda: (torch.ones(9).sum(), fresh.append(torch.get_num_threads())))
        thread.start()
        thread.join()
        assert fresh == [4]
        seen.clear()
        torch.set_num_threads(1)
        model(torch.ones(4, 3)).sum().backward()
        assert {each[2] for each in seen} == {1}
    finally:
        torch.set_num_threads(before)


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


class Failing(nn.Linear):
    def __init__(self, make_error):
        super().__init__(3, 3)
        self.make_error = make_error

    def forward(self, x):
        if x.sum() > 6:
            raise self.make_error()
        return super().forward(x)


def test_an_error_in_a_replica_is_the_users_and_says_where():
    model = on_cpus(nn.Linear(3, 3), 2)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied.*in the forward of replica 0 of 2, on cpu"):
        model(torch.ones(4, 2))
    model(torch.ones(4, 3))  # as if nothing had happened
    x = torch.cat([torch.zeros(2, 3), torch.ones(2, 3) * 9])
    with pytest.raises(LookupError, match=r"gone \(in the forward of replica 1 of 2, on cpu\)") as caught:
        on_cpus(Failing(lambda: LookupError("gone")), 2)(x)
    assert caught.value.__cause__.args == ("gone",)
    del caught  # its traceback holds this frame, and so the models and their threads
    with pytest.raises(RuntimeError, match=r"Odd: .*replica 1 of 2"):
        on_cpus(Failing(lambda: Odd(1, 2)), 2)(x)


# ---------------------------------------------------------------------- the caller's graph


def test_gradients_by_name_hooks_and_second_derivatives():
    net = nn.Linear(3, 1).double()
    model = on_cpus(net, 2)
    x = torch.randn(4, 3, dtype=torch.float64)
    (grad,) = torch.autograd.grad(model(x).sum(), net.weight)
    torch.testing.assert_close(grad, x.sum(0, keepdim=True))
    assert net.weight.grad is None
    handle = net.weight.register_hook(lambda g: g * 2)  # once, and not once per replica
    model(x).sum().backward()
    torch.testing.assert_close(net.weight.grad, 2 * x.sum(0, keepdim=True))
    handle.remove()
    (grad,) = torch.autograd.grad(model(x).square().sum(), net.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ---------------------------------------------------------------------- the loss where the outputs are


@pytest.mark.parametrize("rows", [2, 3, 7])
@pytest.mark.parametrize(
    "criterion",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64), ignore_index=2),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        nn.functional.cross_entropy,
        lambda out, target: nn.functional.cross_entropy(out, target, reduction="none").square(),
    ],
)
def test_the_loss_equals_that_of_the_whole_batch(rows, criterion):
    torch.manual_seed(rows)
    net = nn.Linear(4, 3).double()
    plain = copy.deepcopy(net)
    model = on_cpus(net, 2)
    x, target = torch.randn(rows, 4, dtype=torch.float64), torch.arange(rows) % 3
    target[rows // 2 :] = 0  # and so 1 and 2 are only in the first part, if anywhere
    target[0] = 2  # one that counts with every criterion
    loss, expected = model.loss(criterion, x, target), criterion(plain(x), target)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    loss.sum().backward()
    expected.sum().backward()
    assert_same_grads(model, plain)


def test_a_criterion_that_is_trained_gets_its_gradients():
    class Trained(nn.Linear):
        def forward(self, out, target):
            return (super().forward(out) - target).square().mean()

    net, criterion = nn.Linear(3, 3).double(), Trained(3, 1).double()
    plain, plain_criterion = copy.deepcopy(net), copy.deepcopy(criterion)
    x, target = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    on_cpus(net, 2).loss(criterion, x, target).backward()
    plain_criterion(plain(x), target).backward()
    assert_same_grads(net, plain)
    assert_same_grads(criterion, plain_criterion)


# ---------------------------------------------------------------------- as torch's class


def test_torchs_interface():
    net = nn.Linear(3, 3)
    model = on_cpus(net, 2)
    assert isinstance(model, nn.DataParallel)
    assert model.module is net
    assert (model.device_ids, model.output_device, model.dim) == ([CPU, CPU], CPU, 0)
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    model(torch.ones(4, 3))
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert torch.equal(model(torch.ones(4, 3)), torch.full((4, 3), 4.0))
    assert "devices=['cpu', 'cpu']" in repr(model)
    again = copy.deepcopy(model)
    with torch.no_grad():
        again.module.bias.zero_()
    assert torch.equal(again(torch.ones(4, 3)), torch.full((4, 3), 3.0))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(torch.ones(4, 3)), torch.full((4, 3), 4.0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_ids": []}, "a list of at least one device"),
        ({"device_ids": ["gpu"]}, "'gpu' isn't a device"),
        ({"device_ids": [torch.cuda.device_count() + 3]}, "torch can use"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        evenstep.DataParallel(nn.Linear(1, 1), **arguments)


def test_batches_that_cannot_be_divided():
    model = on_cpus(nn.Linear(1, 1), 2)
    with pytest.raises(UsageError, match="empty batch"):
        model(torch.empty(0, 1))
    with pytest.raises(ConfigurationError, match=r"it has tensors of lengths \[2, 3\]"):
        model(torch.ones(3, 1), torch.ones(2))
    model.module.to("meta")
    with pytest.raises(ConfigurationError, match="is on meta"):
        model(torch.ones(2, 1))
    with pytest.raises(ValueError, match="uninitialized parameter"):
        on_cpus(nn.LazyLinear(2), 2)(torch.ones(4, 3))
