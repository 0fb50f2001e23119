"""The programs on data of other libraries are true, on one rank and on two, where the libraries are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import pages
from tests.procs.data.test_resumed_streams import needs

SAYS = {
    ("arrow.py", "how-to/large-data.md", "datasets"): ["1000 rows, each once: True"],
    ("hf_stream.py", "how-to/streams.md", "datasets"): [
        f"epoch {epoch}: 1000 rows, each once: True" for epoch in (0, 1)
    ],
    ("tars.py", "how-to/streams.md", "webdataset"): [
        f"epoch {epoch}: 800 samples, each once: True" for epoch in (0, 1)
    ],
}


@pytest.mark.extended
@pytest.mark.parametrize(("name", "page", "package"), SAYS)
def test_other_libraries_programs_on_pages(name: str, page: str, package: str, tmp_path: Path) -> None:
    needs(package)
    (program,) = (block for block in pages.blocks("py", page) if block.startswith(f"# {name}\n"))
    (tmp_path / name).write_text(program)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    for launcher in ([], ["-m", "evenstep", "run", "--nproc-per-node", "2"]):
        done = subprocess.run(
            [sys.executable, *launcher, name],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == SAYS[name, page, package]
