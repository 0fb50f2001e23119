from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from evenstep.ground.health.first_failure import CrashReport, Exit
from evenstep.ground.health.heartbeat import Heartbeat, Phase
from evenstep.launcher.failure.report import (
    Failure,
    RemoteFailure,
    describe_exit,
    describe_failure,
    describe_ranks,
    exit_status,
    failure_of,
    is_evident,
    status_of,
)

TRACEBACK = "Traceback (most recent call last):\n  File ...\nValueError: boom\nand more"
GENUINE = CrashReport(1, 101, 5, False, 1, "ValueError: boom\nand more", TRACEBACK)
WITNESS = CrashReport(0, 100, 4, True, 76, "PeerLostError: gone", "Traceback (most recent call last):\nPeerLostError")
SILENT = [Exit(0, 100, 76), Exit(1, 101, -9)]  # rank 1 says nothing, and rank 0 has lost it


def failed(exits: list[Exit], reports: list[CrashReport], **more: Any) -> Failure:
    failure = failure_of(exits, reports, attempt=0)
    assert failure is not None
    return replace(failure, **more)


def told(exits: list[Exit], reports: list[CrashReport], *, num_nodes: int = 1) -> list[str]:
    return describe_failure(failed(exits, reports), num_nodes=num_nodes).splitlines()


def waited(rank: int, missing: str) -> CrashReport:
    summary = f"CollectiveTimeoutError: rank {rank} waited 6.0 s in all_reduce. Missing: {missing}. Look there."
    return CrashReport(rank, 100 + rank, 4, True, 71, summary, f"Traceback (most recent call last):\n{summary}")


def test_who_died_without_a_word_leaves_the_end_of_its_log() -> None:
    text = describe_failure(failed(SILENT, [WITNESS]), log="/logs/rank-1.log", log_tail="Fatal Python error")
    assert text.splitlines()[:2] == ["evenstep: the last lines of rank 1 (/logs/rank-1.log):", "Fatal Python error"]


LATE = CrashReport(1, 101, 5, True, 76, "PeerLostError: gone", "Traceback (most recent call last):\nPeerLostError")
ALSO = CrashReport(3, 103, 6, True, 76, WITNESS.summary, WITNESS.traceback)
STOPPED = Exit(1, 101, -15, stopped_by_launcher=True)
MISSING = "rank 1 (pid 101) had not arrived where rank 0 waited; it "


@pytest.mark.parametrize(
    ("exits", "reports", "verdict"),
    [
        (
            [Exit(0, 100, 76), Exit(1, 101, 0), Exit(2, 102, 0), Exit(3, 103, 76)],
            [WITNESS, ALSO],
            "rank 1 (pid 101) and rank 2 (pid 102) had ended with status 0 while rank 0 and rank 3 still waited: their",
        ),
        (
            [Exit(0, 100, 76), *(Exit(rank, 100 + rank, 0) for rank in range(1, 9))],
            [WITNESS],
            "rank 1 (pid 101), rank 2 (pid 102), rank 3 (pid 103), rank 4 (pid 104), rank 5 (pid 105), rank 6",
        ),
        ([Exit(0, 100, 71), STOPPED], [waited(0, "rank 1 (pid 101)")], f"{MISSING}was still running, and has been"),
        ([Exit(0, 100, 71), STOPPED], [waited(0, "rank 1 (pid 101, stopped)")], f"{MISSING}was suspended (state T)"),
        # Each hears only of its neighbours: rank 0 waits for rank 1, which waits for rank 2.
        (
            [Exit(0, 100, 71), Exit(1, 101, 71), Exit(2, 102, -9, stopped_by_launcher=True)],
            [waited(0, "rank 1 (pid 101)"), waited(1, "rank 2 (pid 102)")],
            "rank 2 (pid 102) had not arrived where rank 0 and rank 1 waited;",
        ),
        (
            [Exit(0, 100, 71), Exit(1, 101, 71)],
            [waited(0, "rank 1 (pid 101)"), waited(1, "rank 0 (pid 100)")],
            "rank 0 and rank 1 waited for each other, in different calls: compare their tracebacks",
        ),
        ([Exit(0, 100, 71), Exit(1, 101, 76)], [waited(0, "rank 1 (pid 101)"), LATE], f"{MISSING}came later, and"),
        ([Exit(0, 100, 71), Exit(1, 101, 0)], [waited(0, "rank 1 (pid 101)")], "rank 1 (pid 101) had ended with"),
    ],
)  # fmt: skip
def test_who_is_named_of_those_that_left_or_were_late(
    exits: list[Exit], reports: list[CrashReport], verdict: str
) -> None:
    assert told(exits, reports)[-1].startswith(f"evenstep: {verdict}")


def test_what_cannot_be_known_is_not_said() -> None:
    """Rank 1 closed its world and ran on: nobody told why."""
    *before, silent, verdict = told([Exit(0, 100, 76), STOPPED], [WITNESS])
    assert before == WITNESS.traceback.splitlines()
    assert silent == "evenstep: rank 1 (pid 101) was still running, had reported no error, and has been stopped"
    assert verdict == "evenstep: rank 0 (pid 100) failed: PeerLostError: gone"


def test_only_secondary_failures_point_at_other_nodes_where_there_are_any() -> None:
    assert "other nodes" not in "".join(told([Exit(0, 100, 76)], [WITNESS]))
    assert "other nodes" in told([Exit(0, 100, 76)], [WITNESS], num_nodes=2)[0]
    text = told([Exit(0, 100, 76), Exit(1, 101, 0)], [WITNESS], num_nodes=2)
    assert not any("other nodes" in line for line in text), "it is known who left"
    assert "had ended with status 0" in text[-1]
    missing = told([Exit(0, 100, 71)], [waited(0, "rank 3 (pid 8)")], num_nodes=2)
    assert "other nodes" in missing[0]
    assert missing[-1] == "evenstep: rank 3 (pid 8) had not arrived where rank 0 waited; it is on another node"


