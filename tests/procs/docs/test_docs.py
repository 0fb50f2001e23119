"""Programs in docs/ run as they stand: every block that begins with `import`, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PROGRAMS = [
    pytest.param(block, id=f"{page.name}:{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if block.startswith("import")
]


def test_there_are_programs() -> None:
    assert PROGRAMS


@pytest.mark.extended
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_of_a_page(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", "2", "program.py"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
