"""The pages on checkpoints are true: their programs and commands are run, in order."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from evenstep.cli.main import main
from tests import pages
from tests.procs.docs.test_readme import environment

PAGES = ("how-to/checkpoints.md", "how-to/stop.md", "reference/checkpoint-format.md")
PROGRAMS = pages.programs(*PAGES)
COMMANDS = pages.commands(*PAGES)
SAYS = {
    "evenstep run --nproc-per-node 2 train.py": "32 steps",
    "evenstep checkpoint list runs/first": "        32  ",
    "evenstep checkpoint show runs/first": "0.weight: float32 [3, 20]",
    "evenstep checkpoint verify runs/first": "step-0000032-00001-4: whole",
    "evenstep run --nproc-per-node 2 --max-restarts 1 two_tiers.py": "70 steps",
    "evenstep checkpoint list runs/tiers": "        70  ",
    "evenstep checkpoint list runs/stopped": "         6  ",
    "evenstep verify --resume --kill-at 18 train.py": "identical: steps 15 to 32",
    "evenstep run --nproc-per-node 4 sharded.py": "4 steps, ranks: 4",
    "evenstep run --nproc-per-node 3 sharded.py": "8 steps, ranks: 3",
    "python sharded.py": "12 steps, ranks: 1",
    "evenstep checkpoint export runs/sharded hub --max-shard-size 1KB": "hub: the tensors of model of step 12 in ",
    "evenstep checkpoint import hub runs/from-hub": "runs/from-hub/step-0000000-00001-1: model",
    "evenstep checkpoint import dcp runs/from-dcp": "runs/from-dcp/step-0000012-00001-1: model, optimizer",
    "evenstep checkpoint diff runs/sharded runs/from-dcp || test $? = 1": "random",
    "evenstep checkpoint list runs/first --json": '"step": 32',
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reader")
    for name, program in PROGRAMS.items():
        (directory / name).write_text(program)
    return directory


def test_every_program_is_run_by_a_command():
    assert all(re.fullmatch(r"\w+\.py", name) for name in PROGRAMS)
    assert {name for name in PROGRAMS if any(name in command for command in COMMANDS)} == set(PROGRAMS)
    assert set(SAYS) <= set(COMMANDS)


@pytest.mark.extended
@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=pytest.mark.extended) if "verify --resume" in each else each for each in COMMANDS],
)
def test_command(command: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    if command.startswith("evenstep checkpoint "):
        # In this process: starting another one means importing torch, for seconds.
        monkeypatch.chdir(workplace)
        words, _, may_be = command.partition(" || test $? = ")
        assert main(words.split()[1:]) == int(may_be or 0)
        said = capsys.readouterr().out
    else:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=workplace,
            env=environment(workplace),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        said = done.stdout
    assert SAYS.get(command, "") in said, said
