"""The files of a logger: what stands in them, also after a crash and a resume, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from evenstep import Logger, World
from evenstep.errors import ConfigurationError, UsageError
from evenstep.logger import files, logger
from evenstep.logger.files import Csv, JsonLines, TensorBoard, why_no_tensorboard, write_whole


@pytest.fixture
def world() -> World:
    return World.alone(device="cpu")


def json_lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert all(line.pop("time") > 1e9 for line in lines)
    return lines


def csv_rows(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row.pop("time")) > 1e9 for row in rows)
    return rows


def test_a_line_per_call(world: World, tmp_path: Path) -> None:
    with Logger(tmp_path / "run", formats=("jsonl", "csv"), world=world) as log:
        log.log({"loss": 0.5, "lr": torch.tensor(0.1, dtype=torch.float64)}, step=0)
        log.log({"loss": torch.tensor([0.25])}, step=1)
        assert len(json_lines(tmp_path / "run")) == 2  # before it is closed
    assert json_lines(tmp_path / "run") == [{"step": 0, "loss": 0.5, "lr": 0.1}, {"step": 1, "loss": 0.25}]
    assert csv_rows(tmp_path / "run") == [
        {"step": "0", "loss": "0.5", "lr": "0.1"},
        {"step": "1", "loss": "0.25", "lr": ""},
    ]


def test_a_name_that_comes_later_is_a_new_column(world: World, tmp_path: Path) -> None:
    with Logger(tmp_path, formats=("csv",), world=world) as log:
        log.log({"loss": 1.0}, step=0)
        log.log({'a, "quoted" name': 2.0}, step=0)
        log.log({"loss": 3.0, 'a, "quoted" name': 4.0}, step=1)
    assert csv_rows(tmp_path) == [
        {"step": "0", "loss": "1.0", 'a, "quoted" name': ""},
        {"step": "0", "loss": "", 'a, "quoted" name': "2.0"},
        {"step": "1", "loss": "3.0", 'a, "quoted" name': "4.0"},
    ]


def test_numbers_that_json_does_not_have(world: World, tmp_path: Path) -> None:
    with Logger(tmp_path, world=world) as log:
        log.log({"a": float("nan"), "b": float("inf"), "c": -torch.tensor(torch.inf)}, step=0)
    assert json_lines(tmp_path) == [{"step": 0, "a": "NaN", "b": "Infinity", "c": "-Infinity"}]


def test_steps_that_are_made_again_are_written_once(world: World, tmp_path: Path) -> None:
    """The first run dies at step 7, behind a checkpoint of step 4."""
    for steps in (range(8), range(5, 10)):
        with Logger(tmp_path, formats=("jsonl", "csv"), world=world) as log:
            for step in steps:
                log.log({"loss": float(10 * steps.start + step)}, step=step)
    expected = [0.0, 1.0, 2.0, 3.0, 4.0, 55.0, 56.0, 57.0, 58.0, 59.0]
    assert [line["loss"] for line in json_lines(tmp_path)] == expected
    assert [float(row["loss"]) for row in csv_rows(tmp_path)] == expected


def test_no_run_loses_the_lines_of_an_earlier_one(world: World, tmp_path: Path, capsys: Any, fresh_seed: int) -> None:
    """Three fresh runs and a resumed one, with other metrics each: every line is in one of the two files, once."""
    draw = random.Random(fresh_seed)
    written: list[dict[str, Any]] = []
    first_steps = [draw.randint(0, 3), 0, draw.randint(0, 3), 4]
    for run, first in enumerate(first_steps):
        with Logger(tmp_path, formats=("jsonl", "csv"), world=world) as log:
            for step in range(first, first + draw.randint(2, 7)):
                written.append({"step": step, f"of {run % 2}": float(len(written))})
                log.log({f"of {run % 2}": written[-1][f"of {run % 2}"]}, step=step)
    replaced = tmp_path / "replaced"
    replaced.mkdir()
    for kind in ("jsonl", "csv"):
        (tmp_path / f"metrics.replaced.{kind}").rename(replaced / f"metrics.{kind}")
    found = json_lines(tmp_path) + json_lines(replaced)
    assert sorted(found, key=str) == sorted(written, key=str)
    rows = [{k: float(v) for k, v in row.items() if v} for row in csv_rows(tmp_path) + csv_rows(replaced)]
    assert sorted(rows, key=str) == sorted(({k: float(v) for k, v in line.items()} for line in written), key=str)
    assert f"by an earlier run. They are in metrics.replaced.{kind} now" in capsys.readouterr().err
    assert [line["step"] for line in json_lines(tmp_path)] == sorted(line["step"] for line in json_lines(tmp_path))


def test_two_loggers_of_a_run_share_the_files(world: World, tmp_path: Path) -> None:
    train, test = (
        Logger(directory, formats=("jsonl", "csv"), world=world) for directory in (tmp_path, f"{tmp_path}/.")
    )
    for step in range(4):
        train.log({"loss": float(step)}, step=step)
        if step % 2:
            test.log({"accuracy": float(step)}, step=step)
    train.close()
    test.log({"accuracy": 9.0}, step=9)
    test.close()
    expected: list[dict[str, Any]] = [
        *({"step": 0, "loss": 0.0}, {"step": 1, "loss": 1.0}, {"step": 1, "accuracy": 1.0}, {"step": 2, "loss": 2.0}),
        *({"step": 3, "loss": 3.0}, {"step": 3, "accuracy": 3.0}, {"step": 9, "accuracy": 9.0}),
    ]
    assert json_lines(tmp_path) == expected
    rows = [{k: float(v) for k, v in row.items() if v} for row in csv_rows(tmp_path)]
    assert rows == [{k: float(v) for k, v in line.items()} for line in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_a_second_process_is_refused_while_the_first_logs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WAIT_S", 0.2)
    program = f"""
        import os, sys
        from evenstep import Logger, World
        log = Logger({str(tmp_path)!r}, world=World.alone(device="cpu"), formats=("csv", "jsonl"))
        for step in (0, 1):
            log.log({{"loss": 1.0, f"new {{step}}": 2.0}}, step=step)
            print(step, flush=True)
            sys.stdin.readline()
        if os.fork() == 0:  # as a worker of a loader, which may outlive its rank
            log.log({{"loss": 7.0}}, step=2)
            print("child", flush=True)
            sys.stdin.readline()
            os._exit(0)
        sys.stdin.readline()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        for step in (0, 1):  # also after the file was replaced, for a new column
            assert other.stdout.readline() == f"{step}\n"
            for kind in ("csv", "jsonl"):
                with pytest.raises(
                    ConfigurationError, match=r"Logger on rank 0: .* open in a Logger of another process"
                ):
                    Logger(tmp_path, formats=(kind,), world=world)
            other.stdin.write("\n")
            other.stdin.flush()
        assert other.stdout.readline() == "child\n"
        other.kill()
        other.wait()
        with Logger(tmp_path, formats=("csv", "jsonl"), world=world) as log:
            log.log({"loss": 3.0}, step=2)
    assert [line["loss"] for line in json_lines(tmp_path)] == [1.0, 1.0, 3.0]
    assert [row["loss"] for row in csv_rows(tmp_path)] == ["1.0", "1.0", "3.0"]


