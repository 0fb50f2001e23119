"""What a rank saves that has lost another one: the step that both had finished, whatever has happened since."""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evenstep
from evenstep import Checkpointer, environment, randomness
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.load import restore
from evenstep.checkpoint.save.stream_page import StreamPage
from evenstep.checkpoint.save.survivors import LastStep, why_not
from evenstep.checkpoint.storage.directory import steps_in
from evenstep.checkpoint.storage.storage import LocalDirectory
from evenstep.environment import Placement
from evenstep.errors import PeerLostError
from evenstep.health import recovery_files
from evenstep.world import World


class Counts:
    """A small object of the user's own, with a tensor, and a large one."""

    def __init__(self, numel: int) -> None:
        self.values = torch.zeros(numel)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"].clone()


def objects() -> dict[str, Any]:
    """One of each kind, new, with state."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        "small": Counts(3),
        "large": Counts(100_000),
    }


def step(of: dict[str, Any], generator: torch.Generator) -> None:
    """A whole step of training."""
    of["model"](torch.randn(5, 3, generator=generator).double()).square().mean().backward()
    of["optimizer"].step()
    of["optimizer"].zero_grad()
    of["scheduler"].step()
    of["small"].values += 1


def states(of: dict[str, Any]) -> dict[str, Any]:
    """All there is, in copies."""
    flat = {f"model.{key}": value.clone() for key, value in of["model"].state_dict().items()}
    for number, kept in of["optimizer"].state_dict()["state"].items():
        flat |= {f"optimizer.{number}.{key}": value.clone() for key, value in kept.items()}
    groups = of["optimizer"].param_groups
    flat["lr"] = torch.tensor([group["lr"] for group in groups])
    flat["scheduler"] = torch.tensor(of["scheduler"].last_epoch)
    return flat | {name: of[name].values.clone() for name in ("small", "large")}


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a run of ours, whose rank 0 this process is."""
    placement = dataclasses.replace(Placement(), run_directory=tmp_path)
    monkeypatch.setattr(environment, "current_placement", lambda: placement)
    return tmp_path


@pytest.fixture
def made(run_directory: Path) -> Iterator[Callable[..., tuple[LastStep, dict[str, Any]]]]:
    """Makes the `LastStep` of rank 0 of 2; rank 1 has left its streams of steps 1 to 3."""
    open_ones: list[LastStep] = []
    with randomness.preserved():

        def make(of: dict[str, Any] | None = None) -> tuple[LastStep, dict[str, Any]]:
            of = objects() if of is None else of
            world = World.alone(device="cpu")
            world.world_size = 2
            last_step = LastStep(of, world, "saved")
            open_ones.append(last_step)
            other = StreamPage(last_step._streams_file(1))
            for number in (1, 2, 3):
                torch.manual_seed(1000 + number)
                other.write(number, has_diverged=True)
            other.close()
            return last_step, of

        yield make
        for each in open_ones:
            each.close()


def test_the_last_step_is_saved_whatever_has_happened_since(
    made: Callable[..., tuple[LastStep, dict[str, Any]]], fresh_seed: int
) -> None:
    last_step, of = made()
    generator = torch.Generator().manual_seed(fresh_seed)
    for number in (1, 2, 3):
        step(of, generator)
        torch.manual_seed(fresh_seed + number)
        random.seed(fresh_seed + number)
        last_step.remember(number, {"loss": 0.5})
    expected, streams = states(of), randomness.capture()
    of["model"](torch.randn(5, 3, generator=generator).double()).square().mean().backward()  # a step under way
    of["scheduler"].step()
    of["small"].values += 7
    torch.rand(5)
    random.random()
    last_step._exchange_begins()
    last_step.save()
    assert recovery_files.newest_in_memory(last_step.run_directory) == 3
    assert recovery_files.why_unsaved(last_step.run_directory, 0, 0) is None

    fresh = objects()
    found = restore.find(last_step.storage, World.alone(device="cpu"), 3, fresh, strict=True)
    assert found.manifest.world_size == 2
    assert found.manifest.metrics == {"loss": 0.5}
    of_ranks = found.states[RANDOM]["ranks"]
    restore.apply(found, World.alone(device="cpu"), fresh, "memory")
    assert states(fresh).keys() == expected.keys()
    for name, value in states(fresh).items():
        assert torch.equal(value, expected[name]), name
    assert torch.equal(torch.get_rng_state(), streams.torch_cpu)
    assert random.getstate() == streams.python
    torch.manual_seed(1003)
    assert torch.equal(of_ranks[1]["torch"], torch.get_rng_state())
    assert [each["data_rank"] for each in of_ranks] == [0, 1]
    assert [each["has_diverged"] for each in of_ranks] == [False, True]


