"""One process on a GPU, `evenstep.launch` of several that share it, and no waiting of the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evenstep
from tests.gpu.sharing import never_waiting
from tests.reference_engine import ReferenceReplica

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).double()


def equal_to_reference():
    world = evenstep.init(device="cuda:0", quiet=True)
    assert world.transport_name == ("local" if world.world_size == 1 else "gloo")
    model = evenstep.DistributedDataParallel(make_model(), bucket_cap_mb=1e-3, world=world)
    module = make_model().cuda()
    for step in range(4):
        generator = torch.Generator().manual_seed(step * 10 + world.rank)
        x = torch.randn(3 + world.rank, 8, dtype=torch.float64, generator=generator).cuda()
        for part in model.microbatches(x, 2):
            model.backward(model(part).square().mean(), weight=torch.tensor(len(part), device="cuda"))
        oracle = ReferenceReplica(module, world)
        oracle.add(module(x).square().mean(), float(len(x)))
        oracle.average()
        for a, b in zip(model.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13)
        model.zero_grad()
    world.close()


def test_ranks_that_share_a_gpu_exchange_through_the_host():
    evenstep.launch(equal_to_reference, nproc=2, device="cuda:0")


def test_one_rank_on_a_gpu():
    evenstep.launch(equal_to_reference, nproc=1, device="cuda:0")


def test_a_step_in_a_world_of_one_never_waits_for_the_device():
    world = evenstep.World.alone(device="cuda:0")
    model = evenstep.DistributedDataParallel(make_model().cuda(), world=world)
    x = torch.randn(4, 8, dtype=torch.float64, device="cuda")
    weight = torch.tensor(4.0, device="cuda")
    model.backward(model(x).square().mean(), weight=weight)
    with never_waiting():
        model.backward(model(x).square().mean(), weight=weight)
        model(x).square().mean()


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:0"], [0], ["cuda:0"] * 3])
def test_replicas_on_a_gpu_equal_the_bare_module(devices):
    """Their graphs are differentiated by autograd's own thread of the device, from within a node that runs there."""
    plain = make_model().cuda()
    model = evenstep.DataParallel(make_model(), device_ids=devices)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    x, target = torch.randn(7, 8, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    for step in range(3):
        nn.functional.mse_loss(plain(x.cuda()), target.cuda()).backward()
        if step % 2:
            nn.functional.mse_loss(model(x), target.cuda()).backward()
        else:
            model.loss(nn.MSELoss(), x, target).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
