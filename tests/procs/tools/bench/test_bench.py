"""`evenstep bench` on scripts that run: one training with either wrapper, and scripts with a planted cause."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest

from evenstep.tools.bench.report import PART_NAMES
from tests.commands import Command

# The same training with either wrapper.
PROGRAMS = {
    "train.py": """\
import evenstep
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

with evenstep.init(seed=0) as world:
    train_set = TensorDataset(torch.randn(4096, 256), torch.randint(10, (4096,)))
    layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
    model = evenstep.DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = evenstep.DataLoader(train_set, global_batch_size=256, shuffle=True)
    checkpoint = evenstep.Checkpointer("runs/train", model=model, optimizer=optimizer, loader=loader)
    checkpoint.resume()
    for epoch in loader.epochs(100):
        for x, y in world.progress(loader):
            model.backward(F.cross_entropy(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
            checkpoint.step()
""",
    "train_ddp.py": """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
train_set = TensorDataset(torch.randn(4096, 256), torch.randint(10, (4096,)))
layers = [torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()]
model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=256, sampler=sampler)
for epoch in range(100):
    sampler.set_epoch(epoch)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
""",
}
FLAGS = ["--nproc-per-node", "1,2", "--steps", "10", "--rounds", "1"]

DEADLINE_S = 240.0  # several runs, one after the other, on a machine that may be busy
pytestmark = pytest.mark.timeout(DEADLINE_S + 30)


def wait(command: Command) -> int:
    """Its exit status; killed, with all it started, if it takes too long."""
    try:
        return command.process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        for pid in command.processes():
            os.kill(pid, signal.SIGKILL)
        command.process.wait()
        raise AssertionError(f"{command.arguments} hangs:\n{command.stdout}\n{command.stderr}") from None


def bench(directory: Path, *arguments: str, out: str = "bench-report") -> dict[str, Any]:
    command = Command(directory, ["bench", *arguments], {"COLUMNS": "80"})
    assert wait(command) == 0, f"{command.stdout}\n{command.stderr}"
    assert command.leaves_no_process()
    assert not [name for name in command.left_files() if name.startswith("evenstep-")]
    report: dict[str, Any] = json.loads((directory / out / "report.json").read_text())
    return report


@pytest.mark.extended
@pytest.mark.parametrize("wrapper", ["evenstep", "torch"])
def test_a_report_of_either_wrapper(wrapper: str, tmp_path: Path) -> None:
    name = "train.py" if wrapper == "evenstep" else "train_ddp.py"
    (tmp_path / name).write_text(PROGRAMS[name])
    out = f"bench-{wrapper}"
    report = bench(tmp_path, *FLAGS, "--out", out, name, out=out)
    one, two = report["curves"]["weak"]
    assert (one["num_replicas"], two["num_replicas"]) == (1, 2)
    for point in (one, two):
        assert set(point["parts"]) == set(PART_NAMES)
        assert sum(point["parts"].values()) == pytest.approx(point["step_s"]["median"], rel=1e-6)
        for part in ("compute", "data", "optimizer"):
            assert point["parts"][part] > 0, part
    assert two["parts"]["exposed"] + two["parts"]["imbalance"] > 0
    assert report["facts"]["wrapper"] == wrapper
    assert not (tmp_path / "runs").exists(), "the checkpointer left something"
    assert not (tmp_path / "model.pt").exists()
    kept = sorted(path.name for path in (tmp_path / out).iterdir())
    assert kept == ["report.json", "trace-0.json.gz", "trace-1.json.gz"]
    with gzip.open(tmp_path / out / "trace-1.json.gz", "rt") as file:
        seen = {event["name"] for event in json.load(file)["traceEvents"]}
    assert ({"evenstep:backward", "Optimizer.step#SGD.step"} if wrapper == "evenstep" else {"gloo:all_reduce"}) <= seen


# ---------------------------------------------------------------------- planted causes

# Sleeping stands for computing and for the wire: what a step costs is then known, however busy the machine is.
SCRIPT = """
import time
from concurrent.futures import ThreadPoolExecutor
import torch, evenstep
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import Dataset

class Samples(Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep({load_s})
        return torch.full((16,), index % 7, dtype=torch.float32), index % {classes}

class Work(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(16, {hidden}), torch.nn.Linear({hidden}, {classes})
    def forward(self, x):
        is_late = world.rank == world.world_size - 1 and world.world_size > 1
        time.sleep({work_s} * (world.world_size if {shares_cores} else 1) + ({late_s} if is_late else 0))
        return self.head(self.body(x))

sender = ThreadPoolExecutor(1)
def over_a_wire(_, bucket):
    future, flat = torch.futures.Future(), bucket.buffer()
    work = dist.all_reduce(flat, async_op=True)
    def travel():
        work.wait()
        time.sleep({latency_s} + flat.nbytes / {bytes_per_s})
        future.set_result(flat.div_(world.world_size))
    sender.submit(travel)
    return future

{prelude}
with evenstep.init(seed=0) as world:
    model = evenstep.DistributedDataParallel(Work())
    if world.world_size > 1 and {has_wire}:
        model.register_comm_hook(None, over_a_wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = evenstep.DataLoader(Samples(), global_batch_size={batch})
    for epoch in loader.epochs(1000):
        for x, y in loader:
            model.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""
CALM = {
    "load_s": 0, "classes": 10, "hidden": 16, "work_s": 0.2, "late_s": 0, "batch": 8, "prelude": "",
    "has_wire": False, "latency_s": 0, "bytes_per_s": 1e9, "shares_cores": False,
}  # fmt: skip
SLOW_WIRE = {"has_wire": True, "bytes_per_s": 50e6}
NUM_THREADS = 4 * len(os.sched_getaffinity(0))


def found_in(directory: Path, **changed: object) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    (directory / "train.py").write_text(textwrap.dedent(SCRIPT).format(**{**CALM, **changed}))
    usual = ["--replicas", "1,2", "--steps", "12", "--rounds", "1", "--device", "cpu"]
    report = bench(directory, *usual, "train.py")
    return report["findings"], report


@pytest.mark.extended
@pytest.mark.parametrize("changed", [{"work_s": 0.4}, {"work_s": 0.6, **SLOW_WIRE}], ids=["shared memory", "slow wire"])
def test_nothing_is_found_in_a_healthy_script(changed: dict[str, Any], tmp_path: Path) -> None:
    findings, report = found_in(tmp_path, **changed)
    assert findings == [], report


@pytest.mark.extended
@pytest.mark.parametrize(
    ("cause", "changed"),
    [
        ("slow loader", {"load_s": 0.04}),
        ("slow rank", {"late_s": 0.2}),
        ("small batch", {"work_s": 0.1, "batch": 1, "has_wire": True, "latency_s": 0.15}),
        ("contention", {"shares_cores": True, "prelude": f"torch.set_num_threads({NUM_THREADS})"}),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_planted_cause_is_found_and_no_other(cause: str, changed: dict[str, Any], tmp_path: Path) -> None:
    findings, report = found_in(tmp_path, **changed)
    assert [finding["cause"] for finding in findings] == [cause], report
    if cause == "slow rank":
        assert findings[0]["what"].startswith("rank 1 is the last one ready")
        assert "in the forward pass" in findings[0]["what"]
    if cause == "contention":
        assert f"2 ranks compute with {2 * NUM_THREADS} threads" in findings[0]["what"]


LATE = """
import sys, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
import evenstep
from torch.nn.parallel import DistributedDataParallel

late_s, backend = float(sys.argv[1]), sys.argv[2]
if backend == "evenstep":
    model = evenstep.DistributedDataParallel(torch.nn.Linear(256, 256), world=evenstep.init(seed=0))
else:
    dist.init_process_group(backend)
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(1000):
    time.sleep(0.05)
    loss = model(torch.randn(8, 256)).square().mean()
    time.sleep(late_s * dist.get_rank())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.extended
@pytest.mark.parametrize("backend", ["evenstep", "gloo"])
def test_a_rank_that_sleeps_before_its_backward_pass_is_late_and_communication_is_as_before(
    backend: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LATE)
    usual = ["--replicas", "2", "--steps", "15", "--rounds", "1", "--device", "cpu", "train.py"]
    on_time, late = (bench(tmp_path, *usual, seconds, backend)["curves"]["weak"][0] for seconds in ("0", "0.1"))
    assert late["parts"]["imbalance"] > on_time["parts"]["imbalance"] + 0.06
    assert late["parts"]["exposed"] < on_time["parts"]["exposed"] + 0.04
    assert (late["late"]["rank"], late["late"]["phase"]) == (1, "script"), late["late"]
    assert late["late"]["share_of_steps"] > 0.8


# ---------------------------------------------------------------------- what goes wrong


FAILING = """
import torch, evenstep
world = evenstep.init()
model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    if world.rank == 1:
        raise ValueError("no such thing")
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


WORKERS = """
import torch, evenstep
import torch.nn.functional as F
from torch.utils.data import TensorDataset

def start_slowly(number):
    import time
    time.sleep(0.3)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
    loader = torch.utils.data.DataLoader(data, batch_size=32, num_workers=1, worker_init_fn=start_slowly, **{more})
    for epoch in range(100):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.extended
@pytest.mark.parametrize("keeps", [False, True], ids=["new in each epoch", "kept"])
def test_workers_that_start_anew_in_each_epoch_are_told_from_slow_data(keeps: bool, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKERS.replace("{more}", repr({"persistent_workers": keeps})))
    report = bench(tmp_path, "--replicas", "1", "--steps", "8", "--rounds", "1", "--device", "cpu", "train.py")
    advice = [finding["advice"] for finding in report["findings"] if finding["cause"] == "slow loader"]
    assert any("persistent_workers=True" in each for each in advice) is not keeps, report


@pytest.mark.extended
def test_a_script_that_fails_is_shown_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    command = Command(tmp_path, ["bench", "train.py", "--replicas", "2"], {"COLUMNS": "80"})
    assert wait(command) == 2, f"{command.stdout}\n{command.stderr}"
    assert "ValueError: no such thing" in command.stderr
    assert command.leaves_no_process()
    assert not [name for name in command.left_files() if name.startswith("evenstep-")]


# ---------------------------------------------------------------------- scripts beside each other


def compare(directory: Path, *arguments: str) -> tuple[dict[str, Any], Command]:
    command = Command(directory, ["bench", "compare", "--json", "compare.json", *arguments], {"COLUMNS": "200"})
    assert wait(command) == 0, f"{command.stdout}\n{command.stderr}"
    assert command.leaves_no_process()
    assert not [name for name in command.left_files() if name.startswith("evenstep-")]
    return json.loads((directory / "compare.json").read_text()), command


def write_script(directory: Path, name: str, *, work_s: float, lr: float = 1e-3) -> None:
    text = textwrap.dedent(SCRIPT).format(**{**CALM, "work_s": work_s})
    (directory / name).write_text(text.replace("lr=1e-3", f"lr={lr}"))


@pytest.mark.extended
def test_a_slower_script_is_slower_and_another_training_has_other_losses(tmp_path: Path) -> None:
    """All three on two ranks: the base, the same with a longer nap, and one that learns faster."""
    write_script(tmp_path, "a.py", work_s=0.05)
    write_script(tmp_path, "slow.py", work_s=0.25)
    write_script(tmp_path, "other.py", work_s=0.05, lr=0.3)
    flags = ["--nproc-per-node", "2", "--device", "cpu", "--rounds", "2", "--steps", "6"]
    data, command = compare(tmp_path, *flags, "a.py", "slow.py", "other.py")
    first, slow, other = data["scripts"]
    assert first["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert min(slow["ratios"]) > 1.5
    assert slow["ratio"]["low"] <= slow["ratio"]["median"] <= slow["ratio"]["high"]
    assert slow["step_s"]["median"] > 0.25 > 0.05 < first["step_s"]["median"]
    assert slow["losses"]["difference"] < 1e-3, slow
    assert slow["losses"]["num_steps"] == 11, "those of the warm-up, too"
    assert other["losses"]["difference"] > 1e-3, other
    assert other["losses"]["step"] > 1, "before the first step nothing has been learned"
    assert "slow.py: slower than a.py in every round" in command.stdout
    assert "losses: apart by " in command.stdout
    order = re.findall(r"^evenstep: run \d of 6: ([\w.]+)", command.stderr, re.MULTILINE)
    assert order == ["a.py", "slow.py", "other.py", "other.py", "slow.py", "a.py"]


@pytest.mark.extended
def test_compare_of_either_wrapper(tmp_path: Path) -> None:
    """torch's wrapper beside ours, with one batch for both; they draw other samples, and that is told."""
    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    flags = ["--nproc-per-node", "2", "--rounds", "2", "--steps", "10"]
    data, _ = compare(tmp_path, *flags, "train_ddp.py", "train.py")
    torchs, ours = data["scripts"]
    assert (torchs["name"], ours["name"]) == ("train_ddp.py", "train.py")
    assert (torchs["rows_per_step"], ours["rows_per_step"]) == (512, 256)
    assert ours["losses"]["difference"] > 1e-3
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.extended
def test_arguments_reach_every_script_and_one_that_fails_is_named(tmp_path: Path) -> None:
    write_script(tmp_path, "a.py", work_s=0.01)
    (tmp_path / "b.py").write_text("import sys\nraise ValueError(f'arguments {sys.argv[1:]}')")
    flags = ["--nproc-per-node", "1", "--device", "cpu", "--rounds", "1", "--steps", "3"]
    command = Command(tmp_path, ["bench", "compare", *flags, "a.py", "b.py", "--", "--epochs", "7"])
    assert wait(command) == 2, f"{command.stdout}\n{command.stderr}"
    assert "1 replica: b.py failed with status 1" in command.stderr
    assert "ValueError: arguments ['--epochs', '7']" in command.stderr
    assert command.leaves_no_process()