def test_a_logger_that_writes_nothing_leaves_nothing(world: World, tmp_path: Path) -> None:
    Logger(tmp_path, formats=("jsonl", "csv"), world=world).close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_cut_anywhere_is_gone_on_with(tmp_path: Path, fresh_seed: int) -> None:
    """Whatever a power cut leaves of the end, the resumed file is that of a run that never stopped."""
    draw = random.Random(fresh_seed)
    for round_ in range(60):
        for kind, name in ((JsonLines, "metrics.jsonl"), (Csv, "metrics.csv")):
            num_steps = draw.randint(1, 12)
            straight, cut = tmp_path / f"{round_}-straight-{name}", tmp_path / f"{round_}-cut-{name}"
            rows = [{"loss": draw.random(), **({"late": draw.random()} if s > 5 else {})} for s in range(num_steps)]
            for path in (straight, cut):
                _write(kind(path), enumerate(rows))
            whole = cut.read_bytes()
            lines = whole.splitlines(keepends=True)
            left = draw.randint(0, len(whole))
            cut.write_bytes(whole[:left])
            ends = [sum(map(len, lines[: n + 1])) for n in range(len(lines))]
            num_whole = sum(end <= left for end in ends) - (kind is Csv)
            # The checkpoint is of a step that was whole in the file, or before.
            first = draw.randint(0, max(0, num_whole))
            _write(kind(cut), list(enumerate(rows))[first:])
            if first < num_steps:
                assert cut.read_bytes() == straight.read_bytes(), (kind, left, first)


