"""A child process of the launcher, whose pid stays reserved until no more signals will be sent to it.

[Note: signal before you reap]

A process that has ended keeps its pid until its parent reaps it. Then another process may get the pid. The processes
that a rank has started belong to the process group with the rank's pid, and have to be killed after the rank has ended.
So the launcher checks its children without reaping them (`WNOWAIT`), signals their groups, and reaps them last.
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

from evenstep.ground.host.processes import STOP_SIGNALS

_GUARD = str(Path(__file__).with_name("guard.py"))
_POLL_S = 0.005


class BecomeRank(BaseException):
    """Raised in a forked rank to leave the launcher's stack and continue as a rank.

    Attributes:
        arguments: Arguments for `evenstep.launcher.spawn.script_runner.main`.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(*arguments)
        self.arguments = list(arguments)


class Child:
    """A child process that leads a session of its own, with the interface of `subprocess.Popen`.

    Args:
        pid: The child's pid; nothing else in this process may wait for the child.
        reap: Called once, when the child has ended and is released; None: `os.waitpid`. For a process from `subprocess`
            pass its `poll`, which keeps the object alive: python reaps children whose objects are collected.

    Attributes:
        pid: The child.
        returncode: The exit status, negative for a signal; None while the child runs.
    """

    def __init__(self, pid: int, *, reap: Callable[[], object] | None = None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reap = reap
        self._is_released = False

    def poll(self) -> int | None:
        """Return the current `returncode`."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is not None:
                    is_exit = ended.si_code == os.CLD_EXITED
                    self.returncode = ended.si_status if is_exit else -ended.si_status
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the child has ended; returns its `returncode`.

        Raises:
            subprocess.TimeoutExpired: The child has not ended in time.
        """
        await_ends([self], math.inf if timeout is None else timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, which: int) -> None:
        """Send a signal to the child, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, which)

    def signal_group(self, which: int) -> None:
        """Send a signal to the child and to the processes that it has started, even after its end.

        Does nothing once the child is released.
        """
        if not self._is_released:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                try:
                    os.killpg(self.pid, which)
                except ProcessLookupError:  # the child has just been started, and doesn't lead a group yet
                    os.kill(self.pid, which)

    def release(self) -> None:
        """Reap the child if it has ended; another process may then get its pid. A second call does nothing."""
        if self._is_released or self.poll() is None:
            return
        self._is_released = True
        if self._reap is not None:
            self._reap()
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)


class Guard:
    """A process that kills the process groups of children if this process is killed: see `guard.py`. Linux.

    Args:
        pids: Children that lead process groups. Close the guard before a child is released.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        command = [sys.executable, "-I", "-S", _GUARD, *map(str, (os.getpid(), *pids))]
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, cwd="/", stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )

    def close(self) -> None:
        """End the guard process. A second call does nothing."""
        self._process.kill()
        self._process.wait()


def stop(
    children: Mapping[int, Child], ask: Callable[[int], object], *, patience_s: float, terminate_s: float
) -> list[int]:
    """Stop children and the processes that they have started. A signal to this process kills them at once.

    Args:
        children: The children, by any number.
        ask: Sends the first signal to a running child, by its number, and to no other process: until it has saved, the
            child may need the processes that it has started, such as its loader's workers.
        patience_s: Time from the first signal until SIGKILL to all children and their processes. Nothing is sent if all
            children had ended before the call.
        terminate_s: Time from SIGKILL until children that still run are left behind.

    Returns:
        The numbers of children that can't be killed.
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
    """Wait until all children have ended, at most for the given time."""
    running, deadline = list(children), time.monotonic() + longest_s
    while time.monotonic() < deadline and (running := [child for child in running if child.poll() is None]):
        time.sleep(_POLL_S)


def keep_ended_children() -> Callable[[], None]:
    """Make the kernel keep the exit statuses of children, even if this process was started with SIGCHLD ignored.

    Otherwise the kernel would reap children itself: their statuses would be lost, and an ended child would look like a
    child that couldn't be started.

    Returns:
        A function that restores the old setting. Only the main thread may change it; in another thread nothing is done.
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
    """If this is process 1 of a container, continue in a child. Returns in the child; otherwise at once.

    Process 1 inherits orphaned processes and has to reap them, and the kernel ignores signals without a handler in it.
    So process 1 only reaps, passes signals on, and ends with its child's status. All other processes of the container
    end with it.
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
            if found.si_code <= 0:  # sent by a process; the terminal sends its signals to the child, too
                os.kill(child, found.si_signo)
            continue
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    os._exit(code if code >= 0 else 128 - code)
