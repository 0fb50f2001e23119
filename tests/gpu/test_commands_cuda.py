"""The commands and the examples on a GPU that two ranks share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import call

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use"),
    pytest.mark.timeout(300),
]
ROOT = Path(__file__).parents[2]
ON_ONE = ("--nproc-per-node", "2", "--device", "cuda:0")


def evenstep(directory: Path, *arguments: object) -> str:
    """Standard output of `evenstep ARGUMENTS`."""
    command = [sys.executable, "-m", "evenstep", *map(str, arguments)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_env_knows_the_gpu(tmp_path: Path) -> None:
    assert torch.cuda.get_device_name(0) in evenstep(tmp_path, "env")


def test_check_takes_a_step_on_it(tmp_path: Path) -> None:
    code, command = call(tmp_path, ["--check", *ON_ONE])
    assert code == 0, command.stderr
    total, step, everybody, _ = command.stdout.splitlines()
    assert total == "a sum over 2 ranks: right"
    assert step == "a training step on cuda: the same as one process's"
    assert everybody.startswith("all ranks: gloo, latency ")


def test_more_ranks_than_gpus_are_refused_in_one_message(tmp_path: Path) -> None:
    num_ranks = torch.cuda.device_count() + 1
    script = "import evenstep\nevenstep.init()\n"
    code, command = call(tmp_path, ["--nproc-per-node", str(num_ranks), "--device", "cuda", "script.py"], script)
    assert code == 78
    assert "cuda:0" in command.stderr
    assert "Traceback" not in command.stderr


def test_the_digits(tmp_path: Path) -> None:
    told = evenstep(tmp_path, "run", *ON_ONE, ROOT / "examples" / "digits.py")
    assert "accuracy" in told


SCRIPT = """\
import evenstep, torch

with evenstep.init(seed=0) as world:
    layers = torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    model = evenstep.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(320.0).sin().view(40, 8), torch.arange(40.0).cos())
    for x, y in evenstep.DataLoader(data, global_batch_size=8, shuffle=True):
        loss = (model(x)[:, 0] - y).square().mean()
        {backward}
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("is_right", [True, False])
def test_verify_tells_a_mistake(tmp_path: Path, is_right: bool) -> None:
    backward = "model.backward(loss, weight=len(x))" if is_right else "(loss / world.world_size).backward()"
    (tmp_path / "train.py").write_text(SCRIPT.format(backward=backward))
    out = tmp_path / "verified.json"
    command = [
        sys.executable,
        "-m",
        "evenstep",
        "verify",
        "--ranks",
        "1,2",
        "--device",
        "cuda:0",
        "--json",
        str(out),
        "train.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    assert found["fine"] == is_right, f"{done.stdout}\n{done.stderr}"
    assert (done.returncode == 0) == is_right
