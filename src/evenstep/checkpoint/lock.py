"""One job per directory: a lock file with pid and start time, which no dead process can hold."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from evenstep.environment import host_identity
from evenstep.errors import CheckpointError

NAME = "lock.json"
_TEMPORARY = ".lock-"


class LockedError(CheckpointError):
    """Another job writes its checkpoints here."""


def take_lock(directory: Path, owner: Mapping[str, object]) -> Callable[[], None]:
    """Write the lock file of a directory; returns what gives it back.

    Args:
        directory: Exists.
        owner: What the file says beside this process's identity.

    Raises:
        LockedError: A process that lives, or one of another host, has it.
        OSError: Nothing can be written here.
    """
    me = {**owner, **_identity()}
    path = directory / NAME
    with _guarded(directory):
        holder = _read(path)
        if holder is not None and not _is_mine(holder, me) and _may_live(holder):
            raise LockedError(
                f"{directory} belongs to another job: pid {holder.get('pid')} on {holder.get('hostname')}, "
                f"{_since(holder)}. Let it end, or give this job a directory of its own. If that process is gone for "
                f"good, remove {path}."
            )
        temporary = directory / f"{_TEMPORARY}{os.getpid()}"
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(me, file)
        temporary.rename(path)
        for left in directory.glob(f"{_TEMPORARY}*"):  # of jobs that were killed between these two lines
            with contextlib.suppress(OSError):
                left.unlink()

    def release() -> None:
        with contextlib.suppress(OSError), _guarded(directory):
            holder = _read(path)
            if holder is not None and _is_mine(holder, me):
                path.unlink(missing_ok=True)

    return release


@contextlib.contextmanager
def _guarded(directory: Path) -> Iterator[None]:
    """Alone among processes of this host: two that find the same stale lock must not both take it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> dict[str, object] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _since(holder: Mapping[str, object]) -> str:
    """When a lock was taken, in words; somebody may have edited the file."""
    try:
        began = time.localtime(float(str(holder["time"])))
    except (KeyError, ValueError, OverflowError, OSError):
        return "nobody knows since when"
    return time.strftime("since %Y-%m-%d %H:%M:%S", began)


def _identity() -> dict[str, object]:
    hostname, _, boot = host_identity().partition(" ")
    return {
        "pid": os.getpid(),
        "start": _start_of(os.getpid()),
        "hostname": hostname,
        "boot": boot,
        "processes": _process_namespace(),
        "time": time.time(),
    }


def _is_mine(holder: Mapping[str, object], me: Mapping[str, object]) -> bool:
    return all(holder.get(key) == me[key] for key in ("pid", "start", "boot", "processes"))


def _may_live(holder: Mapping[str, object]) -> bool:
    """Whether the process of a lock may still be there; only its own host can know better."""
    me = _identity()
    if holder.get("boot") != me["boot"]:
        # The same host after a restart: nothing of before lives. Another host: nobody here knows.
        return holder.get("hostname") != me["hostname"]
    if holder.get("processes") != me["processes"]:
        return True  # another container on this machine counts its processes by itself
    pid = holder.get("pid")
    return isinstance(pid, int) and _start_of(pid) is not None and _start_of(pid) == holder.get("start")


def _start_of(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: tells it from a later one with the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
