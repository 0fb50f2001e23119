"""The zygote: a process that has imported torch once and is forked for every rank, in milliseconds, not seconds.

[Note: ranks forked from a zygote]

    launcher ── fork ── zygote                       right after the imports, before anything else has been done
        │                  │  a rank is requested: arguments, variables, three descriptors
        │                  └── fork ── (between) ── fork ── rank
        │                                ends at once       │
        └───────────────── becomes the parent of ───────────┘

- The process between ends, so that the kernel gives the rank to the nearest ancestor that takes orphans, and the
  launcher has declared itself one (`PR_SET_CHILD_SUBREAPER`), only for this moment: it has no use for the orphans that
  ranks leave later. It waits for its ranks and learns how they ended, as for those it has started itself; and they die
  with it, not with the zygote.
- A forked rank has what the zygote has: modules, and nothing else. There is one thread, no CUDA, no process group, no
  generator that has drawn a number, no descriptor that the launcher was given: somebody's lock would be held as long as
  the ranks run. `post_fork` puts right what differs between a fork and a process that python has just started: session,
  variables, streams, signals, threads, random numbers, path.
- One difference stays: python draws the seed of its hashes at its start, so all ranks of a node iterate over a set of
  texts in the same order. `evenstep verify` runs once without a zygote, and sees code that depends on it.
- A forked rank leaves the stack of the launcher by an exception, `BecomeRank`, which `cli.main` turns into a call of
  the worker. It ends as any python process does: exit handlers, finalisers, files that are still open.
- Where a fork could differ from a fresh process there is no zygote, and python starts the ranks: options of the
  interpreter, modules that were found beside the launcher, threads, another system than Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from evenstep.ground.compat.c_library.libc import c_library
from evenstep.launcher.spawn.child import Child
from evenstep.launcher.spawn.post_fork import search_path, set_blas_threads, settle, show_as
from evenstep.launcher.spawn.start_worker import die_with_parent

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
WORKER = str(Path(__file__).with_name("start_worker.py"))
_MAX_PID = 32  # characters
_ANSWER_S = 60.0
_POLL_S = 0.005
_THREADS_END_S = 0.5


class BecomeRank(BaseException):
    """Raised in a forked rank: leave the launcher's stack, and go on as a rank.

    Attributes:
        arguments: What `evenstep.launcher.spawn.script_runner.main` is to be called with.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(*arguments)
        self.arguments = list(arguments)


class Zygote:
    """The launcher's end of the zygote.

    Args:
        connection: To the zygote.
        pid: Its process.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection: socket.socket | None = connection
        self.pid = pid

    def start_command(
        self, command: Sequence[str], variables: Mapping[str, str], descriptors: Sequence[int]
    ) -> Child | None:
        """Fork a rank; None if the zygote can't any more, and where the command isn't python with our worker.

        Such as a program that binds a rank to cores and then starts it: that is started as it is written.

        Args:
            command: Python's, with our worker and its arguments.
            variables: The rank's whole environment.
            descriptors: What become its stdin, stdout and stderr.
        """
        is_ours = tuple(command[:3]) == (sys.executable, "-u", WORKER) and os.path.lexists("/proc/self/fd/0")
        if self._connection is None or not is_ours:
            return None
        with open(os.memfd_create("evenstep-rank", os.MFD_CLOEXEC), "w+b") as order:
            order.write(json.dumps([command[4:], dict(variables)]).encode())
            order.flush()
            try:
                with _adopting_orphans():
                    socket.send_fds(self._connection, [b"."], [order.fileno(), *descriptors])
                    pid = int(self._connection.recv(_MAX_PID))
            except (OSError, ValueError):
                self.close()
                return None
        return Child(pid, command[4:]) if pid else None

    def close(self) -> None:
        """End the zygote and wait for that."""
        if self._connection is None:
            return
        self._connection.close()
        self._connection = None
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)  # it may be in the middle of an import
            os.waitpid(self.pid, 0)


def why_not(first_on_path: str, options: Sequence[str], modules: Iterable[str | None]) -> str | None:
    """Why a fork of this process would differ from one that python starts; None if it wouldn't. Pure.

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


