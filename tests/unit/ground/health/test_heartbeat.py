"""The heartbeat page: what is marked is read, from outside the process too."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evenstep.ground.health import heartbeat
from evenstep.ground.health.heartbeat import Phase, read_page


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = heartbeat.page_file(tmp_path, 3, 0)
    heartbeat.open_page(path)
    yield path
    heartbeat.close_page()


def test_what_is_marked_is_read(path: Path) -> None:
    before = time.monotonic_ns()
    heartbeat.mark(Phase.FORWARD, step=7)
    heartbeat.mark_collective(418, bucket=2)
    heartbeat.mark_waiting(True)
    seen = read_page(path)
    assert seen is not None
    assert (seen.pid, seen.phase, seen.step, seen.collective) == (os.getpid(), Phase.FORWARD, 7, 418)
    assert (seen.is_waiting, seen.bucket) == (True, 2)
    assert before <= seen.time_ns <= time.monotonic_ns()
    assert str(seen) == "in forward, step 7, collective 418"
    heartbeat.mark(Phase.BACKWARD)
    heartbeat.mark_waiting(False)
    heartbeat.mark_collective(419)
    later = read_page(path)
    assert later is not None
    assert (later.phase, later.step, later.is_waiting, later.bucket) == (Phase.BACKWARD, 7, False, None)
    assert not later.is_done
    heartbeat.mark_done()
    assert (at_the_end := read_page(path)) is not None
    assert at_the_end.is_done


def test_without_a_page_marking_does_nothing(tmp_path: Path) -> None:
    heartbeat.mark(Phase.FORWARD, step=1)
    heartbeat.mark_collective(1)
    heartbeat.mark_waiting(True)
    assert read_page(tmp_path / "none") is None
    heartbeat.close_page()


def test_a_page_outlives_its_rank_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "page"
    opened = f"heartbeat.open_page(pathlib.Path({str(path)!r}))"
    code = f"import os, pathlib; from evenstep.ground.health import heartbeat; {opened}"
    ending = "; heartbeat.mark(heartbeat.Phase.OPTIMIZER, step=5); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code + ending], check=False)
    seen = read_page(path)
    assert seen is not None
    assert (seen.phase, seen.step) == (Phase.OPTIMIZER, 5)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("data", [b"", b"x" * 64, bytes(64), b"short"])
def test_what_is_no_page_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "page").write_bytes(data)
    assert read_page(tmp_path / "page") is None
