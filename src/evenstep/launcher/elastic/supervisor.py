"""The ranks of one attempt: watches them, finds the root cause of a failure, and only then stops the others."""

from __future__ import annotations

import math
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import RunProcsResult, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from evenstep.compat.torch_elastic import start_again
from evenstep.console import say
from evenstep.errors import EXIT_PREEMPTED
from evenstep.health.first_failure import CrashReport, Exit, read_reports, saves_file
from evenstep.health.heartbeat import Heartbeat, Phase, page_file, read_page
from evenstep.health.phase_timeouts import PhaseTimeouts
from evenstep.health.recovery_files import (
    keep_what_belongs_together,
    kept_by_survivors,
    newest_in_memory,
    note_losses,
    note_lost_peers,
    virtual_ranks_of,
    why_unsaved,
)
from evenstep.launcher.elastic.heartbeat import OtherNodes, Saved
from evenstep.launcher.elastic.looks import RankProcess, StackRequest, WorkerStacks, packed, unpacked
from evenstep.launcher.elastic.recovery import Recoveries, Recovery, is_known_here, is_loss, lost_ranks
from evenstep.launcher.failure.detection import (
    Ends,
    Hang,
    Observation,
    StopWatch,
    TimeoutWatch,
    count_memory_kills,
    observe,
)
from evenstep.launcher.failure.hangs import DEFAULT_AFTER_S, HangWatch, Seen
from evenstep.launcher.failure.policy import Loss, LossPolicy, StopPolicy, describe_exit, is_evident
from evenstep.launcher.failure.report import Failure, RemoteFailure, judge, state_of, status_of, summary_of
from evenstep.launcher.spawn.child import Child
from evenstep.launcher.spawn.script_runner import ready_file, stack_file
from evenstep.processes import has_gpu, has_gpu_driver, time_on_core_ns

_POLL_S = 0.02
_LOOK_EVERY_S = 0.25
_LOOK_FOR_STOPS_EVERY_S = 0.1
_STACK_S = 0.3
_ANOTHER_HOST = "another node has come: all ranks are stopped, and start again with it"


