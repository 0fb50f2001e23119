"""A process that has imported torch once, and is copied for every rank: starting one costs milliseconds, not seconds.

[Note: copies of a template]

    launcher ── fork ── template                     right after the imports, before anything else has been done
        │                  │  a rank is wanted: arguments, variables, three descriptors
        │                  └── fork ── (between) ── fork ── rank
        │                                ends at once       │
        └───────────────── becomes the parent of ───────────┘

- The process between ends, so that the kernel gives the rank to the nearest ancestor that takes orphans, and the
  launcher has said that it does (`PR_SET_CHILD_SUBREAPER`). It waits for its ranks, and learns how they ended, as for
  those it has started itself; and they die with it, not with the template.
- A copy has what the template has: modules, and nothing else. There is one thread, no CUDA, no process group, no
  generator that was asked for a number. What differs between a copy and a process that python has just started is put
  right by `copy_state`: session, variables, streams, signals, threads, random numbers, path.
- The copy leaves the stack of the launcher by an exception, `BecomeRank`, which `cli.main` lets go on to the worker. It
  ends as any python process does: exit handlers, finalisers, files that nobody has closed.
- Where a copy could differ from a fresh process there is no template, and ranks are started by python as ever: options
  of the interpreter, modules that were found beside the launcher, threads, another system than Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from evenstep.launcher.copy_state import copied_path, set_blas_threads, settle, show_as
from evenstep.launcher.lifeline import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
WORKER = str(Path(__file__).with_name("start_worker.py"))
_LENGTH = struct.Struct("<Q")
_ANSWER_S = 60.0
_POLL_S = 0.005
_THREADS_END_S = 0.5


class BecomeRank(BaseException):
    """Raised in a copy: leave the launcher's stack, and go on as a rank.

    Attributes:
        arguments: What `evenstep.launcher.worker.main` is to be called with.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(*arguments)
        self.arguments = list(arguments)


class CopiedProcess:
    """A rank that was copied, as `subprocess.Popen` shows those that it has started.

    Attributes:
        pid: Its process.
        returncode: None while it runs; negative: the signal that ended it.
    """

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid = pid
        self.args = list(args)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """`returncode`, as of now."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return when it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def send_signal(self, which: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, which)


class Template:
    """The launcher's end: asks for copies.

    Args:
        connection: To the template.
        pid: Its process.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection: socket.socket | None = connection
        self.pid = pid

    def start(
        self, arguments: Sequence[str], variables: Mapping[str, str], descriptors: Sequence[int]
    ) -> CopiedProcess | None:
        """Start a rank; None if the template can't any more.

        Args:
            arguments: What `worker.main` gets.
            variables: The rank's whole environment.
            descriptors: What become its stdin, stdout and stderr.
        """
        if self._connection is None:
            return None
        payload = json.dumps([list(arguments), dict(variables)]).encode()
        try:
            socket.send_fds(self._connection, [_LENGTH.pack(len(payload))], list(descriptors))
            self._connection.sendall(payload)
            (pid,) = _LENGTH.unpack(_receive(self._connection, _LENGTH.size))
        except (OSError, EOFError):
            self.close()
            return None
        return CopiedProcess(pid, arguments) if pid else None

    def close(self) -> None:
        """Let it end, and wait for that."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # it may be in the middle of an import
            os.waitpid(self.pid, 0)


def why_not(first_on_path: str, options: Sequence[str], modules: Iterable[str | None]) -> str | None:
    """Why a copy of this process would differ from one that python starts; None if it wouldn't. Pure.

    Args:
        first_on_path: The directory that python has put first on its path: of the script, or the current one.
        options: This process's command line behind the name of the interpreter.
        modules: The files of the modules that were imported, but for evenstep's own.
    """
    for option in options:
        if not option.startswith("-") or option == "-m":
            break
        if option != "-u":  # ranks have that anyway
            return f"python was started with {option}"
    for file in modules:
        # Modules of torch that no file has made name one all the same, without a directory.
        if file is not None and first_on_path and os.path.dirname(file) == first_on_path:
            return f"{file} was imported from where the launcher stands"
    return None


def fork_template(*, preloads: bool = False) -> Template | None:
    """Fork the template off this process; None if copies of this process are no good as ranks.

    Call this early, with nothing on the stack that must be undone: the copies unwind it with `BecomeRank`.

    Args:
        preloads: Have it import, as soon as it has nothing else to do, what torch itself imports when the first
            optimizer is made. Ranks that are started later have it then.

    Raises:
        BecomeRank: In the copies.
    """
    if sys.platform != "linux" or getattr(sys.flags, "safe_path", False) or _is_shadowed():
        return None
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        return None
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # what is in its buffer would be written once by every copy
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            os.setsid()  # Ctrl-C is the launcher's
            die_with_parent(launcher)
            arguments = _serve(theirs, launcher, preloads=preloads)
        except BaseException:
            os._exit(1)
        raise BecomeRank(arguments)
    theirs.close()
    ours.settimeout(_ANSWER_S)
    template = Template(ours, pid)
    # Looked at only now: numpy's threads end when a process forks, and begin again when they are needed; the system
    # may list one for a moment after that. A thread that is still here may have held a lock, which nobody would ever
    # release in the copies.
    deadline = time.monotonic() + _THREADS_END_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            template.close()
            return None
        time.sleep(_POLL_S)
    return template


def _is_shadowed() -> bool:
    files = [
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("evenstep", "__main__", "__mp_main__")
    ]
    return why_not(os.path.abspath(sys.path[0]) if sys.path else "", sys.orig_argv[1:], files) is not None


def _serve(connection: socket.socket, launcher: int, *, preloads: bool) -> list[str]:
    """Make one copy after the other, until the launcher has gone. Returns in the copies: what they are to run."""
    num_copies = 0
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
        if not head:
            os._exit(0)
        head += _receive(connection, _LENGTH.size - len(head))
        arguments, variables = json.loads(_receive(connection, _LENGTH.unpack(head)[0]))
        if num_copies == 0:
            set_blas_threads(variables)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() > 0:
                os._exit(0)
            connection.close()
            os.close(reader)
            _join(launcher)
            os.write(writer, _LENGTH.pack(os.getpid()))
            os.close(writer)
            try:
                settle(variables, descriptors)
                show_as([sys.executable, "-u", WORKER, str(launcher), *arguments], variables)
                sys.path[:] = copied_path(sys.path, Path(__file__).resolve().parents[1])
            except BaseException:
                traceback.print_exc()
                raise
            return list(arguments)
        os.close(writer)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        connection.sendall(os.read(reader, _LENGTH.size) or _LENGTH.pack(0))
        os.close(reader)
        num_copies += 1
        if preloads and num_copies == int(variables.get("LOCAL_WORLD_SIZE", "1")):
            _preload()


def _join(launcher: int) -> None:
    """Lead a session, and be the launcher's child: it can signal and wait for this process from here on."""
    between = os.getppid()
    os.setsid()
    while (parent := os.getppid()) != launcher:
        if parent != between:
            os._exit(1)  # the launcher has gone
        between = parent
        time.sleep(0.0002)
    die_with_parent(launcher)


def _preload() -> None:
    # The first optimizer imports it, a second and more. Not through the import statement: the launcher has no use for
    # it, and nothing may depend on it.
    with contextlib.suppress(Exception):
        __import__("torch._dynamo")


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
