"""On a GPU: clipping without waiting, gathers behind the next forward pass, and the benchmarks' rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import MismatchError

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).parents[2]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).double()


def other_rate(device: str) -> str:
    world = evenstep.init(device=device, transport="gloo", quiet=True)
    model = evenstep.DistributedDataParallel(make_model(), world=world)
    rate = torch.tensor(0.1, device=world.device, dtype=torch.float64)
    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=rate, capturable=True)
    try:
        for step in range(60):
            model(torch.randn(4, 8, dtype=torch.float64, device=world.device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 5 and world.rank == 1:
                rate.mul_(2)
    except MismatchError as error:
        return str(error)
    finally:
        world.close()
    return ""


def test_a_rate_on_the_device_that_differs_is_named():
    told = evenstep.launch(other_rate, nproc=2, args=("cuda:0",), device="cuda:0")
    assert "lr of parameter group 0 is 0.1 on rank 0 and 0.2 on rank 1" in told


def test_a_benchmark_has_rows_of_the_gpu(tmp_path):
    out = tmp_path / "result.json"
    flags = ["--models", "tiny MLP", "--blocks", "2", "--block-s", "0.01", "--ranks", "1", "2", "--device", "cuda"]
    command = [sys.executable, str(ROOT / "benchmarks" / "step.py"), *flags, "--json", str(out)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "GPU" in told
    assert any("GPU" in key for key in json.loads(out.read_text()))
