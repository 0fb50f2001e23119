"""What the pages show of other libraries runs with them: `make test-peers` installs them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages

# What the loops on the left of the migration pages start from; theirs begin where they differ from a plain one.
BEFORE = """
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

inputs = torch.randn(256, 20)
model = torch.nn.Linear(20, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(inputs, inputs.argmax(1) % 3), batch_size=32, shuffle=True)
"""
TRACKED = re.compile(r"`run = ((\w+)\.init\([^`]*\))`")


def run(script: str, directory: Path, **variables: str) -> str:
    """Run a script on two CPU ranks, started by torchrun, and return what it prints."""
    (directory / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HOME": str(directory), **variables}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.extended
@pytest.mark.parametrize(
    ("page", "module", "saved"),
    [
        ("how-to/migrate/accelerate.md", "accelerate", "state"),
        ("how-to/migrate/fabric.md", "lightning_fabric", "state.ckpt"),
    ],
)
def test_other_libraries_loop_before(page: str, module: str, saved: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    (loop,) = pages.blocks("py", page)
    # The page names the whole of Lightning; `lightning_fabric` is the part of it that is needed.
    printed = run(BEFORE + loop.replace("lightning.fabric", "lightning_fabric"), tmp_path, ACCELERATE_USE_CPU="1")
    assert [line for line in printed.splitlines() if line.startswith("epoch")] == ["epoch 0", "epoch 1", "epoch 2"]
    assert (tmp_path / saved).exists()


@pytest.mark.extended
@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_other_libraries_trackers(tracker: str, tmp_path: Path) -> None:
    lines = {name: line for line, name in TRACKED.findall(pages.text("how-to/trackers.md"))}
    assert set(lines) == {"wandb", "trackio"}
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    program = pages.programs("how-to/trackers.md")["track.py"]
    assert "run = PrintedRun() if" in program
    script = f"import {tracker}\n" + program.replace("run = PrintedRun() if", f"run = {lines[tracker]} if")
    run(script, tmp_path, WANDB_MODE="offline")
    written = [path for path in tmp_path.rglob("*") if path.suffix in (".wandb", ".db")]
    assert len(written) == 1, "one run, of rank 0"
