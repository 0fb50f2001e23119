"""Checks of ranks from outside: each rank's state (`RankState`), and suspended and overdue ranks.

`look_at` reads /proc, a process's exit status, and its heartbeat page. All decisions from these are pure.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from evenstep.ground.health.first_failure import CrashReport, Exit
from evenstep.ground.health.heartbeat import Heartbeat, Note, Page, Phase
from evenstep.ground.health.phase_timeouts import AwaitedRank, PhaseTimeouts, find_awaited
from evenstep.ground.host.processes import RESIDENT_PAGES, STATE, stat_fields, time_on_core_ns
from evenstep.launcher.spawn.child import Child


@dataclass(frozen=True)
class RankState:
    """The state of a rank of this node at one time: its process, and its heartbeat page. `look_at` makes it.

    Attributes:
        exit_code: The process's exit code, negative for a signal; None: it runs.
        page: The rank's heartbeat page; None: the process hasn't written to it yet, or isn't python.
        notes: The rank's notes on its page.
        report: The rank's report of the error that ends it. If another process has written the report to this page, it
            counts only once the rank's process has ended with a status other than 0. Such a report may come from a
            script that the user's program has started: then that program's status decides whether the rank failed. Or
            it comes from a child whose failure its parent has caught.
        was_stopped: Whether the rank received a signal from this launcher while it ran.
        is_lost: Whether the other ranks continue without this rank.
        state: As in `/proc/PID/stat`: T is stopped by a signal, t by a debugger; "" if it can't be read, or the process
            has ended.
        resident_bytes: The memory that the process holds.
        on_core_ns: Total time for which the main thread has used a processor; None if that can't be read.
    """

    rank: int
    pid: int
    exit_code: int | None = None
    page: Heartbeat | None = None
    notes: frozenset[Note] = frozenset()
    report: CrashReport | None = None
    was_stopped: bool = False
    is_lost: bool = False
    state: str = ""
    resident_bytes: int = 0
    on_core_ns: int | None = None

    @property
    def runs(self) -> bool:
        """Whether the rank's process has not ended."""
        return self.exit_code is None

    @property
    def is_suspended(self) -> bool:
        """Whether a signal or a debugger has stopped the rank."""
        return self.runs and self.state in ("T", "t")

    @property
    def is_done(self) -> bool:
        """Whether the rank has reported an error, and has ended or only runs the interpreter's shutdown."""
        return self.report is not None and (not self.runs or (self.page is not None and self.page.is_done))

    @property
    def is_leaving(self) -> bool:
        """Whether the rank has left its world without an error, and still runs."""
        return self.runs and self.page is not None and self.page.phase is Phase.ENDED

    @property
    def end(self) -> Exit | None:
        """How the rank has ended; None: it has not, or the others continue without it.

        A rank that has reported counts as failed for any exit status: it may have been stopped before its end, have an
        exit handler that ends it with status 0, or be unkillable.
        """
        if self.is_lost:
            return None
        if self.report is not None and (self.was_stopped or not self.exit_code):
            return Exit(self.rank, self.pid, self.report.exit_code)
        return None if self.exit_code is None else Exit(self.rank, self.pid, self.exit_code, self.was_stopped)


def look_at(rank: int, process: Child, page: Page, *, was_stopped: bool = False, is_lost: bool = False) -> RankState:
    """Read a rank's present state. While a rank is watched, only this function reads its process and page."""
    # Read the exit status before the page: a rank reports before it ends, so after the end a missing report stays
    # missing.
    code = process.poll()
    report = CrashReport.unpack(page.report())
    if report is not None and report.pid != process.pid and (code or 0) <= 0:
        report = None
    try:
        fields = stat_fields(process.pid) if code is None else []
    except OSError:
        fields = []
    return RankState(
        rank,
        process.pid,
        code,
        page.read(),
        frozenset(each for each in Note if page.words[each]),
        report,
        was_stopped,
        is_lost,
        state=fields[STATE] if fields else "",
        resident_bytes=int(fields[RESIDENT_PAGES]) * os.sysconf("SC_PAGE_SIZE") if fields else 0,
        on_core_ns=time_on_core_ns(process.pid) if code is None else None,
    )


