"""docs/how-to/mesh.md is true: its programs run, and say the same on one rank and on two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages

PROGRAMS = pages.programs("how-to/mesh.md")
SAYS = {"mesh.py": r"^norm \d+\.\d{4}$"}


@pytest.mark.extended
def test_programs_say_on_two_ranks_what_they_say_on_one(tmp_path: Path) -> None:
    assert set(PROGRAMS) == set(SAYS)
    for name, program in PROGRAMS.items():
        (tmp_path / name).write_text(program)
    (tmp_path / "all.py").write_text("import runpy\nfor name in %r:\n    runpy.run_path(name)\n" % sorted(PROGRAMS))  # noqa: UP031
    said = []
    for launcher in ([], ["-m", "evenstep", "run", "--nproc-per-node", "2"]):
        command = [sys.executable, *launcher, "all.py"]
        done = subprocess.run(
            command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        said.append(done.stdout)
    assert said[0] == said[1]
    for name, expected in SAYS.items():
        assert re.search(expected, said[0], re.MULTILINE), f"{name}: {said[0]}"