def write_over(of: dict[str, Any]) -> None:
    with torch.no_grad():
        of["model"][0].weight.mul_(2)


def begin_to_step(of: dict[str, Any]) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    other.step()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (write_over, "the parameters have changed since step 2 was finished"),
        (begin_to_step, "the parameters have changed since step 2 was finished"),
        (lambda of: of["large"].values.add_(1), "a large object (large) has changed since step 2 was finished"),
    ],
)
def test_a_state_that_is_not_that_of_the_step_is_not_saved(
    made: Callable[..., tuple[LastStep, dict[str, Any]]], changes: Callable[[dict[str, Any]], None], why: str
) -> None:
    last_step, of = made()
    last_step.remember(2, {})
    changes(of)
    last_step.save()
    assert recovery_files.newest_in_memory(last_step.run_directory) is None
    assert recovery_files.why_unsaved(last_step.run_directory, 0, 0) == why


def test_without_the_streams_of_all_ranks_nothing_is_saved(
    made: Callable[..., tuple[LastStep, dict[str, Any]]],
) -> None:
    last_step, _ = made()
    last_step.remember(4, {})
    last_step.save()
    assert recovery_files.newest_in_memory(last_step.run_directory) is None
    found = recovery_files.why_unsaved(last_step.run_directory, 0, 0)
    assert found == "rank 1 has not left its random streams of step 4"


def test_a_model_in_evaluation_is_not_saved(made: Callable[..., tuple[LastStep, dict[str, Any]]]) -> None:
    model = evenstep.DistributedDataParallel(nn.Linear(2, 1), world=World.alone(device="cpu"))
    last_step, _ = made({"model": model})
    last_step.remember(1, {})
    model.eval()
    last_step.save()
    assert recovery_files.why_unsaved(last_step.run_directory, 0, 0) == "the model was being evaluated"
    model.train()
    last_step.save()
    assert recovery_files.newest_in_memory(last_step.run_directory) == 1


def test_an_object_that_fails_is_named_and_not_raised(made: Callable[..., tuple[LastStep, dict[str, Any]]]) -> None:
    last_step, of = made()
    last_step.remember(1, {})

    def fails(state: dict[str, Any]) -> None:
        raise KeyError("no such thing")

    of["small"].load_state_dict = fails
    last_step.save()
    assert recovery_files.why_unsaved(last_step.run_directory, 0, 0) == "KeyError: 'no such thing'"


def test_each_step_is_written_once_and_the_newest_is_kept(
    made: Callable[..., tuple[LastStep, dict[str, Any]]],
) -> None:
    last_step, _ = made()
    for number in (1, 3):
        last_step.remember(number, {})
        last_step.save()
        recovery_files.keep_what_belongs_together(last_step.run_directory, 0)
        assert steps_in(last_step.storage) == [number]
    manifest = last_step.storage.root / "step-0000003" / "manifest.json"
    written = manifest.stat().st_mtime_ns
    last_step.save()
    last_step.save_at_end()
    assert manifest.stat().st_mtime_ns == written


