"""What the launcher says when a rank has failed: the culprit's traceback, and last, in one line, who it was. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.health.blame import CrashReport, Exit, choose_culprit
from evenstep.launcher.verdict import describe_exit

# As a `CollectiveTimeoutError` of ours names the ranks that it has waited for.
_MISSING = re.compile(r"Missing: (rank \d+ \([^)]*\)(?:, rank \d+ \([^)]*\))*)")
_MISSING_RANK = re.compile(r"rank (?P<rank>\d+) \(pid (?P<pid>\d+)(?P<is_suspended>, stopped)?\)")

_MAX_NAMES = 8  # one line, however many ranks

_UNEVEN = (
    "Give all ranks equally many steps, as evenstep.DataLoader(global_batch_size=...) does, or let those that are "
    "done take part: `with model.join():` around the loop."
)


@dataclass(frozen=True)
class Failure:
    """One attempt that failed.

    Attributes:
        attempt: 0 for the first.
        culprit: Who began it, or who first noticed.
        report: The culprit's own account, if it left one.
        only_witnesses: Everybody on this host only lost somebody: who left without a word, hangs, or is elsewhere.
        exits: How the ranks of this host ended.
        reports: What they told.
    """

    attempt: int
    culprit: Exit
    report: CrashReport | None
    only_witnesses: bool = False
    exits: tuple[Exit, ...] = ()
    reports: tuple[CrashReport, ...] = ()


def judge(exits: Sequence[Exit], reports: Sequence[CrashReport], *, attempt: int) -> Failure | None:
    """Who began it; None if nobody failed."""
    culprit = choose_culprit(exits, reports)
    if culprit is None:
        return None
    report = next((report for report in reports if report.rank == culprit.rank), None)
    only_witnesses = report is not None and report.is_consequence
    return Failure(attempt, culprit, report, only_witnesses, tuple(exits), tuple(reports))


def tell(
    failure: Failure, *, num_hosts: int = 1, log: str = "", log_tail: str = "", other_logs: Path | None = None
) -> str:
    """The text for the screen.

    Args:
        failure: What happened.
        num_hosts: Hosts of the run; the failure is that of one of them.
        log: The culprit's log file; "" if it wrote to the terminal.
        log_tail: The last lines of that file.
        other_logs: Directory of the logs; None if there is nothing in it to look at.
    """
    culprit, report = failure.culprit, failure.report
    who = f"rank {culprit.rank} (pid {culprit.pid})"
    lines = []
    if other_logs is not None:
        lines.append(f"evenstep: output of the other ranks: {other_logs}")
    if report is None:
        if log_tail:
            lines += [f"evenstep: the last lines of rank {culprit.rank} ({log}):", log_tail]
        lines.append(f"evenstep: {who} {describe_exit(culprit.exit_code)}")
    elif not report.traceback or report.traceback.startswith(report.summary):
        # A user's mistake: its message says it all, and must not be said twice.
        lines.append(f"evenstep: {who} failed: {report.traceback or report.summary}")
    else:
        summary = (report.summary.splitlines() or [""])[0]
        verdict = [f"{who} failed: {summary}"]
        if failure.only_witnesses:
            if num_hosts > 1:
                hint = "the ranks of this host only lost another one; see the other hosts, or the traceback."
                lines.append(f"evenstep: {hint}")
            verdict = _blame_the_silent(failure) or [*_still_running(failure), *verdict]
        lines += [report.traceback, *(f"evenstep: {line}" for line in verdict)]
    return "\n".join(lines)


def _blame_the_silent(failure: Failure) -> list[str]:
    """Of those who told nothing, who was waited for; nothing if that can't be known."""
    missing_of = {report.rank: _missing(report) for report in failure.reports}
    left = [end for end in failure.exits if end.exit_code == 0 and not end.stopped_by_launcher]
    if left:
        waiting = _listed(f"rank {rank}" for rank in sorted(missing_of))
        loops = "its loop was shorter, or it left" if len(left) == 1 else "their loops were shorter, or they left"
        return [f"{_named(left)} had ended with status 0 while {waiting} still waited: {loops} early. {_UNEVEN}"]
    patient = sorted(rank for rank, missing in missing_of.items() if missing)
    waiting = _listed(f"rank {rank}" for rank in patient)
    found_missing = {rank: found for missing in missing_of.values() for rank, found in missing.items()}
    silent = {rank: found for rank, found in sorted(found_missing.items()) if rank not in patient}
    if patient and not silent:
        return [f"{waiting} waited for each other, in different calls: compare their tracebacks"]
    here = {end.rank for end in failure.exits}
    lines = []
    for rank, found in silent.items():
        state = "was suspended (state T)" if found["is_suspended"] else "was still running"
        how = f"it {state}, and has been stopped" if rank in here else "it is on another host"
        if rank in missing_of:
            how = "it came later, and found nobody"
        lines.append(f"rank {rank} (pid {found['pid']}) had not arrived where {waiting} waited; {how}")
    return lines


def _still_running(failure: Failure) -> list[str]:
    witnesses = {report.rank for report in failure.reports}
    running = [end for end in failure.exits if end.stopped_by_launcher and end.rank not in witnesses]
    was, has = ("was", "has") if len(running) == 1 else ("were", "have")
    story = f"{was} still running, had told of no error, and {has} been stopped"
    return [f"{_named(running)} {story}"] if running else []


def _missing(report: CrashReport) -> dict[int, re.Match[str]]:
    """The ranks that a witness has waited for in vain, as far as it says so."""
    named = _MISSING.search(report.summary)
    return {int(found["rank"]): found for found in _MISSING_RANK.finditer(named[1])} if named else {}


def _named(ends: Iterable[Exit]) -> str:
    return _listed(f"rank {end.rank} (pid {end.pid})" for end in ends)


def _listed(names: Iterable[str]) -> str:
    *others, last = [*names] or [""]
    if len(others) >= _MAX_NAMES:
        others, last = others[: _MAX_NAMES - 1], f"{len(others) + 2 - _MAX_NAMES} others"
    return f"{', '.join(others)} and {last}" if others else last
