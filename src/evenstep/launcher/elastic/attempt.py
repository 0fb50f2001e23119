"""One attempt on this node: the processes of its ranks, and the loop that watches them until they have ended.

`failure/verdict.py` decides what to do; this module does it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import SubprocessContext

from evenstep.console import say
from evenstep.errors import EXIT_PREEMPTED
from evenstep.ground.health.first_failure import Exit
from evenstep.ground.health.heartbeat import Note
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.ground.health.phase_timeouts import PhaseTimeouts
from evenstep.ground.host.processes import has_gpu, has_gpu_driver
from evenstep.launcher.elastic.nodes import OtherNodes, Parting, Standing, agree_on_cause, agree_on_saved
from evenstep.launcher.failure.detection import (
    Ends,
    Hang,
    RankState,
    StopWatch,
    count_memory_kills,
    find_overdue,
    look_at,
)
from evenstep.launcher.failure.hangs import HangWatch, packed, unpacked
from evenstep.launcher.failure.report import (
    Failure,
    RemoteFailure,
    StopPolicy,
    describe_exit,
    failure_of,
)
from evenstep.launcher.failure.stacks import StackRequest, WorkerStacks
from evenstep.launcher.failure.verdict import (
    End,
    Situation,
    Step,
    ends_of,
    find_lost,
    is_known,
    judge,
    reports_of,
)
from evenstep.launcher.spawn.child import Child, Guard, stop

_POLL_S = 0.02
_POLL_EVERY_S = 0.25  # time between checks for hangs
_STACK_S = 0.3


class Ranks:
    """The rank processes of one attempt on this node, and their heartbeat pages.

    Args:
        context: torchelastic's context, with the processes already started.
        ranks: Global rank of each local rank.
        pages: The ranks' pages. Closed with this object.

    Attributes:
        lost: Ranks without which the others continue.
        stopped: Ranks that received a signal from this launcher while they ran.
    """

    def __init__(self, context: SubprocessContext, *, ranks: Sequence[int], pages: NodePages) -> None:
        self._context, self._all_pages = context, pages
        self._processes: dict[int, Child] = {}
        for local_rank, handler in context.subprocess_handlers.items():
            # Replace it in the context, too: polling a `Popen` would reap the process.
            started: Any = handler
            if isinstance(handler.proc, subprocess.Popen):
                started.proc = Child(handler.proc.pid, reap=handler.proc.poll)
            self._processes[ranks[local_rank]] = started.proc
        self._pages = dict(zip(ranks, pages.pages, strict=True))
        self._files = {rank: Path(file) for rank, file in zip(ranks, pages.files, strict=True)}
        self._ends = Ends(process.pid for process in self._processes.values())
        self._guard = Guard(process.pid for process in self._processes.values())
        self.lost: set[int] = set()
        self.stopped: set[int] = set()

    # ------------------------------------------------------------------ reading

    def poll(self) -> list[RankState]:
        """The present state of each rank."""
        return [
            look_at(rank, process, self._pages[rank], was_stopped=rank in self.stopped, is_lost=rank in self.lost)
            for rank, process in self._processes.items()
        ]

    def await_end(self, longest_s: float) -> None:
        """Wait until a rank ends, at most for the given time."""
        self._ends.wait(longest_s)

    def request_stacks(self, states: Iterable[RankState]) -> StackRequest:
        """Request the stacks of ranks that run and can write them. Others would die of the signal, or never answer."""
        asked = [each for each in states if each.runs and not each.is_suspended and Note.WRITES_STACKS in each.notes]
        return StackRequest({each.rank: (each.pid, self._files[each.rank]) for each in asked})

    def request_worker_stacks(self, requests: WorkerStacks, states: Iterable[RankState]) -> None:
        """Request the stacks of the workers of ranks' loaders."""
        for each in states:
            if Note.WRITES_STACKS in each.notes:
                requests.ask(each.rank, each.pid, self._files[each.rank])

    def _running(self) -> dict[int, Child]:
        return {rank: process for rank, process in self._processes.items() if process.poll() is None}

    # ------------------------------------------------------------------ stopping

    def kill(self, rank: int) -> None:
        """Kill one rank and the processes that it has started."""
        self._processes[rank].signal_group(signal.SIGKILL)

    def stop(self, first: signal.Signals, *, patience_s: float, terminate_s: float) -> None:
        """Stop the ranks and the processes that they have started; see `child.stop`."""
        self.stopped |= self._running().keys()
        ask = functools.partial(self._request, first)
        for rank in stop(self._processes, ask, patience_s=patience_s, terminate_s=terminate_s):
            say(f"evenstep: rank {rank} (pid {self._processes[rank].pid}) can't be killed, and is left behind")

    def _request(self, which: signal.Signals, rank: int) -> None:
        """Send a signal to the process that trains: if the command is a shell script, its child."""
        process, page = self._processes[rank], self._pages[rank]
        seen = page.read()
        if which == signal.SIGINT and not page.words[Note.IS_READY]:
            which = signal.SIGTERM
        with contextlib.suppress(OSError):
            if seen is not None and os.getsid(seen.pid) == process.pid:
                os.kill(seen.pid, which)
                return
        process.send_signal(which)

    def close(self) -> None:
        """Close after all ranks have ended or can't be killed. Writes the rest of the output for the terminal."""
        self._ends.close()
        self._guard.close()
        self._all_pages.close()
        self._context.close(signal.SIGKILL, timeout=0)
        for process in self._processes.values():
            process.release()


