"""Who is waited for, for how long, and who is slow: decided by what pages say."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path

import pytest

from evenstep.errors import ConfigurationError
from evenstep.health import page, peer_pages
from evenstep.health.budgets import Budgets, find_late, slow_ranks
from evenstep.health.page import Phase, Seen
from evenstep.health.steps import SlowWatch
from evenstep.launcher.watch import LateWatch

SECOND = 1_000_000_000


def seen(
    phase: Phase = Phase.FORWARD, *, step: int = 7, waits_since_s: float | None = None, at_s: float = 0.0, pid: int = 11
) -> Seen:
    waiting = None if waits_since_s is None else int(waits_since_s * SECOND)
    return Seen(
        pid=pid,
        phase=phase,
        step=step,
        collective=5,
        is_waiting=waiting is not None,
        time_ns=int(at_s * SECOND),
        waiting_since_ns=waiting,
    )


def test_budgets_are_named_or_multiples_of_the_deadline() -> None:
    budgets = Budgets.parse("evaluating=7200, saving=inf", step_s=100)
    assert [budgets.of(seen(phase)) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)] == [100] * 3
    assert budgets.of(seen(Phase.BETWEEN_STEPS)) == 100
    assert budgets.of(seen(Phase.COMPILING)) == 600
    assert budgets.of(seen(Phase.EVALUATING)) == 7200
    assert budgets.of(seen(Phase.SAVING)) == math.inf
    assert all(budgets.of(seen(phase)) > 0 for phase in Phase), "every phase has one"
    assert Budgets.parse(str(budgets), step_s=100) == budgets
    assert Budgets.parse("step=60").of(seen(Phase.COMPILING)) == 360


@pytest.mark.parametrize("text", ["step", "step=x", "step=0", "sleeping=3", "step=-1", "step=nan"])
def test_a_budget_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--budget"):
        Budgets.parse(text)


def test_who_is_late_is_named_with_its_phase_once_and_given_up_when_its_budget_is_used_up() -> None:
    watch = LateWatch(Budgets(600), report_after_s=30, margin_s=5)
    pages = {0: seen(waits_since_s=100), 1: seen(Phase.BACKWARD, pid=12)}
    assert watch.look(pages, 129 * SECOND) == ([], None)
    (line,), nobody = watch.look(pages, 131 * SECOND)
    assert line == (
        "rank 1 (pid 12) is in backward of step 7; rank 0 waits since 31 s. All ranks are stopped after 600 s"
    )
    assert nobody is None
    assert watch.look(pages, 704 * SECOND) == ([], None)
    lines, hang = watch.look(pages, 706 * SECOND)
    assert not lines
    assert hang is not None
    assert (hang.rank, hang.pid, hang.is_suspended) == (1, 12, False)
    assert hang.verdict.endswith("That is more than a rank may take there (600 s), so the run was ended")


@pytest.mark.parametrize("phase", [Phase.EVALUATING, Phase.COMPILING, Phase.SAVING])
def test_what_takes_long_by_right_is_no_hang(phase: Phase) -> None:
    watch = LateWatch(Budgets(600))
    pages = {0: seen(waits_since_s=0), 1: seen(phase)}
    assert watch.look(pages, 3599 * SECOND)[1] is None
    assert watch.look(pages, 3606 * SECOND)[1] is not None


def test_ranks_that_wait_for_each_other_or_for_nobody_are_not_late() -> None:
    everybody_waits = {0: seen(waits_since_s=0), 1: seen(waits_since_s=1)}
    nobody_waits = {0: seen(), 1: seen(Phase.MAIN_FIRST)}
    has_left = {0: seen(waits_since_s=0), 1: seen(Phase.ENDED), 2: None}
    for pages in (everybody_waits, nobody_waits, has_left):
        assert find_late(pages, Budgets(), now_ns=10_000 * SECOND) == []


def after_steps(rank: int, num_steps: int, own_s: float, step_s: float) -> Seen:
    """A page after so many steps, of which this rank spent a part on its own work and the rest waiting."""
    return Seen(
        pid=rank,
        phase=Phase.BETWEEN_STEPS,
        step=num_steps,
        collective=0,
        is_waiting=False,
        time_ns=0,
        waited_ns=int(num_steps * (step_s - own_s) * SECOND),
        stepped_ns=int(num_steps * step_s * SECOND),
    )


def pages_after(num_steps: int, own_s: list[float]) -> dict[int, Seen]:
    return {rank: after_steps(rank, num_steps, own, max(own_s)) for rank, own in enumerate(own_s)}


def test_a_slow_rank_is_the_one_that_does_not_wait() -> None:
    before = pages_after(0, [0.1, 0.1])
    assert slow_ranks(before, pages_after(100, [0.1, 0.14])) == {}
    assert slow_ranks(before, pages_after(100, [0.1, 0.2])) == pytest.approx({1: 2.0})
    assert slow_ranks(before, pages_after(10, [0.1, 0.2])) == {}, "ten steps say nothing"
    four = [0.1, 0.12, 0.3, 0.11]
    assert slow_ranks(pages_after(0, four), pages_after(50, four)) == pytest.approx({2: 0.3 / 0.11})


def test_equal_ranks_are_never_slow(fresh_seed: int) -> None:
    draw = random.Random(fresh_seed)
    for _ in range(200):
        own = [0.1 * draw.uniform(0.9, 1.1) for _ in range(draw.randint(1, 8))]
        assert slow_ranks(pages_after(0, own), pages_after(draw.randint(0, 99), own)) == {}


def test_slow_is_said_once_and_only_of_two_windows_in_a_row() -> None:
    watch = SlowWatch()
    steps = 0
    said = []
    for own in ([0.1, 0.1], [0.1, 0.3], [0.1, 0.1], [0.1, 0.3], [0.1, 0.3], [0.1, 0.3]):
        before = watch._before[1] if watch._before is not None else pages_after(0, own)
        steps += 100
        grown = {
            rank: after_steps(rank, steps, 0, 0).__class__(
                **{
                    **vars(seen_before),
                    "step": seen_before.step + 100,
                    "stepped_ns": seen_before.stepped_ns + int(100 * max(own) * SECOND),
                    "waited_ns": seen_before.waited_ns + int(100 * (max(own) - own[rank]) * SECOND),
                }
            )
            for rank, seen_before in before.items()
        }
        said.append(watch.judge(float(steps), grown))
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 1, 0]
    assert said[4][0].startswith("rank 1 (pid 1) is slow: its part of a step takes 3.0 times as long")


def test_pages_are_shared_between_processes_of_a_host_and_leave_no_file(tmp_path: Path) -> None:
    told: list[object] = []

    def exchange(value: object) -> list[object]:
        told.append(value)
        return [value]

    end = peer_pages.share_pages(exchange, rank=0)
    try:
        path = Path(told[0]["page"])  # type: ignore[index]
        assert not path.exists()
        page.mark(Phase.SAVING, step=3)
        page.mark_waiting(True)
        page.mark_waiting(False)
        found = peer_pages.read(os.getpid())
        assert found is not None
        assert (found.phase, found.step, found.is_waiting, found.waited_ns > 0) == (Phase.SAVING, 3, False, True)
        assert peer_pages.read_all() == {0: peer_pages.read(os.getpid())}
        assert peer_pages.read(1) is None
        line = f"{__file__}:"
        assert line in peer_pages.tell_sites("call 1", {0: os.getpid()})
        before = peer_pages.tell_sites("call 2", {0: os.getpid()})
        for number in range(3, 6):  # three more disagreements, before another rank has read of the first
            page.write_site(f"call {number}\nelsewhere")
        assert peer_pages._said_of("call 2", os.getpid()) in before
        page.write_site("call 6\n" + "é" * 5000)
        assert set(peer_pages._said_of("call 6", os.getpid()) or "") <= {"é", "\N{REPLACEMENT CHARACTER}"}
        assert peer_pages._said_of("call 2", os.getpid()) is None
        assert peer_pages.tell_sites("call 1", {0: os.getpid(), 1: 1}) == ""
    finally:
        end()
    assert page.own_path() is None
    assert peer_pages.read(os.getpid()) is None


def test_a_forked_child_writes_nothing_to_the_page_of_its_parent(tmp_path: Path) -> None:
    page.open_page(tmp_path / "page")
    try:
        page.mark(Phase.FORWARD, step=1)
        pid = os.fork()
        if pid == 0:
            page.mark(Phase.OPTIMIZER, step=9)
            os._exit(0)
        os.waitpid(pid, 0)
        found = page.read_page(tmp_path / "page")
        assert found is not None
        assert (found.phase, found.step) == (Phase.FORWARD, 1)
    finally:
        page.close_page()
