"""What the pages show of other libraries runs with them: `make test-peers` installs them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import libraries

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
    return start(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script=script,
        directory=directory,
        **variables,
    )


def start(*options: str, script: str, directory: Path, **variables: str) -> str:
    """Run a script in a directory and return what it prints."""
    (directory / "train.py").write_text(script)
    command = [sys.executable, *options, "train.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HOME": str(directory), **variables}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(library: str) -> None:
    """Skip a test where a library isn't installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.extended
@pytest.mark.parametrize(("module", "saved"), [("accelerate", "state"), ("lightning_fabric", "state.ckpt")])
def test_other_libraries_loop_before(module: str, saved: str, tmp_path: Path) -> None:
    needs(module)
    name = module.replace("_", ".")
    (loop,) = (each for each in pages.blocks("py", "how-to/migrate/accelerate-fabric.md") if f"from {name} " in each)
    # The page names the whole of Lightning; `lightning_fabric` is the part of it that is needed.
    printed = run(BEFORE + loop.replace(name, module), tmp_path, ACCELERATE_USE_CPU="1")
    assert [line for line in printed.splitlines() if line.startswith("epoch")] == ["epoch 0", "epoch 1", "epoch 2"]
    assert (tmp_path / saved).exists()


@pytest.mark.extended
@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_other_libraries_trackers(tracker: str, tmp_path: Path) -> None:
    lines = {name: line for line, name in TRACKED.findall(pages.text("how-to/logging.md"))}
    assert set(lines) == {"wandb", "trackio"}
    needs(tracker)
    program = pages.programs("how-to/logging.md")["track.py"]
    assert "run = PrintedRun() if" in program
    script = f"import {tracker}\n" + program.replace("run = PrintedRun() if", f"run = {lines[tracker]} if")
    run(script, tmp_path, WANDB_MODE="offline")
    written = [path for path in tmp_path.rglob("*") if path.suffix in (".wandb", ".db")]
    assert len(written) == 1, "one run, of rank 0"


@pytest.mark.extended
def test_other_libraries_tensorboard(tmp_path: Path) -> None:
    """Read back by TensorBoard itself; what a run makes again stands there once."""
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    program = pages.programs("how-to/logging.md")["board.py"]
    run(program, tmp_path)
    again = program.replace("first = 0", "first = 2").replace("range(first, 3)", "range(first, 5)")
    run(again.replace("1.0 + world.rank", "2.0 + world.rank"), tmp_path)
    events = EventAccumulator(str(tmp_path / "runs" / "board")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(0, 1.5), (1, 1.5), (2, 2.5), (3, 2.5), (4, 2.5)]
    lines = [json.loads(line) for line in (tmp_path / "runs" / "board" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 4]


@pytest.mark.extended
def test_other_libraries_line_of_pandas(tmp_path: Path) -> None:
    """Of two lines of a step the later attempt's counts, name by name; a rare name isn't lost."""
    needs("pandas")
    (line,) = re.findall(r"`(pandas\.read_json[^`]*)`", pages.text("how-to/logging.md"))
    written = [(0, 0, {"loss": 1.0}), (1, 0, {"loss": 2.0}), (1, 0, {"accuracy": 0.5}), (2, 0, {"loss": 3.0})]
    written += [(1, 1, {"loss": 4.0}), (2, 1, {"loss": 5.0}), (3, 1, {"loss": 6.0})]
    folder = tmp_path / "runs" / "example"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "attempt": a, "time": 1e9, **values}) + "\n" for s, a, values in written)
    )
    script = f"import pandas\nfound = {line}\nprint(found.loss.to_dict(), found.accuracy[1], list(found.attempt))\n"
    printed = run(script, tmp_path).splitlines()
    assert printed == ["{0: 1.0, 1: 4.0, 2: 5.0, 3: 6.0} 0.5 [0, 1, 1, 1]"] * 2


@pytest.mark.extended
def test_other_libraries_arrow_files(tmp_path: Path) -> None:
    needs("datasets")
    (program,) = pages.blocks("py", "how-to/large-data.md")
    assert run(program, tmp_path) == "1000 rows, each once: True\n"
    assert list((tmp_path / "table").glob("*.arrow"))


def page_program(name: str) -> str:
    (program,) = (each for each in pages.blocks("py", "how-to/with-what-you-use.md") if each.startswith(f"# {name}"))
    return program


@pytest.mark.extended
def test_other_libraries_trainer_of_hugging_face(tmp_path: Path) -> None:
    """The same digits as over Gloo."""
    needs("transformers")
    program = page_program("trainer.py")
    ours, gloos = (run(each, tmp_path) for each in (program, program.replace('group("evenstep")', 'group("gloo")')))
    (line,) = (each for each in ours.splitlines() if each.startswith("loss"))
    assert line.endswith(" over evenstep")
    assert line.replace("over evenstep", "over gloo") in gloos.splitlines()


@pytest.mark.extended
def test_other_libraries_trainer_of_lightning(tmp_path: Path) -> None:
    needs("lightning")
    assert "trained over evenstep" in start(script=page_program("lightning_trainer.py"), directory=tmp_path)


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_other_libraries_ray_restarts_a_killed_worker(tmp_path: Path) -> None:
    """Killed at step 13 of its first attempt, the run resumes at step 10 and ends with an undisturbed run's digits."""
    needs("ray")
    program = page_program("ray_train.py")
    kill = """checkpoint.step()
                done = sum(1 for _ in Path(config["directory"]).parent.glob("step-*"))
                if world.rank == 1:
                    Path(config["directory"]).parent.joinpath(f"step-{done}").touch()
                    if done == 12:
                        os.kill(os.getpid(), signal.SIGKILL)
"""
    assert program.count("checkpoint.step()\n") == 1
    killed = "import os\nimport signal\n" + program.replace("checkpoint.step()\n", kill)
    killed = killed.replace("checkpoint.resume()", 'print("resumed at", checkpoint.resume())')
    printed = []
    for name, script in (("undisturbed", program), ("killed", killed)):
        (tmp_path / name).mkdir()
        printed.append(start(script=script, directory=tmp_path / name, RAY_TRAIN_V2_ENABLED="1"))
    digits = [set(re.findall(r"trained over shared memory: (\S+)", each)) for each in printed]
    assert digits[0] == digits[1]
    assert len(digits[0]) == 1
    assert "resumed at 10" in printed[1]


CELLS = [line.strip("| ").split(" | ") for line in pages.text("explanation/equal-replicas.md").splitlines()]
ROWS = {cells[0]: cells for cells in CELLS if cells[0] in libraries.CASES}


@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", libraries.LIBRARIES)
def test_other_libraries_answers(library: str) -> None:
    """What the page says that a library computes: the answer of one process but for rounding, or another one."""
    needs(libraries.LIBRARIES[library][0])
    column = 1 + list(libraries.LIBRARIES).index(library)
    is_right = {case: float(row[column]) < 1e-5 for case, row in ROWS.items()}
    assert is_right == {case: libraries.distance(library, case) < 1e-5 for case in libraries.CASES}
