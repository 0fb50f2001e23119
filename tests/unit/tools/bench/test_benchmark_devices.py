"""Where benchmarks measure: on the CPU always, and on GPUs where there are some."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import modules


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> Any:
    return modules.load(modules.ROOT / "benchmarks" / "measuring.py", monkeypatch)


@pytest.mark.parametrize(
    ("asked", "num_ranks", "num_gpus", "expected"),
    [
        (None, 2, 0, [("cpu", None)]),
        (["cpu"], 2, 8, [("cpu", None)]),
        (None, 1, 1, [("cpu", None), ("cuda", None)]),
        (None, 2, 2, [("cpu", None), ("cuda", "nccl")]),
        (["cuda"], 4, 2, [("cuda:0", None)]),
        (["cuda", "cpu"], 2, 1, [("cpu", None), ("cuda:0", None)]),
    ],
)
def test_devices(measuring, asked, num_ranks, num_gpus, expected):
    found = measuring.choose_devices(asked, num_ranks, num_gpus)
    assert [(device.name, device.transport) for device in found] == expected
    assert [device.is_cuda for device in found] == [name != "cpu" for name, _ in expected]


def test_a_gpu_that_is_not_there_is_an_error(measuring):
    with pytest.raises(SystemExit, match="no GPU"):
        measuring.choose_devices(["cuda"], 2, 0)


def test_a_cpu_is_not_waited_for(measuring, monkeypatch):
    def refuse(device: Any = None) -> None:
        raise AssertionError("there is nothing queued")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    measuring.synchronise(torch.device("cpu"))
    with pytest.raises(AssertionError):
        measuring.synchronise(torch.device("cuda:0"))