def fork_zygote(*, preloads: bool = False) -> Zygote | None:
    """Fork the zygote off this process; None if forks of this process can't serve as ranks.

    Call this early, with nothing on the stack that must be undone: forked ranks unwind it with `BecomeRank`.

    Args:
        preloads: After the first attempt's ranks the zygote imports what torch itself imports when the first
            optimizer is made. Ranks of later attempts then have it.

    Raises:
        BecomeRank: In the forked ranks.
    """
    if sys.platform != "linux" or getattr(sys.flags, "safe_path", False) or _is_shadowed():
        return None
    try:
        with _adopting_orphans():
            pass
    except OSError:
        return None
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # what is in its buffer would be written once by every fork
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            close_inherited(theirs.fileno())
            os.setsid()  # Ctrl-C is the launcher's
            die_with_parent(launcher)
            arguments = _serve(theirs, launcher, preloads=preloads)
        except BaseException:
            os._exit(1)
        raise BecomeRank(arguments)
    theirs.close()
    ours.settimeout(_ANSWER_S)
    zygote = Zygote(ours, pid)
    # Looked at only now: numpy's threads end when a process forks, and begin again when they are needed; the system
    # may list one for a moment after that. A thread that is still here may have held a lock, which nobody would ever
    # release in the forks.
    deadline = time.monotonic() + _THREADS_END_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            zygote.close()
            return None
        time.sleep(_POLL_S)
    return zygote


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Processes whose parents end inside become children of this one.

    Raises:
        OSError: Not on this kernel.
    """
    libc, before = c_library(), ctypes.c_int()
    if (
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) != 0
        or libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0
    ):
        raise OSError("PR_SET_CHILD_SUBREAPER")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def close_inherited(keep: int) -> None:
    """Close what whoever started this process has left open for it, but for the three streams.

    What python and its libraries open themselves isn't inheritable, which tells the two apart.

    Args:
        keep: A descriptor to be left open.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the list's own
            if descriptor > 2 and descriptor != keep and os.get_inheritable(descriptor):
                os.close(descriptor)


def _is_shadowed() -> bool:
    files = [
        getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("evenstep", "__main__", "__mp_main__")
    ]
    return why_not(os.path.abspath(sys.path[0]) if sys.path else "", sys.orig_argv[1:], files) is not None


def _serve(connection: socket.socket, launcher: int, *, preloads: bool) -> list[str]:
    """Fork one rank after the other until the launcher has gone. Returns in the forked ranks: what they are to run."""
    num_forks = 0
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
        if not head:
            os._exit(0)
        with open(descriptors.pop(0), "rb") as order:
            order.seek(0)
            arguments, variables = json.load(order)
        if num_forks == 0:
            set_blas_threads(variables)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() > 0:
                os._exit(0)
            connection.close()
            os.close(reader)
            _join(launcher, between)
            os.write(writer, b"%d" % os.getpid())
            os.close(writer)
            try:
                settle(variables, descriptors)
                show_as([sys.executable, "-u", WORKER, str(launcher), *arguments], variables)
                sys.path[:] = search_path(sys.path, Path(__file__).resolve().parents[2])
            except BaseException:
                traceback.print_exc()
                raise
            return list(arguments)
        os.close(writer)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        connection.sendall(os.read(reader, _MAX_PID) or b"0")
        os.close(reader)
        num_forks += 1
        if preloads and num_forks == int(variables.get("LOCAL_WORLD_SIZE", "1")):
            _preload()


def _join(launcher: int, between: int) -> None:
    """Lead a session, and be the launcher's child: it can signal and wait for this process from here on.

    Args:
        launcher: Its process; it adopts what its grandchildren leave.
        between: The process that forked this one, and ends at once.
    """
    os.setsid()
    while (parent := os.getppid()) != launcher:
        if parent != between:
            os._exit(1)  # the launcher has gone
        time.sleep(0.0002)
    die_with_parent(launcher)


def _preload() -> None:
    # The first optimizer imports it, a second and more. Not through the import statement: the launcher has no use for
    # it, and nothing may depend on it.
    with contextlib.suppress(Exception):
        __import__("torch._dynamo")
