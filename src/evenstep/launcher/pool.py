"""A group of rank processes on this host that run functions, one after the other, each on all ranks at once.

RankGroup(2)     two processes are started and wait
run(fn, args)    each rank calls fn(*args); returns the results, or raises the first failure's exception
run(...)         the same processes again
close()          the processes end; a failed task ends them, too

WAITING --run--> RUNNING --all answered--> WAITING
                 RUNNING --one failed, or too late--> CLOSED
WAITING --close--> CLOSED
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from evenstep.errors import CollectiveTimeoutError, ConfigurationError, RankFailedError, UsageError
from evenstep.ground import environment
from evenstep.ground.health.first_failure import CrashReport, Exit, choose_root_cause
from evenstep.ground.health.peer_heartbeats import NodePages
from evenstep.ground.host.network import LOOPBACK, Reservation
from evenstep.launcher.failure.report import StopPolicy, describe_exit, is_evident
from evenstep.launcher.failure.stacks import StackRequest
from evenstep.launcher.spawn.child import Child, Guard, await_ends, keep_ended_children, stop
from evenstep.launcher.spawn.remote import Answer, Task, pack_call
from evenstep.launcher.spawn.start_worker import WORKER

Answers = dict[int, Answer | Exit]
"""By rank; an `Exit` of one that died without an answer."""


# The parent sleeps in short intervals: a signal that comes just before it sleeps doesn't wake it, and an interrupt
# would take effect only when a rank answers.
_POLL_EVERY_S = 0.5
_STACK_S = 0.5


class RemoteTraceback(Exception):
    """The text of a traceback from another process, shown as the cause of the exception that was raised there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}\n"""'


@dataclass
class _Rank:
    process: Child
    connection: Connection[Task, Answer]


class RankGroup:
    """Processes of this host, one per rank, that persist between tasks. Linux.

    The processes die with the thread that made the group, so make it where it is used.

    Args:
        num_ranks: The number of ranks, at least 1.
        num_threads: Threads of each rank's CPU operations.
        device: Default device of `evenstep.init` in the ranks; None: GPUs if there are any.
        policy: How ranks are stopped.
        servers: The number of parameter servers, which are the last ranks.
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
        self._guard: Guard | None = None
        self._num_tasks = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._restore_signals = keep_ended_children()
        self._pages = NodePages(num_ranks)
        self._port = Reservation()
        atexit.register(self.close)
        try:
            for rank in range(num_ranks):
                self._start(rank, num_threads, device)
            self._guard = Guard(self.pids)
        except BaseException:
            self._stop()  # ranks that import torch would notice the closed pipe only afterwards
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
        return [rank.process.pid for rank in self._ranks]

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
            fn: A function of an importable module; other functions need cloudpickle.
            args: The function's arguments, equal on all ranks.
            kwargs: The function's keyword arguments.
            timeout_s: Seconds until the ranks are stopped; None: no limit.
            results: "all", or "first" to fetch only rank 0's result.

        Returns:
            The ranks' results, in order of rank; with "first" only rank 0's result.

        Raises:
            ConfigurationError: The call can't be sent; the group can still be used.
            CollectiveTimeoutError: Not all ranks were done in time. The group is closed.
            RankFailedError: A rank died, or raised an exception that can't be sent. The group is closed.
            Exception: The exception of the rank that failed first. The group is closed.
        """
        if self._is_closed:
            raise UsageError(f"{self!r} can't run another task: a task failed, or it was closed. Make a new one.")
        call = pack_call(fn, args, kwargs or {})
        preparation = None
        if self._num_tasks == 0:
            preparation = spawn.get_preparation_data("evenstep rank")
            for name in ("authkey", "start_method"):  # these can't be sent, and a script's rank doesn't have them
                del preparation[name]
        self._num_tasks += 1
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        answers: Answers = {}
        try:
            for index, rank in enumerate(self._ranks):
                task = Task(call, wants_result=results == "all" or index == 0, preparation=preparation)
                # If a rank is already dead, `_await_answers` notices it, with its signal.
                with contextlib.suppress(OSError):
                    rank.connection.send(task)
            self._await_answers(answers, deadline)
            if _exits(answers):
                self._await_secondary(answers)
                self._raise_failure(answers)
            if len(answers) < self.num_ranks:
                raise self._too_late(answers, timeout_s or 0.0)
        except BaseException:
            # After any exception, even a KeyboardInterrupt, no rank is left behind.
            self._stop()
            raise
        found = (answer.value for _, answer in sorted(answers.items()) if isinstance(answer, Answer))
        return [pickle.loads(value) for value in found if value is not None]

    def close(self) -> None:
        """End the processes and remove the file of their rendezvous. A second call does nothing."""
        if self._is_closed or os.getpid() != self._pid:  # a forked child that ends leaves its parent's ranks alone
            return
        for rank in self._ranks:
            rank.connection.close()  # the rank notices the end of the pipe, and ends
        await_ends((rank.process for rank in self._ranks), self._policy.terminate_s)
        self._stop()

    # ------------------------------------------------------------------ starting

    def _start(self, rank: int, num_threads: int, device: str | None) -> None:
        variables = environment.rank_variables(
            rank=rank,
            world_size=self.num_ranks,
            device=device,
            servers=self._servers,
            **self._pages.settings,
        )
        variables |= {
            "OMP_NUM_THREADS": str(num_threads),
            # For functions that call torch's init_process_group.
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._port.port),
        }
        ours, theirs = multiprocessing.Pipe()
        python, *options = spawn.get_command_line()  # with the options of this interpreter
        command = [python, *options[: options.index("-c")], "-u", WORKER, str(os.getpid()), "function"]
        try:
            # Close this copy of the rank's end of the pipe: otherwise the parent would never notice that the rank has
            # closed it.
            with theirs, environment.exported(variables):
                process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # so that Ctrl-C reaches only the parent
                )
            self._ranks.append(_Rank(Child(process.pid, reap=process.poll), ours))
        except BaseException:
            ours.close()  # after an interrupt, this ends a rank that isn't recorded yet
            raise

    # ------------------------------------------------------------------ answers

    def _await_answers(self, answers: Answers, deadline: float, *, stop_early: bool = True) -> None:
        """Collect answers until all ranks have answered or died, one has failed, or the deadline has passed."""
        while pending := {index: rank for index, rank in enumerate(self._ranks) if index not in answers}:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (stop_early and _exits(answers)):
                return
            connections = [rank.connection for rank in pending.values()]
            ready = multiprocessing.connection.wait(connections, timeout=min(left_s, _POLL_EVERY_S))
            for index, rank in pending.items():
                # A process that a rank has forked may hold the rank's end of the pipe.
                if rank.connection in ready or rank.process.poll() is not None:
                    answers[index] = self._receive(index, rank)

    def _receive(self, index: int, rank: _Rank) -> Answer | Exit:
        with contextlib.suppress(EOFError, OSError):
            if rank.connection.poll():
                return rank.connection.recv()
        await_ends([rank.process], self._policy.terminate_s)
        code = rank.process.poll()
        return Exit(index, rank.process.pid, 1 if code is None else code)

    def _await_secondary(self, answers: Answers) -> None:
        """After the first failure: let the others end by themselves, longer while the root cause is unknown."""
        started = time.monotonic()
        for grace_s in (self._policy.evident_grace_s, self._policy.grace_s):
            self._await_answers(answers, started + grace_s, stop_early=False)
            if is_evident(_exits(answers), _reports(answers)):
                break

    # ------------------------------------------------------------------ failing

    def _raise_failure(self, answers: Answers) -> None:
        exits = _exits(answers)
        root_cause = choose_root_cause(exits, _reports(answers)) or exits[0]
        who = f"rank {root_cause.rank} (pid {root_cause.pid})"
        answer = answers[root_cause.rank]
        if isinstance(answer, Exit) or answer.report is None:
            message = f"{who} of {self.num_ranks} {describe_exit(root_cause.exit_code)}"
            raise RankFailedError(message, rank=root_cause.rank, exitcode=root_cause.exit_code)
        report = answer.report
        remote = RemoteTraceback(f"on {who} of {self.num_ranks}:\n{report.traceback}")
        error: BaseException | None = None
        with contextlib.suppress(Exception):  # no exception was sent, or its class exists only in the ranks
            error = pickle.loads(answer.value or b"")
        if error is None:
            message = f"{who} of {self.num_ranks} failed: {report.summary}"
            error = RankFailedError(message, rank=root_cause.rank, exitcode=root_cause.exit_code)
        if hasattr(error, "add_note"):  # python 3.11 and later
            _, at, where = report.traceback.rpartition("\n  at ")  # a user's mistake names its place
            error.add_note(f"raised on {who} of {self.num_ranks}" + (f", at {where}" if at else ""))
        raise error from remote

    def _too_late(self, answers: Answers, timeout_s: float) -> CollectiveTimeoutError:
        missing = [index for index in range(self.num_ranks) if index not in answers]
        stacks = StackRequest(
            {index: (self._ranks[index].process.pid, Path(self._pages.files[index])) for index in missing}
        ).await_stacks(_STACK_S)
        names = ", ".join(map(str, missing))
        return CollectiveTimeoutError(
            f"task {self._num_tasks} was not done after {timeout_s:g} s; missing: rank {names} of {self.num_ranks}. "
            f"The ranks were stopped. They were here:\n"
            + "\n".join(f"rank {index}:\n{stacks.get(index, '')}" for index in missing)
        )

    def _stop(self) -> None:
        """Stop the remaining ranks, and the processes that they have started."""
        self._is_closed = True
        atexit.unregister(self.close)
        ranks, self._ranks, policy = dict(enumerate(self._ranks)), [], self._policy
        children = {index: rank.process for index, rank in ranks.items()}
        try:
            stop(
                children,
                lambda index: children[index].send_signal(signal.SIGTERM),
                patience_s=policy.terminate_s,
                terminate_s=policy.terminate_s,
            )
        finally:
            if self._guard is not None:
                self._guard.close()
            for rank in ranks.values():
                rank.connection.close()
                rank.process.release()
            self._restore_signals()
            self._port.close()
            self._pages.close()


def _reports(answers: Answers) -> list[CrashReport]:
    return [each.report for each in answers.values() if isinstance(each, Answer) and each.report is not None]


def _exits(answers: Answers) -> list[Exit]:
    """The ends of ranks that have failed."""
    raised = [Exit(report.rank, report.pid, report.exit_code or 1) for report in _reports(answers)]
    return raised + [each for each in answers.values() if isinstance(each, Exit)]


def _refuse_while_importing() -> None:
    """Refuse to start ranks while a rank imports its script: each new rank would start more without end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "evenstep.launch was called while a rank was importing the script. The ranks import it to find the "
            'function, so start them only under `if __name__ == "__main__":`.'
        )
