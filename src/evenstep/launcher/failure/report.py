"""The launcher's text about a failure: the rank's traceback and, in the last line, which rank it was. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from evenstep.checks import counted
from evenstep.errors import CollectiveTimeoutError, MismatchError, PeerLostError
from evenstep.ground.environment import NODE_TIMEOUT_S
from evenstep.ground.health.first_failure import CrashReport, Exit, choose_root_cause
from evenstep.ground.health.heartbeat import Heartbeat, Phase
from evenstep.ground.health.users_code import is_users
from evenstep.launcher.failure.detection import Hang
from evenstep.launcher.failure.hangs import DEFAULT_AFTER_S, UNDER_NO_IF

# The form in which `CollectiveTimeoutError` names the missing ranks.
_MISSING = re.compile(r"Missing: (rank \d+ \([^)]*\)(?:, rank \d+ \([^)]*\))*)")
_MISSING_RANK = re.compile(r"rank (?P<rank>\d+) \(pid (?P<pid>\d+)(?P<is_suspended>, stopped)?[^)]*\)")

_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.MULTILINE)

_MAX_NAMES = 8  # the most ranks to name: the line stays short for any number of ranks

_UNEVEN = (
    "Give all ranks equally many steps, as evenstep.DataLoader(global_batch_size=...) does, or let those that are "
    f"done take part: `with model.join():` around the loop. {UNDER_NO_IF}"
)


@dataclass(frozen=True)
class RemoteFailure:
    """The first failure on another node, as far as this node knows.

    Attributes:
        text: The message to print.
        status: The run's exit status for this failure.
        state: Where the rank of the root cause was, and which ranks waited; "" if that isn't known.
    """

    text: str
    status: int
    state: str = ""


@dataclass(frozen=True)
class Failure:
    """The failure of one attempt.

    Attributes:
        attempt: Number of the attempt, from 0.
        root_cause: The rank that failed first or, if all failures are secondary, the first rank to report one.
        report: The report of the rank that failed first, if it left one.
        only_secondary: Whether ranks of this node have only lost a peer, which left silently, hangs, or is on another
            node.
        exits: How the ranks of this node ended.
        reports: The reports of the ranks of this node.
        hang: A rank that was given up and killed.
        remote_failure: The cause, if it is another node's published failure, or the loss of a node.
        stacks: Stacks of ranks that reported nothing and still ran at the end.
        pages: The ranks' heartbeat pages when the failure was noticed.
        on_other_nodes: The activity of other nodes' ranks when the failure was noticed, a line per node.
        resident_bytes: The memory that each rank held when it was last checked.
        num_memory_kills: Number of processes that the kernel killed for memory during the attempt; None if that isn't
            known.
        noticed_ns: When the failure was noticed (monotonic).
        was_stopping: Whether ranks had agreed to save and stop, on request; or another node's launcher was asked to
            stop, and the run can't continue without that node.
    """

    attempt: int
    root_cause: Exit
    report: CrashReport | None
    only_secondary: bool = False
    exits: tuple[Exit, ...] = ()
    reports: tuple[CrashReport, ...] = ()
    hang: Hang | None = None
    remote_failure: RemoteFailure | None = None
    stacks: Mapping[int, str] = field(default_factory=dict)
    pages: Mapping[int, Heartbeat] = field(default_factory=dict)
    on_other_nodes: Sequence[str] = ()
    resident_bytes: Mapping[int, int] = field(default_factory=dict)
    num_memory_kills: int | None = None
    noticed_ns: int = 0
    was_stopping: bool = False

    @property
    def left(self) -> list[Exit]:
        """Ranks that ended, or left their process group, early and without an error; if others only lost a peer."""
        reporting = {each.rank for each in self.reports}
        gone = {rank for rank, seen in self.pages.items() if seen.phase is Phase.ENDED} - reporting
        ended = [
            each for each in self.exits if (each.rank in gone if each.stopped_by_launcher else each.exit_code == 0)
        ]
        return ended if self.only_secondary else []

    @property
    def is_shared(self) -> bool:
        """Whether all ranks of this node report the same user's mistake, so that its message is enough."""
        if self.report is None or (self.report.traceback and not self.report.traceback.startswith(self.report.summary)):
            return False
        said = [each.summary for each in self.reports]
        return len(self.exits) > 1 and said == [self.report.summary] * len(self.exits)


