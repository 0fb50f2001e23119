"""One job per directory: a lock file, and the heartbeat that keeps it.

[Note: who holds a lock]

    the process that took it                            it holds the lock
    belongs to an earlier attempt of this job           no, wherever it is: the scheduler has started the job again
    is seen from here, and runs                         yes
    is seen from here no more                           no
    can't be seen from here: another node, container    while its heartbeats come, every `RENEW_EVERY_S`;
                                                        when the last is `EXPIRES_AFTER_S` old, no more

One process sees another if both share a kernel (the boot id says so) and a PID namespace. Names of hosts say nothing:
containers and virtual machines often have the same.

A heartbeat writes the lock file's bytes again, so its modification time is by the storage's own clock; its age is
the distance to the time of a file that was written just now beside it. The clocks of the hosts don't matter.

A holder that was stopped for longer than that finds another's lock when it goes on: `confirm` looks before each rename.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from evenstep.console import say
from evenstep.errors import CheckpointError
from evenstep.ground.environment import attempts, node_identity
from evenstep.processes import state_and_start

NAME = "lock.json"
RENEW_EVERY_S = 10.0
EXPIRES_AFTER_S = 60.0
_LOOK_EVERY_S = 0.5
_TEMPORARY = ".lock-"
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LockedError(CheckpointError):
    """Another job writes its checkpoints here."""


@dataclass(frozen=True)
class _Found:
    """A lock file, as it was read.

    Attributes:
        holder: Its content; empty where it isn't JSON.
        renewed_ns: When it was written last, by the storage's clock.
        now_ns: When it was read, by the storage's clock.
    """

    holder: dict[str, object]
    renewed_ns: int
    now_ns: int

    @property
    def age_s(self) -> float:
        """Since the last heartbeat."""
        return max(0.0, (self.now_ns - self.renewed_ns) / 1e9)

    def __str__(self) -> str:
        who = f"pid {self.holder.get('pid')} on {self.holder.get('hostname')}"
        return f"{who}, {_since(self.holder)}, last heartbeat {self.age_s:.0f} s ago"


class FileLock:
    """The lock of a directory, held by this process. A daemon thread writes its heartbeat.

    It is released when it is no longer referenced, or when this process ends in an orderly way, at the latest.
    """

    def __init__(self, directory: Path, me: Mapping[str, object], mode: int) -> None:
        self._directory, self._me, self._mode = directory, me, mode
        stop = threading.Event()
        # The thread must not keep this object alive: see `_release`.
        thread = threading.Thread(
            target=_renew_until, args=(stop, directory, me, mode), name=f"evenstep lock {directory}", daemon=True
        )
        self._release = weakref.finalize(self, _release, stop, thread, directory, me)
        thread.start()

    def confirm(self) -> None:
        """See `Lock.confirm`."""
        _renew(self._directory, self._me, self._mode)

    def release(self) -> None:
        """See `Lock.release`."""
        self._release()


def take_lock(directory: Path, owner: Mapping[str, object], *, mode: int = 0o600, wait_s: float = 0.0) -> FileLock:
    """Write the lock file of a directory.

    Args:
        directory: Exists.
        owner: What the file holds besides this process's identity.
        mode: Of the file.
        wait_s: How long to wait for the next heartbeat of a holder that can't be seen from here. If there is one, or
            the time has passed, the directory stays that holder's.

    Raises:
        LockedError: Another process has it, or may have it.
        OSError: Nothing can be written here.
    """
    me = {**owner, **_identity(), "key": secrets.token_hex(8)}
    deadline = time.monotonic() + wait_s
    first: _Found | None = None
    while True:
        with _guarded(directory), _temporary(directory, me, mode) as (temporary, now_ns):
            found = _read(directory, now_ns)
            state = "free" if found is None else _state(found, me)
            if state == "free" and _put(temporary, directory / NAME, replaces=found is not None):
                return FileLock(directory, me, mode)
        if found is None or state == "free":
            continue  # another process was faster
        has_renewed = first is not None and first.renewed_ns != found.renewed_ns
        if state == "held" or has_renewed or time.monotonic() >= deadline:
            raise LockedError(
                f"{directory} belongs to another job: {found}. Let it end, or give this job a directory of its own. A "
                f"job that gives no sign of life for {EXPIRES_AFTER_S:.0f} s loses the lock. If you know that it is "
                f"gone: evenstep checkpoint unlock {directory}"
            )
        if first is None:
            first = found
            say(
                f"evenstep: {directory} is locked by {found}, which can't be seen from here. Waiting for its next "
                f"heartbeat; {EXPIRES_AFTER_S:.0f} s after the last one the lock is taken over"
            )
        time.sleep(_LOOK_EVERY_S)


def remove_lock(directory: Path) -> str:
    """Remove a lock, whoever holds it, unless that process is seen to run; returns a line for the user.

    Raises:
        LockedError: The holder runs.
        OSError: Nothing can be written here.
    """
    me = _identity()
    with _guarded(directory), _temporary(directory, me, 0o600) as (_, now_ns):
        found = _read(directory, now_ns)
        if found is None:
            return f"{directory} is not locked"
        if _runs_here(found.holder, me):
            raise LockedError(f"{directory} is locked by {found}, which runs on this host. End it first.")
        (directory / NAME).unlink(missing_ok=True)
    return (
        f"{directory}: removed the lock of {found}. If that job runs after all, it saves until another one takes over"
    )


def _state(found: _Found, me: Mapping[str, object]) -> str:
    """Whether a lock is "free", "held", or "unknown": its holder can't be seen from here."""
    if _is_mine(found.holder, me) or _is_earlier_attempt(found.holder, me):
        return "free"
    if _shares_kernel(found.holder, me):
        return "held" if _runs_here(found.holder, me) else "free"
    return "free" if found.age_s >= EXPIRES_AFTER_S else "unknown"


