"""First failure reports: which rank failed first, when one failure takes all ranks down.

A rank that dies of an exception writes a `CrashReport` to its heartbeat page *before* it closes its sockets. Its peers
see the connection break only after that, so the order of the reports is the order of causes.
Ranks that are killed write nothing, but the launcher knows the signal. `choose_root_cause` uses both.
"""

from __future__ import annotations

import dis
import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from evenstep.console import printable
from evenstep.errors import EvenstepError
from evenstep.ground.health.heartbeat import REPORT_BYTES
from evenstep.ground.health.users_code import PACKAGE, TORCH

# torch's messages about a lost peer, in RuntimeErrors from C++. A rank that raises one of them is a secondary failure.
# Errors with such words from elsewhere are the rank's own: a failed download, a data set ("failed to read x.png"), or
# torch's loader ("timed out after").
_PEER_GONE = re.compile(
    r"connection (closed|reset|refused|was closed)|broken pipe|read error|write error|socket timeout"
    r"|timed out (waiting|after)|peer (closed|disconnected)|remote process exited|ncclRemoteError"
    r"|application timeout|failed to (recv|read|connect)",
    re.IGNORECASE,
)

_RAISE = dis.opmap["RAISE_VARARGS"]
_DISTRIBUTED = (PACKAGE, f"{TORCH}distributed{os.sep}")
_MAX_TEXT_CHARACTERS = 20_000


@dataclass(frozen=True)
class CrashReport:
    """A rank's own report of its end.

    Attributes:
        time_ns: Monotonic time of the host at the moment of the report.
        is_consequence: Whether the error means that another rank is gone: a secondary failure.
        exit_code: The status with which the process is about to end.
        summary: One line: type and message.
        traceback: The traceback as python prints it; empty if the message explains the error.
    """

    rank: int
    pid: int
    time_ns: int
    is_consequence: bool
    exit_code: int
    summary: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, *, rank: int, traceback: str) -> CrashReport:
        """Describe the exception that is about to end this process."""
        # Messages of torch's spawn begin with empty lines.
        summary = f"{type(error).__name__}: {_message_of(error).strip()}"
        return cls(
            rank=rank,
            pid=os.getpid(),
            time_ns=time.monotonic_ns(),
            is_consequence=is_consequence(error),
            exit_code=error.exit_code if isinstance(error, EvenstepError) else 1,
            summary=summary[:_MAX_TEXT_CHARACTERS],
            traceback=traceback[-_MAX_TEXT_CHARACTERS:],
        )

    def pack(self, most_bytes: int = REPORT_BYTES) -> bytes:
        """The report as bytes for a heartbeat page.

        If it is too long, the summary's end and the traceback's beginning are cut off.
        """
        data, most = json.dumps(asdict(self)).encode(), _MAX_TEXT_CHARACTERS
        while len(data) > most_bytes:
            most //= 2
            cut = replace(self, summary=self.summary[:most], traceback=self.traceback[-most:])
            data = json.dumps(asdict(cut)).encode()
        return data

    @classmethod
    def unpack(cls, data: bytes) -> CrashReport | None:
        """A rank's report, safe to print; None if there is none, or it is malformed."""
        try:
            report = cls(**json.loads(data))
            return replace(report, summary=printable(report.summary), traceback=printable(report.traceback))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True)
class Exit:
    """The end of a rank's process, as its launcher saw it; negative exit codes are signals."""

    rank: int
    pid: int
    exit_code: int
    stopped_by_launcher: bool = False


def is_consequence(error: BaseException) -> bool:
    """Whether an exception means that another rank is gone, not that this rank has failed.

    Also true if the exception was raised because of, or while handling, such an exception.
    """
    seen: set[int] = set()
    step: BaseException | None = error
    while step is not None and id(step) not in seen:
        seen.add(id(step))
        if _says_that_a_peer_is_gone(step):
            return True
        step = step.__cause__ or (None if step.__suppress_context__ else step.__context__)
    return False


def _says_that_a_peer_is_gone(error: BaseException) -> bool:
    if isinstance(error, EvenstepError):
        return error.is_consequence
    if not isinstance(error, RuntimeError) or _was_raised_elsewhere(error):
        return False
    return _PEER_GONE.search(_message_of(error)) is not None


def _was_raised_elsewhere(error: BaseException) -> bool:
    """Whether a python `raise` raised an error, outside of evenstep and of torch's distributed modules."""
    raised = error.__traceback__
    if raised is None:
        return False
    while raised.tb_next is not None:
        raised = raised.tb_next
    code = raised.tb_frame.f_code
    return code.co_code[raised.tb_lasti] == _RAISE and not code.co_filename.startswith(_DISTRIBUTED)


def _message_of(error: BaseException) -> str:
    """`str(error)`, even if that raises."""
    try:
        return str(error)
    except Exception:  # of the script's own class
        return "<exception str() failed>"  # as python writes it


def choose_root_cause(exits: Iterable[Exit], reports: Iterable[CrashReport]) -> Exit | None:
    """The end of the rank that failed first; None if no rank failed. Pure.

    The choice, in this order: the earliest report of a genuine error; a process ended by a signal that the launcher
    didn't send; a bad exit status without a report; and, if there are only secondary failures, the earliest report.
    """
    failed = {end.rank: end for end in exits if end.exit_code != 0 and not end.stopped_by_launcher}
    reported = sorted((r for r in reports if r.rank in failed), key=lambda report: report.time_ns)
    for report in reported:
        if not report.is_consequence:
            return failed[report.rank]
    silent = [end for rank, end in sorted(failed.items()) if all(r.rank != rank for r in reported)]
    for end in sorted(silent, key=lambda end: end.exit_code >= 0):  # signals first
        return end
    return failed[reported[0].rank] if reported else None