class Attempt:
    """One attempt on this node: watches its ranks, finds the root cause of a failure, and only then stops the others.

    It replaces torchelastic's process context. torchelastic calls `close` when a signal has ended `watch`.

    Args:
        ranks: The processes, already started.
        number: Number of restarts so far.
        policy: How ranks are watched and stopped.
        timeouts: How long ranks may keep others waiting.
        others: The other nodes of the run; None: there are none.
        may_restart: Whether ranks of this run are started again if they fail.
        needs_all_nodes: Whether ranks aren't started again without a node that was asked to stop.
        num_ranks: Number of ranks on all nodes.
        num_nodes_waiting: Returns the number of new nodes that wait to join.

    Attributes:
        failure: The attempt's failure, once it has failed.
        saved: What the attempt has saved, once it has ended: on any node if it has failed, otherwise on this node.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        number: int,
        policy: StopPolicy,
        timeouts: PhaseTimeouts,
        num_ranks: int,
        others: OtherNodes | None = None,
        may_restart: bool = False,
        needs_all_nodes: bool = False,
        num_nodes_waiting: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ranks, self._number, self._policy, self._timeouts = ranks, number, policy, timeouts
        self._others, self._may_restart, self._needs_all_nodes = others, may_restart, needs_all_nodes
        self._num_nodes_waiting = num_nodes_waiting
        self._stop_watch = StopWatch(
            grace_s=policy.stopped_grace_s,
            follows=lambda rank: "it is killed" if rank < policy.num_workers else "all ranks are stopped",
        )
        self._hang_watch = HangWatch(
            after_s=policy.name_after_s, timeouts=timeouts, num_ranks=num_ranks, may_have_gpus=has_gpu_driver()
        )
        self._stack_request: StackRequest | None = None
        self._worker_stacks = WorkerStacks()
        self._last_poll = 0.0
        self._num_memory_kills = count_memory_kills()
        self._noticed: list[RankState] = []  # the states when the failure was noticed
        self._saved_ns: int | None = None
        self._failed_ns: int | None = None
        self._hang: Hang | None = None
        self._remote_failure: RemoteFailure | None = None
        self._stacks: dict[int, str] = {}
        self._new_node_waits = self._was_left = self._is_closed = False
        self.failure: Failure | None = None
        self.saved = Standing()

    def watch(self) -> End:
        """Watch until all ranks have ended, or can't be killed. A signal makes this raise an exception."""
        while True:
            states = self._poll()
            step = judge(
                Situation(
                    states,
                    self._policy,
                    time.monotonic_ns(),
                    saved_ns=self._saved_ns,
                    failed_ns=self._failed_ns,
                    is_given_up=self._hang is not None,
                    failed_elsewhere=self._remote_failure is not None,
                    new_node_waits=self._new_node_waits or (self._others is not None and self._others.new_node_waits),
                )
            )
            if step is Step.WAIT:
                self._wait(states)
            elif step is Step.NOTICE:
                self._notice(states)
            elif step is Step.LEAVE_BEHIND:
                self._leave_behind([each for each in states if each.runs])
            else:
                return self._end(step, states)

    def close(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Stop the remaining ranks, for torchelastic. Uses the policy's timeouts and ignores `timeout`."""
        if not self._is_closed:
            may_save = self._others is None or self._others.poll() is None
            if self._others is not None:
                self._others.announce_stop()
            self._stop(death_sig, may_save=may_save)
            if self.has_saved:
                self._part(Parting.SAVED)
            self._close()

    @property
    def has_saved(self) -> bool:
        """Whether all ranks have saved and ended after a request to stop, except those that were left behind."""
        return {each.exit_code for each in self._ranks.poll() if not each.is_lost} == {EXIT_PREEMPTED}

    # ------------------------------------------------------------------ while it runs

    def _poll(self) -> list[RankState]:
        """The states of all ranks but lost ranks: those were killed, and the others continue without them."""
        states = [each for each in self._ranks.poll() if not each.is_lost]
        if self._failed_ns is None and not self._ranks.stopped:
            for each in find_lost(states, self._policy.num_workers):
                self._ranks.lost.add(each.rank)
                self._ranks.kill(each.rank)  # kills the processes that the lost rank had started
                states.remove(each)
                who = f"worker {each.rank} (rank {each.rank}, pid {each.pid})"
                say(f"evenstep: {who} {describe_exit(each.exit_code or 0)}; the others go on without it")
        if self._saved_ns is None and any(each.exit_code == EXIT_PREEMPTED for each in states):
            self._saved_ns = time.monotonic_ns()
        return states

    def _wait(self, states: Sequence[RankState]) -> None:
        """Wait until the next check.

        While no failure is known, first check for hangs, which exit statuses don't show.
        """
        if self._failed_ns is not None:
            self._ranks.await_end(_POLL_S)
            return
        self._hang = self._find_hang(states)
        if self._hang is not None and self._hang.is_suspended and self._hang.rank < self._policy.num_workers:
            self._ranks.kill(self._hang.rank)  # then the rank is lost like any other killed rank
            self._hang = None
        if self._others is not None:
            self._remote_failure = self._others.poll()
            if any(each.is_leaving or each.exit_code == 0 for each in states):
                self._others.publish_leaving()
        self._new_node_waits = self._num_nodes_waiting() > 0
        if self._hang is None and self._remote_failure is None and not self._new_node_waits:
            self._ranks.await_end(self._policy.poll_every_s)

    def _find_hang(self, states: Sequence[RankState]) -> Hang | None:
        """Report suspended and overdue ranks; returns a rank to give up."""
        now = time.monotonic()
        lines, hang = self._stop_watch.poll(now, states)
        if now - self._last_poll >= _POLL_EVERY_S:
            self._last_poll = now
            # Suspended ranks have already been named.
            running = {each.rank: each.page for each in states if not each.is_suspended}
            hang = hang or find_overdue(running, self._timeouts, now_ns=time.monotonic_ns())
            lines += self._look_for_hangs(states)
        for line in lines:
            say(f"evenstep: {line}")
        return hang

    def _look_for_hangs(self, states: Sequence[RankState]) -> list[str]:
        """Lines about ranks that keep the others waiting. Never blocks: stacks are requested now, and read later."""
        now_ns, watch = time.monotonic_ns(), self._hang_watch
        watch.observe(now_ns, states)
        others = unpacked(self._others.views()) if self._others is not None else []
        if self._stack_request is not None:
            if self._stack_request.is_complete():
                with_gpu = [each.rank for each in states if each.runs and has_gpu(each.pid)]
                watch.read(now_ns, self._stack_request.stacks(), with_gpu=with_gpu)
                self._stack_request = None
        elif not self._worker_stacks.is_busy and watch.is_due(now_ns, others):
            self._stack_request = self._ranks.request_stacks(states)
            watch.asked()
        if self._others is not None:
            self._others.publish_views(packed(watch.views(now_ns)))
        lines, loading = watch.judge(now_ns, others), watch.loading()
        self._ranks.request_worker_stacks(self._worker_stacks, (each for each in states if each.rank in loading))
        if self._stack_request is None:  # a rank and its workers write to the same file
            lines += self._worker_stacks.poll()
        return lines

    def _leave_behind(self, late: Sequence[RankState]) -> None:
        """Kill ranks that don't end, perhaps because of a slow exit handler, although all have saved."""
        for each in late:
            say(
                f"evenstep: rank {each.rank} (pid {each.pid}) still runs {self._policy.terminate_s:g} s after others "
                f"have saved and stopped: it is killed"
            )
            self._ranks.lost.add(each.rank)
        self._stop(signal.SIGTERM)

    def _notice(self, states: list[RankState]) -> None:
        """Record when the attempt has failed and where ranks were, and kill a rank that was given up."""
        self._failed_ns, self._noticed = time.monotonic_ns(), states
        if self._others is not None:
            self._others.request_states()
        if self._hang is not None:
            if not self._hang.is_suspended:
                self._stacks = self._read_stacks(states)
            # A suspended rank receives no other signal. Its peers report that they have lost it, as after any death.
            self._ranks.kill(self._hang.rank)

    def _read_stacks(self, states: Iterable[RankState]) -> dict[int, str]:
        """Stacks of the ranks that still run and have reported no error."""
        return self._ranks.request_stacks(each for each in states if each.report is None).await_stacks(_STACK_S)

    # ------------------------------------------------------------------ the end

    def _end(self, step: Step | End, states: Sequence[RankState]) -> End:
        end = step if isinstance(step, End) else self._fail(step, states)
        if end in (End.WELL, End.SAVED):
            for line in self._hang_watch.ended_well():
                say(f"evenstep: {line}")
            if end is End.SAVED and self._others is not None and self._others.check_for_new_node():
                end = End.NODE_COMES
            elif not self._part(Parting[end.name]):
                self._notice([*states])
                end = self._fail(Step.STOP, states)
        if end is End.NODE_COMES:
            say("evenstep: another node has come: all ranks are stopped, and start again with it")
            if self._others is not None:
                self._others.announce_new_node()  # first, else other nodes may see a failure in our ranks' end
            self._stop(signal.SIGTERM, may_save=True)
            self.saved = _saved_here(self._ranks.poll())
        self._close()
        return end

    def _part(self, how: Parting) -> bool:
        """Wait until the attempt has ended on the other nodes, too. Returns whether it ended without a failure there.

        All ranks agree before they save, so after a save no later event is a failure of this node.
        """
        if self._others is None:
            return True
        self._others.publish_end(how)
        ends = self._others.await_ends(self._policy.terminate_s if how is Parting.SAVED else math.inf)
        self._remote_failure = self._others.poll()
        self._was_left = Parting.LOST in ends
        return how is Parting.SAVED or not (self._remote_failure is not None or self._was_left)

    def _fail(self, step: Step, states: Sequence[RankState]) -> End:
        """Stop the ranks that run, and find the root cause, here or on another node."""
        if not (is_known(states) or self._hang or self._remote_failure):
            self._stacks = self._read_stacks(states)
        self._stop(signal.SIGKILL if step is Step.KILL else signal.SIGTERM)
        ended, on_other_nodes = self._ranks.poll(), list[str]()
        was_stopping = any(Note.STOPS in each.notes for each in ended)
        failure = failure_of(ends_of(ended), reports_of(ended), attempt=self._number)
        if failure is None and self._hang is not None:  # the hanging rank can't be killed
            failure = Failure(self._number, Exit(self._hang.rank, self._hang.pid, -signal.SIGKILL), None)
        if self._was_left and self._remote_failure is None:
            exits = ends_of(ended)
            failure = Failure(self._number, exits[0], None, only_secondary=True, exits=tuple(exits))
        if failure is not None:
            pages = {each.rank: each.page for each in self._noticed if each.page is not None}
            failure = replace(failure, hang=self._hang, pages=pages, noticed_ns=self._failed_ns or 0)
        self.saved = _saved_here(ended)
        if self._others is not None:
            self._remote_failure = agree_on_cause(
                self._others,
                failure,
                self._remote_failure,
                grace_s=self._policy.grace_s,
                patience_s=self._policy.node_timeout_s,
            )
            on_other_nodes = self._others.states()
            if self._others.new_node_waits and (failure is None or failure.only_secondary):
                return End.NODE_COMES
            if self._may_restart:  # all nodes make the same decision
                longest_s = self._policy.terminate_s + self._policy.grace_s
                self.saved = agree_on_saved(self._others, self.saved, longest_s=longest_s)
            was_stopping = was_stopping or (self._needs_all_nodes and self._others.is_stopping)
        if failure is None:  # nothing failed on this node
            failure = Failure(self._number, Exit(ended[0].rank, ended[0].pid, ended[0].exit_code or 0), None)
        kills, before = count_memory_kills(), self._num_memory_kills
        self.failure = replace(
            failure,
            remote_failure=self._remote_failure,
            stacks=self._stacks,
            on_other_nodes=on_other_nodes,
            resident_bytes=self._stop_watch.resident_bytes,
            num_memory_kills=None if kills is None or before is None else kills - before,
            was_stopping=was_stopping,
        )
        return End.FAILED

    def _stop(self, first: signal.Signals, *, may_save: bool = False) -> None:
        """Stop the ranks and the processes that they have started; see `Ranks.stop`.

        Args:
            first: The signal to send first.
            may_save: All ranks still run, so they can save, and get the time for it.
        """
        saves, policy = may_save and _saved_here(self._ranks.poll()).saves, self._policy
        if saves and first == signal.SIGINT:
            say("evenstep: interrupted: the ranks save, and end. Ctrl-C once more kills them")
        patience_s = policy.save_s if saves else policy.terminate_s
        self._ranks.stop(first, patience_s=patience_s, terminate_s=policy.terminate_s)

    def _close(self) -> None:
        """Close after all ranks have ended or can't be killed."""
        self._ranks.close()
        if self._others is not None:
            self._others.close()
        self._is_closed = True


def _saved_here(states: Iterable[RankState]) -> Standing:
    states = [*states]
    steps = [each.page.saved_step for each in states if each.page is not None and each.page.saved_step is not None]
    saves = any(Note.SAVES in each.notes for each in states)
    return Standing(saves=saves, saved_step=max(steps, default=None), has_saved=bool(steps))
