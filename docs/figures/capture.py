"""Takes the pictures of terminals from real runs.

    python docs/figures/capture.py            # all of them, into docs/figures/captured
    python docs/figures/capture.py verify     # one

They show what a run printed, so they differ in numbers each time, and no test compares them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
DOCS = HERE.parent
CHARACTER, LINE = 7.5, 18
FAILING = """\
import evenstep
import torch

with evenstep.init(seed=0) as world:
    model = evenstep.DistributedDataParallel(torch.nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        x = torch.randn(8, 20)
        if world.rank == 1 and step == 7:
            raise ValueError("sample 1234 has no label")
        model.backward(model(x).square().mean(), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
"""


def main() -> None:
    """Take the pictures that the command line names, or all."""
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()


def failed_rank() -> None:
    """The terminal after one of two ranks has failed."""
    command = "evenstep run --nproc-per-node 2 train.py"
    _write("failed-rank", command, _printed(command, {"train.py": FAILING}))


def verify() -> None:
    """The table of `evenstep verify`, from the tutorial's script."""
    command = "evenstep verify --nproc-per-node 1,2 --steps 3 train.py"
    _write("verify", command, _printed(command, {"train.py": _program("tutorials/why-different.md")}))


def doctor() -> None:
    """A finding of `evenstep doctor`, from the tutorial's script."""
    command = "evenstep doctor --no-run train.py"
    _write("doctor", command, _printed(command, {"train.py": _program("tutorials/what-is-wrong.md")}))


PICTURES = {"failed-rank": failed_rank, "verify": verify, "doctor": doctor}


def _program(page: str) -> str:
    """The first program of a page."""
    found = re.search(r"^```python\n# train\.py\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def _printed(command: str, files: dict[str, str]) -> str:
    """What a command prints in a directory with some files."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        for name, content in files.items():
            (where / name).write_text(content)
        env = os.environ | {"COLUMNS": "96", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": "/tmp"}
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
        done = subprocess.run(
            command, shell=True, cwd=where, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.stdout.replace(str(where), "~/project")


def _write(name: str, command: str, printed: str) -> None:
    (HERE / "captured" / f"{name}.svg").write_text(terminal(command, printed))


def terminal(command: str, printed: str) -> str:
    """A terminal as SVG: dark in both modes, as terminals are."""
    lines = [f"$ {command}", *(line.rstrip() for line in printed.rstrip("\n").splitlines())]
    width = round(max(len(line) for line in lines) * CHARACTER + 32)
    height = len(lines) * LINE + 56
    rows = []
    for number, line in enumerate(lines):
        kind = "command" if number == 0 else "ours" if line.startswith("evenstep:") else "out"
        y = 52 + number * LINE
        # Each line as wide as its characters, whatever font there is.
        length = f'textLength="{len(line) * CHARACTER:.0f}" lengthAdjust="spacingAndGlyphs"' if line else ""
        rows.append(f'<text class="{kind}" x="16" y="{y}" xml:space="preserve" {length}>{escape(line)}</text>')
    style = (
        "text { font: 12.5px ui-monospace, 'DejaVu Sans Mono', monospace; white-space: pre }"
        ".out { fill: #c9d1d9 } .command { fill: #7ee787 } .ours { fill: #ffb77c }"
    )
    dots = "".join(
        f'<circle cx="{18 + 18 * i}" cy="18" r="5.5" fill="{c}"/>'
        for i, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="a terminal after {escape(command)}">',
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>',
            dots,
            *rows,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    main()
