"""Ranks that can't be ended, and what is on the way while another host wants to join."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evenstep.errors import EXIT_PREEMPTED
from evenstep.health.blame import CrashReport, write_report
from evenstep.health.budgets import Budgets
from evenstep.launcher.account import Failure
from evenstep.launcher.agent import WatchedRanks
from evenstep.launcher.other_hosts import Elsewhere, Saved
from evenstep.launcher.verdict import StopPolicy


class Rank:
    """A process that ends when it is told to, or never."""

    def __init__(self, returncode: int | None = None) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as gone:
            self.pid = gone.pid  # signals go to nobody
        self.returncode = returncode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, which: int, /) -> None:
        pass


class Others:
    """Launchers of other hosts, of which one wants room."""

    def __init__(self) -> None:
        self.room_is_wanted = False
        self.wants_room_soon = False
        self.blamed: list[str] = []

    def look(self) -> Elsewhere | None:
        self.room_is_wanted = self.room_is_wanted or self.wants_room_soon
        return None

    def hear_of_room(self) -> bool:
        self.look()
        return self.room_is_wanted

    def make_room(self) -> None:
        self.room_is_wanted = True

    def blame(self, text: str, status: int, *, state: str = "") -> None:
        self.blamed.append(text)

    def ask_for_states(self) -> None:
        pass

    def states(self) -> list[str]:
        return []

    def agree_on_saved(self, own: Saved, *, longest_s: float) -> Saved:
        return own

    def close(self) -> None:
        pass


class Told:
    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.num_preempted = 0

    def preempted(self) -> None:
        self.num_preempted += 1


def watch(directory: Path, ranks: list[Rank], told: Told, others: Others | None = None) -> WatchedRanks:
    context: Any = SimpleNamespace(
        subprocess_handlers={local: SimpleNamespace(proc=rank) for local, rank in enumerate(ranks)},
        error_files=dict.fromkeys(range(len(ranks)), ""),
        close=lambda *_, **__: None,
    )
    return WatchedRanks(
        context,
        ranks=[*range(len(ranks))],
        attempt=0,
        run_directory=directory,
        policy=StopPolicy(grace_s=0.2, evident_grace_s=0.1, terminate_s=0.3, save_s=0.3, look_every_s=0.01),
        budgets=Budgets(),
        on_failure=told.failures.append,
        on_preempted=told.preempted,
        others=others,  # type: ignore[arg-type]
        may_restart=True,
    )


def test_who_can_not_be_killed_is_named_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FAULTS.md, 13."""
    told, stuck = Told(), Rank()
    ranks = watch(tmp_path, [Rank(-11), stuck], told)
    started = time.monotonic()
    result = ranks.wait()
    assert result is not None
    assert result.is_failed()
    assert time.monotonic() - started < 10  # 0.7 s: the grace, and terminate_s twice
    assert f"evenstep: rank 1 (pid {stuck.pid}) can't be killed, and is left behind" in capsys.readouterr().err
    assert [failure.culprit.rank for failure in told.failures] == [0]


WITNESS = CrashReport(0, 1, 1, True, 76, "PeerLostError: gone", "")
GENUINE = CrashReport(0, 1, 1, False, 1, "ValueError: boom", "")


@pytest.mark.parametrize(
    ("code", "report", "is_failure"), [(76, WITNESS, False), (1, GENUINE, True), (EXIT_PREEMPTED, None, False)]
)
def test_ranks_that_end_while_another_host_waits_have_failed_only_if_they_say_so(
    tmp_path: Path, code: int, report: CrashReport | None, is_failure: bool
) -> None:
    """Those of one host are stopped first, and take the others with them; or all have saved, as they were asked to."""
    told, others = Told(), Others()
    if report is not None:
        write_report(tmp_path, report)
    ranks = watch(tmp_path, [Rank(code)], told, others)
    others.wants_room_soon = True
    result = ranks.wait()
    assert result is not None
    assert ranks.should_make_room != is_failure
    assert bool(told.failures) == result.is_failed() == is_failure
    assert bool(others.blamed) == is_failure
    if not is_failure:
        ranks.make_room()
    assert told.num_preempted == 0, "the run isn't over"