def _is_mine(holder: Mapping[str, object], me: Mapping[str, object]) -> bool:
    return all(holder.get(key) == me[key] for key in ("pid", "start", "boot", "processes"))


def _is_earlier_attempt(holder: Mapping[str, object], me: Mapping[str, object]) -> bool:
    """Whether a holder is what this job, or this run, was before it was started again."""
    theirs, mine = holder.get("attempts"), me["attempts"]
    if not isinstance(theirs, dict) or not isinstance(mine, dict):
        return False
    return any(isinstance(theirs.get(name), int) and theirs[name] < count for name, count in mine.items())


def _shares_kernel(holder: Mapping[str, object], me: Mapping[str, object]) -> bool:
    """Whether both are processes of one kernel and PID namespace, so that one sees the other."""
    return all(me[key] and holder.get(key) == me[key] for key in ("boot", "processes"))


def _runs_here(holder: Mapping[str, object], me: Mapping[str, object]) -> bool:
    """Whether a holder is seen to run."""
    pid = holder.get("pid")
    if not _shares_kernel(holder, me) or not isinstance(pid, int):
        return False
    return _start_of(pid) is not None and _start_of(pid) == holder.get("start")


def _identity() -> dict[str, object]:
    hostname, _, boot = node_identity().partition(" ")
    return {
        "pid": os.getpid(),
        "start": _start_of(os.getpid()),
        "hostname": hostname,
        "boot": boot,
        "processes": _process_namespace(),
        "attempts": attempts(),
        "time": time.time(),
    }


def _start_of(pid: int) -> int | None:
    """The start time of a process that still runs."""
    state, start_ticks = state_and_start(pid)
    return None if state in ("", "Z") else start_ticks


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _since(holder: Mapping[str, object]) -> str:
    """When a lock was taken, for a message; the file may have been edited."""
    try:
        began = time.localtime(float(str(holder["time"])))
    except (KeyError, ValueError, OverflowError, OSError):
        return "since an unknown time"
    return time.strftime("since %Y-%m-%d %H:%M:%S", began)


# ---------------------------------------------------------------------- heartbeat


