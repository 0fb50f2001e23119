"""A group of rank processes on this host that run functions: one after the other, on all ranks at once.

RankGroup(2)     two processes are started and wait
run(fn, args)    each rank calls fn(*args); the results come back, or the first failure's exception is raised
run(...)         the same processes again
close()          they end; a failed task ends them too

WAITING --run--> RUNNING --all answered--> WAITING
                 RUNNING --one failed, or too late--> CLOSED
WAITING --close--> CLOSED
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from evenstep.errors import CollectiveTimeoutError, ConfigurationError, EvenstepError, RankFailedError, UsageError
from evenstep.ground import environment
from evenstep.ground.coordination.rendezvous_store import meet_without_port
from evenstep.ground.environment import current_placement, openmp_threads
from evenstep.ground.health.excepthook import describe
from evenstep.ground.health.first_failure import CrashReport, Exit, choose_root_cause
from evenstep.ground.health.peer_heartbeats import NodePages, own_page
from evenstep.launcher.failure.report import StopPolicy, describe_exit, is_evident
from evenstep.launcher.failure.stacks import StackRequest
from evenstep.launcher.pool.remote import pack_call, pack_exception, pack_result, unpack_call
from evenstep.launcher.spawn.child import keep_ended_children
from evenstep.launcher.spawn.script_runner import register_stacks
from evenstep.launcher.spawn.start_worker import die_with_parent
from evenstep.network import LOOPBACK, Reservation


@dataclass(frozen=True)
class Task:
    """One call."""

    call: bytes
    wants_result: bool


@dataclass(frozen=True)
class Succeeded:
    """A rank's answer: the packed result; None if the parent doesn't want it."""

    result: bytes | None


@dataclass(frozen=True)
class Failed:
    """A rank's answer: what it raised. `exception` is None if it can't travel."""

    report: CrashReport
    exception: bytes | None


def serve(connection: Connection, parent_pid: int) -> None:
    """Run one task after the other until the parent closes the pipe, or one fails."""
    die_with_parent(parent_pid)
    # Ignored from the start, and no longer blocked: a task may choose to handle it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # A spawned process would spawn in its turn, and a loader's workers take seconds to start instead of milliseconds.
    multiprocessing.set_start_method(None, force=True)
    faulthandler.enable()
    torch.set_num_threads(openmp_threads() or 1)
    placement = current_placement()
    meet_without_port(placement)
    # Open to the end of the process: the parent asks where a rank is that doesn't finish in time.
    register_stacks(os.open(placement.pages[placement.local_rank], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        answer = _perform(task, placement.rank)
        try:
            connection.send_bytes(pickle.dumps(answer))
        except OSError:
            return
        if isinstance(answer, Failed):
            # Only now may sockets close: peers that see them break report after this rank.
            raise SystemExit(answer.report.exit_code)


def _perform(task: Task, rank: int) -> Succeeded | Failed:
    try:
        fn, args, kwargs = unpack_call(task.call)
        result = fn(*args, **kwargs)
        return Succeeded(pack_result(result) if task.wants_result else None)
    except SystemExit as error:
        if not error.code:
            return Succeeded(pack_result(None) if task.wants_result else None)
        return _failure(error, rank, exit_code=error.code if isinstance(error.code, int) else 1)
    except BaseException as error:
        return _failure(error, rank, exit_code=error.exit_code if isinstance(error, EvenstepError) else 1)


def _failure(error: BaseException, rank: int, *, exit_code: int) -> Failed:
    report = replace(CrashReport.of(error, rank=rank, traceback=describe(error)), exit_code=exit_code)
    # `sys.exit(3)` on a rank must not end the parent: it arrives as the text of a RankFailedError.
    exception = None if isinstance(error, SystemExit) else pack_exception(error)
    return Failed(report=report, exception=exception)


# A signal that comes just before the parent sleeps is noted and doesn't wake it: an interrupt would count only when a
# rank answers. So it sleeps in short stretches.
_LOOK_EVERY_S = 0.5
_STACK_S = 0.5


class RemoteTraceback(Exception):
    """The text of a traceback from another process, shown as the cause of the exception that was raised there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}\n"""'


@dataclass
class _Rank:
    process: SpawnProcess
    connection: Connection


@dataclass
class _Answers:
    """What is known of a running task."""

    succeeded: dict[int, Succeeded] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    died: dict[int, Exit] = field(default_factory=dict)

    @property
    def reports(self) -> list[CrashReport]:
        return [answer.report for answer in self.failed.values()]

    @property
    def exits(self) -> list[Exit]:
        raised = [Exit(report.rank, report.pid, report.exit_code or 1) for report in self.reports]
        return raised + list(self.died.values())


class RankGroup:
    """Processes of this host, one per rank, that are kept between tasks. Linux; start method "spawn".

    The processes die with the thread that made the group, so make it where it is used.

    Args:
        num_ranks: How many; at least 1.
        num_threads: Threads of each rank's CPU operations.
        device: What `evenstep.init` takes as its default in the ranks; None: GPUs if there are any.
        policy: How ranks are stopped.
        servers: How many of them, the last ones, are parameter servers.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        num_threads: int = 1,
        device: str | None = None,
        policy: StopPolicy | None = None,
        servers: int = 0,
    ) -> None:
        _refuse_while_importing()
        self.num_ranks = num_ranks
        self._policy = policy or StopPolicy()
        self._servers = servers
        self._ranks: list[_Rank] = []
        self._num_tasks = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._restore_signals = keep_ended_children()
        self._pages = NodePages(num_ranks)
        self._port = Reservation()
        # Before multiprocessing's own exit handler, which would wait for the ranks for ever.
        atexit.register(self.close)
        try:
            with _interrupts_ignored():
                for rank in range(num_ranks):
                    self._ranks.append(self._start(rank, num_threads, device))
        except BaseException:
            self._stop()  # they import torch, and would see the closed pipe only then
            raise

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"pids {self.pids}"
        return f"<RankGroup of {self.num_ranks}, {self._num_tasks} tasks, {state}>"

    @property
    def is_closed(self) -> bool:
        """Whether the processes have ended: after `close`, or after a task that failed."""
        return self._is_closed

    @property
    def pids(self) -> list[int]:
        """The processes, in order of rank."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        results: str = "all",
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank at once.

        Args:
            fn: A function of an importable module; others need cloudpickle.
            args: Its arguments, equal on all ranks.
            kwargs: Its keyword arguments.
            timeout_s: Seconds until the ranks are stopped; None: no limit.
            results: "all", or "first" to fetch only rank 0's.

        Returns:
            What each rank returned, in order of rank; of rank 0 alone with "first".

        Raises:
            ConfigurationError: The call can't be sent; the group is as before.
            CollectiveTimeoutError: Not all ranks were done in time. The group is closed.
            RankFailedError: A rank died, or raised what can't be sent. The group is closed.
            Exception: What the rank that failed first raised. The group is closed.
        """
        if self._is_closed:
            raise UsageError(f"{self!r} can't run another task: a task failed, or it was closed. Make a new one.")
        call = pack_call(fn, args, kwargs or {})
        self._num_tasks += 1
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            for index, rank in enumerate(self._ranks):
                task = Task(call, wants_result=results == "all" or index == 0)
                # A rank that is already dead is noticed, with its signal, where the answers are awaited.
                with contextlib.suppress(OSError):
                    rank.connection.send_bytes(pickle.dumps(task))
            answers = self._await_answers(_Answers(), deadline)
            if answers.failed or answers.died:
                self._raise_failure(self._await_secondary(answers))
            if len(answers.succeeded) < self.num_ranks:
                raise self._too_late(answers, timeout_s or 0.0)
        except BaseException:
            # Also a KeyboardInterrupt here: no rank is left behind.
            self._stop()
            raise
        wanted = range(self.num_ranks) if results == "all" else range(1)
        return [pickle.loads(answers.succeeded[rank].result or b"") for rank in wanted]

    def close(self) -> None:
        """End the processes and remove what they met in. Twice is once."""
        if self._is_closed or os.getpid() != self._pid:  # a forked child that ends leaves its parent's ranks alone
            return
        for rank in self._ranks:
            rank.connection.close()  # the rank sees the end of the pipe, and leaves
        deadline = time.monotonic() + self._policy.terminate_s
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._stop()

    # ------------------------------------------------------------------ starting

    def _start(self, rank: int, num_threads: int, device: str | None) -> _Rank:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, os.getpid()), name=f"evenstep rank {rank}")
        variables = environment.rank_variables(
            rank=rank,
            world_size=self.num_ranks,
            device=device,
            servers=self._servers,
            **self._pages.settings,
        )
        variables |= {
            "OMP_NUM_THREADS": str(num_threads),
            # For functions that call torch's own init_process_group.
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._port.port),
        }
        with environment.exported(variables):
            process.start()
        # Ours must be the only copy of the other end that is left, or its end would never be seen.
        theirs.close()
        return _Rank(process, ours)

    # ------------------------------------------------------------------ answers

    def _await_answers(self, answers: _Answers, deadline: float | None, *, stop_early: bool = True) -> _Answers:
        """Collect until all ranks have answered or died, one has failed, or the deadline has passed."""
        while True:
            known = answers.succeeded.keys() | answers.failed.keys() | answers.died.keys()
            pending = {index: rank for index, rank in enumerate(self._ranks) if index not in known}
            if not pending or (stop_early and (answers.failed or answers.died)):
                return answers
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return answers
            look_s = _LOOK_EVERY_S if left is None else min(left, _LOOK_EVERY_S)
            sources = {rank.connection: index for index, rank in pending.items()}
            sentinels = {rank.process.sentinel: index for index, rank in pending.items()}
            ready = multiprocessing.connection.wait([*sources, *sentinels], timeout=look_s)
            for source in ready:
                index = sentinels[source] if isinstance(source, int) else sources[source]  # type: ignore[index]
                self._receive(index, answers)

    def _receive(self, index: int, answers: _Answers) -> None:
        rank = self._ranks[index]
        if index in answers.died or index in answers.failed or index in answers.succeeded:
            return
        try:
            answer = pickle.loads(rank.connection.recv_bytes()) if rank.connection.poll() else None
        except (EOFError, OSError):
            answer = None
        if isinstance(answer, Succeeded):
            answers.succeeded[index] = answer
        elif isinstance(answer, Failed):
            answers.failed[index] = answer
        else:
            rank.process.join(self._policy.terminate_s)
            code = rank.process.exitcode
            answers.died[index] = Exit(index, rank.process.pid or 0, 1 if code is None else code)

    def _await_secondary(self, answers: _Answers) -> _Answers:
        """After the first failure: let the others end by themselves, longer while the root cause is unknown."""
        started = time.monotonic()
        for grace_s in (self._policy.evident_grace_s, self._policy.grace_s):
            self._await_answers(answers, started + grace_s, stop_early=False)
            if is_evident(answers.exits, answers.reports):
                break
        return answers

    # ------------------------------------------------------------------ failing

    def _raise_failure(self, answers: _Answers) -> None:
        root_cause = choose_root_cause(answers.exits, answers.reports) or answers.exits[0]
        who = f"rank {root_cause.rank} (pid {root_cause.pid})"
        failed = answers.failed.get(root_cause.rank)
        if failed is None:
            report = CrashReport.unpack(self._pages.pages[root_cause.rank].report())
            if report is not None and report.pid == root_cause.pid:
                # It ended while it imported the script, and has left word why.
                raise ConfigurationError(report.summary.partition(": ")[2])
            message = f"{who} of {self.num_ranks} {describe_exit(root_cause.exit_code)}"
            raise RankFailedError(message, rank=root_cause.rank, exitcode=root_cause.exit_code)
        remote = RemoteTraceback(f"on {who} of {self.num_ranks}:\n{failed.report.traceback}")
        error: BaseException | None = None
        if failed.exception is not None:
            with contextlib.suppress(Exception):  # e.g. its class exists only in the ranks
                error = pickle.loads(failed.exception)
        if error is None:
            message = f"{who} of {self.num_ranks} failed: {failed.report.summary}"
            error = RankFailedError(message, rank=root_cause.rank, exitcode=root_cause.exit_code)
        if hasattr(error, "add_note"):  # python 3.11 and later
            _, at, where = failed.report.traceback.rpartition("\n  at ")  # of a user's mistake
            error.add_note(f"raised on {who} of {self.num_ranks}" + (f", at {where}" if at else ""))
        raise error from remote

    def _too_late(self, answers: _Answers, timeout_s: float) -> CollectiveTimeoutError:
        missing = [index for index in range(self.num_ranks) if index not in answers.succeeded]
        processes = {index: self._ranks[index].process for index in missing}
        alive = {index: each.pid or 0 for index, each in processes.items() if each.is_alive()}
        stacks = StackRequest(
            {index: (pid, Path(self._pages.files[index])) for index, pid in alive.items()}
        ).await_stacks(_STACK_S)
        names = ", ".join(map(str, missing))
        return CollectiveTimeoutError(
            f"task {self._num_tasks} was not done after {timeout_s:g} s; missing: rank {names} of {self.num_ranks}. "
            f"The ranks were stopped. They were here:\n"
            + "\n".join(f"rank {index}:\n{stacks.get(index, '')}" for index in missing)
        )

    def _stop(self) -> None:
        """Send SIGTERM, then SIGKILL, to the ranks that are left."""
        self._is_closed = True
        atexit.unregister(self.close)
        alive = [rank.process for rank in self._ranks if rank.process.is_alive()]
        for process in alive:
            process.terminate()
        deadline = time.monotonic() + self._policy.terminate_s
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in alive:
            if process.is_alive():
                process.kill()
                process.join(self._policy.terminate_s)
        for rank in self._ranks:
            rank.connection.close()
            if not rank.process.is_alive():
                rank.process.close()
        self._ranks = []
        self._restore_signals()
        self._port.close()
        self._pages.close()


def _refuse_while_importing() -> None:
    """A rank that imports its script must not start ranks: it would do so without end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        placement = environment.current_placement()
        error = ConfigurationError(
            "evenstep.launch was called while a rank was importing the script. The ranks import it to find the "
            'function, so start them only under `if __name__ == "__main__":`.'
        )
        page = own_page(placement)
        if page is not None:
            page.write_report(CrashReport.of(error, rank=placement.rank, traceback="").pack())
        # Not the error itself: every rank would print its traceback. The parent raises it, once.
        raise SystemExit(error.exit_code)


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ranks started inside ignore Ctrl-C: the parent receives it, and stops them.

    One that comes meanwhile is handled at the end: Linux keeps a signal that is blocked, even while it is ignored. The
    ranks unblock it themselves.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    # The first rank would start it, which ends with interrupts unblocked.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
