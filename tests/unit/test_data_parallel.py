"""The one-line, one-process interface: replicas on the CPU side by side."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, UsageError


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


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_outputs_and_gradients_equal_the_bare_module(rows, num_replicas):
    torch.manual_seed(rows)
    net = Net()
    model = evenstep.DataParallel(net, device_ids=["cpu"] * num_replicas)
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    bare = net(x, scale=2.0)["out"]
    bare.square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()] + [x.grad.clone()]
    net.zero_grad()
    x.grad = None
    out = model(x, scale=2.0)
    assert torch.equal(out["out"], bare) or torch.allclose(out["out"], bare, rtol=1e-14)
    assert out["rows"].shape == (() if num_replicas == 1 or rows == 1 else (min(rows, num_replicas),))
    out["out"].square().sum().backward()
    for got, e in zip([p.grad for p in net.parameters()] + [x.grad], expected, strict=True):
        torch.testing.assert_close(got, e, rtol=1e-12, atol=1e-13)
    assert net.calls == 2  # buffers are the first replica's


def test_grad_mode_and_autocast_reach_the_replicas():
    model = evenstep.DataParallel(Net().eval(), device_ids=["cpu", "cpu"])
    with torch.no_grad():
        assert not model(torch.ones(4, 3, dtype=torch.float64))["out"].requires_grad
    linear = evenstep.DataParallel(nn.Linear(3, 3), device_ids=["cpu", "cpu"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(torch.ones(4, 3)).dtype == torch.bfloat16
    assert list(linear.state_dict()) == ["module.weight", "module.bias"]


def test_an_error_in_a_replica_is_the_users():
    model = evenstep.DataParallel(nn.Linear(3, 3), device_ids=["cpu", "cpu"])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(4, 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_ids": []}, "name at least one"),
        ({"device_ids": ["gpu"]}, "'gpu' is no device"),
        ({"device_ids": [torch.cuda.device_count() + 3]}, "GPUs that torch can use"),
        ({"dim": 1}, "along dimension 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        evenstep.DataParallel(nn.Linear(1, 1), **arguments)


def test_an_empty_batch_is_refused():
    with pytest.raises(UsageError, match="empty batch"):
        evenstep.DataParallel(nn.Linear(1, 1), device_ids=["cpu", "cpu"])(torch.empty(0, 1))
