"""The rank processes of one attempt on this node: which run, how they ended, what they reported; and stopping them."""

from __future__ import annotations

import contextlib
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
from evenstep.ground.health.heartbeat import Note
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.launcher.failure.detection import Ends, RankState, look_at
from evenstep.launcher.failure.report import Failure
from evenstep.launcher.failure.stacks import StackRequest
from evenstep.launcher.spawn.child import Child

_POLL_S = 0.02


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
        self.lost: set[int] = set()
        self.stopped: set[int] = set()

    # ------------------------------------------------------------------ what is seen of them

    def look(self) -> list[RankState]:
        """What each is like now."""
        return [
            look_at(
                self.ranks[local_rank],
                process,
                self._pages.pages[local_rank],
                was_stopped=local_rank in self.stopped,
                is_lost=local_rank in self.lost,
            )
            for local_rank, process in self.processes.items()
        ]

    def await_end(self, longest_s: float) -> None:
        """Wait until one ends, but not for longer."""
        self._ends.wait(longest_s)

    def request_stacks(self, states: Iterable[RankState]) -> StackRequest:
        """Ask ranks for their stacks: those that run and write any. Others would end by the signal, or never answer."""
        asked = [each for each in states if each.runs and not each.is_suspended and Note.WRITES_STACKS in each.notes]
        return StackRequest({each.rank: (each.pid, self.stack_file(each.rank)) for each in asked})

    def stack_file(self, rank: int) -> Path:
        """The file that a rank writes its stacks to."""
        return Path(self._pages.files[self.ranks.index(rank)])

    # ------------------------------------------------------------------ what is done to them

    def _alive(self) -> dict[int, Child]:
        """By local rank, those that run."""
        return {local_rank: process for local_rank, process in self.processes.items() if process.poll() is None}

    def lose(self, rank: int) -> None:
        """Go on without one: it doesn't count any more, and what it has started is killed if it has ended itself."""
        local_rank = self.ranks.index(rank)
        self.lost.add(local_rank)
        if self.processes[local_rank].poll() is not None:
            self.kill(rank)

    def kill(self, rank: int) -> None:
        """Kill one rank and what it has started."""
        self.processes[self.ranks.index(rank)].signal_group(signal.SIGKILL)

    def stop(self, first: signal.Signals, *, patience_s: float, terminate_s: float) -> None:
        """Stop the ranks and what they started. A signal to us meanwhile means SIGKILL now.

        Args:
            first: Sent first, to the ranks alone: they may need what they have started, such as the workers of their
                loaders, for the steps until they save. SIGKILL follows, to everything.
            patience_s: Until then.
            terminate_s: From SIGKILL until a rank that still runs is left behind.
        """
        self.stopped |= self._alive().keys()
        try:
            for local_rank in self._alive():
                ready = self._pages.pages[local_rank].words[Note.IS_READY]
                self._request(local_rank, signal.SIGTERM if first == signal.SIGINT and not ready else first)
            self._await_all(patience_s)
        finally:
            if self.stopped:
                for process in self.processes.values():
                    process.signal_group(signal.SIGKILL)
        self._await_all(terminate_s)
        for local_rank, process in self._alive().items():
            message = f"evenstep: rank {self.ranks[local_rank]} (pid {process.pid}) can't be killed, and is left behind"
            say(message)

    def _request(self, local_rank: int, which: signal.Signals) -> None:
        """Send a signal to the process that trains: behind a shell script it isn't the one that was started."""
        process, seen = self.processes[local_rank], self._pages.pages[local_rank].read()
        with contextlib.suppress(OSError):
            if seen is not None and os.getsid(seen.pid) == process.pid:
                os.kill(seen.pid, which)
                return
        process.send_signal(which)

    def _await_all(self, longest_s: float) -> None:
        deadline = time.monotonic() + longest_s
        while self._alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Close after all ranks have ended or can't be killed. Writes the rest of what goes to the terminal."""
        self._ends.close()
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
