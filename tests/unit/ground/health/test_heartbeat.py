"""The heartbeat page: what is marked is read, from outside the process too."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from evenstep.ground.health import heartbeat
from evenstep.ground.health.heartbeat import _MARK, PAGE_BYTES, REPORT_BYTES, Note, Page, Phase
from evenstep.ground.health.peer_heartbeats import NodePages


def test_what_is_marked_is_read(page: Page) -> None:
    before = time.monotonic_ns()
    heartbeat.mark(Phase.FORWARD, step=7)
    heartbeat.mark_collective(418)
    heartbeat.mark_waiting(True)
    seen = page.read()
    assert seen is not None
    assert (seen.pid, seen.rank, seen.phase, seen.step, seen.collective) == (os.getpid(), 3, Phase.FORWARD, 7, 418)
    assert (seen.is_waiting, seen.saved_step) == (True, None)
    assert before <= seen.time_ns <= time.monotonic_ns()
    assert str(seen) == "in forward, step 7 of this attempt, collective 418"
    heartbeat.mark(Phase.BACKWARD)
    heartbeat.mark_waiting(False)
    heartbeat.mark_collective(419)
    heartbeat.mark_commit(0)
    later = page.read()
    assert later is not None
    assert (later.phase, later.step, later.is_waiting) == (Phase.BACKWARD, 7, False)
    assert (later.saved_step, later.is_done) == (0, False)
    for step in (4, 2):  # local copies may be complete before an earlier checkpoint is
        heartbeat.mark_commit(step)
    heartbeat.note(Note.IS_DONE)
    assert (at_the_end := page.read()) is not None
    assert (at_the_end.saved_step, at_the_end.is_done) == (4, True)


def test_a_page_outlives_its_rank_and_says_what_the_rank_did_last() -> None:
    pages = NodePages(2)
    assert pages.pages[1].read() is None, "no rank has written yet"
    code = """
import os, sys
from evenstep.ground.environment import Placement
from evenstep.ground.health import heartbeat, peer_heartbeats
peer_heartbeats.write_page(Placement(rank=5, world_size=6, local_rank=1, local_world_size=2, pages=tuple(sys.argv[1:])))
heartbeat.mark(heartbeat.Phase.OPTIMIZER, step=5)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code, *pages.files], check=False)
    file = os.stat(pages.files[1])
    assert (file.st_mode & 0o777, file.st_size) == (0o600, PAGE_BYTES)
    assert file.st_blocks * 512 >= PAGE_BYTES, "a hole would be a SIGBUS where memory is short"
    pages.close()
    seen = pages.pages[1].read()
    assert seen is not None
    assert (seen.rank, seen.phase, seen.step) == (5, Phase.OPTIMIZER, 5)
    assert pages.pages[0].read() is None


def test_a_report_that_fills_its_place_spoils_nothing(page: Page) -> None:
    page.write_site("here")
    page.write_report(b"x" * REPORT_BYTES)
    assert page.report() == b"x" * REPORT_BYTES
    assert page.sites() == ["here", "", "", ""]
    with pytest.raises(ValueError, match="different structures"):
        page.write_report(b"y" * (REPORT_BYTES + 1))
    assert page.report() == b"", "a report that isn't whole is none"
    assert (seen := page.read()) is not None
    assert seen.rank == 3


@pytest.mark.parametrize("data", [b"", _MARK, bytes(PAGE_BYTES)], ids=["empty", "short", "zeros"])
def test_what_is_no_page_is_not_mapped(data: bytes) -> None:
    fd = os.memfd_create("no page")
    try:
        os.write(fd, data)
        assert Page.at(f"/proc/self/fd/{fd}") is None
    finally:
        os.close(fd)
    assert Page.at(f"/proc/self/fd/{fd}") is None