def failure_of(exits: Sequence[Exit], reports: Sequence[CrashReport], *, attempt: int) -> Failure | None:
    """Make a failure with its root cause; None if no rank failed."""
    root_cause = choose_root_cause(exits, reports)
    if root_cause is None:
        return None
    report = next((report for report in reports if report.rank == root_cause.rank), None)
    only_secondary = report is not None and report.is_consequence
    return Failure(attempt, root_cause, report, only_secondary, tuple(exits), tuple(reports))


def status_of(failure: Failure) -> int:
    """The run's exit status. Pure.

    It is the root cause's own status; 72 if a rank left early and the others only lost it; 71 if a rank was given up;
    76 if only the loss of a peer is known.
    """
    if failure.remote_failure is not None:
        return failure.remote_failure.status
    if failure.hang is not None:
        return CollectiveTimeoutError.exit_code
    if failure.left:
        return MismatchError.exit_code
    if failure.only_secondary and failure.root_cause.exit_code == 1:  # torch's own errors from Gloo or NCCL
        return PeerLostError.exit_code
    return exit_status(failure.root_cause.exit_code)


def describe_failure(
    failure: Failure,
    *,
    run: str = "",
    num_nodes: int = 1,
    log: str = "",
    log_tail: str = "",
    other_logs: Path | None = None,
    saved_step: int | None = None,
) -> str:
    """The text that the launcher prints.

    Args:
        failure: The failure.
        run: The run, attempt and host to name, or "".
        num_nodes: Number of nodes in the run; the failure is one node's.
        log: The log file of the rank that failed first; "" if it wrote to the terminal.
        log_tail: The last lines of that file.
        other_logs: Directory of the other ranks' logs; None if there are none.
        saved_step: Step of the run's newest checkpoint or local copies; None: none is known.
    """
    root_cause, report = failure.root_cause, failure.report
    who = f"rank {root_cause.rank} (pid {root_cause.pid})"
    lines = []
    # If all ranks made the same mistake, their positions and other output add nothing.
    if run and not failure.is_shared:
        lines += [f"evenstep: {run}: {state}"] if (state := state_of(failure)) else []
        lines += [f"evenstep: at that time, {each}" for each in failure.on_other_nodes]
    if other_logs is not None and not failure.is_shared:
        lines.append(f"evenstep: output of the other ranks: {other_logs}")
    if saved_step is not None:
        lines.append(f"evenstep: the newest saved step is {saved_step}")
    for rank, stack in sorted(failure.stacks.items()):
        if stack and (failure.only_secondary or (failure.hang is not None and failure.hang.rank == rank)):
            lines += [f"evenstep: rank {rank} was here:", stack]
    if failure.remote_failure is not None:
        lines.append(f"evenstep: {failure.remote_failure.text}. The ranks of this node were stopped")
    elif failure.hang is not None:
        lines.append(f"evenstep: {failure.hang.verdict}")
    elif report is None and failure.left:
        lines += [f"evenstep: {line}" for line in _name_the_missing(failure)]
    elif report is None:
        if log_tail:
            lines += [f"evenstep: the last lines of rank {root_cause.rank} ({log}):", log_tail]
        how, where = describe_exit(root_cause.exit_code, guess=False), _where(failure.pages.get(root_cause.rank))
        lines.append(f"evenstep: {who} {how}{_memory(failure)}{where and f' {where}'}")
    elif not report.traceback or report.traceback.startswith(report.summary):
        # A user's mistake: its message is complete, and must not be printed twice.
        if failure.is_shared:
            who = "all ranks" if num_nodes == 1 else "all ranks of this node"
        lines.append(f"evenstep: {who} failed: {report.traceback or report.summary}")
    else:
        summary = (report.summary.splitlines() or [""])[0]
        verdict = [f"{who} failed: {summary}"]
        if failure.only_secondary:
            if num_nodes > 1 and not failure.left:
                hint = "the ranks of this node only lost another rank; see the other nodes, or the traceback."
                lines.append(f"evenstep: {hint}")
            verdict = _name_the_missing(failure) or [*_still_running(failure), *verdict]
        if not failure.left:  # else the verdict names the place where the rank waited
            lines.append(report.traceback)
        lines += [f"evenstep: {line}" for line in verdict]
    return "\n".join(lines)


