"""The zygote: a process that has imported torch once and is forked for every rank, in milliseconds instead of seconds.

[Note: ranks forked from a zygote]

    launcher ── fork ── zygote                       right after the imports, before anything else has been done
        │                  │  a rank is requested: arguments, variables, three descriptors
        │                  └── fork ── (between) ── fork ── rank
        │                                ends at once       │
        └───────────────── becomes the parent of ───────────┘

- The process between ends, so that the kernel gives the rank to the nearest ancestor that adopts orphans. The launcher
  adopts orphans (`PR_SET_CHILD_SUBREAPER`) only during this time: it mustn't adopt the orphans that ranks leave later.
  So ranks are the launcher's own children: it waits for them and gets their exit statuses, and they die with the
  launcher, not with the zygote.
- A forked rank has the zygote's modules, and nothing else: one thread, no CUDA, no process group, no used random
  generator, and no descriptor that the launcher has inherited, because a rank would keep another program's lock on the
  file. `become_fresh` corrects the differences between a fork and a process that python has just started: session,
  variables, streams, signals, threads, random numbers, path.
- One difference stays: python draws the seed of its hashes at its start, so all ranks of a node iterate over a set of
  texts in the same order. `evenstep verify` runs once without a zygote, and so finds code that depends on this order.
- A forked rank leaves the launcher's stack by an exception, `BecomeRank`. `cli.main` catches it and calls the worker.
  It ends as any python process does: exit handlers, finalisers, files that are still open.
- If a fork could differ from a fresh process, there is no zygote, and each rank is a new python: if the interpreter has
  options, modules were imported from the launcher's directory, there are other threads, or the system isn't Linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from evenstep.ground import environment
from evenstep.ground.compat.c_library.libc import c_library
from evenstep.ground.host.processes import stat_fields
from evenstep.launcher.spawn.child import BecomeRank, Child
from evenstep.launcher.spawn.script_runner import unbuffered
from evenstep.launcher.spawn.start_worker import WORKER, die_with_parent, import_what_the_launcher_did

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_MAX_PID = 32  # characters of a pid's text
_ANSWER_S = 60.0
_POLL_S = 0.005
_THREADS_END_S = 0.5


class Zygote:
    """The launcher's handle of the zygote.

    Args:
        connection: The connection to the zygote.
        pid: The zygote's process.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection: socket.socket | None = connection
        self.pid = pid

    def start_command(
        self, command: Sequence[str], variables: Mapping[str, str], descriptors: Sequence[int]
    ) -> Child | None:
        """Fork a rank. Returns None if the zygote can't fork any more, or the command doesn't run evenstep's worker.

        For example, a program that binds a rank to cores and then starts it has to be started itself.

        Args:
            command: The python command with evenstep's worker and its arguments.
            variables: The rank's whole environment.
            descriptors: The descriptors for its stdin, stdout and stderr.
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
        return Child(pid) if pid else None

    def close(self) -> None:
        """End the zygote and wait for its end."""
        if self._connection is None:
            return
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self._connection.close()
        self._connection = None


def why_not(first_on_path: str, options: Sequence[str], modules: Iterable[str | None]) -> str | None:
    """Why a fork of this process would differ from a fresh python process; None if it wouldn't. Pure.

    Args:
        first_on_path: The directory that python has put first on its path: the script's or the current directory.
        options: This process's command line after the name of the interpreter.
        modules: The files of all imported modules except evenstep's own.
    """
    for option in options:
        if not option.startswith("-") or option == "-m":
            break
        if option != "-u":  # ranks have this option in any case
            return f"python was started with {option}"
    for file in modules:
        # torch's modules without a file still name one, without a directory.
        if file is not None and first_on_path and os.path.dirname(file) == first_on_path:
            return f"{file} was imported from the launcher's directory"
    return None


def fork_zygote(*, preloads: bool = False) -> Zygote | None:
    """Fork the zygote from this process; None if forks of this process can't become ranks.

    Call this early, with nothing on the stack that must be undone: forked ranks unwind it with `BecomeRank`.

    Args:
        preloads: After forking the first attempt's ranks, import the modules that torch imports when the first
            optimizer is made, for the ranks of later attempts.

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
            stream.flush()  # else every fork would write the buffered text again
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            close_inherited(theirs.fileno())
            os.setsid()  # so that Ctrl-C doesn't reach the zygote
            die_with_parent(launcher)
            arguments = _serve(theirs, launcher, preloads=preloads)
        except BaseException:
            os._exit(1)
        raise BecomeRank(arguments)
    theirs.close()
    ours.settimeout(_ANSWER_S)
    zygote = Zygote(ours, pid)
    # Check threads only now: numpy's threads end when a process forks, and start again when they are needed; the system
    # may list one for a moment longer. Any other thread may hold a lock, which would never be released in the forks.
    deadline = time.monotonic() + _THREADS_END_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            zygote.close()
            return None
        time.sleep(_POLL_S)
    return zygote


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Context in which this process adopts orphaned descendants as its children.

    Raises:
        OSError: The kernel doesn't support it.
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
    """Close all inherited descriptors, except the three standard streams.

    Descriptors that python and its libraries open themselves aren't inheritable, so these can be distinguished.

    Args:
        keep: A descriptor to leave open.
    """
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor with which the directory was listed
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
    """Fork one rank after the other until the launcher has ended.

    Returns only in the forked ranks: their worker's arguments.
    """
    num_forks = 0
    while True:
        head, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
        if not head:
            os._exit(0)  # the launcher has ended
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
                become_fresh(variables, descriptors)
                show_as([sys.executable, "-u", WORKER, str(launcher), *arguments], variables)
                del sys.path[:1]  # the launcher's own directory, or the current directory
                import_what_the_launcher_did()
            except BaseException:
                traceback.print_exc()
                raise
            return list(arguments)
        os.close(writer)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        pid = int(os.read(reader, _MAX_PID) or b"0")
        os.close(reader)
        connection.sendall(b"%d" % pid)
        num_forks += 1
        if preloads and num_forks == int(variables.get("LOCAL_WORLD_SIZE", "1")):
            _preload()


