"""The progress page, and what the launcher concludes from looking at ranks."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evenstep.health import page, steps
from evenstep.health.page import Phase, Seen, read_page
from evenstep.launcher.watch import Observation, StopWatch, count_memory_kills, observe


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    path = page.page_file(tmp_path, 3, 0)
    page.open_page(path)
    yield path
    page.close_page()


def test_what_is_marked_is_read(path: Path) -> None:
    before = time.monotonic_ns()
    page.mark(Phase.FORWARD, step=7)
    page.mark_collective(418, bucket=2)
    page.mark_waiting(True)
    seen = read_page(path)
    assert seen is not None
    assert (seen.pid, seen.phase, seen.step, seen.collective) == (os.getpid(), Phase.FORWARD, 7, 418)
    assert (seen.is_waiting, seen.bucket) == (True, 2)
    assert before <= seen.time_ns <= time.monotonic_ns()
    assert str(seen) == "in forward, step 7, collective 418"
    page.mark(Phase.BACKWARD)
    page.mark_waiting(False)
    page.mark_collective(419)
    later = read_page(path)
    assert later is not None
    assert (later.phase, later.step, later.is_waiting, later.bucket) == (Phase.BACKWARD, 7, False, None)
    assert not later.is_done
    page.mark_done()
    assert (at_the_end := read_page(path)) is not None
    assert at_the_end.is_done


def test_without_a_page_marking_does_nothing(tmp_path: Path) -> None:
    page.mark(Phase.FORWARD, step=1)
    page.mark_collective(1)
    page.mark_waiting(True)
    assert read_page(tmp_path / "none") is None
    page.close_page()


def test_a_page_outlives_its_rank_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "page"
    code = f"from evenstep.health import page; import os; page.open_page(__import__('pathlib').Path({str(path)!r}))"
    ending = "; page.mark(page.Phase.OPTIMIZER, step=5); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code + ending], check=False)
    seen = read_page(path)
    assert seen is not None
    assert (seen.phase, seen.step) == (Phase.OPTIMIZER, 5)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("data", [b"", b"x" * 64, bytes(64), b"short"])
def test_what_is_no_page_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "page").write_bytes(data)
    assert read_page(tmp_path / "page") is None


def seen(step: int = 7) -> Seen:
    return Seen(pid=11, phase=Phase.BACKWARD, step=step, collective=5, is_waiting=False, time_ns=1)


def test_a_stopped_rank_is_told_of_once_and_given_up_after_the_grace() -> None:
    watch = StopWatch(report_after_s=2, grace_s=10)
    running, stopped = Observation(10, "R", 1), Observation(11, "T", 2)
    assert watch.look(0.0, {0: running, 1: stopped}, {1: seen()}) == ([], None)
    assert watch.look(1.9, {0: running, 1: stopped}, {1: seen()}) == ([], None)
    (line,), nobody = watch.look(2.0, {0: running, 1: stopped}, {1: seen()})
    assert line.startswith(
        "rank 1 (pid 11) is stopped (state T) in backward, step 7, collective 5, since 2 s. kill -CONT"
    )
    assert nobody is None
    assert watch.look(9.9, {0: running, 1: stopped}, {1: seen()}) == ([], None)
    lines, hang = watch.look(10.0, {0: running, 1: stopped}, {1: seen()})
    assert (lines, hang is not None and hang.rank) == ([], 1)
    assert watch.resident_bytes == {0: 1, 1: 2}


def test_a_rank_that_goes_on_starts_anew_and_a_debugger_may_take_its_time() -> None:
    watch = StopWatch(report_after_s=2, grace_s=10)
    watch.look(0.0, {1: Observation(11, "T", 0)}, {})
    watch.look(3.0, {1: Observation(11, "T", 0)}, {})
    assert watch.look(9.0, {1: Observation(11, "S", 0)}, {}) == (["rank 1 (pid 11) goes on"], None)
    assert watch.look(11.0, {1: Observation(11, "T", 0)}, {}) == ([], None)
    debugged = StopWatch(report_after_s=2, grace_s=10)
    for now in (0.0, 5.0, 500.0):
        assert debugged.look(now, {1: Observation(11, "t", 0)}, {})[1] is None


def test_no_grace_still_gives_two_seconds() -> None:
    watch = StopWatch(report_after_s=2, grace_s=0)
    assert watch.look(0.0, {1: Observation(11, "T", 0)}, {})[1] is None
    assert watch.look(2.0, {1: Observation(11, "T", 0)}, {})[1] is not None


def test_a_rank_that_is_stopped_for_a_moment_is_not_named_and_one_that_stays_is_before_two_seconds() -> None:
    """As the launcher looks: ten times a second."""
    for stopped_s, is_named in ((1.0, False), (1.4, False), (1.9, True)):
        watch = StopWatch()
        looks = [number / 10 for number in range(40)]
        told = {now: watch.look(now, {1: Observation(11, "T" if now <= stopped_s else "S", 1)}, {})[0] for now in looks}
        assert [now for now, lines in told.items() if any("is stopped" in line for line in lines)] == [1.5] * is_named


def test_observing_this_process() -> None:
    own = observe(os.getpid())
    assert own.state in ("R", "S")
    assert own.resident_bytes > 1 << 20
    assert observe(1 << 22) == Observation(1 << 22, "", 0)
    assert count_memory_kills() is None or count_memory_kills() >= 0  # type: ignore[operator]


def test_the_busiest_optimizer_that_is_left_counts(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(sys.modules["torch.optim.optimizer"], name, OrderedDict())
    monkeypatch.setattr(steps, "_is_counting", False)
    steps.count_optimizer_steps()
    steps.count_optimizer_steps()
    busy, idle = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    for _ in range(5):
        busy.step()
    idle.step()
    seen = read_page(path)
    assert seen is not None
    assert (seen.phase, seen.step) == (Phase.BETWEEN_STEPS, 5)
    del busy
    gc.collect()
    idle.step()
    seen = read_page(path)
    assert seen is not None
    assert seen.step == 2
