"""One attempt, with ranks that end as a test wants: what is done as `failure/verdict.py` decides."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from evenstep.errors import EXIT_PREEMPTED
from evenstep.ground.health.first_failure import CrashReport
from evenstep.ground.health.heartbeat import Note, Phase
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.ground.health.phase_timeouts import PhaseTimeouts
from evenstep.ground.host.processes import state_and_start
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
    others.look.return_value = failure
    others.check_for_new_node.return_value = False
    others.await_ends.return_value = set() if ends is None else {ends}
    others.looks.return_value = others.states.return_value = others.exchange.return_value = []

    def announce_new_node() -> None:
        others.new_node_waits = True

    others.announce_new_node.side_effect = announce_new_node
    return others


POLICY = StopPolicy(grace_s=0.2, evident_grace_s=0.1, terminate_s=0.3, save_s=0.3, look_every_s=0.01)
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


def test_a_rank_that_is_given_up_and_can_not_be_killed_is_the_cause() -> None:
    pages = NodePages(2)
    for number, page in enumerate(pages.pages):
        page.begin(number)
    pages.pages[0].words[5] = time.monotonic_ns()  # it waits
    pages.pages[1].words[2] = Phase.FORWARD
    timeouts = PhaseTimeouts.parse("step=0.1,starting=0.1")
    pages.pages[1].words[6] = pages.pages[0].words[5] = time.monotonic_ns() - 10**10
    hangs = Rank()
    attempt = attempt_of(Rank(ends_with=0), hangs, pages=pages, timeouts=timeouts)
    assert attempt.watch() is End.FAILED
    assert hangs.calls[0] == signal.SIGKILL, "before its peers are stopped, which may have more to say"
    assert attempt.failure is not None
    assert attempt.failure.hang is not None
    assert (attempt.failure.root_cause.rank, attempt.failure.hang.rank, status_of(attempt.failure)) == (1, 1, 71)
    assert "in forward" in describe_failure(attempt.failure)


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


@pytest.mark.parametrize("announced", ["by this node", "by another"])
def test_a_new_node_stops_the_ranks_which_save(announced: str, capsys: pytest.CaptureFixture[str]) -> None:
    pages, ranks = NodePages(2), [Rank(ends_with=EXIT_PREEMPTED), Rank(ends_with=EXIT_PREEMPTED)]
    for number, step in enumerate((5, 7)):
        pages.pages[number].begin(number)
        pages.pages[number].words[8] = step + 1  # it has committed that step
    pages.pages[0].words[Note.SAVES] = 1
    more: dict[str, Any] = {"num_nodes_waiting": lambda: 1}
    if announced == "by another":
        more = {"others": other_nodes(new_node_waits=True)}
    attempt = attempt_of(*ranks, pages=pages, policy=replace(POLICY, save_s=7), **more)
    patience = note_patience(attempt)
    assert attempt.watch() is End.NODE_COMES
    assert (attempt.failure, attempt.saved.saved_step) == (None, 7)
    assert [rank.calls[0] for rank in ranks] == [f"alone {signal.SIGTERM}"] * 2
    assert patience == [7], "they save"
    assert capsys.readouterr().err.count("another node has come") == 1


def report_of(pid: int) -> CrashReport:
    return CrashReport(0, pid, time.monotonic_ns() - 10**10, False, 1, "ValueError: boom", "")


@pytest.mark.parametrize("others_end_with", [0, None])
def test_a_rank_that_reported_an_error_has_failed_whatever_its_status(others_end_with: int | None) -> None:
    """An exit handler may end a rank with status 0: `atexit.register(os._exit, 0)`."""
    rank = Rank(0)
    attempt = attempt_of(rank, Rank(others_end_with), report=report_of(rank.pid))
    assert attempt.watch() is End.FAILED
    assert attempt.failure is not None
    assert (attempt.failure.root_cause.rank, attempt.failure.root_cause.exit_code) == (0, 1)


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


@pytest.mark.parametrize("needs_all_nodes", [True, False])
@pytest.mark.parametrize("who", ["ranks", "another node", "nobody"])
def test_an_attempt_that_fails_while_somebody_was_asked_to_stop_says_so(who: str, needs_all_nodes: bool) -> None:
    """This node's own launcher doesn't get that far: a signal raises through `watch`."""
    pages, others = NodePages(1), other_nodes()
    pages.pages[0].words[Note.STOPS] = who == "ranks"
    others.is_stopping = who == "another node"
    attempt = attempt_of(Rank(-9), pages=pages, others=others, needs_all_nodes=needs_all_nodes)
    assert attempt.watch() is End.FAILED
    assert attempt.failure is not None
    assert attempt.failure.was_stopping == (who == "ranks" or (who == "another node" and needs_all_nodes))
    others = other_nodes()
    attempt_of(Rank(ends_with=0), others=others).close(signal.SIGTERM)
    others.announce_stop.assert_called_once()


def test_ranks_that_end_late_are_left_behind_where_others_have_saved(capsys: pytest.CaptureFixture[str]) -> None:
    attempt = attempt_of(Rank(EXIT_PREEMPTED), Rank(ends_with=-15))
    assert attempt.watch() is End.SAVED
    assert attempt.has_saved
    assert "rank 1" in capsys.readouterr().err


def test_a_worker_that_is_lost_takes_with_it_what_it_had_started(capsys: pytest.CaptureFixture[str]) -> None:
    lost, worker, server = Rank(-9), Rank(), Rank()
    attempt = attempt_of(lost, worker, server, policy=replace(POLICY, num_workers=2))

    def wait(longest_s: float) -> None:
        assert lost.calls == [signal.SIGKILL]
        worker.returncode = server.returncode = 0

    attempt._ranks.await_end = wait  # type: ignore[method-assign]
    assert attempt.watch() is End.WELL
    said = "evenstep: worker 0 (rank 0, pid {}) was killed by SIGKILL: out of memory, or killed from outside; "
    assert capsys.readouterr().err == f"{said.format(lost.pid)}the others go on without it\n"


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


@pytest.mark.parametrize("has_begun_to_fail", [False, True])
def test_a_signal_meanwhile_leaves_what_is_needed_to_stop_the_ranks(has_begun_to_fail: bool) -> None:
    """torchelastic closes what stands in its context's place."""
    rank = Rank(ends_with=EXIT_PREEMPTED)
    attempt = attempt_of(rank, *([Rank(-9)] if has_begun_to_fail else []))
    looks = iter(range(3))

    def wait(longest_s: float) -> None:
        if next(looks) == 2:
            raise SignalException("got SIGTERM", signal.SIGTERM)

    attempt._ranks.await_end = wait  # type: ignore[method-assign]
    with pytest.raises(SignalException):
        attempt.watch()
    assert not attempt.has_saved
    attempt.close(signal.SIGTERM)
    assert attempt.has_saved != has_begun_to_fail
    assert rank.calls == [f"alone {signal.SIGTERM}", signal.SIGKILL, "released"]
    attempt.close(signal.SIGTERM)
    assert rank.calls[-1] == "released", "once"


def test_groups_are_signalled_before_ranks_are_reaped_and_never_after() -> None:
    """The number of a process that was reaped may be another's, and so may its group."""
    failed, ended = Rank(3), Rank(0)
    assert attempt_of(failed, ended).watch() is End.FAILED
    assert (failed.calls[-1], ended.calls[-1]) == ("released", "released")


def test_what_python_has_started_is_taken_over() -> None:
    """torchelastic looks at the processes, too, by `Popen.poll`, which reaps."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], start_new_session=True) as process:
        handler = SimpleNamespace(proc=process)
        context: Any = SimpleNamespace(subprocess_handlers={0: handler}, close=lambda *_, **__: None)
        ranks = Ranks(context, ranks=[0], pages=NodePages(1))
        attempt = Attempt(ranks, number=0, num_ranks=1, policy=POLICY, timeouts=PhaseTimeouts())
        while handler.proc.poll() is None:
            time.sleep(0.01)
        assert state_and_start(process.pid)[0] == "Z"
        assert process.returncode is None
        assert attempt.watch() is End.FAILED
        assert process.returncode == 3, "reaped at the end, by its object"