def _join(launcher: int, between: int) -> None:
    """Lead a session and become the launcher's child, so that the launcher can signal and wait for this process.

    Args:
        launcher: The launcher's process, which adopts its orphaned grandchildren.
        between: The process that forked this one, and ends at once.
    """
    os.setsid()
    while (parent := os.getppid()) != launcher:
        if parent != between:
            os._exit(1)  # the launcher has ended
        time.sleep(0.0002)
    die_with_parent(launcher)


def _preload() -> None:
    # torch imports dynamo for the first optimizer, which takes more than a second. Import it by name, because the
    # launcher doesn't need it and nothing may depend on it.
    with contextlib.suppress(Exception):
        __import__("torch._dynamo")


_SET_BLAS_THREADS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


def become_fresh(variables: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Install a rank's variables and streams, and set up threads and random numbers as in a new process.

    Args:
        variables: The whole environment.
        descriptors: The descriptors for stdin, stdout and stderr; their present numbers are closed.
    """
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    environment.replace(variables)
    _set_signals()
    tempfile.tempdir = None  # an import may have cached it, and this rank's TMPDIR may differ
    sys.stdout = sys.__stdout__ = unbuffered(1, "<stdout>", sys.__stdout__)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = unbuffered(2, "<stderr>", sys.__stderr__)  # type: ignore[misc]
    _set_threads()
    # A fork reseeds python's own generator. Without new seeds, these generators would be the same in all ranks.
    torch.default_generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _set_signals() -> None:
    """Reset signals that the launcher handles to their defaults, even if they were ignored before, as `exec` would."""
    for which in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(which) is signal.SIG_IGN:
            signal.signal(which, signal.default_int_handler if which == signal.SIGINT else signal.SIG_DFL)


class _MemoryMap(ctypes.Structure):
    """The kernel's `struct prctl_mm_map`."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


# The fields' positions in /proc/PID/stat after the name of the program.
_IN_STAT = {"start_code": 23, "end_code": 24, "start_stack": 25, "start_data": 42, "end_data": 43, "start_brk": 44}
_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_shown: list[mmap.mmap] = []  # the kernel reads this memory as long as this process runs


def show_as(command: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Make `ps` and /proc show this command line and these variables instead of the launcher's.

    Returns:
        Whether the kernel allowed it; otherwise the launcher's are shown.
    """
    texts = [b"".join(os.fsencode(word) + b"\0" for word in command)]
    texts.append(b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items()))
    # Use private memory: the kernel doesn't show memory that belongs to a file, and counts shared memory as a file.
    memory = mmap.mmap(-1, sum(map(len, texts)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"".join(texts))
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fields = stat_fields("self")
    libc = c_library()
    libc.sbrk.restype = ctypes.c_void_p
    middle = begin + len(texts[0])
    wanted = _MemoryMap(
        **{name: int(fields[place]) for name, place in _IN_STAT.items()},
        brk=libc.sbrk(0),
        arg_start=begin,
        arg_end=middle,
        env_start=middle,
        env_end=middle + len(texts[1]),
        exe_fd=0xFFFFFFFF,
    )
    _shown.append(memory)
    return bool(libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(wanted), ctypes.sizeof(wanted), 0) == 0)


def _set_threads() -> None:
    """Apply `OMP_NUM_THREADS` as torch would do when it is loaded."""
    num_threads = environment.openmp_threads()
    if num_threads is not None and not environment.is_set("MKL_NUM_THREADS"):
        torch.set_num_threads(num_threads)


def mapped_files(maps: str) -> set[str]:
    """The names of the files in the text of /proc/PID/maps; names may have spaces. Pure."""
    places = [line.split(maxsplit=5) for line in maps.splitlines()]
    return {place[5] for place in places if len(place) == 6 and place[5].startswith("/")}


def set_blas_threads(variables: Mapping[str, str]) -> None:
    """Set the number of threads of numpy's OpenBLAS. Called in the zygote, before it forks.

    Otherwise OpenBLAS would start a thread per core in each fork, and leave most of them idle.

    Args:
        variables: The rank's variables.
    """
    wanted = variables.get("OMP_NUM_THREADS", "")
    if not wanted.isdecimal() or variables.get("OPENBLAS_NUM_THREADS") or variables.get("GOTO_NUM_THREADS"):
        return
    for file in mapped_files(Path("/proc/self/maps").read_text()):
        if "openblas" not in os.path.basename(file):
            continue
        library = ctypes.CDLL(file)  # numpy's library: it is loaded already
        for function in _SET_BLAS_THREADS:
            if hasattr(library, function):
                getattr(library, function)(int(wanted))
