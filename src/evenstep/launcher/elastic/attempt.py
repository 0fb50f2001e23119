"""The rank processes of one attempt on this node: which run, how they ended, what they reported; and stopping them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from evenstep.console import say
from evenstep.ground.health.first_failure import CrashReport, Exit
from evenstep.ground.health.heartbeat import Heartbeat, Note, Phase
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.launcher.failure.detection import Ends
from evenstep.launcher.failure.report import Failure
from evenstep.launcher.spawn.child import Child, Guard, stop


class Attempt:
    """The rank processes of one attempt on this node, and what they leave on their pages.

    Args:
        context: torchelastic's, with the processes already started.
        ranks: Global rank of each local rank.
        number: How many restarts there were.
        pages: Of these ranks. Closed with the attempt.

    Attributes:
        processes: By local rank, that of each.
        pids: By local rank, as torchelastic has started it.
        lost: Local ranks without which the others go on.
        stopped: Local ranks that a signal of ours reached alive.
    """

    def __init__(self, context: SubprocessContext, *, ranks: list[int], number: int, pages: NodePages) -> None:
        self._context = context
        self.ranks = ranks
        self.number = number
        self._pages = pages
        self.processes: dict[int, Child] = {}
        for local_rank, handler in context.subprocess_handlers.items():
            # In its place, too: what polls a `Popen` would reap it.
            started: Any = handler
            if isinstance(handler.proc, subprocess.Popen):
                started.proc = Child(handler.proc.pid, reap=handler.proc.poll)
            self.processes[local_rank] = started.proc
        self.pids = {local_rank: process.pid for local_rank, process in self.processes.items()}
        self._ends = Ends(self.pids.values())
        self._guard = Guard(self.pids.values())
        self.lost: set[int] = set()
        self.stopped: set[int] = set()

    # ------------------------------------------------------------------ what is seen of them

    def codes(self) -> list[int | None]:
        """How each has ended, of those that are not lost; None: it runs."""
        return [process.poll() for local_rank, process in self.processes.items() if local_rank not in self.lost]

    def alive(self) -> dict[int, Child]:
        """By local rank, those that run."""
        return {local_rank: process for local_rank, process in self.processes.items() if process.poll() is None}

    def await_end(self, longest_s: float) -> None:
        """Wait until one ends, but not for longer."""
        self._ends.wait(longest_s)

    def pages(self) -> dict[int, Heartbeat | None]:
        """Their heartbeat pages as they are now, by rank."""
        return self._pages.read(self.ranks)

    def has_noted(self, what: Note) -> bool:
        """Whether any of them has noted something on its page."""
        return any(page.words[what] for page in self._pages.pages)

    def stack_files(self, local_ranks: Iterable[int]) -> dict[int, tuple[int, Path]]:
        """By rank, its pid and the file that its stacks go to; without those that don't write any."""
        return {
            self.ranks[each]: (self.processes[each].pid, Path(self._pages.files[each]))
            for each in local_ranks
            if self._pages.pages[each].words[Note.WRITES_STACKS]
        }

    def reports(self) -> list[CrashReport]:
        """What they have reported. What another process has reported in a rank's name counts only with the rank's end.

        That may be the script behind a program of the user's, whose status says whether the rank failed; or a child
        that failed, and whose parent has caught that.
        """
        reports = []
        for local_rank, process in self.processes.items():
            report = CrashReport.unpack(self._pages.pages[local_rank].report())
            if report is not None and (report.pid == process.pid or (process.poll() or 0) > 0):
                reports.append(report)
        return reports

    def exits(self) -> list[Exit]:
        """How they ended; a rank that has reported counts as failed, however it ended then.

        It may have been stopped before its end, or have an exit handler that ends it with status 0.
        """
        reports = {report.rank: report for report in self.reports()}
        exits = []
        for local_rank, process in self.processes.items():
            code, rank = process.poll(), self.ranks[local_rank]
            if code is None or local_rank in self.lost:
                continue
            was_stopped = local_rank in self.stopped
            if (was_stopped or code == 0) and rank in reports:
                code, was_stopped = reports[rank].exit_code, False
            exits.append(Exit(rank, process.pid, code, stopped_by_launcher=was_stopped))
        return exits

    def has_reported(self, *, longest_s: float) -> bool:
        """Whether a rank has reported an error and only python's own end is left, which takes a third of a second.

        Or the rest takes too long: a thread or an exit handler of the script holds the rank. Or it has ended, with
        whatever status an exit handler has chosen.
        """
        reports = self.reports()
        if not reports:
            return False
        pages = self.pages()
        done = {rank for rank, seen in pages.items() if seen is not None and seen.is_done}
        done |= set(self.ranks) - {self.ranks[local_rank] for local_rank in self.alive()}
        return any(r.rank in done or time.monotonic_ns() - r.time_ns > longest_s * 1e9 for r in reports)

    def only_end(self) -> bool:
        """Whether all that are left have reported an error, and written what they had to write."""
        pages, reporting = self.pages(), {report.rank for report in self.reports()}
        ranks = [self.ranks[local_rank] for local_rank in self.alive()]
        return all(rank in reporting and (seen := pages[rank]) is not None and seen.is_done for rank in ranks)

    def anybody_is_leaving(self) -> bool:
        """Whether one that still runs has left its world."""
        pages = self.pages()
        leaving = {rank for rank, seen in pages.items() if seen is not None and seen.phase is Phase.ENDED}
        return any(self.ranks[local_rank] in leaving for local_rank in self.alive())

    # ------------------------------------------------------------------ what is done to them

    def kill(self, rank: int) -> None:
        """Kill one rank and what it has started."""
        self.processes[self.ranks.index(rank)].signal_group(signal.SIGKILL)

    def stop(self, first: signal.Signals, *, patience_s: float, terminate_s: float) -> None:
        """Stop the ranks and what they started; see `child.stop`."""
        self.stopped |= self.alive().keys()
        ask = functools.partial(self._request, first)
        for local_rank in stop(self.processes, ask, patience_s=patience_s, terminate_s=terminate_s):
            who = f"rank {self.ranks[local_rank]} (pid {self.pids[local_rank]})"
            say(f"evenstep: {who} can't be killed, and is left behind")

    def _request(self, which: signal.Signals, local_rank: int) -> None:
        """Send a signal to the process that trains: behind a shell script it isn't the one that was started."""
        process, page = self.processes[local_rank], self._pages.pages[local_rank]
        seen = page.read()
        if which == signal.SIGINT and not page.words[Note.IS_READY]:
            which = signal.SIGTERM
        with contextlib.suppress(OSError):
            if seen is not None and os.getsid(seen.pid) == process.pid:
                os.kill(seen.pid, which)
                return
        process.send_signal(which)

    def close(self) -> None:
        """Close after all ranks have ended or can't be killed. Writes the rest of what goes to the terminal."""
        self._ends.close()
        self._guard.close()
        self._pages.close()
        self._context.close(signal.SIGKILL, timeout=0)
        for process in self.processes.values():
            process.release()

    def result_of(self, failure: Failure | None) -> RunProcsResult:
        """For torchelastic, after `close`: which ranks failed, and at least one where the attempt did."""
        failures = {
            local_rank: ProcessFailure(
                local_rank=local_rank,
                pid=process.pid,
                exitcode=process.returncode,
                error_file=self._context.error_files[local_rank],
            )
            for local_rank, process in self.processes.items()
            if process.returncode
        }
        if failure is not None and not failures:  # of a rank that ended with status 0, or on another node
            local_rank = self.ranks.index(failure.root_cause.rank)
            pid, file = failure.root_cause.pid, self._context.error_files[local_rank]
            failures[local_rank] = ProcessFailure(local_rank=local_rank, pid=pid, exitcode=1, error_file=file)
        return RunProcsResult(failures=failures, return_values=dict.fromkeys(self.processes))
