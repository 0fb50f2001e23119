"""The file of a logger: what stands in it, also after a crash and a resume, and what is refused."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep import Logger, World
from evenstep.errors import ConfigurationError, UsageError
from evenstep.logger import logger
from evenstep.logger.logger import write_whole


@pytest.fixture
def world() -> World:
    return World.alone(device="cpu")


def json_lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert all(line.pop("time") > 1e9 for line in lines)
    assert all(line.pop("attempt") == 0 for line in lines)
    return lines


def test_a_line_per_call(world: World, tmp_path: Path) -> None:
    with Logger(tmp_path / "run", world=world) as log:
        log.log({"loss": 0.5, "lr": torch.tensor(0.1, dtype=torch.float64)}, step=0)
        log.log({"loss": torch.tensor([0.25])}, step=1)
        assert len(json_lines(tmp_path / "run")) == 2  # before it is closed
    assert json_lines(tmp_path / "run") == [{"step": 0, "loss": 0.5, "lr": 0.1}, {"step": 1, "loss": 0.25}]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_numbers_that_json_does_not_have(world: World, tmp_path: Path) -> None:
    with Logger(tmp_path, world=world) as log:
        log.log({"a": float("nan"), "b": float("inf"), "c": -torch.tensor(torch.inf)}, step=0)
    assert json_lines(tmp_path) == [{"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}]


def test_steps_that_are_made_again_stand_behind_the_first_ones(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run dies at step 7, behind a checkpoint of step 4. Not a byte that it wrote is changed."""
    before = b""
    for attempt, steps in enumerate((range(8), range(5, 10))):
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": attempt}.items():
            monkeypatch.setenv(name, str(value))
        with Logger(tmp_path, world=world) as log:
            for step in steps:
                log.log({"loss": float(10 * steps.start + step)}, step=step)
        content = (tmp_path / "metrics.jsonl").read_bytes()
        assert content.startswith(before)
        before = content
    lines = [json.loads(line) for line in before.splitlines()]
    assert [line["step"] for line in lines] == [*range(8), *range(5, 10)]
    assert [line["attempt"] for line in lines] == [0] * 8 + [1] * 5
    counts = {line["step"]: line["loss"] for line in lines}  # the later one of a step
    assert list(counts.values()) == [0.0, 1.0, 2.0, 3.0, 4.0, 55.0, 56.0, 57.0, 58.0, 59.0]


def test_a_file_cut_anywhere_is_gone_on_with(world: World, tmp_path: Path, fresh_seed: int) -> None:
    """Whatever a power cut leaves of the end, every whole line stays, and what comes next is a line of its own."""
    draw = random.Random(fresh_seed)
    for round_ in range(60):
        directory = tmp_path / f"{round_}"
        num_steps = draw.randint(1, 12)
        with Logger(directory, world=world) as log:
            for step in range(num_steps):
                log.log({"loss": draw.random(), "x" * draw.choice((1, 1, 1 << 17)): 1.0}, step=step)
        path = directory / "metrics.jsonl"
        whole = path.read_bytes()
        left = draw.randint(0, len(whole))
        path.write_bytes(whole[:left])
        num_whole = whole[:left].count(b"\n")
        with Logger(directory, world=world) as log:
            log.log({"loss": 7.0}, step=num_steps)
        *before, last = path.read_bytes().splitlines(keepends=True)
        assert before == whole.splitlines(keepends=True)[:num_whole], (num_steps, left)
        assert json.loads(last)["loss"] == 7.0


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("whole\n")
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    really_write = os.write
    monkeypatch.setattr(logger.os, "write", lambda fd, data: really_write(fd, data[:3]))
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "torn line\n")
    os.close(file)
    assert path.read_text() == "whole\n"