def summary_of(failure: Failure) -> str:
    """The verdict in one line, for other nodes. Pure."""
    return describe_failure(failure).splitlines()[-1].removeprefix("evenstep: ")


def _name_the_missing(failure: Failure) -> list[str]:
    """Lines about the silent ranks that others waited for; empty if these ranks aren't known."""
    missing_of = {report.rank: _missing(report) for report in failure.reports}
    if left := failure.left:
        waiting = _listed(f"rank {rank}" for rank in sorted(missing_of)) or "ranks of other nodes"
        loops = "its loop was shorter, or it left" if len(left) == 1 else "their loops were shorter, or they left"
        how = "left its process group" if any(each.stopped_by_launcher for each in left) else "ended with status 0"
        ended = f"{_named(left)} had {how} while {waiting} still waited: {loops} early"
        return [f"{ended}{_steps(failure, left)}. {_waited(failure)}{_UNEVEN}"]
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
        how = f"it {state}, and has been stopped" if rank in here else "it is on another node"
        if rank in missing_of:
            how = "it came later, and found no other rank"
        lines.append(f"rank {rank} (pid {found['pid']}) had not arrived where {waiting} waited; {how}")
    return lines


def _steps(failure: Failure, left: Sequence[Exit]) -> str:
    """The numbers of steps of the ranks that left and of the others, if their pages have them."""
    gone = {end.rank for end in left}
    ended = [seen for rank, seen in failure.pages.items() if rank in gone]
    others = [seen for rank, seen in failure.pages.items() if rank not in gone]
    there, here = (max((seen.step for seen in each), default=0) for each in (ended, others))
    more = f"; the others have made {here}" if here > there else ""
    return f", after {counted(there, 'step')}{more}" if there else ""


def _waited(failure: Failure) -> str:
    """A sentence with the place where the rank that lost the others had waited; "" if it isn't known."""
    frames = () if failure.report is None else _FRAME.finditer(failure.report.traceback)
    users = [frame for frame in frames if is_users(frame["file"])]
    if not users:
        return ""
    return f"Rank {failure.root_cause.rank} waited at {users[-1]['file']}, line {users[-1]['line']}. "


def _where(seen: Heartbeat | None) -> str:
    """Where a rank was; "" before the first step, or if its page doesn't show it."""
    return str(seen) if seen is not None and (seen.step or seen.collective) else ""


def describe_ranks(pages: Mapping[int, Heartbeat | None], *, now_ns: int) -> str:
    """A line about the activity of one node's ranks, for other nodes; "" before the first step. Pure.

    Ranks that don't wait come first, because the others wait for them.
    """
    known = [(rank, seen) for rank, seen in pages.items() if seen is not None and _where(seen)]
    parts = []
    for rank, seen in sorted(known, key=lambda item: (item[1].is_waiting, item[0])):
        since = seen.waiting_since_ns
        waits = "" if since is None else f", waiting for others for {max(0, now_ns - since) / 1e9:.1f} s"
        parts.append(f"rank {rank} (pid {seen.pid}) was {seen}{waits}")
    return "; ".join([*parts[:_MAX_NAMES], *([f"{len(parts) - _MAX_NAMES} others"] if len(parts) > _MAX_NAMES else [])])


def state_of(failure: Failure) -> str:
    """Where the failed rank was, and which ranks waited; "" before the first step, or if pages don't show it. Pure."""
    if failure.remote_failure is not None:
        return failure.remote_failure.state
    found = failure.root_cause if failure.hang is None else failure.hang
    where = _where(failure.pages.get(found.rank))
    if failure.only_secondary or not where:
        return ""
    waited = {
        rank: seen.waiting_since_ns
        for rank, seen in sorted(failure.pages.items())
        if rank != found.rank and seen.waiting_since_ns is not None
    }
    who, longest_ns = _listed(f"rank {rank}" for rank in waited), failure.noticed_ns - min(waited.values(), default=0)
    waiting = f"; {who} waited for others, for {max(0, longest_ns) / 1e9:.1f} s" if waited else ""
    return f"rank {found.rank} (pid {failure.pages[found.rank].pid}) was {where}{waiting}"


