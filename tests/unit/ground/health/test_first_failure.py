from __future__ import annotations

import pytest

from evenstep.errors import CollectiveTimeoutError, ConfigurationError, PeerLostError
from evenstep.ground.health.first_failure import (
    CrashReport,
    Exit,
    choose_root_cause,
    is_consequence,
)
from evenstep.ground.health.heartbeat import REPORT_BYTES


def report(rank: int, time_ns: int, *, is_consequence: bool = False) -> CrashReport:
    return CrashReport(rank, 100 + rank, time_ns, is_consequence, 1, "ValueError: x", "Traceback ...")


def ended(rank: int, exit_code: int, *, stopped: bool = False) -> Exit:
    return Exit(rank, 100 + rank, exit_code, stopped_by_launcher=stopped)


@pytest.mark.parametrize(
    ("exits", "reports", "root_cause"),
    [
        ([ended(0, 0), ended(1, 0)], [], None),
        # One raised, the other noticed.
        ([ended(0, 1), ended(1, 1)], [report(0, 9, is_consequence=True), report(1, 5)], 1),
        # The secondary failure was quicker to write than the root cause: what it says still gives it away.
        ([ended(0, 1), ended(1, 1)], [report(0, 4, is_consequence=True), report(1, 5)], 1),
        # Both have a cause of their own: the earlier.
        ([ended(0, 1), ended(1, 1)], [report(0, 6), report(1, 5)], 1),
        # Killed ranks tell nothing; the secondary failure does.
        ([ended(0, 1), ended(1, -9)], [report(0, 5, is_consequence=True)], 1),
        ([ended(0, 1), ended(1, 3)], [report(0, 5, is_consequence=True)], 1),
        ([ended(0, 3), ended(1, -9), ended(2, 1)], [report(2, 5, is_consequence=True)], 1),
        # Stopped by the launcher: no root cause, whatever its signal.
        ([ended(0, -15, stopped=True), ended(1, 3)], [], 1),
        # Everybody only lost somebody: the first to notice.
        ([ended(0, 1), ended(1, 1)], [report(0, 8, is_consequence=True), report(1, 5, is_consequence=True)], 1),
    ],
)
def test_choose_root_cause(exits: list[Exit], reports: list[CrashReport], root_cause: int | None) -> None:
    chosen = choose_root_cause(exits, reports)
    assert (chosen.rank if chosen is not None else None) == root_cause


def raised(error: BaseException) -> BaseException:
    """By a `raise` of a script."""
    try:
        raise error
    except BaseException as caught:
        return caught


def caused_by(cause: BaseException) -> BaseException:
    """Not by a `raise`: torch's errors come from C++."""
    try:
        try:
            (_ for _ in ()).throw(cause)
        except BaseException:
            raise ValueError("could not finish the epoch")  # noqa: B904
    except ValueError as error:
        return error


def in_place_of(hidden: BaseException) -> BaseException:
    try:
        try:
            raise hidden
        except BaseException:
            raise ValueError("the file is empty") from None
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:7045"), True),
        (RuntimeError("Read error [127.0.0.1]:7045"), True),
        (ConnectionResetError("Connection reset by peer"), False),
        (PeerLostError("rank 1 is gone"), True),
        (CollectiveTimeoutError("rank 1 is missing"), True),
        (caused_by(RuntimeError("Connection closed by peer")), True),
        (caused_by(raised(RuntimeError("failed to read image-3.png"))), False),
        (raised(RuntimeError("failed to read image-3.png")), False),  # by a data set
        (raised(RuntimeError("DataLoader timed out after 2 seconds")), False),  # by torch's loader
        (raised(PeerLostError("rank 1 is gone")), True),
        (caused_by(KeyError("x")), False),
        (caused_by(ConnectionRefusedError("[Errno 111] Connection refused")), False),  # as by urllib, for a download
        (in_place_of(PeerLostError("rank 1 is gone")), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed"), False),
        (ConfigurationError("connection refused"), False),
    ],
)
def test_is_consequence(error: BaseException, expected: bool) -> None:
    assert is_consequence(error) is expected


def test_a_report_is_read_back_and_what_is_none_passed_over() -> None:
    assert CrashReport.unpack(report(1, 5).pack()) == report(1, 5)
    for data in (b"", b"{", b"{}", b"[1]", b"\xff", report(1, 5).pack()[:-1]):
        assert CrashReport.unpack(data) is None


def test_an_error_whose_message_fails_is_reported() -> None:
    class OwnError(RuntimeError):
        def __str__(self) -> str:
            raise ValueError("no message")

    found = CrashReport.of(OwnError(), rank=0, traceback="Traceback ...")
    assert (found.summary, found.is_consequence) == ("OwnError: <exception str() failed>", False)


@pytest.mark.parametrize("letter", ["x", "é", "\N{GRINNING FACE}"])
def test_a_report_fits_its_place_and_keeps_where_it_was_raised(letter: str) -> None:
    long = CrashReport.of(ValueError("begins" + letter * 30_000), rank=0, traceback=letter * 30_000 + "ends")
    data = long.pack()
    assert len(data) <= REPORT_BYTES
    found = CrashReport.unpack(data)
    assert found is not None
    assert found.summary.startswith("ValueError: begins" + letter * 1000)
    assert found.traceback.endswith(letter * 1000 + "ends")
