"""Where the answer can't be written a command says so in one line, and its status isn't that of findings."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("libcst")

PRINTS = Path(__file__).parents[3] / "scripts" / "planted" / "tutorial_print.py"
SINGLE = Path(__file__).parents[3] / "scripts" / "single" / "accumulation.py"


@pytest.mark.extended(beyond=1)
@pytest.mark.parametrize(
    ("streams", "status", "said"),
    [
        (">/dev/full", 74, "evenstep: standard output can't be written: No space left on device.\n"),
        (">&-", 78, "evenstep: standard output is closed, and would have the answer. Send it to /dev/null instead.\n"),
        ("| true", 74, ""),
    ],
)
@pytest.mark.parametrize("command", ["doctor --no-run", pytest.param("convert", marks=pytest.mark.extended)])
def test_output_that_cannot_be_written(command: str, streams: str, status: int, said: str, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text((PRINTS if command != "convert" else SINGLE).read_text())
    call = f"set -o pipefail; {shlex.quote(sys.executable)} -m evenstep {command} {script} {streams}"
    done = subprocess.run(["bash", "-c", call], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (status, said)


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import evenstep_command; sys.exit(evenstep_command.main())"


def test_reading_does_without_torch():
    """The command `evenstep`: its other commands, and programs, get the whole package."""

    def call(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = call(WITHOUT_TORCH, "doctor", "--no-run", str(PRINTS))
    assert (done.returncode, done.stderr) == (1, ""), done.stderr
    assert "EV201 all ranks print or log" in done.stdout
    done = call(WITHOUT_TORCH, "doctor", "--explain", "EV101")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "EV101 no distributed sampler"), done
    checks = (
        "import torch.distributed as dist; assert hasattr(dist.Backend, 'EVENSTEP'); import evenstep.data.loader as l"
    )
    for first in ("", "import evenstep_command; import evenstep; evenstep.init; "):
        done = call(f"{first}import evenstep; {checks}; assert evenstep.DataLoader is l.DataLoader")
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
