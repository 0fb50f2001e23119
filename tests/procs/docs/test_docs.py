"""Programs in docs/ run as they stand; a page that moves, or a program that is added, can't drop out of testing.

A program that begins with `import` is run here, on two ranks. One that begins with its file's name is run by the test
that `RUN_BY` names for its page.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.procs.docs.test_tutorials import HOW_TO, TUTORIALS

ROOT = Path(__file__).parents[3]
PAGES = {page.relative_to(pages.DOCS).as_posix(): page.read_text() for page in sorted(pages.DOCS.rglob("*.md"))}
BLOCKS = {name: pages.blocks("python", name) for name in PAGES}
PROGRAMS = [
    pytest.param(block, id=f"{name}:{number}")
    for name, blocks in BLOCKS.items()
    for number, block in enumerate(blocks)
    if block.startswith("import")
]
RUN_BY = {
    "how-to/reproducible.md": "tests/procs/docs/test_reproducible_page.py",
    **dict.fromkeys(
        ("how-to/checkpoints.md", "how-to/stop.md", "reference/checkpoint-format.md"),
        "tests/procs/checkpoint/test_docs.py",
    ),
    "how-to/convert.md": "tests/unit/tools/convert/test_convert.py",
    **{f"how-to/{page}.md": "tests/procs/data/test_docs.py" for page in ("data", "streams", "large-data", "evaluate")},
    "how-to/examples.md": "tests/procs/docs/test_readme.py",
    **{
        f"how-to/{page}.md": "tests/procs/docs/test_optimizers_page.py"
        for page in ("optimizers", "mixed-precision", "contrastive", "learning-rates", "local-sgd")
    },
    "how-to/mesh.md": "tests/procs/parallel/test_docs.py",
    "explanation/parameter-servers.md": "tests/procs/parameter_servers/test_docs.py",
    "how-to/parameter-server.md": "tests/procs/parameter_servers/test_docs.py",
    "how-to/remote-embeddings.md": "tests/procs/parameter_servers/test_docs.py",
    "reference/doctor.md": "tests/unit/tools/doctor/test_pages.py",
    "reference/api.md": "tests/unit/test_api_page.py",
    **dict.fromkeys((*TUTORIALS, *HOW_TO), "tests/procs/docs/test_tutorials.py"),
}


def test_pages_that_are_played_exist() -> None:
    assert set(RUN_BY) <= set(PAGES)


@pytest.mark.parametrize("name", [name for name, blocks in BLOCKS.items() if blocks])
def test_every_program_of_a_page_is_run(name: str) -> None:
    elsewhere = [block for block in BLOCKS[name] if not block.startswith("import")]
    assert not elsewhere or name in RUN_BY, f"a program of {name} begins neither with import nor with its name"
    if name in RUN_BY and name not in (*TUTORIALS, *HOW_TO):
        assert name in (ROOT / RUN_BY[name]).read_text(), f"{RUN_BY[name]} doesn't name {name}"


@pytest.mark.extended
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_of_a_page(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", "2", "program.py"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
