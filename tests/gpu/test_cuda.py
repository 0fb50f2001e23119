"""On a GPU: NCCL with one rank, Gloo with several that share it, and no waiting of the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evenstep
from evenstep.replica.reference import ReferenceReplica

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).double()


def equal_to_reference(transport):
    world = evenstep.init(device="cuda:0", transport=transport, quiet=True)
    assert world.transport_name == ("local" if world.world_size == 1 else transport)
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


def test_ranks_that_share_a_gpu_exchange_over_gloo():
    evenstep.launch(equal_to_reference, nproc=2, args=("gloo",), device="cuda:0")


def test_one_rank_on_a_gpu():
    evenstep.launch(equal_to_reference, nproc=1, args=(None,), device="cuda:0")


def test_a_step_in_a_world_of_one_never_waits_for_the_device():
    world = evenstep.World.alone(device="cuda:0")
    model = evenstep.DistributedDataParallel(make_model().cuda(), world=world)
    x = torch.randn(4, 8, dtype=torch.float64, device="cuda")
    weight = torch.tensor(4.0, device="cuda")
    model.backward(model(x).square().mean(), weight=weight)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.backward(model(x).square().mean(), weight=weight)
        model(x).square().mean()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batches_arrive_on_the_gpu():
    world = evenstep.World.alone(device="cuda:0")
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = evenstep.DataLoader(data, global_batch_size=4, world=world)
    batches = list(loader)
    assert all(x.is_cuda and y.is_cuda for x, y in batches)
    assert torch.cat([y for _, y in batches]).tolist() == list(range(10))
