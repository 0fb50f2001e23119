"""Batches on a GPU: there before they are asked for, equal to those on the CPU, and without the host waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from evenstep import DataLoader, World
from tests.gpu.sharing import never_waiting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def _loaders(**arguments: Any) -> tuple[DataLoader, DataLoader]:
    dataset = TensorDataset(torch.randn(1000, 512), torch.arange(1000))
    worlds = World.alone(device="cuda:0"), World.alone(device="cpu")
    on_gpu, on_cpu = (DataLoader(dataset, 64, shuffle=True, seed=2, world=world, **arguments) for world in worlds)
    return on_gpu, on_cpu


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [None, False])
def test_batches_are_those_of_the_cpu(num_workers: int, pin_memory: bool | None):
    on_gpu, on_cpu = _loaders(num_workers=num_workers, pin_memory=pin_memory)
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours[0].device == torch.device("cuda", 0)
        assert torch.equal(ours[0].cpu(), theirs[0])
        assert torch.equal(ours[1].cpu(), theirs[1])
    assert on_gpu.state_dict() == on_cpu.state_dict()


def test_a_batch_in_use_is_not_overwritten_by_the_next():
    """A long kernel works on one batch while the next is copied and the one before has been given up."""
    on_gpu, on_cpu = _loaders()
    sums = []
    for x, _ in on_gpu:
        torch.cuda._sleep(10_000_000)
        sums.append((x * 2).double().sum(1))
        del x
    for ours, (x, _) in zip(sums, on_cpu, strict=True):
        torch.testing.assert_close(ours.cpu(), (x * 2).double().sum(1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_host_does_not_wait(num_workers: int):
    on_gpu, _ = _loaders(num_workers=num_workers)
    batches = iter(on_gpu)
    next(batches)
    with never_waiting():
        for _ in range(5):
            next(batches)
    batches.close()


def test_what_was_copied_ahead_is_not_consumed():
    on_gpu, _ = _loaders()
    weight = torch.nn.Parameter(torch.zeros(1, device="cuda"))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step, _ in enumerate(on_gpu):
        optimizer.step()
        assert on_gpu.position == min(1000, 64 * (step + 1))
