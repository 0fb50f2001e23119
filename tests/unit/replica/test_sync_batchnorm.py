"""SyncBatchNorm in a world of one: conversion, replacement, statistics, and what doesn't count."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import evenstep
from evenstep.errors import ConfigurationError
from evenstep.replica.normalization.sync_batchnorm import SyncLayers, replace_torchs


@pytest.fixture
def world():
    return evenstep.World.alone(device="cpu")


def test_torchs_interface():
    ours, theirs = evenstep.SyncBatchNorm(4, momentum=None, affine=False), nn.SyncBatchNorm(4, momentum=None)
    assert isinstance(ours, nn.SyncBatchNorm)
    assert ours.extra_repr() == theirs.extra_repr().replace("affine=True", "affine=False").replace(
        "bias=True", "bias=False"
    )
    assert ours.process_group is None
    with pytest.raises(ValueError, match="at least 2D"):
        ours(torch.ones(3))
    with pytest.raises(ValueError, match="with 4 channels"):
        ours(torch.ones(3, 5))
    assert ours.eval()(torch.ones(3, 4)).shape == (3, 4)


def test_conversion_takes_everything_over():
    shared, unbiased = nn.BatchNorm1d(3), nn.BatchNorm3d(2)
    unbiased.register_parameter("bias", None)  # `bias=False`, which torch 2.11 has no name for
    net = nn.Sequential(nn.Linear(3, 3), shared, nn.Sequential(shared, unbiased), nn.ReLU())
    called = []
    shared.register_forward_hook(lambda *_: called.append(1))
    shared.eval()
    parameters, buffers, keys = list(net.parameters()), list(net.buffers()), list(net.state_dict())
    assert evenstep.SyncBatchNorm.convert_sync_batchnorm(net) is net
    assert type(net[1]) is type(net[2][1]) is evenstep.SyncBatchNorm
    assert net[1] is net[2][0]  # what occurs twice stays one
    assert all(a is b for a, b in zip(parameters, net.parameters(), strict=True))
    assert all(a is b for a, b in zip(buffers, net.buffers(), strict=True))
    assert list(net.state_dict()) == keys
    assert not net[1].training
    assert net[2][1].training
    assert net[2][1].bias is None
    net[1](torch.ones(1, 3))
    assert called
    alone = nn.BatchNorm2d(3)
    assert type(evenstep.SyncBatchNorm.convert_sync_batchnorm(alone)) is evenstep.SyncBatchNorm
    assert type(alone) is nn.BatchNorm2d
    with pytest.raises(ConfigurationError, match="run one batch before"):
        evenstep.SyncBatchNorm.convert_sync_batchnorm(nn.LazyBatchNorm1d())


def test_torchs_layers_are_replaced_and_others_left_alone():
    class Own(nn.SyncBatchNorm):
        pass

    net = nn.ModuleDict({"torchs": nn.SyncBatchNorm(2), "plain": nn.BatchNorm1d(2), "own": Own(2)})
    weight = net["torchs"].weight
    assert replace_torchs(net) is net
    assert [type(each) for each in net.values()] == [evenstep.SyncBatchNorm, nn.BatchNorm1d, Own]
    assert net["torchs"].weight is weight
    assert type(replace_torchs(nn.SyncBatchNorm(2))) is evenstep.SyncBatchNorm
    on_meta = nn.SyncBatchNorm(2, device="meta")
    assert replace_torchs(on_meta) is on_meta


def test_wrapping_replaces_torchs_layers(world):
    bare, other = nn.SyncBatchNorm(2), nn.BatchNorm1d(2)
    model = evenstep.DistributedDataParallel(bare, world=world)
    assert type(model.module) is evenstep.SyncBatchNorm
    x = torch.randn(4, 2)
    assert torch.equal(model(x), other(x))
    assert torch.equal(bare.running_mean, other.running_mean)  # the same buffers
    again = copy.deepcopy(model.module)
    assert again.overseer is None


def test_a_second_derivative_is_refused(world):
    layer = evenstep.SyncBatchNorm(2)
    evenstep.DistributedDataParallel(layer, world=world)
    x = torch.zeros(0, 2, requires_grad=True)  # no rows: the path of several ranks
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class Windows:
    """What the layers see of an engine."""

    num_reductions = 0

    def contribution(self):
        return 1.0

    def announce(self):
        pass


class Operations(TorchDispatchMode):
    """Notes the operations that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_number_is_copied_to_the_device(world, momentum):
    """On a GPU each such copy would wait for all that is queued, a hundred times a step in a ResNet-50."""
    windows = Windows()
    layers = SyncLayers(nn.Sequential(evenstep.SyncBatchNorm(2, momentum=momentum)), world, windows)
    x = torch.zeros(0, 2, requires_grad=True)
    with Operations() as operations:
        layers.layers["0"](x).sum().backward()
    assert "aten.native_batch_norm_backward.default" not in operations.names  # there are no rows
    assert "aten.clamp.default" in operations.names
    assert not [name for name in operations.names if "lift_fresh" in name]
