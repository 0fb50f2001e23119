"""The pages on data are true: every program in them runs, on one rank and on two, and says the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages

PAGES = (
    "how-to/data.md",
    "how-to/streams.md",
    "how-to/large-data.md",
    "how-to/evaluate.md",
)
PROGRAMS = pages.programs(*PAGES)
SAYS = {
    "epochs.py": r"epoch 1: 16 steps, first samples \[\d+, \d+, \d+, \d+\]",
    "resume.py": r"stopped at epoch 1, position 48; nothing twice, nothing missing",
    "orders.py": r"10 steps\n100 steps",
    "stream.py": r"7 steps on every rank, each record once",
    "tokens.py": r"62 windows, each once: True",
    "mapped.py": r"1000 rows, each once: True",
    "evaluation.py": r"accuracy 0\.\d{4}",
    "metrics.py": r"\d+ of 33 right, 0\.\d{4}",
}


def test_every_program_is_run() -> None:
    assert set(PROGRAMS) == set(SAYS)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reader")
    for name, program in PROGRAMS.items():
        (directory / name).write_text(program)
    # All in one process, and all in one run of two: starting costs more than running.
    (directory / "all.py").write_text("import runpy\nfor name in %r:\n    runpy.run_path(name)\n" % sorted(PROGRAMS))  # noqa: UP031
    return directory


def said(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments, "all.py"]
    done = subprocess.run(command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.extended
def test_programs_say_on_two_ranks_what_they_say_on_one(workplace: Path) -> None:
    one = said(workplace)
    two = said(workplace, "-m", "evenstep", "run", "--nproc-per-node", "2")
    assert one.stdout == two.stdout
    for name, expected in SAYS.items():
        assert re.search(expected, one.stdout), f"{name}: {one.stdout}"