@dataclass(frozen=True)
class Hang:
    """A rank that makes no progress, and how long others have waited for it.

    Attributes:
        late: The rank and the ranks that wait for it, if it isn't suspended.
    """

    rank: int
    pid: int
    seconds: float
    seen: Heartbeat | None
    late: AwaitedRank | None = None

    @property
    def is_suspended(self) -> bool:
        """Whether a signal has stopped the rank. Otherwise it runs, but doesn't reach the point where others wait."""
        return self.late is None

    @property
    def verdict(self) -> str:
        """The verdict to print after the rank was given up."""
        if self.late is None:
            return f"{self}. It was not continued, so the run was ended"
        return f"{self}. This is longer than allowed in this phase ({self.late.limit_s:g} s), so the run was ended"

    def __str__(self) -> str:
        if self.late is not None:
            return str(self.late)
        where = f" {self.seen}" if self.seen is not None else ""
        return f"rank {self.rank} (pid {self.pid}) is stopped (state T){where}, since {self.seconds:.0f} s"


class StopWatch:
    """Notices ranks that a signal has stopped. They are named after a while, and given up later.

    Args:
        report_after_s: Seconds after which to name a rank.
        grace_s: Seconds after which to give a rank up; until then a user may continue it. A rank that a debugger has
            stopped is never given up.
        follows: Returns what happens when a rank is given up, for messages.
    """

    def __init__(
        self,
        *,
        report_after_s: float = 1.5,
        grace_s: float = 30.0,
        follows: Callable[[int], str] = lambda rank: "all ranks are stopped",
    ) -> None:
        self._follows = follows
        self.report_after_s = report_after_s
        self.grace_s = grace_s
        self._since: dict[int, float] = {}
        self._told: set[int] = set()
        self.resident_bytes: dict[int, int] = {}  # by rank, at the last check

    def poll(self, now: float, states: Iterable[RankState]) -> tuple[list[str], Hang | None]:
        """Returns (lines to print, the rank to give up or None).

        Args:
            now: Seconds on any clock that doesn't stop.
            states: The states of this node's ranks.
        """
        lines: list[str] = []
        given_up: Hang | None = None
        for seen in states:
            rank = seen.rank
            if not seen.runs:
                continue
            if seen.resident_bytes:
                self.resident_bytes[rank] = seen.resident_bytes
            if not seen.is_suspended:
                if rank in self._told:
                    lines.append(f"rank {rank} (pid {seen.pid}) goes on")
                self._since.pop(rank, None)
                self._told.discard(rank)
                continue
            stopped_s = now - self._since.setdefault(rank, now)
            hang = Hang(rank, seen.pid, stopped_s, seen.page)
            if seen.state == "T" and stopped_s >= max(self.grace_s, self.report_after_s):
                given_up = given_up or hang
            elif stopped_s >= self.report_after_s and rank not in self._told:
                self._told.add(rank)
                remedy = f"kill -CONT {seen.pid} continues it"
                limit = "" if seen.state == "t" else f"; {self._follows(rank)} after {self.grace_s:g} s"
                lines.append(f"{hang}. {remedy}{limit}")
        return lines, given_up


def find_overdue(
    pages: Mapping[int, Heartbeat | None], timeouts: PhaseTimeouts, *, now_ns: int, margin_s: float = 5.0
) -> Hang | None:
    """Find a rank to give up, because others wait for it longer than its phase allows. `HangWatch` names it. Pure.

    The ranks have their own deadlines, with more detailed errors. This deadline is for ranks that can't raise any more.

    Args:
        pages: Pages of ranks that run and aren't suspended, by rank.
        timeouts: The time that each phase allows.
        now_ns: Monotonic time.
        margin_s: Seconds to add to that time, so that the ranks' own deadlines come first.
    """
    over = [each for each in find_awaited(pages, timeouts, now_ns=now_ns) if each.overdue_s > margin_s]
    late = min(over, key=lambda each: each.seen.time_ns, default=None)
    return None if late is None else Hang(late.rank, late.seen.pid, late.waited_s, late.seen, late)


class Ends:
    """Notices the ends of processes: at once if the kernel has pidfds, else after a wait.

    Args:
        pids: Children of this process that nobody has waited for.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._poll: select.poll | None = select.poll()
        self._fds: list[int] = []
        try:
            for pid in pids:
                self._fds.append(os.pidfd_open(pid))
                self._poll.register(self._fds[-1], select.POLLIN)
        except (OSError, AttributeError):  # an old kernel, or a sandbox that refuses it
            self._poll = None

    def wait(self, longest_s: float) -> None:
        """Return when a process has ended, or after the given time."""
        if self._poll is None:
            time.sleep(longest_s)
            return
        for fd, _ in self._poll.poll(longest_s * 1000):
            self._poll.unregister(fd)  # else every later wait would return at once

    def close(self) -> None:
        """Close the descriptors of the processes."""
        while self._fds:
            os.close(self._fds.pop())


def count_memory_kills() -> int | None:
    """Number of processes that the kernel has killed for memory since it booted; None if that can't be read."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
