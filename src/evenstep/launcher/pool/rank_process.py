"""The child's side of a `RankGroup`: what runs in each of its processes, and the messages on the pipe."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from evenstep.errors import EvenstepError
from evenstep.ground.coordination.rendezvous_store import meet_without_port
from evenstep.ground.environment import current_placement, openmp_threads
from evenstep.ground.health.excepthook import describe
from evenstep.ground.health.first_failure import CrashReport
from evenstep.launcher.pool.remote import pack_exception, pack_result, unpack_call
from evenstep.launcher.spawn.script_runner import register_stacks
from evenstep.launcher.spawn.start_worker import die_with_parent


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