@pytest.mark.parametrize(
    ("exits", "reports", "expected"),
    [
        ([Exit(0, 100, 76)], [WITNESS], False),
        ([Exit(0, 100, 76)], [WITNESS, GENUINE], True),
        ([Exit(0, 100, 76), Exit(1, 101, -9)], [WITNESS], True),
        ([Exit(0, 100, 76), Exit(1, 101, -15, stopped_by_launcher=True)], [WITNESS], False),
    ],
)
def test_is_evident(exits: list[Exit], reports: list[CrashReport], expected: bool) -> None:
    assert is_evident(exits, reports) is expected


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        (3, "exited with status 3", 3),
        (-9, "was killed by SIGKILL: out of memory, or killed from outside", 137),
        (-15, "was killed by SIGTERM", 143),
        (-63, "was killed by signal 63", 191),
    ],
)
def test_ends_in_words_and_numbers(code: int, words: str, status: int) -> None:
    assert (describe_exit(code), exit_status(code)) == (words, status)


@pytest.mark.parametrize(
    ("exits", "reports", "status"),
    [
        ([Exit(0, 100, 76), Exit(1, 101, 1)], [WITNESS, GENUINE], 1),
        ([Exit(0, 100, 76), Exit(1, 101, -9)], [WITNESS], 137),
        ([Exit(0, 100, 76)], [WITNESS], 76),
        ([Exit(0, 100, 76), Exit(1, 101, 0)], [WITNESS], 72),
        ([Exit(0, 100, 1)], [replace(WITNESS, exit_code=1, summary="RuntimeError: connection closed")], 76),
    ],
)
def test_status(exits: list[Exit], reports: list[CrashReport], status: int) -> None:
    assert status_of(failed(exits, reports)) == status


@pytest.mark.parametrize(
    ("kills", "says"),
    [
        (1, "SIGKILL: out of memory; it held 2.0 GiB, the other ranks up to 1.0 GiB when last checked"),
        (0, "SIGKILL (from outside: the kernel killed none for memory)"),
        (None, "SIGKILL: out of memory, or killed from outside; it held 2.0 GiB"),
    ],
)
def test_who_was_killed_for_memory(kills: int | None, says: str) -> None:
    sizes = {0: 1 << 30, 1: 2 << 30}
    assert says in describe_failure(failed(SILENT, [WITNESS], resident_bytes=sizes, num_memory_kills=kills))


def test_what_a_rank_says_cannot_command_the_terminal() -> None:
    said = replace(GENUINE, summary="ValueError: \x1b[2Jboo\nm", traceback="\x07ü")
    report = CrashReport.unpack(said.pack())
    assert report is not None
    assert (report.summary, report.traceback) == ("ValueError: \\x1b[2Jboo\nm", "\\x07ü")


def test_the_state_of_the_root_cause_and_of_who_waits_comes_first() -> None:
    pages = {
        0: Heartbeat(100, Phase.BACKWARD, 7, 9, True, 1, waiting_since_ns=500_000_000),
        1: Heartbeat(101, Phase.BACKWARD, 7, 9, False, 1),
    }
    failure = failed(SILENT, [WITNESS], pages=pages, noticed_ns=2_000_000_000)
    text = describe_failure(failure, run="run R, attempt 2 of 4, host A")
    assert text.splitlines()[0] == (
        "evenstep: run R, attempt 2 of 4, host A: rank 1 (pid 101) was in backward, step 7 of this attempt, "
        "collective 9; rank 0 waited for others, for 1.5 s"
    )


def test_what_ranks_of_a_node_do_in_a_line_for_others() -> None:
    pages = {
        0: Heartbeat(100, Phase.BACKWARD, 5, 31, True, 10, waiting_since_ns=2_000_000_000),
        1: Heartbeat(101, Phase.FORWARD, 5, 30, False, 10),
        2: None,
    }
    assert describe_ranks(pages, now_ns=4_500_000_000) == (
        "rank 1 (pid 101) was in forward, step 5 of this attempt, collective 30; "
        "rank 0 (pid 100) was in backward, step 5 of this attempt, collective 31, waiting for others for 2.5 s"
    )
    many = {rank: replace(pages[1], pid=rank) for rank in range(11)}
    assert describe_ranks(many, now_ns=0).endswith("; 3 others")
    assert describe_ranks({0: Heartbeat(100, Phase.STARTING, 0, 0, False, 10)}, now_ns=0) == "", (
        "not before the first step"
    )


def test_another_nodes_root_cause_and_what_other_ranks_did_come_before_the_verdict() -> None:
    state = "rank 1 (pid 101) was in forward, step 5"
    failure = Failure(
        0,
        Exit(0, 100, 76),
        None,
        remote_failure=RemoteFailure("on node 1 (b): rank 1 (pid 101) failed: x", 1, state),
        on_other_nodes=["on node 1 (b): rank 1 (pid 101) was in forward, step 5"],
    )
    assert describe_failure(failure, run="run a").splitlines() == [
        f"evenstep: run a: {state}",
        "evenstep: at that time, on node 1 (b): rank 1 (pid 101) was in forward, step 5",
        "evenstep: on node 1 (b): rank 1 (pid 101) failed: x. The ranks of this node were stopped",
    ]