@pytest.fixture
def goes_on(
    made: Callable[..., tuple[LastStep, dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Checkpointer, Path]]]:
    """Makes the `Checkpointer` of a rank that goes on from what a survivor has saved; and where that lies."""
    monkeypatch.setattr(environment, "recovers", lambda: True)
    monkeypatch.setattr(recovery_files, "key_of", lambda where: "key")
    open_ones: list[Checkpointer] = []

    def make(*steps: int, metrics: Mapping[str, float] | None = None, **options: Any) -> tuple[Checkpointer, Path]:
        last_step, _ = made()
        for number in steps:
            last_step.remember(number, metrics or {})
            last_step.save()
        checkpoint = Checkpointer(tmp_path / "saved", world=World.alone(device="cpu"), **options, **objects())
        open_ones.append(checkpoint)
        return checkpoint, last_step.storage.root

    yield make
    for each in open_ones:
        each.close()


def test_a_damaged_step_is_removed_so_that_the_next_ones_count(
    goes_on: Callable[..., tuple[Checkpointer, Path]],
) -> None:
    checkpoint, memory = goes_on(2)
    shutil.copytree(memory / "step-0000002", memory / "step-0000005")  # whose manifest is that of another step
    assert checkpoint.resume() == 2
    assert steps_in(LocalDirectory(memory)) == [2]


@pytest.mark.parametrize(("metrics", "is_saved"), [({"loss": 0.5}, True), ({"loss": 0.9}, False), ({}, False)])
def test_a_best_checkpoint_that_was_under_way_is_saved_anew(
    goes_on: Callable[..., tuple[Checkpointer, Path]], metrics: dict[str, float], is_saved: bool
) -> None:
    before, _ = goes_on(best="loss", every_minutes=None)
    before.step(loss=0.7)
    before.close()
    checkpoint, _ = goes_on(3, metrics=metrics, best="loss", every_minutes=None)
    assert checkpoint.resume() == 3
    checkpoint.wait()
    found = {step: dict(each) for step, each in checkpoint._directory.steps.items()}
    assert found == {1: {"loss": 0.7}, **({3: metrics} if is_saved else {})}


def test_a_save_that_is_due_by_time_is_due_however_often_ranks_were_lost(
    goes_on: Callable[..., tuple[Checkpointer, Path]],
) -> None:
    checkpoint, memory = goes_on(2)
    run_directory = memory.parents[1]
    began = recovery_files.read_time(recovery_files.saved_file(run_directory, "key"))
    assert began is None
    checkpoint.resume()
    recovery_files.saved_file(run_directory, "key").write_text(repr(time.monotonic() - 601))
    checkpoint._world_ended(PeerLostError("rank 1 has gone"))
    again, _ = goes_on()
    again.resume()
    again.step()
    again.wait()
    assert list(again._directory.steps) == [3]
    saved = recovery_files.read_time(recovery_files.saved_file(run_directory, "key"))
    assert saved is not None
    assert time.monotonic() - saved < 600


def test_two_of_them_take_note_of_the_same_exchange(made: Callable[..., tuple[LastStep, dict[str, Any]]]) -> None:
    model = evenstep.DistributedDataParallel(nn.Linear(2, 1), world=World.alone(device="cpu"))
    first, _ = made({"model": model})
    second = LastStep({"model": model}, World.alone(device="cpu"), "elsewhere")
    assert model.engine.before_exchange == [first._exchange_begins, second._exchange_begins]
    second.close()
    assert model.engine.before_exchange == [first._exchange_begins]


def test_where_the_state_is_not_on_every_rank_that_is_said() -> None:
    class Divided:
        """As the sharded optimizers are."""

        def state_shards(self) -> None:
            """Never called."""

    world = World.alone(device="cpu")
    assert why_not(objects(), world) is None
    found = why_not({"optimizer": Divided()}, world)
    assert found == "optimizer (Divided) has a part of its state on one rank only"
    world.device = torch.device("cuda")
    assert why_not(objects(), world) == "the ranks compute on cuda"
