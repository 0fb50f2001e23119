"""The ranks of one attempt, with our own way to end: the culprit is found before anybody is stopped."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from evenstep.errors import EXIT_PREEMPTED
from evenstep.health.blame import Exit, read_reports, saves_file
from evenstep.health.budgets import Budgets
from evenstep.health.page import Phase, Seen, page_file, read_page
from evenstep.launcher.account import Failure, in_short, judge, state_of, status_of
from evenstep.launcher.other_hosts import Elsewhere, OtherHosts, Saved
from evenstep.launcher.starting import RankProcess
from evenstep.launcher.verdict import StopPolicy, is_evident
from evenstep.launcher.watch import Ends, Hang, LateWatch, StopWatch, count_memory_kills, observe
from evenstep.launcher.worker import STACK_SIGNAL, ready_file, stack_file

_POLL_S = 0.02
_LOOK_EVERY_S = 0.25
_LOOK_FOR_STOPS_EVERY_S = 0.1
_STACK_S = 0.3
_ANOTHER_HOST = "another host has come: all ranks are stopped, and start again with it"


class WatchedRanks:
    """The ranks of one attempt: stands where torchelastic keeps its process context, and answers to what it asks.

    Args:
        context: torchelastic's, with the processes already started.
        ranks: Global rank of each local rank.
        attempt: How many restarts there were.
        run_directory: Where ranks leave their reports.
        policy: How ranks are stopped.
        budgets: How long they may keep others waiting.
        on_failure: Told of a failed attempt once all its ranks have ended and all their output is written.
        on_preempted: Told when all ranks have ended because they were asked to stop, and have saved.
        others: The other hosts of the run; None: there are none.
        may_restart: Ranks of this run are started again if they fail.

    Attributes:
        should_make_room: On another host it was seen that one more host waits: see `make_room`.
    """

    def __init__(
        self,
        context: SubprocessContext,
        *,
        ranks: list[int],
        attempt: int,
        run_directory: Path,
        policy: StopPolicy,
        budgets: Budgets,
        on_failure: Callable[[Failure], None],
        on_preempted: Callable[[], None],
        others: OtherHosts | None = None,
        may_restart: bool = False,
    ) -> None:
        self._context = context
        self._ranks = ranks
        self._attempt = attempt
        self._run_directory = run_directory
        self._policy = policy
        self._on_failure = on_failure
        self._others = others
        self._may_restart = may_restart
        self._on_preempted = on_preempted
        self._first_preempted: float | None = None
        self.should_make_room = False
        self._stopped: set[int] = set()  # local ranks that a signal of ours reached alive
        self._watch = StopWatch(grace_s=policy.stopped_grace_s)
        self._lateness = LateWatch(budgets)
        self._last_look = self._last_look_for_stops = 0.0
        self._num_memory_kills = count_memory_kills()
        self._ends = Ends(process.pid for process in self._processes.values())

    @property
    def _processes(self) -> dict[int, RankProcess]:
        return {local_rank: handler.proc for local_rank, handler in self._context.subprocess_handlers.items()}

    # ------------------------------------------------------------------ what torchelastic calls

    def pids(self) -> dict[int, int]:
        """Process of each local rank."""
        return {local_rank: process.pid for local_rank, process in self._processes.items()}

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """One look: None while all run; a result once all have succeeded or one has failed and all have ended."""
        codes = [process.poll() for process in self._processes.values()]
        if any(code not in (None, 0, EXIT_PREEMPTED) for code in codes) or self._has_told():
            return self._end_failed_attempt()
        if EXIT_PREEMPTED in codes and self._first_preempted is None:
            self._first_preempted = time.monotonic()
        if self._others is not None and self._others.room_is_wanted:
            return self._leave_for_room()
        if None in codes:
            # They agree on a step before they leave, so the others follow within moments.
            is_late = time.monotonic() - (self._first_preempted or math.inf) > self._policy.terminate_s
            hang, elsewhere = self._look(), self._others.look() if self._others is not None else None
            if is_late or hang or elsewhere:
                return self._end_failed_attempt(hang, elsewhere)
            self._ends.wait(self._policy.look_every_s)
            return None
        if self._first_preempted is not None and set(codes) != {EXIT_PREEMPTED}:
            return self._end_failed_attempt()
        if self._first_preempted is not None and self._others is not None and self._others.hear_of_room():
            return self._leave_for_room()
        self._close_context()
        self._tell_preempted()
        return RunProcsResult(return_values=dict.fromkeys(range(len(codes))))

    def close(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Stop whoever is left; `timeout` is torchelastic's, the policy's counts."""
        self._stop(death_sig, patience_s=self._policy.save_s if self._saves() else self._policy.terminate_s)
        self._close_context()
        self._tell_preempted()

    def make_room(self) -> int | None:
        """Stop the ranks, for one more host waits to take part: no failure, and no end of the run.

        Returns:
            The step of the last checkpoint that ranks of this host have committed; None: none.
        """
        print(f"evenstep: {_ANOTHER_HOST}", file=sys.stderr, flush=True)  # noqa: T201
        if self._others is not None:
            self._others.make_room()  # before anybody there can take the end of ours for a failure
        self._stop(signal.SIGTERM, patience_s=self._policy.save_s if self._saves() else self._policy.terminate_s)
        saved_step = self._saved_here(self._pages()).step
        self._close_context()
        return saved_step

    def _leave_for_room(self) -> RunProcsResult:
        """What `wait` answers where the agent is to call `make_room`, and go on."""
        self.should_make_room = True
        return RunProcsResult()

    # ------------------------------------------------------------------ how it ends

    def _look(self) -> Hang | None:
        """Say who is stopped; returns a rank that has been for too long."""
        now = time.monotonic()
        if now - self._last_look_for_stops < _LOOK_FOR_STOPS_EVERY_S:
            return None
        self._last_look_for_stops = now
        observations = {self._ranks[local]: observe(process.pid) for local, process in self._alive().items()}
        is_stopped = any(self._watch.is_stopped(rank) for rank in self._ranks)
        late: Hang | None = None
        told: list[str] = []
        pages = self._pages() if is_stopped or now - self._last_look >= _LOOK_EVERY_S else {}
        lines, hang = self._watch.look(now, observations, pages)
        if now - self._last_look >= _LOOK_EVERY_S:
            self._last_look = now
            # Who is stopped has been named already.
            told, late = self._lateness.look({r: p for r, p in pages.items() if not self._watch.is_stopped(r)})
        lines, hang = lines + told, hang or late
        for line in lines:
            print(f"evenstep: {line}", file=sys.stderr, flush=True)  # noqa: T201
        return hang

    def _pages(self) -> dict[int, Seen | None]:
        return read_pages(self._run_directory, self._ranks, self._attempt)

    def _anybody_is_leaving(self) -> bool:
        pages = self._pages()
        leaving = {rank for rank, seen in pages.items() if seen is not None and seen.phase is Phase.ENDED}
        return any(self._ranks[local_rank] in leaving for local_rank in self._alive())

    def _ask_for_stacks(self) -> dict[int, str]:
        """Where those are that still run and have told of no error."""
        told = {report.rank for report in read_reports(self._run_directory, attempt=self._attempt)}
        asked = {}
        for local_rank, process in self._alive().items():
            rank = self._ranks[local_rank]
            path = stack_file(self._run_directory, rank, self._attempt)
            if rank not in told and path.exists():  # it hears the signal: anybody else would die of it
                process.send_signal(STACK_SIGNAL)
                asked[rank] = path
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline and not all(path.stat().st_size for path in asked.values()):
            time.sleep(_POLL_S)
        return {rank: path.read_text(errors="replace").strip() for rank, path in asked.items()}

    def _tell_preempted(self) -> None:
        if {process.returncode for process in self._processes.values()} == {EXIT_PREEMPTED}:
            self._on_preempted()

    def _saves(self) -> bool:
        """Whether the ranks save when they are asked to stop, which may take its time."""
        return any(saves_file(self._run_directory, rank, self._attempt).exists() for rank in self._ranks)

    def _has_told(self) -> bool:
        """Whether a rank has told of an error, and only python's own end is left; that takes a third of a second.

        Or more is left, but it takes too long: a thread or an exit handler of the script holds the rank.
        """
        longest_ns = self._policy.terminate_s * 1e9
        reports = read_reports(self._run_directory, attempt=self._attempt)
        if not reports:
            return False
        pages = self._pages()
        done = {rank for rank, seen in pages.items() if seen is not None and seen.is_done}
        return any(r.rank in done or time.monotonic_ns() - r.time_ns > longest_ns for r in reports)

    def _close_context(self) -> None:
        """Everybody has ended, or can't be killed: don't wait again. Writes the rest of what goes to the terminal."""
        self._ends.close()
        self._context.close(signal.SIGKILL, timeout=0)
        if self._others is not None:
            self._others.close()

    def _end_failed_attempt(self, hang: Hang | None = None, elsewhere: Elsewhere | None = None) -> RunProcsResult:
        started, noticed_ns = time.monotonic(), time.monotonic_ns()
        pages = self._pages()
        if self._others is not None:
            self._others.ask_for_states()
        stacks: dict[int, str] = {}
        if hang is not None:
            if not hang.is_suspended:
                stacks = self._ask_for_stacks()
            # It can hear no other signal. Its peers tell that they have lost it, as after any death.
            _signal_group(self._processes[self._ranks.index(hang.rank)], signal.SIGKILL)
        evident = False
        while self._alive() and elsewhere is None:
            evident = is_evident(self._exits(), read_reports(self._run_directory, attempt=self._attempt))
            grace_s = self._policy.evident_grace_s if evident else self._policy.grace_s
            if not evident and self._anybody_is_leaving():
                # It left its world as it should, and early: how it ends decides who is blamed.
                grace_s = max(grace_s, self._policy.terminate_s)
            if time.monotonic() - started >= grace_s:
                break
            time.sleep(_POLL_S)
        if not (evident or elsewhere is not None or hang is not None):
            stacks = self._ask_for_stacks()
        self._stop(signal.SIGTERM)
        exits = self._exits()
        failure = judge(exits, read_reports(self._run_directory, attempt=self._attempt), attempt=self._attempt)
        if failure is not None:
            seen_pages = {rank: seen for rank, seen in pages.items() if seen is not None}
            failure = replace(failure, hang=hang, pages=seen_pages, noticed_ns=noticed_ns)
        elsewhere = elsewhere or self._compare_with_others(failure)
        states = self._others.states() if self._others is not None else ()
        if self._others is not None and self._others.room_is_wanted and (failure is None or failure.only_witnesses):
            return self._leave_for_room()
        saved = self._saved_anywhere(self._pages())  # a save behind the loop may have ended meanwhile
        self._close_context()
        if failure is None and elsewhere is not None:
            failure = Failure(self._attempt, exits[0], None, noticed_ns=noticed_ns)  # nothing happened here
        if failure is not None:
            kills, before = count_memory_kills(), self._num_memory_kills
            self._on_failure(
                replace(
                    failure,
                    elsewhere=elsewhere,
                    stacks=stacks,
                    on_other_hosts=states,
                    resident_bytes=self._watch.resident_bytes,
                    num_memory_kills=None if kills is None or before is None else kills - before,
                    saves=saved.has_checkpointer,
                    saved_step=saved.step,
                )
            )
        failures = {
            local_rank: ProcessFailure(
                local_rank=local_rank,
                pid=process.pid,
                exitcode=process.returncode,
                error_file=self._context.error_files[local_rank],
            )
            for local_rank, process in self._processes.items()
            if process.returncode
        }
        return RunProcsResult(failures=failures)

    def _compare_with_others(self, failure: Failure | None) -> Elsewhere | None:
        """Tell the other hosts who failed here; or, where everybody only lost somebody, hear who failed there."""
        if self._others is None or failure is None:
            return None
        if not failure.only_witnesses:
            self._others.blame(in_short(failure), status_of(failure), state=state_of(failure))
            return None
        deadline = time.monotonic() + self._policy.grace_s
        while (told := self._others.look()) is None and time.monotonic() < deadline:
            if self._others.room_is_wanted:
                return None
            time.sleep(_POLL_S)
        return told

    def _saved_here(self, pages: Mapping[int, Seen | None]) -> Saved:
        steps = (seen.saved_step for seen in pages.values() if seen is not None)
        return Saved(self._saves(), max((step for step in steps if step is not None), default=None))

    def _saved_anywhere(self, pages: Mapping[int, Seen | None]) -> Saved:
        """What this attempt has saved, on any host: all of them decide alike whether one more is worth while."""
        saved = self._saved_here(pages)
        if self._others is None or not self._may_restart:
            return saved
        return self._others.agree_on_saved(saved, longest_s=self._policy.terminate_s + self._policy.grace_s)

    def _exits(self) -> list[Exit]:
        """How the ranks that have ended did; what one has told counts, even if it was stopped before it had ended."""
        told = {report.rank: report for report in read_reports(self._run_directory, attempt=self._attempt)}
        exits = []
        for local_rank, process in self._processes.items():
            code, rank = process.poll(), self._ranks[local_rank]
            if code is None:
                continue
            was_stopped = local_rank in self._stopped
            if was_stopped and rank in told:
                code, was_stopped = told[rank].exit_code, False
            exits.append(Exit(rank, process.pid, code, stopped_by_launcher=was_stopped))
        return exits

    def _alive(self) -> dict[int, RankProcess]:
        return {local_rank: process for local_rank, process in self._processes.items() if process.poll() is None}

    def _stop(self, first: signal.Signals, patience_s: float | None = None) -> None:
        """`first`, then SIGKILL, to the ranks and to what they started. A signal to us meanwhile means SIGKILL now."""
        self._stopped |= self._alive().keys()
        try:
            for local_rank, process in self._alive().items():
                ready = ready_file(self._run_directory, self._ranks[local_rank], self._attempt).exists()
                _signal_group(process, signal.SIGTERM if first == signal.SIGINT and not ready else first)
            deadline = time.monotonic() + (self._policy.terminate_s if patience_s is None else patience_s)
            while self._alive() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:
            if self._stopped:
                for process in self._processes.values():
                    _signal_group(process, signal.SIGKILL)
        deadline = time.monotonic() + self._policy.terminate_s
        while self._alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for local_rank, process in self._alive().items():
            message = (
                f"evenstep: rank {self._ranks[local_rank]} (pid {process.pid}) can't be killed, and is left behind"
            )
            print(message, file=sys.stderr, flush=True)  # noqa: T201


def _signal_group(process: RankProcess, which: signal.Signals) -> None:
    # Each rank leads a session of its own, so this reaches the workers of its loaders too, also after it has ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, which)


def read_pages(run_directory: Path, ranks: Iterable[int], attempt: int) -> dict[int, Seen | None]:
    """What the progress pages of ranks say now, by rank."""
    return {rank: read_page(page_file(run_directory, rank, attempt)) for rank in ranks}