def test_a_full_disk_does_not_end_the_training(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked: list[int] = []
    with Logger(tmp_path, to=lambda values, step: tracked.append(step), world=world) as log:
        log.log({"loss": 1.0}, step=0)
        with monkeypatch.context() as patched:
            patched.setattr(logger, "write_whole", _fail)
            with pytest.warns(RuntimeWarning, match="No space left.*from step 1 on; training continues"):
                log.log({"loss": 2.0}, step=1)
        log.log({"loss": 3.0}, step=2)
    assert len(json_lines(tmp_path)) == 1
    assert tracked == [0, 1, 2]
    with World.alone(device="cpu") as ended:
        log = Logger(tmp_path, world=ended)
        assert "metrics.jsonl" in repr(log)
    assert "writes nothing here" in repr(log), "the world closes its loggers"


def _fail(file: int, text: str) -> None:
    raise OSError(28, "No space left on device")


# ---------------------------------------------------------------------- trackers


def test_a_tracker_gets_what_is_written(world: World, tmp_path: Path) -> None:
    seen: list[tuple[dict[str, float], int]] = []
    with Logger(tmp_path, to=lambda values, step: seen.append((values, step)), every=2, world=world) as log:
        for step in range(4):
            log.log({"loss": torch.tensor(0.5), "step time": step}, step=step, mean=step > 0)
    assert seen == [({"loss": 0.5, "step time": 0.0}, 0), ({"loss": 0.5, "step time": 2.0}, 2)]
    assert json_lines(tmp_path) == [{"step": step, **values} for values, step in seen]


def test_a_tracker_that_fails_does_not_end_the_training(world: World, tmp_path: Path) -> None:
    def fail(values: dict[str, float], step: int) -> None:
        raise ValueError("no network")

    with Logger(tmp_path, to=fail, world=world) as log:
        with pytest.warns(
            RuntimeWarning, match=r"ValueError: no network. to=.*nothing from step 0 on; training continues"
        ):
            log.log({"loss": 1.0}, step=0)
        log.log({"loss": 2.0}, step=1)
    assert len(json_lines(tmp_path)) == 2


def test_times_of_the_newest_step(world: World, tmp_path: Path) -> None:
    import evenstep

    model = evenstep.DistributedDataParallel(torch.nn.Linear(4, 2), world=world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Logger(tmp_path, telemetry=True, world=world) as log:
        log.log({"loss": 1.0}, step=0)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        log.log({"loss": 1.0}, step=1)
    before, after = json_lines(tmp_path)
    assert before == {"step": 0, "loss": 1.0}
    assert after["time/forward_s"] > 0
    assert after["time/optimizer_s"] > 0
    assert world.telemetry.newest() == world.telemetry.steps()[-1]
    assert world.telemetry.newest(1) is None


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "wandb"}, "to='wandb'; a function, or None"),
        ({"every": 0}, "every=0"),
        ({"directory": "/proc/no/such"}, "/proc/no"),
        ({"directory": __file__}, "test_logger.py"),
    ],
)
def test_arguments(world: World, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Logger(**{"directory": tmp_path, "world": world, **arguments})
    assert str(caught.value).startswith("Logger: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "step", "message"),
    [
        ({"loss": "0.5"}, 0, "'loss' is '0.5'"),
        ({"loss": torch.zeros(2)}, 0, "'loss' is a tensor of shape [2]"),
        ({"loss": 10**400}, 0, "'loss' is 1000"),
        ({"step": 1.0}, 0, "the name 'step'"),
        ({3: 1.0}, 0, "the name 3"),
        ([("loss", 1.0)], 0, "a list; it takes a dictionary"),
        ({"loss": 1.0}, -1, "step=-1"),
    ],
)
@pytest.mark.parametrize("mean", [False, True])
def test_values(world: World, tmp_path: Path, values: Any, step: Any, message: str, mean: bool) -> None:
    with Logger(tmp_path, world=world) as log, pytest.raises(ConfigurationError) as caught:
        log.log(values, step=step, mean=mean)
    assert message in str(caught.value)
    assert str(caught.value).startswith("Logger.log(mean=True): " if mean else "Logger.log on rank 0: ")


def test_steps_go_forward(world: World, tmp_path: Path) -> None:
    with Logger(tmp_path, world=world) as log:
        log.log({"loss": 1.0}, step=5)
        log.log({"accuracy": 1.0}, step=5)
        with pytest.raises(UsageError, match="step 4 after step 5"):
            log.log({"loss": 1.0}, step=4)
