"""Each command of the pages on launchers and faults is run here, or named with the test that runs it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from evenstep.cli.main import main
from tests import pages
from tests.procs.docs.test_readme import PROGRAMS, call

ROOT = Path(__file__).parents[3]

FAULTS = "tests/faults/test_run_faults.py"
HOSTS = "tests/hosts/test_runs.py"

# What is run elsewhere: the test that does, and what of the command it runs.
ELSEWHERE = {
    "python train.py": "tests/procs/docs/test_readme.py",
    "evenstep run --nproc-per-node 2 train.py": "tests/procs/docs/test_readme.py",
    "torchrun --nproc-per-node 2 train.py": "tests/procs/docs/test_readme.py",
    "mpiexec -n 2 python train.py": "tests/launchers/test_mpi.py",
    "srun -n 2 python train.py": "tests/launchers/test_slurm.py",
    "evenstep run --nnodes 2 --node-rank 0 --master-addr host0 --master-port 29500 train.py": HOSTS,
    "evenstep run --nnodes 1:3 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint host0:29400 --rdzv-id my-run "
    "train.py": HOSTS,
    "srun --ntasks-per-node 1 evenstep run --nnodes 2 train.py": "tests/launchers/test_slurm.py",
    "evenstep run --check --nproc-per-node 2": "tests/procs/tools/preflight/test_rank_check.py",
    'evenstep run --nproc-per-node 2 --inject "kill:rank=1,step=2,phase=backward" train.py': FAULTS,
    'evenstep run --nproc-per-node 2 --inject "exit:rank=0,step=1" train.py': FAULTS,
}


def commands() -> list[str]:
    return pages.commands("how-to/launchers.md", "reference/faults.md")


def test_what_is_run_elsewhere_is_still_in_the_docs() -> None:
    assert set(ELSEWHERE) <= set(commands())
    assert all((ROOT / path).exists() for path in ELSEWHERE.values())


@pytest.mark.extended
@pytest.mark.parametrize("command", [command for command in commands() if command not in ELSEWHERE])
def test_command(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command)
    assert program == "evenstep"
    if arguments[0] != "run":
        assert main(arguments) == 0  # in this process: it starts nothing
        assert capsys.readouterr().out
        return
    (tmp_path / "train.py").write_text(PROGRAMS["train.py"])
    done = call(command, tmp_path)
    assert done.returncode == 71, done.stderr
    assert "is stopped (state T)" in done.stderr
