"""The ranks of one attempt: some that can't be ended, and some that end while a new node waits to join."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from evenstep.errors import EXIT_PREEMPTED
from evenstep.ground.health.first_failure import CrashReport
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.ground.health.phase_timeouts import PhaseTimeouts
from evenstep.launcher.elastic.supervisor import WatchedRanks
from evenstep.launcher.failure.report import Failure, RemoteFailure, StopPolicy
from evenstep.processes import state_and_start


class Rank:
    """A process that ends when it is told to, or never."""

    def __init__(self, returncode: int | None = None) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as gone:
            self.pid = gone.pid  # of nobody
        self.returncode = returncode
        self.calls: list[int | str] = []

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, which: int, /) -> None:
        pass

    def signal_group(self, which: int, /) -> None:
        self.calls.append(which)

    def release(self) -> None:
        self.calls.append("released")


class Others:
    """Launchers of other nodes, of which one has announced a new node."""

    def __init__(self) -> None:
        self.new_node_waits = False
        self.wants_room_soon = False
        self.blamed: list[str] = []

    def look(self) -> RemoteFailure | None:
        self.new_node_waits = self.new_node_waits or self.wants_room_soon
        return None

    def check_for_new_node(self) -> bool:
        self.look()
        return self.new_node_waits

    def announce_new_node(self) -> None:
        self.new_node_waits = True

    def publish_failure(self, text: str, status: int, **_: object) -> None:
        self.blamed.append(text)

    def publish_looks(self, text: str) -> None:
        pass

    def looks(self) -> list[tuple[str, str]]:
        return []

    def request_states(self) -> None:
        pass

    def states(self) -> list[str]:
        return []

    def exchange(self, text: str, *, longest_s: float) -> list[str]:
        return []

    def close(self) -> None:
        pass


class Told:
    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.num_preempted = 0

    def preempted(self) -> None:
        self.num_preempted += 1


def watch(
    ranks: list[Rank], told: Told, others: Others | None = None, report: CrashReport | None = None
) -> WatchedRanks:
    """Ranks under watch, of which rank 0 has reported."""
    pages = NodePages(len(ranks))
    if report is not None:
        pages.pages[0].write_report(report.pack())
    context: Any = SimpleNamespace(
        subprocess_handlers={local: SimpleNamespace(proc=rank) for local, rank in enumerate(ranks)},
        error_files=dict.fromkeys(range(len(ranks)), ""),
        close=lambda *_, **__: None,
    )
    return WatchedRanks(
        context,
        ranks=[*range(len(ranks))],
        attempt=0,
        pages=pages,
        policy=StopPolicy(grace_s=0.2, evident_grace_s=0.1, terminate_s=0.3, save_s=0.3, look_every_s=0.01),
        timeouts=PhaseTimeouts(),
        on_failure=told.failures.append,
        on_preempted=told.preempted,
        others=others,  # type: ignore[arg-type]
        may_restart=True,
    )


def test_who_can_not_be_killed_is_named_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    """FAULTS.md, 13."""
    told, stuck = Told(), Rank()
    ranks = watch([Rank(-11), stuck], told)
    started = time.monotonic()
    result = ranks.wait()
    assert result is not None
    assert result.is_failed()
    assert time.monotonic() - started < 10  # 0.7 s: the grace, and terminate_s twice
    assert f"evenstep: rank 1 (pid {stuck.pid}) can't be killed, and is left behind" in capsys.readouterr().err
    assert [failure.root_cause.rank for failure in told.failures] == [0]


WITNESS = CrashReport(0, 1, 1, True, 76, "PeerLostError: gone", "")
GENUINE = CrashReport(0, 1, 1, False, 1, "ValueError: boom", "")


@pytest.mark.parametrize(
    ("code", "report", "is_failure"), [(76, WITNESS, False), (1, GENUINE, True), (EXIT_PREEMPTED, None, False)]
)
def test_ranks_that_end_while_a_new_node_waits_have_failed_only_if_they_say_so(
    code: int, report: CrashReport | None, is_failure: bool
) -> None:
    """The ranks of one node are stopped first, and the others fail with them; or all have saved on the signal."""
    told, others = Told(), Others()
    ranks = watch([Rank(code)], told, others, report)
    others.wants_room_soon = True
    result = ranks.wait()
    assert result is not None
    assert ranks.should_admit_node != is_failure
    assert bool(told.failures) == result.is_failed() == is_failure
    assert bool(others.blamed) == is_failure
    if not is_failure:
        ranks.stop_for_new_node()
    assert told.num_preempted == 0, "the run isn't over"


def report_of(pid: int) -> CrashReport:
    return CrashReport(0, pid, time.monotonic_ns() - 10**10, False, 1, "ValueError: boom", "")


def test_a_report_of_a_child_is_none_of_the_rank_unless_the_rank_fails() -> None:
    """A child that fails, and whose parent has caught that; or the script behind a program with its status."""
    told, rank = Told(), Rank()
    ranks = watch([rank], told, report=report_of(rank.pid + 1))
    assert ranks.wait() is None, "it runs on"
    rank.returncode = 0
    result = ranks.wait()
    assert result is not None
    assert not result.is_failed()
    assert result.return_values == {0: None}
    assert told.failures == []

    program = Rank(1)
    result = watch([program], told, report=report_of(program.pid + 1)).wait()
    assert result is not None
    assert result.is_failed()
    assert [failure.report and failure.report.summary for failure in told.failures] == ["ValueError: boom"]


@pytest.mark.parametrize("others_end_with", [0, None])
def test_a_rank_that_reported_an_error_has_failed_whatever_its_status(others_end_with: int | None) -> None:
    """An exit handler may end a rank with status 0: `atexit.register(os._exit, 0)`."""
    told, rank = Told(), Rank(0)
    result = watch([rank, Rank(others_end_with)], told, report=report_of(rank.pid)).wait()
    assert result is not None
    assert result.is_failed()
    (failure,) = told.failures
    assert (failure.root_cause.rank, failure.root_cause.exit_code) == (0, 1)


def test_a_failure_of_another_node_is_one_where_all_ranks_ended_well() -> None:
    """torchelastic would take a result without failures for success, and look for values of all ranks."""
    told, others = Told(), Others()
    rank = Rank()
    ranks = watch([rank], told, others)

    def look() -> RemoteFailure:
        rank.returncode = 0
        return RemoteFailure("on node 1: rank 1 failed", 1)

    others.look = look  # type: ignore[method-assign]
    result = ranks.wait()
    assert result is not None
    assert result.is_failed()


def test_groups_are_signalled_before_ranks_are_reaped_and_never_after() -> None:
    """The number of a process that was reaped may be another's, and so may its group."""
    told, failed = Told(), Rank(3)
    ranks = watch([failed, Rank(0)], told)
    assert ranks.wait() is not None
    assert failed.calls[-1] == "released"
    assert ranks._attempt.processes[1].calls[-1] == "released"  # type: ignore[attr-defined]


def test_what_python_has_started_is_taken_over() -> None:
    """torchelastic looks at the processes, too, by `Popen.poll`, which reaps."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True) as process:
        handler = SimpleNamespace(proc=process)
        context: Any = SimpleNamespace(
            subprocess_handlers={0: handler}, error_files={0: ""}, close=lambda *_, **__: None
        )
        told = Told()
        ranks = WatchedRanks(
            context,
            ranks=[0],
            attempt=0,
            pages=NodePages(1),
            policy=StopPolicy(grace_s=0.1, evident_grace_s=0.1, terminate_s=5, look_every_s=0.01),
            timeouts=PhaseTimeouts(),
            on_failure=told.failures.append,
            on_preempted=told.preempted,
        )
        while handler.proc.poll() is None:
            time.sleep(0.01)
        assert state_and_start(process.pid)[0] == "Z"
        assert process.returncode is None
        result = ranks.wait()
        assert result is not None
        assert result.is_failed()
        assert process.returncode == 3, "reaped at the end, by its object"
