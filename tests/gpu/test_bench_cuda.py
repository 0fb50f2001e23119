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
