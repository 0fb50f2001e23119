"""The ranks of one attempt: watches them, finds the root cause of a failure, and only then stops the others."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch.distributed.elastic.multiprocessing import RunProcsResult, SubprocessContext

from evenstep.console import say
from evenstep.errors import EXIT_PREEMPTED
from evenstep.ground.health.first_failure import CrashReport, Exit
from evenstep.ground.health.heartbeat import Note
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.ground.health.phase_timeouts import PhaseTimeouts
from evenstep.launcher.elastic.attempt import Attempt
from evenstep.launcher.elastic.nodes import OtherNodes, Saved, agree_on_cause, agree_on_saved
from evenstep.launcher.failure.detection import Hang, RankState, StopWatch, count_memory_kills, find_overdue
from evenstep.launcher.failure.hangs import DEFAULT_AFTER_S, HangWatch, packed, unpacked
from evenstep.launcher.failure.report import (
    Failure,
    LossPolicy,
    RemoteFailure,
    StopPolicy,
    describe_exit,
    is_evident,
    judge,
)
from evenstep.launcher.failure.stacks import StackRequest, WorkerStacks
from evenstep.processes import has_gpu, has_gpu_driver

_POLL_S = 0.02
_LOOK_EVERY_S = 0.25
_STACK_S = 0.3
_ANOTHER_HOST = "another node has come: all ranks are stopped, and start again with it"


class WatchedRanks:
    """The ranks of one attempt, with the interface of torchelastic's process context, in whose place it stands.

    Args:
        context: torchelastic's, with the processes already started.
        ranks: Global rank of each local rank.
        attempt: How many restarts there were.
        pages: Of these ranks.
        policy: How ranks are stopped.
        timeouts: How long they may keep others waiting.
        on_failure: Called with a failed attempt once all its ranks have ended and all their output is written.
        on_preempted: Called when all ranks have saved and ended after a stop signal.
        others: The other nodes of the run; None: there are none.
        may_restart: Ranks of this run are started again if they fail.
        num_ranks: Of all nodes; None: of this one.
        name_after_s: See `HangWatch`.
        losses: Which ranks the run can lose.

    Attributes:
        should_admit_node: Another node has announced a new one that waits: see `stop_for_new_node`.
    """

    def __init__(
        self,
        context: SubprocessContext,
        *,
        ranks: list[int],
        attempt: int,
        pages: NodePages,
        policy: StopPolicy,
        timeouts: PhaseTimeouts,
        on_failure: Callable[[Failure], None],
        on_preempted: Callable[[], None],
        others: OtherNodes | None = None,
        may_restart: bool = False,
        num_ranks: int | None = None,
        name_after_s: float = DEFAULT_AFTER_S,
        losses: LossPolicy | None = None,
    ) -> None:
        self._attempt = Attempt(context, ranks=ranks, number=attempt, pages=pages)
        self._losses = losses or LossPolicy()
        self._policy = policy
        self._on_failure = on_failure
        self._others = others
        self._may_restart = may_restart
        self._on_preempted = on_preempted
        self._first_preempted: float | None = None
        self.should_admit_node = self._is_closed = False
        self._watch = StopWatch(
            grace_s=policy.stopped_grace_s,
            follows=lambda rank: (
                "it is killed" if self._losses.can_lose(rank, -signal.SIGKILL) else "all ranks are stopped"
            ),
        )
        self._timeouts = timeouts
        self._hang_watch = HangWatch(
            after_s=name_after_s,
            timeouts=timeouts,
            num_ranks=num_ranks or len(ranks),
            may_have_gpus=has_gpu_driver(),
        )
        self._stack_request: StackRequest | None = None
        self._worker_stacks = WorkerStacks()
        self._names_hangs = name_after_s < math.inf
        self._last_look = 0.0
        self._num_memory_kills = count_memory_kills()

    # ------------------------------------------------------------------ what torchelastic calls

    def pids(self) -> dict[int, int]:
        """Process of each local rank, as torchelastic has started it."""
        return self._attempt.pids

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """One look: None while all run; a result once all have succeeded or one has failed and all have ended."""
        states = self._take_losses(self._attempt.look())
        codes = [each.exit_code for each in states]
        if any(code not in (None, 0, EXIT_PREEMPTED) for code in codes) or self._has_reported(states):
            return self._end_failed_attempt(states)
        if EXIT_PREEMPTED in codes and self._first_preempted is None:
            self._first_preempted = time.monotonic()
        if self._others is not None and self._others.new_node_waits:
            return self._yield_to_new_node()
        if None in codes:
            # They agree on a step before they leave, so the others follow within moments.
            is_late = time.monotonic() - (self._first_preempted or math.inf) > self._policy.terminate_s
            hang, remote_failure = self._look(states), self._others.look() if self._others is not None else None
            if hang is not None and hang.is_suspended and self._losses.can_lose(hang.rank, -signal.SIGKILL):
                self._attempt.kill(hang.rank)
                hang = None  # what follows is decided as of any other that was killed
            if hang or remote_failure:
                return self._end_failed_attempt(states, hang, remote_failure)
            if is_late:
                self._leave_behind(each for each in states if each.runs)
                return None
            self._attempt.await_end(self._policy.look_every_s)
            return None
        if self._first_preempted is not None and set(codes) != {EXIT_PREEMPTED}:
            return self._end_failed_attempt(states)
        for line in self._hang_watch.ended_well():
            say(f"evenstep: {line}")
        if self._first_preempted is not None and self._others is not None and self._others.check_for_new_node():
            return self._yield_to_new_node()
        self._close()
        self._tell_preempted()
        return RunProcsResult(return_values=dict.fromkeys(self._attempt.processes))

    def close(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Stop the ranks that are left; `timeout` is torchelastic's, the policy's counts."""
        if self._is_closed:  # such as one that stopped for a new node: its ranks have saved, as at the end of the run
            return
        self._stop(death_sig, may_save=self._others is None or self._others.look() is None)
        self._close()
        self._tell_preempted()

    def stop_for_new_node(self) -> int | None:
        """Stop the ranks because a new node waits to join: no failure, and no end of the run.

        Returns:
            The step of the last checkpoint that ranks of this node have committed; None: none.
        """
        say(f"evenstep: {_ANOTHER_HOST}")
        if self._others is not None:
            self._others.announce_new_node()  # before another node can take the end of our ranks for a failure
        self._stop(signal.SIGTERM, may_save=True)
        saved_step = _saved_here(self._attempt.look()).step
        self._close()
        return saved_step

    def _yield_to_new_node(self) -> RunProcsResult:
        """The result of `wait` after which the agent calls `stop_for_new_node` and goes on."""
        self.should_admit_node = True
        return RunProcsResult()

    # ------------------------------------------------------------------ ranks that the run can lose

    def _take_losses(self, states: list[RankState]) -> list[RankState]:
        """Those without which the run does not go on: not those that were killed, while a worker is left."""
        left = [each for each in states if not each.is_lost]
        for state in () if self._attempt.stopped else tuple(left):
            code, workers = state.exit_code, [each for each in left if each.rank < self._losses.num_workers]
            if code is None or state.report is not None or not self._losses.can_lose(state.rank, code):
                continue
            if not any(each.exit_code in (None, 0) for each in workers if each is not state):
                continue
            self._attempt.lose(state.rank)
            left.remove(state)
            who = f"worker {state.rank} (rank {state.rank}, pid {state.pid})"
            say(f"evenstep: {who} {describe_exit(code)}; the others go on without it")
        return left

    def _has_reported(self, states: Iterable[RankState]) -> bool:
        """Whether a rank has reported an error and only python's own end is left, which takes a third of a second.

        Or the rest takes too long: a thread or an exit handler of the script holds the rank.
        """
        longest_ns = self._policy.terminate_s * 1e9
        return any(
            each.is_done or (each.report is not None and time.monotonic_ns() - each.report.time_ns > longest_ns)
            for each in states
        )

    # ------------------------------------------------------------------ while it runs

    def _look(self, states: Sequence[RankState]) -> Hang | None:
        """Report suspended and overdue ranks; returns one that is given up."""
        now = time.monotonic()
        lines, hang = self._watch.look(now, states)
        late: Hang | None = None
        if now - self._last_look >= _LOOK_EVERY_S:
            self._last_look = now
            # Suspended ranks have been named already.
            running = {each.rank: each.page for each in states if not each.is_suspended}
            late = find_overdue(running, self._timeouts, now_ns=time.monotonic_ns())
            if self._names_hangs:
                lines += self._look_for_hangs(states)
        for line in lines:
            say(f"evenstep: {line}")
        return hang or late

    def _look_for_hangs(self, states: Sequence[RankState]) -> list[str]:
        """Lines on ranks that keep the others waiting. Never blocks: stacks are asked for now, and read later."""
        now_ns, watch = time.monotonic_ns(), self._hang_watch
        watch.observe(now_ns, states)
        others = unpacked(self._others.looks()) if self._others is not None else []
        if self._stack_request is not None:
            if self._stack_request.is_complete():
                with_gpu = [each.rank for each in states if each.runs and has_gpu(each.pid)]
                watch.read(now_ns, self._stack_request.stacks(), with_gpu=with_gpu)
                self._stack_request = None
        elif not self._worker_stacks.is_busy and watch.is_due(now_ns, others):
            self._stack_request = self._attempt.request_stacks(states)
            watch.asked()
        if self._others is not None:
            self._others.publish_looks(packed(watch.looks(now_ns)))
        lines, loading = watch.judge(now_ns, others), watch.loading()
        for each in states:
            if each.rank in loading and Note.WRITES_STACKS in each.notes:
                self._worker_stacks.ask(each.rank, each.pid, self._attempt.stack_file(each.rank))
        if self._stack_request is None:  # they write to the same file
            lines += self._worker_stacks.look()
        return lines

    def _read_stacks(self, states: Iterable[RankState]) -> dict[int, str]:
        """Stacks of the ranks that still run and have reported no error."""
        return self._attempt.request_stacks(each for each in states if each.report is None).await_stacks(_STACK_S)

    # ------------------------------------------------------------------ how it ends

    def _end_failed_attempt(
        self, noticed: Sequence[RankState], hang: Hang | None = None, remote_failure: RemoteFailure | None = None
    ) -> RunProcsResult:
        attempt, noticed_ns = self._attempt, time.monotonic_ns()
        if self._others is not None:
            self._others.request_states()
        stacks: dict[int, str] = {}
        if hang is not None:
            if not hang.is_suspended:
                stacks = self._read_stacks(noticed)
            # A suspended rank receives no other signal. Its peers report that they have lost it, as after any death.
            attempt.kill(hang.rank)
        is_known, first = False, signal.SIGTERM
        if remote_failure is None:
            is_known, first = self._await_cause(noticed_ns)
        if not (is_known or remote_failure is not None or hang is not None):
            stacks = self._read_stacks(attempt.look())
        self._stop(first)
        ended = attempt.look()
        exits = _ends(ended)
        failure = judge(exits, _reports(ended), attempt=attempt.number)
        if failure is None and hang is not None:  # it can't be killed
            failure = Failure(attempt.number, Exit(hang.rank, hang.pid, -signal.SIGKILL), None, exits=tuple(exits))
        if failure is not None:
            seen_pages = {each.rank: each.page for each in noticed if each.page is not None}
            failure = replace(failure, hang=hang, pages=seen_pages, noticed_ns=noticed_ns)
        states: Sequence[str] = ()
        if self._others is not None:
            remote_failure = agree_on_cause(self._others, failure, remote_failure, grace_s=self._policy.grace_s)
            states = self._others.states()
            if self._others.new_node_waits and (failure is None or failure.only_secondary):
                return self._yield_to_new_node()
        if failure is None and remote_failure is not None:
            anybody = Exit(ended[0].rank, ended[0].pid, ended[0].exit_code or 0)  # nothing failed on this node
            failure = Failure(attempt.number, anybody, None, noticed_ns=noticed_ns)
        was_stopping = any(Note.STOPS in each.notes for each in ended)
        saved = self._saved_anywhere(ended)  # a save behind the loop may have ended meanwhile
        self._close()
        if failure is None:
            return attempt.result_of(None)
        kills, before = count_memory_kills(), self._num_memory_kills
        failure = replace(
            failure,
            remote_failure=remote_failure,
            stacks=stacks,
            on_other_nodes=states,
            resident_bytes=self._watch.resident_bytes,
            num_memory_kills=None if kills is None or before is None else kills - before,
            saves=saved.has_checkpointer,
            saved_step=saved.step,
            was_stopping=was_stopping,
        )
        self._on_failure(failure)
        return attempt.result_of(failure)

    def _await_cause(self, noticed_ns: int) -> tuple[bool, signal.Signals]:
        """Wait until the root cause has reported.

        Returns:
            Whether the root cause is known, as far as it is on this node; and the first signal to those that are left.
        """
        is_known, states = False, self._attempt.look()
        while any(each.runs for each in states):
            if all(each.is_done for each in states if each.runs):
                return is_known, signal.SIGKILL  # python's own end takes a tenth of a second, and nothing comes of it
            is_known = is_evident(_ends(states), _reports(states))
            grace_s = self._policy.evident_grace_s if is_known else self._policy.grace_s
            if not is_known and any(each.is_leaving for each in states):
                # It left its world as it should, and early: how it ends decides which rank is the root cause.
                grace_s = max(grace_s, self._policy.terminate_s)
            if time.monotonic_ns() - noticed_ns >= grace_s * 1e9:
                break
            time.sleep(_POLL_S)
            states = self._attempt.look()
        return is_known, signal.SIGTERM

    def _saved_anywhere(self, states: Sequence[RankState]) -> Saved:
        """What this attempt has saved on any node, so that all nodes decide alike whether to restart."""
        saved = _saved_here(states)
        if self._others is None or not self._may_restart:
            return saved
        return agree_on_saved(self._others, saved, longest_s=self._policy.terminate_s + self._policy.grace_s)

    def _stop(self, first: signal.Signals, *, may_save: bool = False) -> None:
        """Stop the ranks and what they started; see `Attempt.stop`.

        Args:
            first: Sent first.
            may_save: All ranks are there, which a save needs: those that save then have the time for it.
        """
        saves, policy = may_save and any(Note.SAVES in each.notes for each in self._attempt.look()), self._policy
        if saves and first == signal.SIGINT:
            say("evenstep: interrupted: the ranks save, and end. Ctrl-C once more kills them")
        patience_s = policy.save_s if saves else policy.terminate_s
        self._attempt.stop(first, patience_s=patience_s, terminate_s=policy.terminate_s)

    def _close(self) -> None:
        """Close after all ranks have ended or can't be killed."""
        self._attempt.close()
        if self._others is not None:
            self._others.close()
        self._is_closed = True

    def _leave_behind(self, late: Iterable[RankState]) -> None:
        """Kill ranks that don't end, in a slow exit handler perhaps, though all have saved: a stop, and no failure."""
        for each in late:
            say(
                f"evenstep: rank {each.rank} (pid {each.pid}) still runs {self._policy.terminate_s:g} s after others "
                f"have saved and stopped: it is killed"
            )
            self._attempt.lose(each.rank)
        self._stop(signal.SIGTERM)

    def _tell_preempted(self) -> None:
        if {each.exit_code for each in self._attempt.look() if not each.is_lost} == {EXIT_PREEMPTED}:
            self._on_preempted()


def _reports(states: Iterable[RankState]) -> list[CrashReport]:
    return [each.report for each in states if each.report is not None]


def _ends(states: Iterable[RankState]) -> list[Exit]:
    return [end for each in states if (end := each.end) is not None]


def _saved_here(states: Iterable[RankState]) -> Saved:
    pages = [each.page for each in states if each.page is not None]
    newest = max((page.saved_step for page in pages if page.saved_step is not None), default=None)
    return Saved(any(Note.SAVES in each.notes for each in states), newest)
