from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.health.blame import CrashReport, Exit
from evenstep.launcher.account import judge, tell
from evenstep.launcher.verdict import StopPolicy, describe_exit, exit_status, is_evident

TRACEBACK = "Traceback (most recent call last):\n  File ...\nValueError: boom\nand more"
GENUINE = CrashReport(1, 101, 5, False, 1, "ValueError: boom\nand more", TRACEBACK)
WITNESS = CrashReport(0, 100, 4, True, 76, "PeerLostError: gone", "Traceback (most recent call last):\nPeerLostError")
MISTAKE = CrashReport(1, 101, 5, False, 78, "ConfigurationError: bad", "ConfigurationError: bad\n  at train.py, line 3")


def test_the_traceback_comes_first_and_the_verdict_last() -> None:
    failure = judge([Exit(0, 100, 76), Exit(1, 101, 1)], [WITNESS, GENUINE], attempt=0)
    assert failure is not None
    text = tell(failure, other_logs=Path("/logs"))
    assert text.splitlines()[0] == "evenstep: output of the other ranks: /logs"
    assert text.count("Traceback") == 1
    assert text.splitlines()[-1] == "evenstep: rank 1 (pid 101) failed: ValueError: boom"


def test_a_users_mistake_is_said_once_and_without_traceback() -> None:
    failure = judge([Exit(1, 101, 78)], [MISTAKE], attempt=0)
    assert failure is not None
    assert tell(failure) == "evenstep: rank 1 (pid 101) failed: ConfigurationError: bad\n  at train.py, line 3"


def test_a_syntax_error_has_no_traceback_and_still_its_lines() -> None:
    shown = '  File "train.py", line 1\n    x = (\n        ^\nSyntaxError: never closed'
    report = CrashReport(0, 100, 5, False, 1, "SyntaxError: never closed (train.py, line 1)", shown)
    failure = judge([Exit(0, 100, 1)], [report], attempt=0)
    assert failure is not None
    assert tell(failure).splitlines() == [
        *shown.splitlines(),
        "evenstep: rank 0 (pid 100) failed: SyntaxError: never closed (train.py, line 1)",
    ]


def test_who_died_without_a_word_leaves_the_end_of_its_log() -> None:
    failure = judge([Exit(0, 100, 76), Exit(1, 101, -11)], [WITNESS], attempt=0)
    assert failure is not None
    assert tell(failure, log="/logs/rank-1.log", log_tail="Fatal Python error").splitlines() == [
        "evenstep: the last lines of rank 1 (/logs/rank-1.log):",
        "Fatal Python error",
        "evenstep: rank 1 (pid 101) was killed by SIGSEGV",
    ]


def test_only_witnesses_point_at_other_hosts() -> None:
    failure = judge([Exit(0, 100, 76)], [WITNESS], attempt=0)
    assert failure is not None
    assert "the other hosts" in tell(failure)


def test_nobody_failed() -> None:
    assert judge([Exit(0, 100, 0)], [], attempt=0) is None


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
        (-9, "was killed by SIGKILL: out of memory, or killed by somebody", 137),
        (-15, "was killed by SIGTERM", 143),
        (-63, "was killed by signal 63", 191),
    ],
)
def test_ends_in_words_and_numbers(code: int, words: str, status: int) -> None:
    assert (describe_exit(code), exit_status(code)) == (words, status)


def test_a_policy_is_validated() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        StopPolicy(grace_s=-1)