def _write(writer: Any, rows: Any) -> None:
    for step, values in rows:
        writer.write(step, 1000.0 + step, values)
    writer.close()


def test_a_line_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("whole\n")
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    really_write = os.write
    monkeypatch.setattr(files.os, "write", lambda fd, data: really_write(fd, data[:3]))
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "torn line\n")
    os.close(file)
    assert path.read_text() == "whole\n"


def test_a_full_disk_does_not_end_the_training(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Logger(tmp_path, formats=("jsonl", "csv"), world=world) as log:
        log.log({"loss": 1.0}, step=0)
        with monkeypatch.context() as patched:
            patched.setattr(JsonLines, "write", _fail)
            with pytest.warns(RuntimeWarning, match="No space left.*from step 1 on, training goes on"):
                log.log({"loss": 2.0}, step=1)
        log.log({"loss": 3.0}, step=2)
    assert len(json_lines(tmp_path)) == 1
    assert len(csv_rows(tmp_path)) == 3


def _fail(self: object, step: int, seconds: float, values: Mapping[str, float]) -> None:
    raise OSError(28, "No space left on device")


def test_only_some_steps(world: World, tmp_path: Path) -> None:
    with Logger(tmp_path, every=3, world=world) as log:
        for step in range(8):
            log.log({"loss": 1.0}, step=step, mean=True, weight=8)
    assert [line["step"] for line in json_lines(tmp_path)] == [0, 3, 6]


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


def test_the_world_closes_its_loggers(tmp_path: Path) -> None:
    with World.alone(device="cpu") as world:
        log = Logger(tmp_path, world=world)
        log.log({"loss": 1.0}, step=0)
        assert "JsonLines" in repr(log)
    assert "writes nothing here" in repr(log)


# ---------------------------------------------------------------------- TensorBoard


class Recorded:
    """Stands for torch's SummaryWriter."""

    def __init__(self, directory: str, purge_step: int) -> None:
        self.calls: list[tuple[Any, ...]] = [("made", purge_step)]

    def add_scalar(self, name: str, value: float, step: int, walltime: float) -> None:
        self.calls.append((name, value, step))

    def flush(self) -> None:
        self.calls.append(("flush",))

    def close(self) -> None:
        self.calls.append(("close",))


def test_scalars_for_tensorboard(tmp_path: Path) -> None:
    made: list[Recorded] = []

    def make(directory: str, step: int) -> Recorded:
        made.append(Recorded(directory, step))
        return made[-1]

    writer = TensorBoard(tmp_path, make)
    writer.write(7, 1000.0, {"loss": 0.5, "lr": 0.1})
    writer.close()
    writer.close()
    assert made[0].calls == [("made", 7), ("loss", 0.5, 7), ("lr", 0.1, 7), ("flush",), ("close",)]


@pytest.mark.skipif(why_no_tensorboard() is not None, reason="TensorBoard is not installed")
def test_events_of_the_real_tensorboard(world: World, tmp_path: Path) -> None:
    """Read back by TensorBoard itself: names, steps, times and values; steps that are made again stand there once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    began = time.time()
    for run, steps in enumerate((range(8), range(5, 10))):
        with Logger(tmp_path, formats=("tensorboard",), world=world) as log:
            for step in steps:
                log.log({"loss": step + run / 4, "lr": torch.tensor(0.5)}, step=step)
            log.log({"rare/value": math.nan}, step=steps[-1])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss", "lr", "rare/value"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        *((step, step) for step in range(5)),
        *((step, step + 0.25) for step in range(5, 10)),
    ]
    assert [event.value for event in events.Scalars("lr")] == [0.5] * 10
    (rare,) = events.Scalars("rare/value")  # that of step 7 went with the steps that were made again
    assert rare.step == 9
    assert math.isnan(rare.value)
    assert all(began - 1 <= event.wall_time <= time.time() + 1 for event in events.Scalars("loss"))


def test_without_tensorboard_the_error_says_what_to_install(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logger, "why_no_tensorboard", lambda: "No module named 'tensorboard'")
    with pytest.raises(ConfigurationError) as caught:
        Logger(tmp_path, formats=("tensorboard",), world=world)
    assert "No module named 'tensorboard'" in str(caught.value)
    assert 'pip install "evenstep[tensorboard]"' in str(caught.value)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"formats": ("xml",)}, "formats=('xml',)"),
        ({"formats": "csv"}, "formats='csv'"),
        ({"formats": ()}, "formats=()"),
        ({"formats": 3}, "formats=3"),
        ({"formats": ([],)}, "formats=([],)"),
        ({"every": 0}, "every=0"),
        ({"directory": "/proc/no/such"}, "/proc/no"),
        ({"directory": __file__}, "test_logger.py"),
    ],
)
def test_arguments(world: World, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Logger(**{"directory": tmp_path, "world": world, **arguments})
    assert "Logger on rank 0" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "step", "message"),
    [
        ({"loss": "0.5"}, 0, "'loss' is '0.5'"),
        ({"loss": torch.zeros(2)}, 0, "'loss' is a tensor of shape [2]"),
        ({"loss": None}, 0, "'loss' is None"),
        ({"loss": torch.zeros((), dtype=torch.complex64)}, 0, "'loss' is a tensor"),
        ({"step": 1.0}, 0, "the name 'step'"),
        ({3: 1.0}, 0, "the name 3"),
        ([("loss", 1.0)], 0, "a list; it takes a dictionary"),
        ({"loss": 1.0}, -1, "step=-1"),
        ({"loss": 1.0}, 1.5, "step=1.5"),
    ],
)
@pytest.mark.parametrize("mean", [False, True])
def test_values(world: World, tmp_path: Path, values: Any, step: Any, message: str, mean: bool) -> None:
    with Logger(tmp_path, world=world) as log, pytest.raises(ConfigurationError) as caught:
        log.log(values, step=step, mean=mean)
    assert message in str(caught.value)
    assert "rank 0" in str(caught.value)


def test_steps_go_forward(world: World, tmp_path: Path) -> None:
    with Logger(tmp_path, world=world) as log:
        log.log({"loss": 1.0}, step=5)
        log.log({"accuracy": 1.0}, step=5)
        with pytest.raises(UsageError, match="step 4 after step 5"):
            log.log({"loss": 1.0}, step=4)


def test_a_file_of_somebody_else(world: World, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("name,address\nAda,London\n")
    with pytest.raises(ConfigurationError, match=r"Logger on rank 0: .* no file of a Logger"):
        Logger(tmp_path, formats=("csv",), world=world)
    assert (tmp_path / "metrics.csv").read_text() == "name,address\nAda,London\n"
