"""The heartbeat page: what is marked is read, from outside the process too."""

from __future__ import annotations

import os
import time

import pytest

from evenstep.ground.health import heartbeat
from evenstep.ground.health.heartbeat import _MARK, PAGE_BYTES, REPORT_BYTES, Note, Page, Phase


def test_what_is_marked_is_read(page: Page) -> None:
    before = time.monotonic_ns()
    heartbeat.mark(Phase.FORWARD, step=7)
    heartbeat.mark_collective(418)
    heartbeat.mark_waiting(True)
    seen = page.read()
    assert seen is not None
    assert (seen.pid, seen.rank, seen.is_waiting, seen.saved_step) == (os.getpid(), 3, True, None)
    assert before <= seen.time_ns <= time.monotonic_ns()
    assert str(seen) == "in forward, step 7 of this attempt, collective 418"
    for step in (4, 2):  # local copies may be complete before an earlier checkpoint is
        heartbeat.mark_commit(step)
    heartbeat.note(Note.IS_DONE)
    assert (at_the_end := page.read()) is not None
    assert (at_the_end.saved_step, at_the_end.is_done) == (4, True)


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
