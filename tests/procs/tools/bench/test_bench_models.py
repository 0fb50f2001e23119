"""What a measured process sees of torch's own wrapper and of loaders: without starting a run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter_ns

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

import evenstep
from evenstep.ground.environment import Measurement, Placement, changed_settings
from evenstep.ground.health.telemetry import OPTIMIZER_END
from evenstep.testing import RankPool
from evenstep.tools.bench.probe import Probe, is_of_the_script, record_file
from evenstep.tools.bench.records import COLLECTIVE, RankRecord, read_record, sorted_marks, steps_in_parts
from evenstep.tools.bench.watching import ModelWatch
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.record import Recorder


class Sleepy(torch.nn.Module):
    """Sleeps in forward and in the middle of backward."""

    def __init__(self, seconds: float, width: int = 200, num_outputs: int = 2) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(200, width), torch.nn.Linear(width, num_outputs)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: time.sleep(self.seconds))
        out: torch.Tensor = self.last(hidden)
        return out


def train(model: torch.nn.Module, marks: list[int], optimizer: torch.optim.Optimizer, num_steps: int) -> list[int]:
    ends = []
    for _ in range(num_steps):
        model(torch.randn(3, 200)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(perf_counter_ns())
        marks += (OPTIMIZER_END, ends[-1])
    with torch.no_grad():
        model(torch.randn(5, 200))  # an evaluation is no part of it
    return ends


def watch_fsdp(naps: list[float]) -> list[dict[str, float]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    world = evenstep.init(quiet=True)
    torch.manual_seed(0)
    marks: list[int] = []
    watch = ModelWatch(marks)
    layers = [torch.nn.Linear(200, 300), Sleepy(naps[world.rank]), torch.nn.Linear(2, 33)]
    model = torch.nn.Sequential(layers[0], torch.nn.Linear(300, 200), layers[1], layers[2])
    mesh = init_device_mesh("cpu", (2,))
    for index in (0, 2):
        fully_shard(model[index], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    train(model, marks, optimizer, 2)
    watch.models = [model]
    watch._attach(model)
    with Patches() as patches:
        Recorder(watch).install(patches)
        marks.clear()
        ends = train(model, marks, optimizer, 4)
        assert marks[::2].count(COLLECTIVE) > 0
    record = RankRecord(world.rank, 2, 1, tuple(ends), (3,) * 4, tuple(sorted_marks(marks)))
    return steps_in_parts(record)


def test_ranks_of_fsdp2_wait_for_each_other(ranks: RankPool) -> None:
    """Who waits for whom is told as for the wrappers."""
    for fast, slow in zip(*ranks.run(watch_fsdp, 2, [0.0, 0.2], timeout_s=120.0), strict=True):
        assert fast["wait"] - slow["wait"] > 0.2, "it waits where the other sleeps"
        assert slow["forward"] > 0.2


# ---------------------------------------------------------------------- one rank of a run


def test_a_rank_leaves_what_it_has_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patches: Patches) -> None:
    """Of a loop over three batches, the last one of a single sample, that is given other epochs until it has ended."""
    monkeypatch.setattr(Probe, "_leave", lambda self: sys.exit(0))  # else the next step ends this process
    asked = Measurement(str(tmp_path), num_steps=5)
    probe = Probe(asked, Placement())
    model = torch.nn.Linear(4, 2)
    monkeypatch.setattr(probe._models, "find", lambda optimizer: find_only(probe._models, model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = TorchDataLoader(TensorDataset(torch.arange(36.0).view(9, 4)), batch_size=4)
    probe.install(patches)

    def run() -> None:
        for (x,) in loader:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(SystemExit):
        run()
    record = read_record(record_file(asked, 0))
    assert record.rows == (4, 4, 1, 4, 4, 1, 4, 4, 1, 4)
    assert record.rows_per_step == pytest.approx((1 + 4 + 4 + 1 + 4) / 5)
    steps = steps_in_parts(record)
    assert 5 * record.facts.starting_s == pytest.approx(steps[1]["data"] + steps[4]["data"]), "where epochs begin"
    for step in steps:
        assert min(step[phase] for phase in ("data", "forward", "backward", "optimizer")) > 0
    assert (tmp_path / "trace-0.json.gz").exists()
    assert record.profile is not None
    assert record.profile.window[1] > record.profile.window[0]


def find_only(watch: ModelWatch, model: torch.nn.Module) -> None:
    """As `find` does, but not among all objects: this process has had other models."""
    watch.models = [model]
    model.register_forward_pre_hook(watch._count_rows, with_kwargs=True)
    watch._attach(model)


# ---------------------------------------------------------------------- what a measured run may not do


@pytest.fixture
def patches() -> Iterator[Patches]:
    with Patches() as made:
        yield made


def test_the_loader_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.arange(64.0))
    world = evenstep.World.alone()

    def measure(**changes: int) -> None:
        monkeypatch.setenv(*changed_settings(measurement=Measurement("/tmp", **changes)).popitem())

    measure()
    assert evenstep.DataLoader(data, global_batch_size=8, world=world).global_batch_size == 8
    measure(global_batch_size=16, growth=2)
    assert evenstep.DataLoader(data, global_batch_size=8, world=world).global_batch_size == 16
    by_tokens = evenstep.DataLoader(data, max_tokens=8, lengths=[1] * 64, world=world)
    assert len(next(iter(by_tokens))[0]) == 16


def test_lines_of_the_script_are_told_from_libraries() -> None:
    assert is_of_the_script("/home/me/train.py")
    assert not is_of_the_script(torch.optim.__file__)
    assert not is_of_the_script(evenstep.__file__)