def _memory(failure: Failure) -> str:
    """After SIGKILL: whether the kernel killed the process for memory, and how much memory each rank held."""
    if failure.root_cause.exit_code != -signal.SIGKILL:
        return ""
    why = ": out of memory, or killed from outside"
    if failure.num_memory_kills is not None:
        why = ": out of memory" if failure.num_memory_kills else " (from outside: the kernel killed none for memory)"
    sizes = dict(failure.resident_bytes)
    own = sizes.pop(failure.root_cause.rank, None)
    if own is None or why.startswith(" ("):
        return why
    others = f", the other ranks up to {_gib(max(sizes.values()))}" if sizes else ""
    return f"{why}; it held {_gib(own)}{others} when last checked"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _still_running(failure: Failure) -> list[str]:
    reporting = {report.rank for report in failure.reports}
    running = [end for end in failure.exits if end.stopped_by_launcher and end.rank not in reporting]
    was, has = ("was", "has") if len(running) == 1 else ("were", "have")
    story = f"{was} still running, had reported no error, and {has} been stopped"
    return [f"{_named(running)} {story}"] if running else []


def _missing(report: CrashReport) -> dict[int, re.Match[str]]:
    """The ranks for which a rank with a secondary failure has waited, if its message names them."""
    named = _MISSING.search(report.summary)
    return {int(found["rank"]): found for found in _MISSING_RANK.finditer(named[1])} if named else {}


def _named(ends: Iterable[Exit]) -> str:
    return _listed(f"rank {end.rank} (pid {end.pid})" for end in ends)


def _listed(names: Iterable[str]) -> str:
    *others, last = [*names] or [""]
    if len(others) >= _MAX_NAMES:
        others, last = others[: _MAX_NAMES - 1], f"{len(others) + 2 - _MAX_NAMES} others"
    return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True)
class StopPolicy:
    """How ranks are watched, and how the others are stopped once one has failed.

    Attributes:
        grace_s: While only secondary failures are known: how long the others may end by themselves and report why.
        evident_grace_s: Like `grace_s`, once the root cause is known.
        terminate_s: Time from the first signal to SIGKILL.
        stopped_grace_s: How long a rank may be stopped (state T) before it is given up.
        node_timeout_s: How long another node may be silent before it is lost.
        poll_every_s: Time between two checks of running ranks. The end of a rank is noticed at once.
        save_s: Time from a stop signal to SIGKILL for ranks that save on it. A second signal ends this time at once.
        name_after_s: See `HangWatch`.
        num_workers: Number of workers, with parameter servers; see `verdict.find_lost`.
    """

    grace_s: float = 1.0
    evident_grace_s: float = 0.2
    terminate_s: float = 5.0
    save_s: float = 600.0
    stopped_grace_s: float = 30.0
    node_timeout_s: float = NODE_TIMEOUT_S
    poll_every_s: float = 0.1
    name_after_s: float = DEFAULT_AFTER_S
    num_workers: int = 0

    def __post_init__(self) -> None:
        if min(astuple(self)) < 0:
            raise ValueError(f"{self}: times are at least 0")


def is_evident(exits: Iterable[Exit], reports: Sequence[CrashReport]) -> bool:
    """Whether the root cause is known: a rank that has reported, or died silently.

    Otherwise all failures so far are secondary.
    """
    reporting = {report.rank for report in reports}
    died_silently = any(
        end.exit_code != 0 and not end.stopped_by_launcher and end.rank not in reporting for end in exits
    )
    return died_silently or any(not report.is_consequence for report in reports)


def describe_exit(exit_code: int, *, guess: bool = True) -> str:
    """How a process without a report ended, in words; with `guess`, including a guess of the reason."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ": out of memory, or killed from outside" if guess and -exit_code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def exit_status(exit_code: int) -> int:
    """The status that a shell would report: for signals, 128 plus the signal's number."""
    return 128 - exit_code if exit_code < 0 else exit_code
