"""Processes of this host, as the kernel shows them in /proc (Linux). On other systems no process is found."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Signals that ask a run to save and stop. They come from schedulers, job scripts, submitit or a dropped connection.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

# Indices into the result of `stat_fields`.
STATE, PARENT_PID, USER_TICKS, START_TICKS, RESIDENT_PAGES = 0, 1, 11, 19, 21


def stays_ignored(which: signal.Signals) -> bool:
    """Whether this process was started, as by `nohup`, with SIGHUP ignored. False for other signals."""
    return which == signal.SIGHUP and signal.getsignal(which) == signal.SIG_IGN


def boot_id() -> str:
    """The id of this kernel's boot, equal for all processes under this kernel; "" on other systems than Linux."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def stat_fields(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat that follow the program's name; empty if there is no such process.

    Args:
        pid: A process, or "self".

    Raises:
        OSError: The state can't be read, for example because this process has no descriptor left. The process `pid` may
            be alive.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()  # the name in parentheses may contain anything


def state_and_start(pid: int) -> tuple[str, int]:
    """State and start time of a process; ("", 0) if there is none.

    Returns:
        The state as one letter: T is stopped by a signal, t by a debugger, Z has ended and waits for its parent. The
        start in the kernel's ticks distinguishes a process from a later one with the same number.

    Raises:
        OSError: As in `stat_fields`.
    """
    fields = stat_fields(pid)
    return (fields[STATE], int(fields[START_TICKS])) if fields else ("", 0)


def exists(pid: int) -> bool:
    """Whether there is a process with this number, zombies included. Needs no descriptor."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        pass
    return True


def is_running(pid: int, start_ticks: int | None = None) -> bool:
    """Whether a process is running; a zombie isn't. If its state can't be read: whether the number is in use.

    Args:
        pid: The process's number.
        start_ticks: When the process started, since a later process may get the same number. None: any process.
    """
    try:
        state, found = state_and_start(pid)
    except OSError:  # perhaps this process has no descriptor left: the other process may run
        return exists(pid)
    return state not in ("", "Z", "X") and start_ticks in (None, found)


def handles_signal(pid: int, number: int) -> bool:
    """Whether a process has its own handler of a signal; False if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def time_on_core_ns(pid: int) -> int | None:
    """The total time for which a process's main thread has run on a processor; None if that can't be read.

    A thread that waits for a lock, a socket or another thread doesn't run at all: the number stays the same.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        pass
    try:  # a kernel without schedstat counts in ticks
        fields = stat_fields(f"{pid}/task/{pid}")
        return (int(fields[USER_TICKS]) + int(fields[USER_TICKS + 1])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def children(pid: int) -> list[int]:
    """The processes that a process's main thread has started and not waited for."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def has_gpu_driver() -> bool:
    """Whether processes of this host may have GPUs."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd"))


def has_gpu(pid: int) -> bool:
    """Whether a process has a GPU open."""
    try:
        links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(link.startswith(("/dev/nvidia", "/dev/kfd")) for link in links)
