"""A child of the launcher, which keeps its number until nothing will be sent to it any more.

[Note: signal before you reap]

A process that has ended keeps its number until its parent reaps it; then another process may get it. What a rank has
started belongs to the group of the rank's number, and is to be killed after the rank has ended. So the launcher looks
at its children without reaping them (`WNOWAIT`), signals their groups, and reaps them last.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from evenstep.processes import STOP_SIGNALS

_GUARD = str(Path(__file__).with_name("guard.py"))
_POLL_S = 0.005


class BecomeRank(BaseException):
    """Raised in a forked rank: leave the launcher's stack, and go on as a rank.

    Attributes:
        arguments: What `evenstep.launcher.spawn.script_runner.main` is to be called with.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(*arguments)
        self.arguments = list(arguments)


class Child:
    """A child process that leads a session of its own, with the interface of `subprocess.Popen`.

    Args:
        pid: The child; nothing else in this process may wait for it.
        reap: Called once, when it has ended and is released; None: `os.waitpid`. Of a process that `subprocess` has
            started it is its `poll`: python reaps children whose objects have gone, so the object is kept until then.

    Attributes:
        pid: The child.
        returncode: None while it runs; negative: the signal that ended it.
    """

    def __init__(self, pid: int, *, reap: Callable[[], object] | None = None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reap = reap
        self._is_released = False

    def poll(self) -> int | None:
        """`returncode`, as of now."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    is_exit = ended.si_code == os.CLD_EXITED
                    self.returncode = ended.si_status if is_exit else -ended.si_status
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return when it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not.
        """
        await_ends([self], math.inf if timeout is None else timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, which: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, which)

    def signal_group(self, which: int) -> None:
        """Send a signal to it and to what it has started, also after it has ended; nothing once it is released."""
        if not self._is_released:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                try:
                    os.killpg(self.pid, which)
                except ProcessLookupError:  # it was started this moment, and leads no group yet
                    os.kill(self.pid, which)

    def release(self) -> None:
        """Reap it, if it has ended; its number may then become another process's. Twice is once."""
        if self._is_released or self.poll() is None:
            return
        self._is_released = True
        if self._reap is not None:
            self._reap()
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)


class Guard:
    """A process that kills these children's groups if this process is killed: see `guard.py`. Linux.

    Args:
        pids: Children that lead groups. Close this before any of them is released.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        command = [sys.executable, "-I", "-S", _GUARD, *map(str, (os.getpid(), *pids))]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, cwd="/", stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )

    def close(self) -> None:
        """End it. Twice is once."""
        self._process.kill()
        self._process.wait()


def stop(
    children: Mapping[int, Child], ask: Callable[[int], object], *, patience_s: float, terminate_s: float
) -> list[int]:
    """Stop children and what they have started. A signal to this process meanwhile means SIGKILL now.

    Args:
        children: By whatever number.
        ask: Sends the first signal to one of those that run, by its number. To it alone: it may need what it has
            started, such as the workers of its loader, for the steps until it saves.
        patience_s: Until SIGKILL follows, to everything; nothing follows where all had ended before.
        terminate_s: From SIGKILL until those that still run are left behind.

    Returns:
        The numbers of those that can't be killed.
    """
    running = [number for number, child in children.items() if child.poll() is None]
    try:
        for number in running:
            ask(number)
        await_ends(children.values(), patience_s)
    finally:
        for child in children.values() if running else ():
            child.signal_group(signal.SIGKILL)
    await_ends(children.values(), terminate_s)
    return [number for number in running if children[number].poll() is None]


def await_ends(children: Iterable[Child], longest_s: float) -> None:
    """Return when all have ended, but not later."""
    running, deadline = list(children), time.monotonic() + longest_s
    while time.monotonic() < deadline and (running := [child for child in running if child.poll() is None]):
        time.sleep(_POLL_S)


def keep_ended_children() -> Callable[[], None]:
    """Have the kernel keep how children end, also where whoever started this process had SIGCHLD ignored.

    It would reap them itself: no status would be known, and a child that ended looks like one that can't be started.

    Returns:
        What restores that; from a thread it does nothing, because only the main thread may.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGCHLD) != signal.SIG_IGN:
        return lambda: None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.getpid()

    def restore() -> None:
        if os.getpid() == pid and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    return restore


def leave_process_1() -> None:
    """Where this is process 1 of a container, go on in a child. Returns in it, or at once.

    Process 1 inherits what others leave behind, and has to reap it; the kernel ignores signals that it has no handler
    for. So it does only that: it reaps, passes signals on, and ends as its child does, and all other processes with it.
    """
    if os.getpid() != 1:
        return
    passed = {*STOP_SIGNALS, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        found = signal.sigwaitinfo(passed)
        if found.si_signo != signal.SIGCHLD:
            if found.si_code <= 0:  # a process's; a terminal's goes to the child, too
                os.kill(child, found.si_signo)
            continue
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    os._exit(code if code >= 0 else 128 - code)
