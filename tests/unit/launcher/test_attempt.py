"""One attempt, with ranks that end as a test wants: what is done as `failure/verdict.py` decides."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from evenstep.errors import EXIT_PREEMPTED
from evenstep.ground.health.first_failure import CrashReport
from evenstep.ground.health.heartbeat import Note
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.ground.health.phase_timeouts import PhaseTimeouts
from evenstep.launcher.elastic.attempt import Attempt, Ranks
from evenstep.launcher.elastic.nodes import OtherNodes, Parting
from evenstep.launcher.failure.report import RemoteFailure, StopPolicy, describe_failure, status_of
from evenstep.launcher.failure.verdict import End


class Rank:
    """A process that ends when it is told to, or never."""

    def __init__(self, returncode: int | None = None, *, ends_with: int | None = None) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as gone:
            self.pid = gone.pid  # of nobody
        self.returncode, self.ends_with = returncode, ends_with
        self.calls: list[int | str] = []

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, which: int, /) -> None:
        self.calls.append(f"alone {which}")
        if self.ends_with is not None and self.returncode is None:
            self.returncode = self.ends_with

    def signal_group(self, which: int, /) -> None:
        self.calls.append(which)

    def release(self) -> None:
        self.calls.append("released")


def other_nodes(
    *, new_node_waits: bool = False, failure: RemoteFailure | None = None, ends: Parting | None = None
) -> Any:
    """Launchers of other nodes, of which one may announce a new node, or have failed."""
    others = mock.NonCallableMock(spec=OtherNodes, new_node_waits=new_node_waits, is_stopping=False)
    others.poll.return_value = failure
    others.check_for_new_node.return_value = False
    others.await_ends.return_value = set() if ends is None else {ends}
    others.views.return_value = others.states.return_value = others.exchange.return_value = []

    def announce_new_node() -> None:
        others.new_node_waits = True

    others.announce_new_node.side_effect = announce_new_node
    return others


POLICY = StopPolicy(grace_s=0.2, evident_grace_s=0.1, terminate_s=0.3, save_s=0.3, poll_every_s=0.01)
WITNESS = CrashReport(0, 1, 1, True, 76, "PeerLostError: gone", "")
GENUINE = CrashReport(0, 1, 1, False, 1, "ValueError: boom", "")


def attempt_of(*ranks: Rank, report: CrashReport | None = None, pages: NodePages | None = None, **more: Any) -> Attempt:
    """An attempt of these ranks, of which rank 0 may have reported."""
    pages = pages or NodePages(len(ranks))
    if report is not None:
        pages.pages[0].write_report(report.pack())
    context: Any = SimpleNamespace(
        subprocess_handlers={local: SimpleNamespace(proc=rank) for local, rank in enumerate(ranks)},
        close=lambda *_, **__: None,
    )
    numbers = [*range(len(ranks))]
    more = {"policy": POLICY, "may_restart": True, "timeouts": PhaseTimeouts(), **more}
    return Attempt(Ranks(context, ranks=numbers, pages=pages), number=0, num_ranks=len(ranks), **more)


def note_patience(attempt: Attempt) -> list[float]:
    """How long ranks get from the first signal to SIGKILL, for each time that they are stopped from now on."""
    noted, stop = list[float](), attempt._ranks.stop

    def noting(first: signal.Signals, *, patience_s: float, terminate_s: float) -> None:
        noted.append(patience_s)
        stop(first, patience_s=patience_s, terminate_s=terminate_s)

    attempt._ranks.stop = noting  # type: ignore[method-assign]
    return noted


def test_who_can_not_be_killed_is_named_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    """As one that waits in the kernel: SIGKILL has no effect."""
    stuck = Rank()
    attempt = attempt_of(Rank(-11), stuck)
    started = time.monotonic()
    assert attempt.watch() is End.FAILED
    assert time.monotonic() - started < 10  # 0.7 s: the grace, and terminate_s twice
    assert f"evenstep: rank 1 (pid {stuck.pid}) can't be killed, and is left behind" in capsys.readouterr().err
    assert attempt.failure is not None
    assert attempt.failure.root_cause.rank == 0


@pytest.mark.parametrize(
    ("code", "report", "end"),
    [(76, WITNESS, End.NODE_COMES), (1, GENUINE, End.FAILED), (EXIT_PREEMPTED, None, End.NODE_COMES)],
)
def test_ranks_that_end_while_a_new_node_waits_have_failed_only_if_they_say_so(
    code: int, report: CrashReport | None, end: End
) -> None:
    """The ranks of one node are stopped first, and the others fail with them; or all have saved on the signal."""
    others = other_nodes(new_node_waits=report is not None)
    others.check_for_new_node.return_value = True
    attempt = attempt_of(Rank(code), report=report, others=others)
    assert attempt.watch() is end
    assert (attempt.failure is not None) == others.publish_failure.called == (end is End.FAILED)


@pytest.mark.parametrize("code", [0, None])
def test_a_failure_of_another_node_is_one_where_all_ranks_ended_well(code: int | None) -> None:
    others = other_nodes(failure=RemoteFailure("on node 1: rank 1 failed", 3))
    attempt = attempt_of(Rank(code, ends_with=0), Rank(ends_with=0), others=others)
    assert attempt.watch() is End.FAILED
    assert attempt.failure is not None
    assert status_of(attempt.failure) == 3
    others.publish_failure.assert_not_called()


@pytest.mark.parametrize(
    ("code", "ends", "end", "status"),
    [
        (0, Parting.WELL, End.WELL, 0),
        (0, Parting.LOST, End.FAILED, 72),
        (EXIT_PREEMPTED, Parting.SAVED, End.SAVED, 75),
        (EXIT_PREEMPTED, Parting.LOST, End.SAVED, 75),
    ],
)
def test_ranks_that_ended_well_while_others_were_lost_without_them_left_early(
    code: int, ends: Parting, end: End, status: int
) -> None:
    """Those that have saved had agreed on that with the others."""
    others = other_nodes(ends=ends)
    attempt = attempt_of(Rank(code), Rank(code), others=others)
    assert attempt.watch() is end
    others.publish_end.assert_called_once_with(Parting.SAVED if code else Parting.WELL)
    assert others.publish_failure.call_count == (status == 72)
    if end is End.FAILED:
        assert attempt.failure is not None
        assert status_of(attempt.failure) == status
        assert "had ended with status 0 while ranks of other nodes still waited" in describe_failure(attempt.failure)


@pytest.mark.parametrize("is_ready", [False, True])
def test_ctrl_c_reaches_ranks_that_end_quietly_by_it(is_ready: bool) -> None:
    pages, rank = NodePages(1), Rank(ends_with=0)
    pages.pages[0].words[Note.IS_READY] = is_ready
    attempt_of(rank, pages=pages).close(signal.SIGINT)
    assert rank.calls[0] == f"alone {signal.SIGINT if is_ready else signal.SIGTERM}"


def test_ranks_that_save_when_they_are_stopped_have_the_time_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Unless a rank is missing elsewhere, without which they can't."""
    for failure, saves in ((None, True), (None, False), (RemoteFailure("gone", 76), True)):
        pages = NodePages(1)
        pages.pages[0].words[Note.SAVES] = saves
        attempt = attempt_of(Rank(ends_with=0), pages=pages, others=other_nodes(failure=failure), policy=StopPolicy())
        given = note_patience(attempt)
        attempt.close(signal.SIGINT)
        has_time = saves and failure is None
        assert given == [StopPolicy.save_s if has_time else StopPolicy.terminate_s]
        assert ("the ranks save, and end" in capsys.readouterr().err) == has_time
