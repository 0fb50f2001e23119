"""Temporary directories: what a killed process has left is removed, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from evenstep.ground.host.temporary import private_directory, sweep

STAYS = """
import os, sys
from evenstep.ground.host.temporary import private_directory
with private_directory("run") as directory:
    (directory / "rendezvous").write_text("...")
    print(directory, flush=True)
    sys.stdin.read()
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_directory_is_private_and_ends_with_its_block(root: Path) -> None:
    with private_directory("run") as directory:
        assert directory.parent == root
        assert directory.name.startswith("evenstep-run-")
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "inside").mkdir()
        sweep(root)
        assert (directory / "inside").is_dir(), "its lock is held"
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("ending", [signal.SIGKILL, None])
def test_what_a_killed_process_has_left_goes_when_the_next_one_comes(root: Path, ending: signal.Signals | None) -> None:
    with subprocess.Popen([sys.executable, "-c", STAYS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().decode().strip())
        with private_directory("verify"):
            assert (left / "rendezvous").exists(), "its process runs"
        if ending is not None:
            process.send_signal(ending)
        else:
            process.communicate(b"")  # it ends without having removed it
    assert left.is_dir()
    with private_directory("run") as mine:
        assert [path for path in root.iterdir() if path.is_dir()] == [mine]


def test_what_is_not_known_to_be_left_stays(root: Path) -> None:
    """Somebody else's, one of another kernel, whose locks can't be seen here, and links that lead elsewhere."""
    (root / "evenstep-logs-1-abc").mkdir()
    (root / "evenstep-run-nothing").mkdir()
    (root / "evenstep-run-other").mkdir()
    (root / "evenstep-run-other" / "owner").write_text("another boot")
    (root / "evenstep-run-file").write_text("")
    elsewhere = root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner").write_bytes(Path("/proc/sys/kernel/random/boot_id").read_bytes().strip())
    (root / "evenstep-run-link").symlink_to(elsewhere)
    (root / "evenstep-run-inside").mkdir()
    (root / "evenstep-run-inside" / "owner").symlink_to(elsewhere / "owner")
    before = sorted(os.listdir(root))
    sweep(root)
    assert sorted(os.listdir(root)) == before
    sweep(root / "no such directory")