class WatchedRanks:
    """The ranks of one attempt, with the interface of torchelastic's process context, in whose place it stands.

    Args:
        context: torchelastic's, with the processes already started.
        ranks: Global rank of each local rank.
        attempt: How many restarts there were.
        run_directory: Where ranks leave their reports.
        policy: How ranks are stopped.
        timeouts: How long they may keep others waiting.
        on_failure: Called with a failed attempt once all its ranks have ended and all their output is written.
        on_preempted: Called when all ranks have saved and ended after a stop signal.
        others: The other nodes of the run; None: there are none.
        may_restart: Ranks of this run are started again if they fail.
        num_ranks: Of all nodes; None: of this one.
        name_after_s: See `HangWatch`.
        losses: Which ranks the run can lose.
        recoveries: How the run goes on after a loss; None: it doesn't, unless it is restarted.
        on_recovery: Called with a failed attempt after which it goes on, as `on_failure`, and how.

    Attributes:
        should_admit_node: Another node has announced a new one that waits: see `stop_for_new_node`.
        recovery: All ranks have ended, and the run goes on so; None: no such thing.
    """

    def __init__(
        self,
        context: SubprocessContext,
        *,
        ranks: list[int],
        attempt: int,
        run_directory: Path,
        policy: StopPolicy,
        timeouts: PhaseTimeouts,
        on_failure: Callable[[Failure], None],
        on_preempted: Callable[[], None],
        others: OtherNodes | None = None,
        may_restart: bool = False,
        num_ranks: int | None = None,
        name_after_s: float = DEFAULT_AFTER_S,
        losses: LossPolicy | None = None,
        recoveries: Recoveries | None = None,
        on_recovery: Callable[[Failure, Recovery], None] | None = None,
    ) -> None:
        self._losses = losses or LossPolicy()
        self._lost: set[int] = set()  # local ranks without which the others go on
        self._num_restarts = 0  # of single ranks
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
        self.should_admit_node = False
        self._recoveries, self._on_recovery = recoveries, on_recovery
        self.recovery: Recovery | None = None
        self._stopped: set[int] = set()  # local ranks that a signal of ours reached alive
        follows = "it is killed" if self._losses.num_servers else "all ranks are stopped"
        self._watch = StopWatch(grace_s=policy.stopped_grace_s, follows=follows)
        self._timeout_watch = TimeoutWatch(timeouts)
        self._hang_watch = HangWatch(
            after_s=name_after_s,
            timeouts=timeouts,
            num_ranks=num_ranks or len(ranks),
            may_have_gpus=has_gpu_driver(),
        )
        self._stack_request: StackRequest | None = None
        self._worker_stacks = WorkerStacks()
        self._names_hangs = name_after_s < math.inf
        self._last_look = self._last_look_for_stops = 0.0
        self._num_memory_kills = count_memory_kills()
        self._processes: dict[int, RankProcess] = {}
        for local_rank, handler in context.subprocess_handlers.items():
            # In its place, too: what polls a `Popen` would reap it.
            started: Any = handler
            started.proc = Child.of(handler.proc) if isinstance(handler.proc, subprocess.Popen) else handler.proc
            self._processes[local_rank] = started.proc
        self._ends = Ends(process.pid for process in self._processes.values())
        self._pids = {local_rank: process.pid for local_rank, process in self._processes.items()}

    # ------------------------------------------------------------------ what torchelastic calls

    def pids(self) -> dict[int, int]:
        """Process of each local rank, as torchelastic has started it."""
        return self._pids

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """One look: None while all run; a result once all have succeeded or one has failed and all have ended."""
        self._take_losses()
        codes = [process.poll() for local_rank, process in self._processes.items() if local_rank not in self._lost]
        if any(code not in (None, 0, EXIT_PREEMPTED) for code in codes) or self._has_reported():
            return self._end_failed_attempt()
        if EXIT_PREEMPTED in codes and self._first_preempted is None:
            self._first_preempted = time.monotonic()
        if self._others is not None and self._others.new_node_waits:
            return self._yield_to_new_node()
        if None in codes:
            # They agree on a step before they leave, so the others follow within moments.
            is_late = time.monotonic() - (self._first_preempted or math.inf) > self._policy.terminate_s
            hang, remote_failure = self._look(), self._others.look() if self._others is not None else None
            if hang is not None and hang.is_suspended and self._losses.can_lose(hang.rank, -signal.SIGKILL):
                self._processes[self._ranks.index(hang.rank)].signal_group(signal.SIGKILL)
                hang = None  # what follows is decided as of any other that was killed
            if is_late or hang or remote_failure:
                return self._end_failed_attempt(hang, remote_failure)
            self._ends.wait(self._policy.look_every_s)
            return None
        if self._first_preempted is not None and set(codes) != {EXIT_PREEMPTED}:
            return self._end_failed_attempt()
        for line in self._hang_watch.ended_well():
            say(f"evenstep: {line}")
        if self._first_preempted is not None and self._others is not None and self._others.check_for_new_node():
            return self._yield_to_new_node()
        self._close_context()
        self._tell_preempted()
        return RunProcsResult(return_values=dict.fromkeys(self._processes))

    def close(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Stop the ranks that are left; `timeout` is torchelastic's, the policy's counts."""
        saves = self._saves() and self._look_at_others() is None  # a save needs all ranks
        self._stop(death_sig, patience_s=self._policy.save_s if saves else self._policy.terminate_s)
        self._close_context()
        self._tell_preempted()

    def stop_for_new_node(self) -> int | None:
        """Stop the ranks because a new node waits to join: no failure, and no end of the run.

        Returns:
            The step of the last checkpoint that ranks of this node have committed; None: none.
        """
        say(f"evenstep: {_ANOTHER_HOST}")
        if self._others is not None:
            self._others.announce_new_node()  # before another node can take the end of our ranks for a failure
        self._stop(signal.SIGTERM, patience_s=self._policy.save_s if self._saves() else self._policy.terminate_s)
        saved_step = self._saved_here(self._pages()).step
        self._close_context()
        return saved_step

    def _yield_to_new_node(self) -> RunProcsResult:
        """The result of `wait` after which the agent calls `stop_for_new_node` and goes on."""
        self.should_admit_node = True
        return RunProcsResult()

    # ------------------------------------------------------------------ ranks that the run can lose

    def _take_losses(self) -> None:
        """Start ranks again that were killed, or go on without them, as `LossPolicy` says."""
        if not self._losses.num_servers or self._stopped:
            return
        for local_rank, process in list(self._processes.items()):
            code, rank = process.poll(), self._ranks[local_rank]
            if code is None or local_rank in self._lost or not self._losses.can_lose(rank, code):
                continue
            others = [
                other.poll()
                for each, other in self._processes.items()
                if each not in self._lost and each != local_rank and self._ranks[each] < self._losses.num_workers
            ]
            loss = self._losses.judge(
                rank,
                num_restarts=self._num_restarts,
                num_workers_left=sum(other in (None, 0) for other in others),
                has_checkpoints=self._saves(),
            )
            if loss is Loss.END_RUN:
                continue
            process.signal_group(signal.SIGKILL)  # what it had started
            who = f"{self._losses.name_of(rank)} (rank {rank}, pid {process.pid}) {describe_exit(code)}"
            if loss is Loss.GO_ON:
                self._lost.add(local_rank)
                say(f"evenstep: {who}; {loss.value}")
                continue
            process.release()
            self._num_restarts += 1
            started = start_again(self._context, local_rank)
            self._processes[local_rank] = Child.of(started) if isinstance(started, subprocess.Popen) else started
            self._ends.add(self._processes[local_rank].pid)
            say(f"evenstep: {who}; {loss.value} ({self._num_restarts} of {self._losses.max_restarts})")

    # ------------------------------------------------------------------ how it ends

    def _look(self) -> Hang | None:
        """Report suspended and overdue ranks; returns one that is given up."""
        now = time.monotonic()
        if now - self._last_look_for_stops < _LOOK_FOR_STOPS_EVERY_S:
            return None
        self._last_look_for_stops = now
        observations = {self._ranks[local]: observe(process.pid) for local, process in self._alive().items()}
        is_stopped = any(self._watch.is_stopped(rank) for rank in self._ranks)
        late: Hang | None = None
        pages = self._pages() if is_stopped or now - self._last_look >= _LOOK_EVERY_S else {}
        lines, hang = self._watch.look(now, observations, pages)
        if self._recoveries is not None and self._recoveries.awaits_step:
            steps = [0 if page is None else page.stepped_ns for page in self._pages().values()]
            if min(steps):
                self._recoveries.stepped(min(steps))
                note_losses(self._run_directory, self._recoveries.losses)
        if now - self._last_look >= _LOOK_EVERY_S:
            self._last_look = now
            # Suspended ranks have been named already.
            late = self._timeout_watch.look({r: p for r, p in pages.items() if not self._watch.is_stopped(r)})
            if self._names_hangs:
                lines += self._look_for_hangs(observations, pages)
        for line in lines:
            say(f"evenstep: {line}")
        return hang or late

    def _look_for_hangs(
        self, observations: Mapping[int, Observation], pages: Mapping[int, Heartbeat | None]
    ) -> list[str]:
        """Lines on ranks that keep the others waiting. Never blocks: stacks are asked for now, and read later."""
        seen = {}
        for local_rank, process in self._processes.items():
            rank = self._ranks[local_rank]
            state = observations[rank].state if rank in observations else ""
            seen[rank] = Seen(process.pid, pages.get(rank), state, time_on_core_ns(process.pid), process.poll())
        now_ns, watch = time.monotonic_ns(), self._hang_watch
        watch.observe(now_ns, seen)
        others = unpacked(self._others.looks()) if self._others is not None else []
        if self._stack_request is not None:
            if self._stack_request.is_complete():
                with_gpu = [rank for rank, each in seen.items() if each.exit_code is None and has_gpu(each.pid)]
                watch.read(now_ns, self._stack_request.stacks(), with_gpu=with_gpu)
                self._stack_request = None
        elif not self._worker_stacks.is_busy and watch.is_due(now_ns, others):
            self._stack_request = StackRequest(self._stack_files(self._alive()))
            watch.asked()
        if self._others is not None:
            self._others.publish_looks(packed(watch.looks(now_ns)))
        lines = watch.judge(now_ns, others)
        for rank in watch.loading():
            process = self._processes[self._ranks.index(rank)]
            self._worker_stacks.ask(rank, process.pid, stack_file(self._run_directory, rank, self._attempt))
        if self._stack_request is None:  # they write to the same file
            lines += self._worker_stacks.look()
        return lines

    def _stack_files(self, local_ranks: Iterable[int]) -> dict[int, tuple[int, Path]]:
        """By rank, its pid and the file that its stacks go to; without those that are suspended."""
        ranks = {self._ranks[local_rank]: self._processes[local_rank] for local_rank in local_ranks}
        return {
            rank: (process.pid, stack_file(self._run_directory, rank, self._attempt))
            for rank, process in ranks.items()
            if not self._watch.is_stopped(rank)
        }

    def _pages(self) -> dict[int, Heartbeat | None]:
        return read_pages(self._run_directory, self._ranks, self._attempt)

    def _anybody_is_leaving(self) -> bool:
        pages = self._pages()
        leaving = {rank for rank, seen in pages.items() if seen is not None and seen.phase is Phase.ENDED}
        return any(self._ranks[local_rank] in leaving for local_rank in self._alive())

    def _request_stacks(self) -> dict[int, str]:
        """Stacks of the ranks that still run and have reported no error."""
        reporting = {report.rank for report in self._reports()}
        silent = [local_rank for local_rank in self._alive() if self._ranks[local_rank] not in reporting]
        request = StackRequest(self._stack_files(silent))
        deadline = time.monotonic() + _STACK_S
        while time.monotonic() < deadline and not request.is_complete():
            time.sleep(_POLL_S)
        return request.stacks()

    def _tell_preempted(self) -> None:
        if {process.returncode for process in self._processes.values()} == {EXIT_PREEMPTED}:
            self._on_preempted()

    def _saves(self) -> bool:
        """Whether the ranks save on a stop signal, which may take a while."""
        return any(saves_file(self._run_directory, rank, self._attempt).exists() for rank in self._ranks)

    def _has_reported(self) -> bool:
        """Whether a rank has reported an error and only python's own end is left, which takes a third of a second.

        Or the rest takes too long: a thread or an exit handler of the script holds the rank. Or it has ended, with
        whatever status an exit handler has chosen.
        """
        longest_ns = self._policy.terminate_s * 1e9
        reports = self._reports()
        if not reports:
            return False
        pages = self._pages()
        done = {rank for rank, seen in pages.items() if seen is not None and seen.is_done}
        done |= set(self._ranks) - {self._ranks[local_rank] for local_rank in self._alive()}
        return any(r.rank in done or time.monotonic_ns() - r.time_ns > longest_ns for r in reports)

    def _only_end(self) -> bool:
        """Whether all ranks that are left have reported an error, and written what they had to write."""
        pages, reporting = self._pages(), {report.rank for report in self._reports()}
        ranks = [self._ranks[local_rank] for local_rank in self._alive()]
        return all(rank in reporting and (seen := pages[rank]) is not None and seen.is_done for rank in ranks)

    def _close_context(self) -> None:
        """Close after all ranks have ended or can't be killed. Writes the rest of what goes to the terminal."""
        self._ends.close()
        self._context.close(signal.SIGKILL, timeout=0)
        for process in self._processes.values():
            process.release()
        if self._others is not None:
            self._others.close()

    def _end_failed_attempt(
        self, hang: Hang | None = None, remote_failure: RemoteFailure | None = None
    ) -> RunProcsResult:
        started, noticed_ns = time.monotonic(), time.monotonic_ns()
        pages = self._pages()
        if self._others is not None:
            self._others.request_states()
        stacks: dict[int, str] = {}
        if hang is not None:
            if not hang.is_suspended:
                stacks = self._request_stacks()
            # A suspended rank receives no other signal. Its peers report that they have lost it, as after any death.
            self._processes[self._ranks.index(hang.rank)].signal_group(signal.SIGKILL)
        evident, first = False, signal.SIGTERM
        has_told = False
        while self._alive():
            lost = remote_failure or self._look_at_others()
            if lost is not None and lost.is_loss and not has_told:
                note_lost_peers(self._run_directory, self._attempt, lost.text)  # for the ranks that wait for them
                has_told = True
            if remote_failure is not None and not self._awaits_survivors(started, noticed_ns, remote_failure):
                break
            if self._only_end():
                first = signal.SIGKILL  # python's own end takes a tenth of a second, and nothing comes of it
                break
            evident = is_evident(self._exits(), self._reports())
            grace_s = self._policy.evident_grace_s if evident else self._policy.grace_s
            if not evident and self._anybody_is_leaving():
                # It left its world as it should, and early: how it ends decides which rank is the root cause.
                grace_s = max(grace_s, self._policy.terminate_s)
            if time.monotonic() - started >= grace_s:
                if not self._awaits_survivors(started, noticed_ns, lost):
                    break
                self._kill_suspended()
            time.sleep(_POLL_S)
        if not (evident or remote_failure is not None or hang is not None):
            stacks = self._request_stacks()
        self._stop(first)
        keep_what_belongs_together(self._run_directory, self._attempt)
        exits = self._exits()
        failure = judge(exits, self._reports(), attempt=self._attempt)
        if failure is not None:
            seen_pages = {rank: seen for rank, seen in pages.items() if seen is not None}
            failure = replace(failure, hang=hang, pages=seen_pages, noticed_ns=noticed_ns)
        if self._others is not None and self._recoveries is not None and remote_failure is not None:
            self._others.publish(remote_failure)  # all have to know of it, and a node that is lost can't say so
        remote_failure = remote_failure or self._compare_with_others(failure)
        states = self._others.states() if self._others is not None else ()
        if self._others is not None and self._others.new_node_waits and (failure is None or failure.only_secondary):
            return self._yield_to_new_node()
        if failure is None and remote_failure is not None:
            failure = Failure(self._attempt, exits[0], None, noticed_ns=noticed_ns)  # nothing failed on this node
        if failure is not None:
            failure = replace(failure, remote_failure=remote_failure)
        saved = self._saved_anywhere(self._pages(), failure)  # a save behind the loop may have ended meanwhile
        if remote_failure is None and failure is not None and failure.only_secondary and saved.is_loss:
            failure = replace(failure, remote_failure=self._look_at_others())  # another node has said why meanwhile
        self._close_context()
        recovery = self._plan_recovery(failure, saved)
        if failure is not None:
            kills, before = count_memory_kills(), self._num_memory_kills
            failure = replace(
                failure,
                stacks=stacks,
                on_other_nodes=states,
                resident_bytes=self._watch.resident_bytes,
                num_memory_kills=None if kills is None or before is None else kills - before,
                saves=saved.has_checkpointer,
                saved_step=saved.step,
            )
            if recovery is not None and self._on_recovery is not None:
                self.recovery = recovery
                self._on_recovery(failure, recovery)
                if self._recoveries is not None:
                    note_losses(self._run_directory, self._recoveries.losses)
                return RunProcsResult()
            self._on_failure(failure)
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
        if failure is not None and not failures:  # of a rank that ended with status 0, or on another node
            local_rank = self._ranks.index(failure.root_cause.rank)
            pid, file = failure.root_cause.pid, self._context.error_files[local_rank]
            failures[local_rank] = ProcessFailure(local_rank=local_rank, pid=pid, exitcode=1, error_file=file)
        return RunProcsResult(failures=failures, return_values=dict.fromkeys(self._processes))

    def _look_at_others(self) -> RemoteFailure | None:
        return None if self._others is None else self._others.look()

    def _kill_suspended(self) -> None:
        """Kill ranks that a signal has stopped: a survivor that waits for one doesn't notice that another was lost."""
        for process in self._alive().values():
            if observe(process.pid).state == "T":
                process.signal_group(signal.SIGKILL)

    def _awaits_survivors(self, started: float, noticed_ns: int, remote_failure: RemoteFailure | None) -> bool:
        """Whether a survivor may still save the last step for those who go on: see `checkpoint.save.survivors`.

        While one saves, also where another has saved: it may be a step ahead. A save that began before the loss may be
        one that waits for the lost rank; it counts as long as nobody has saved.
        """
        if self._recoveries is None or not self._saves() or not self._may_be_loss(remote_failure):
            return False
        pages, elapsed_s = self._pages(), time.monotonic() - started
        has_saved = self._has_saved_here()
        alive = (pages[self._ranks[local_rank]] for local_rank in self._alive())
        saving = [seen for seen in alive if seen is not None and seen.phase is Phase.SAVING]
        if any(not has_saved or seen.time_ns > noticed_ns for seen in saving):
            return elapsed_s < self._policy.save_s
        return not has_saved and elapsed_s < self._recoveries.policy.save_s

    def _may_be_loss(self, remote_failure: RemoteFailure | None) -> bool:
        """Whether ranks were lost, as far as is known here and now."""
        if remote_failure is not None:
            return remote_failure.is_loss
        failure = judge(self._exits(), self._reports(), attempt=self._attempt)
        if self._others is not None and failure is not None and failure.only_secondary:
            return True  # the node where it happened knows, and has not said so yet
        return is_loss(failure)

    def _plan_recovery(self, failure: Failure | None, saved: Saved) -> Recovery | None:
        if self._recoveries is None or failure is None or not saved.is_loss:
            return None
        if is_loss(failure):
            for rank in self._ranks:
                why = why_unsaved(self._run_directory, rank, self._attempt)
                if why is not None:
                    say(f"evenstep: rank {rank} could not save the last step: {why}")
        return self._recoveries.plan(
            failure,
            num_ranks=len(self._ranks) if self._others is None else None,
            in_memory=saved.in_memory,
            on_disk=saved.step,
            is_new=saved.is_new,
            virtual_ranks=virtual_ranks_of(self._run_directory),
        )

    def _compare_with_others(self, failure: Failure | None) -> RemoteFailure | None:
        """Publish a failure that began here; else, after secondary failures only, wait for one published elsewhere.

        Where the run goes on after losses, all nodes agree on the reason later, when all have ended.
        """
        if self._others is None or failure is None:
            return None
        if not failure.only_secondary:
            self._others.publish_failure(
                summary_of(failure),
                status_of(failure),
                state=state_of(failure),
                is_loss=is_loss(failure),
                lost=lost_ranks(failure),
            )
            return None
        if self._recoveries is not None:
            return self._others.look()
        deadline = time.monotonic() + self._policy.grace_s
        while (published := self._others.look()) is None and time.monotonic() < deadline:
            if self._others.new_node_waits:
                return None
            time.sleep(_POLL_S)
        return published

    def _saved_here(self, pages: Mapping[int, Heartbeat | None], failure: Failure | None = None) -> Saved:
        steps = (seen.saved_step for seen in pages.values() if seen is not None)
        knows = failure is not None and (self._others is None or is_known_here(failure))
        return Saved(
            self._saves(),
            max((step for step in steps if step is not None), default=None),
            newest_in_memory(self._run_directory),
            self._has_saved_here(),
            is_loss(failure) if knows else None,
        )

    def _has_saved_here(self) -> bool:
        """Whether a survivor on this node has saved all that it had to save in this attempt."""
        return kept_by_survivors(self._run_directory, self._attempt)[0] is not None

    def _saved_anywhere(self, pages: Mapping[int, Heartbeat | None], failure: Failure | None) -> Saved:
        """What this attempt has saved on any node, so that all nodes decide alike whether to restart."""
        saved = self._saved_here(pages, failure)
        if self._others is None or not (self._may_restart or self._recoveries is not None):
            return saved
        longest_s = self._policy.terminate_s + self._policy.grace_s
        return self._others.agree_on_saved(
            saved, longest_s=longest_s if self._recoveries is None else self._policy.save_s
        )

    def _reports(self) -> list[CrashReport]:
        """What ranks have reported. What another process has reported in a rank's name counts only with the rank's end.

        That may be the script behind a program of the user's, whose status says whether the rank failed; or a child
        that failed, and whose parent has caught that.
        """
        processes = {self._ranks[local_rank]: process for local_rank, process in self._processes.items()}
        reports = []
        for report in read_reports(self._run_directory, attempt=self._attempt):
            process = processes.get(report.rank)
            if process is None:
                continue
            if report.pid == process.pid or (process.poll() or 0) > 0:
                reports.append(report)
        return reports

    def _exits(self) -> list[Exit]:
        """How ranks ended; a rank that has reported counts as failed, however it ended then.

        It may have been stopped before its end, or have an exit handler that ends it with status 0.
        """
        reports = {report.rank: report for report in self._reports()}
        exits = []
        for local_rank, process in self._processes.items():
            code, rank = process.poll(), self._ranks[local_rank]
            if code is None or local_rank in self._lost:
                continue
            was_stopped = local_rank in self._stopped
            if (was_stopped or code == 0) and rank in reports:
                code, was_stopped = reports[rank].exit_code, False
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
                process.signal_group(signal.SIGTERM if first == signal.SIGINT and not ready else first)
            deadline = time.monotonic() + (self._policy.terminate_s if patience_s is None else patience_s)
            while self._alive() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:
            if self._stopped:
                for process in self._processes.values():
                    process.signal_group(signal.SIGKILL)
        deadline = time.monotonic() + self._policy.terminate_s
        while self._alive() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for local_rank, process in self._alive().items():
            message = (
                f"evenstep: rank {self._ranks[local_rank]} (pid {process.pid}) can't be killed, and is left behind"
            )
            say(message)


def read_pages(run_directory: Path, ranks: Iterable[int], attempt: int) -> dict[int, Heartbeat | None]:
    """The heartbeat pages of ranks as they are now, by rank."""
    return {rank: read_page(page_file(run_directory, rank, attempt)) for rank in ranks}
