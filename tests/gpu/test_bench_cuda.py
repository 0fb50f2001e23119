"""`evenstep bench` on GPUs: a script that asks for `.item()` in every step, and a rank that is late."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.procs.tools.bench.test_bench import bench

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.timeout(300),
]

SCRIPT = """\
import evenstep
import torch

with evenstep.init(seed=0) as world:
    layers = [layer for _ in range(40) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    model = evenstep.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(4096, 2048, device=world.device)
    for _ in range(1000):
        loss = model(x).square().mean()
        {look}
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("look", ["pass", "[loss.item() for _ in range(3)]; __import__('time').sleep(0.05)"])
def test_item_in_every_step(look: str, tmp_path: Path) -> None:
    """The host sleeps after it has waited, as one does that writes logs: nothing is queued meanwhile."""
    (tmp_path / "train.py").write_text(SCRIPT.format(look=look))
    report = bench(tmp_path, "--replicas", "1", "--rounds", "1", "--device", "cuda:0", "train.py")
    causes = [finding["cause"] for finding in report["findings"]]
    if look == "pass":
        assert causes == [], report["findings"]
    else:
        assert causes == ["host-bound"], report["findings"]
        assert "train.py:11 (3 times a step)" in report["findings"][0]["what"]


LATE = """\
import sys, time
import evenstep
import torch

with evenstep.init(seed=0) as world:
    layers = [layer for _ in range(40) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
    model = evenstep.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(4096, 2048, device=world.device)
    for _ in range(1000):
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        time.sleep(float(sys.argv[1]) * world.rank)
        model.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU exchanges nothing over NCCL")
def test_a_rank_that_sleeps_before_its_backward_pass_is_late_and_communication_is_as_before(tmp_path: Path) -> None:
    """The kernels of the other rank last 20 ms longer: that is no communication."""
    (tmp_path / "train.py").write_text(LATE)
    usual = ["--replicas", "2", "--rounds", "1", "--device", "cuda", "train.py"]
    on_time, late = (bench(tmp_path, *usual, seconds)["curves"]["weak"][0] for seconds in ("0", "0.02"))
    assert late["parts"]["imbalance"] > on_time["parts"]["imbalance"] + 0.012
    assert late["parts"]["exposed"] < on_time["parts"]["exposed"] + 0.005
    assert (late["late"]["rank"], late["late"]["phase"]) == (1, "idle")
    assert (tmp_path / "bench-report" / "trace-1.json.gz").exists()
