"""What the launcher says when a rank has failed: the culprit's traceback, and last, in one line, who it was. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.health.blame import CrashReport, Exit, choose_culprit
from evenstep.launcher.verdict import describe_exit


@dataclass(frozen=True)
class Failure:
    """One attempt that failed.

    Attributes:
        attempt: 0 for the first.
        culprit: Who began it.
        report: The culprit's own account, if it left one.
        only_witnesses: Everybody on this host only lost somebody: the culprit is on another host.
    """

    attempt: int
    culprit: Exit
    report: CrashReport | None
    only_witnesses: bool = False


def judge(exits: Sequence[Exit], reports: Sequence[CrashReport], *, attempt: int) -> Failure | None:
    """Who began it; None if nobody failed."""
    culprit = choose_culprit(exits, reports)
    if culprit is None:
        return None
    report = next((report for report in reports if report.rank == culprit.rank), None)
    return Failure(attempt, culprit, report, only_witnesses=report is not None and report.is_consequence)


def tell(failure: Failure, *, log: str = "", log_tail: str = "", other_logs: Path | None = None) -> str:
    """The text for the screen.

    Args:
        failure: What happened.
        log: The culprit's log file; "" if it wrote to the terminal.
        log_tail: The last lines of that file.
        other_logs: Directory of the logs; None if there is nothing in it to look at.
    """
    culprit, report = failure.culprit, failure.report
    who = f"rank {culprit.rank} (pid {culprit.pid})"
    lines = []
    if other_logs is not None:
        lines.append(f"evenstep: output of the other ranks: {other_logs}")
    if failure.only_witnesses:
        lines.append("evenstep: the ranks of this host only lost another one; see the other hosts, or the traceback.")
    if report is None:
        if log_tail:
            lines += [f"evenstep: the last lines of rank {culprit.rank} ({log}):", log_tail]
        lines.append(f"evenstep: {who} {describe_exit(culprit.exit_code)}")
    elif not report.traceback or report.traceback.startswith(report.summary):
        # A user's mistake: its message says it all, and must not be said twice.
        lines.append(f"evenstep: {who} failed: {report.traceback or report.summary}")
    else:
        summary = (report.summary.splitlines() or [""])[0]
        lines += [report.traceback, f"evenstep: {who} failed: {summary}"]
    return "\n".join(lines)
