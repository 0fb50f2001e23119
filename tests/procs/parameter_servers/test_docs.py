"""docs/how-to/parameter-server.md and remote-embeddings.md are true: their programs are run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.commands import Command

PROGRAMS = pages.blocks("python", "how-to/parameter-server.md")


@pytest.mark.extended
def test_the_program_in_one_process(tmp_path: Path):
    (program,) = PROGRAMS
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert re.search(r"worker 0 of 1: accuracy (0\.[6-9]\d|1\.00), staleness \{0: 160\}", done.stdout), done


@pytest.mark.extended
def test_the_program_with_servers(tmp_path: Path):
    (tmp_path / "train.py").write_text(PROGRAMS[0])
    run = Command(
        tmp_path, ["run", "--servers", "2", "--nproc-per-node", "2", "--device", "cpu", "--all-ranks", "train.py"]
    )
    assert run.wait() == 0, run.stderr
    told = re.findall(r"worker \d of 2: accuracy (\d\.\d\d)", run.stdout)
    assert len(told) == 2, run.stdout
    assert all(float(each) > 0.6 for each in told)


def under_torchrun(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `train.py` on two workers and a server."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py"],
        cwd=folder,
        env=os.environ | {"EVENSTEP_SERVERS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.extended
def test_the_program_under_torchrun(tmp_path: Path):
    """The last of three ranks is the server, by the variable alone."""
    (tmp_path / "train.py").write_text(PROGRAMS[0])
    done = under_torchrun(tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"worker \d of 2: accuracy", done.stdout)) == 2, done.stdout


@pytest.mark.extended
def test_a_dead_rank_ends_the_run_under_torchrun(tmp_path: Path):
    """Nobody hangs: torchrun ends the others."""
    die = "            ps.step()\n            os.kill(os.getpid(), 9) if ps.worker == 1 else None\n"
    (tmp_path / "train.py").write_text("import os\n" + PROGRAMS[0].replace("            ps.step()\n", die))
    done = under_torchrun(tmp_path)
    assert done.returncode == 1, done.stderr
    assert "exitcode  : -9" in done.stderr, done.stderr


@pytest.mark.extended
def test_the_training_that_diverges():
    (program,) = pages.blocks("python", "explanation/parameter-servers.md")
    (output,) = pages.blocks("output", "explanation/parameter-servers.md")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)
    assert done.stdout == output, done


(RECOMMEND,) = pages.blocks("python", "how-to/remote-embeddings.md")


@pytest.mark.extended
def test_the_program_with_tables_in_one_process(tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", RECOMMEND], cwd=tmp_path, capture_output=True, text=True, timeout=90)
    found = re.search(r"worker 0: loss (\d\.\d+), the first user's row \[", done.stdout)
    assert found, done
    assert float(found[1]) < 0.4, "ln 2 without learning"


@pytest.mark.extended
def test_the_program_with_tables_on_servers(tmp_path: Path):
    (tmp_path / "recommend.py").write_text(RECOMMEND)
    run = Command(
        tmp_path, ["run", "--servers", "2", "--nproc-per-node", "2", "--device", "cpu", "--all-ranks", "recommend.py"]
    )
    assert run.wait() == 0, run.stderr
    told = re.findall(r"worker \d: loss (\d\.\d+)", run.stdout)
    assert len(told) == 2, run.stdout
    assert all(float(each) < 0.4 for each in told)