def _renew_until(stop: threading.Event, directory: Path, me: Mapping[str, object], mode: int) -> None:
    """Write heartbeats: the work of the thread. Ends early if another process has taken the lock."""
    while not stop.wait(RENEW_EVERY_S):
        with contextlib.suppress(OSError):  # the storage may come back
            try:
                _renew(directory, me, mode)
            except LockedError:
                return  # raised by `confirm`, where somebody hears it


def _renew(directory: Path, me: Mapping[str, object], mode: int) -> None:
    """Write a heartbeat, if the lock is still this one; put it back if it is gone."""
    path = directory / NAME
    try:
        descriptor = os.open(path, os.O_RDWR | _FLAGS)
    except FileNotFoundError:  # somebody has removed it, and nobody has taken it
        with _temporary(directory, me, mode) as (temporary, _):
            _put(temporary, path, replaces=False)
        descriptor = os.open(path, os.O_RDWR | _FLAGS)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        content = file.readall() or b""
        holder = _parsed(content)
        if holder.get("key") != me["key"]:
            is_mine = _is_mine(holder, me)
            who = "another Checkpointer of this process" if is_mine else f"pid {holder.get('pid')}"
            raise LockedError(
                f"{directory} was taken over by {who} on {holder.get('hostname')}, {_since(holder)}: "
                f"{'a second one was made, or ' if is_mine else ''}this process had given no sign of life for "
                f"{EXPIRES_AFTER_S:.0f} s (was it stopped?), or its lock was removed. It saves nothing more there"
            )
        # The same bytes in place: if another process replaces the file now, this writes to what is no lock any more.
        os.pwrite(file.fileno(), content, 0)


def _release(stop: threading.Event, thread: threading.Thread, directory: Path, me: Mapping[str, object]) -> None:
    """End the heartbeat and remove the lock. Must not refer to the `FileLock`, whose end calls it.

    That may be python's collector, anywhere, also while this process takes a lock: so without `_guarded`.
    """
    if os.getpid() != me["pid"]:
        return  # a child that was forked
    stop.set()
    if thread is not threading.current_thread():
        thread.join(RENEW_EVERY_S)  # a storage that hangs must not hold up the end of the process
    with contextlib.suppress(OSError):
        found = _read(directory, 0)
        if found is not None and found.holder.get("key") == me["key"]:
            (directory / NAME).unlink(missing_ok=True)


# ---------------------------------------------------------------------- files


@contextlib.contextmanager
def _guarded(directory: Path) -> Iterator[None]:
    """Exclude other processes of this host: two that find the same stale lock must not both take it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _temporary(directory: Path, me: Mapping[str, object], mode: int) -> Iterator[tuple[Path, int]]:
    """A new file with a lock's content, and its time: now, by the storage's clock. It is removed at the end."""
    path = directory / f"{_TEMPORARY}{secrets.token_hex(8)}"
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "w") as file:
            json.dump(me, file)
        now_ns = path.stat().st_mtime_ns
        for left in directory.glob(f"{_TEMPORARY}*"):  # by processes that were killed before the end of this
            with contextlib.suppress(OSError):
                if now_ns - left.stat().st_mtime_ns >= EXPIRES_AFTER_S * 1e9:
                    left.unlink()
        yield path, now_ns
    finally:
        path.unlink(missing_ok=True)


def _put(temporary: Path, path: Path, *, replaces: bool) -> bool:
    """Make a temporary file the lock; False: there is one already, and it isn't to be replaced."""
    if not replaces:
        try:
            os.link(temporary, path)
            return True
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            pass
    temporary.rename(path)
    return True


def _read(directory: Path, now_ns: int) -> _Found | None:
    """The lock; None if there is none."""
    try:
        # Opened, and not only looked at: a network file system then asks its server.
        descriptor = os.open(directory / NAME, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        return _Found(_parsed(file.readall() or b""), os.fstat(file.fileno()).st_mtime_ns, now_ns)


def _parsed(content: bytes) -> dict[str, object]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
