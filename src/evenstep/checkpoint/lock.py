"""One job per directory: numbered lock files, heartbeats of the highest one, and which manifests count.

[Note: the holder of a lock]

    lock-00006.json     belongs to a job that is gone; the next job removes it
    lock-00007.json     the highest number holds the directory; its process rewrites it every `RENEW_EVERY_S`

    the process that wrote the highest number           does it hold the lock?
    has released it                                     no
    belongs to an earlier attempt of this job           no, on any node: the scheduler has started the job again
    can be seen from here, and runs                     yes
    could be seen from here, but has ended              no
    can't be seen from here: another node, container    yes, until its last heartbeat is `EXPIRES_AFTER_S` old

One process can see another if both share a kernel (same boot id) and a PID namespace. Host names don't show this:
containers and virtual machines often have the same name. Ages are measured by the storage's clock, by writing a new
file and reading its time. The hosts' clocks don't matter.

A takeover creates the file with the next number: creating a file is the one action in which only one of two jobs can
succeed. No file is deleted and created again. So the highest number stays, even when it is released, and numbers are
never used twice.

[Note: which manifests count]

A job may be suspended right after it has checked its lock, lose the lock meanwhile, and then continue and write a
manifest. So a folder's name contains the number of the lock under which it was written, and a job that takes a lock
lists in it the manifests that exist after the lock was created. A manifest of an earlier number that isn't listed was
written later, and is not a checkpoint. If a lock has no list, its job was killed before it could change anything, or
the lock can't be read: then all manifests count. A holder checks its lock before each manifest and each removal, and
once more before it reports that a manifest was saved.

[Note: what a lock remembers of the run]

`run` is created with the directory's first lock and copied to each later lock: nodes keep their local generations under
this key. `resumes` has (number of the lock, step) of attempts that used local generations. Each attempt resumed from
that step, so later steps that earlier attempts have saved on some node are void. Entries that a later entry makes
redundant are dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.store import Storage
from evenstep.console import say
from evenstep.errors import CheckpointError
from evenstep.ground.environment import attempts, node_identity
from evenstep.ground.host.processes import state_and_start

RENEW_EVERY_S = 10.0
EXPIRES_AFTER_S = 60.0
_POLL_EVERY_S = 0.5
_NUM_LOOKS = 20
_MAX_BYTES = 16 << 20
_LOCK = re.compile(r"lock-(\d{5,})\.json")
_FOLDER = re.compile(r"step-(\d{7,})-(\d{5,})-(\d+)")


class LockedError(CheckpointError):
    """Another job writes its checkpoints here."""


class Place(NamedTuple):
    """The parts of a checkpoint folder's name. Of two places with the same step, the larger is the later one.

    Attributes:
        step: Optimizer steps.
        lock: Number of the lock under which the folder was written.
        save: Number of the save under this lock.
    """

    step: int
    lock: int
    save: int

    @property
    def folder(self) -> str:
        """The folder's name."""
        return f"step-{self.step:07d}-{self.lock:05d}-{self.save}"


def place_of(folder: str) -> Place | None:
    """The inverse of `Place.folder`; None for other names."""
    found = _FOLDER.fullmatch(folder)
    return None if found is None else Place(*map(int, found.groups()))


def step_of(folder: str) -> int:
    """The step of a checkpoint's folder."""
    place = place_of(folder)
    assert place is not None, folder
    return place.step


@dataclass(frozen=True)
class Top:
    """The content of a directory: the highest lock, and the checkpoints.

    Attributes:
        number: The lock's number; 0: there is none.
        record: The lock's content; empty if it isn't JSON.
        names: The names of everything in the directory.
    """

    number: int
    record: Mapping[str, object]
    names: Sequence[str]

    @property
    def damaged(self) -> dict[str, str]:
        """The damage that resumes have found, by folder."""
        found = self.record.get("damaged")
        return {str(folder): str(why) for folder, why in found.items()} if isinstance(found, dict) else {}

    def manifests(self, storage: Storage) -> list[str]:
        """The folders of checkpoints, good or damaged, in the order of their steps. See the note above."""
        listed = self.record.get("manifests")
        found = []
        for name in self.names:
            place = place_of(name)
            if place is not None and (place.lock >= self.number or not isinstance(listed, list) or name in listed):
                found.append((place, name))
        return [name for _, name in sorted(found) if manifests.NAME in storage.list(name)]


def read_top(storage: Storage) -> Top:
    """Read a directory. Needs no lock."""
    for left in reversed(range(_NUM_LOOKS)):
        names = storage.list()
        number = max((int(found[1]) for found in map(_LOCK.fullmatch, names) if found is not None), default=0)
        if number == 0:
            break
        try:
            return Top(number, _parsed(storage.read(_name(number), most_bytes=_MAX_BYTES)), names)
        except FileNotFoundError:  # a higher lock was created meanwhile
            if not left:
                raise
            time.sleep(_POLL_EVERY_S / 10)
    return Top(0, {}, names)


class Lock:
    """The lock of a directory, held by this process. A daemon thread writes its heartbeats.

    It is released, at the latest, when it is no longer referenced or when this process ends in an orderly way.

    Attributes:
        number: The lock's number.
        manifests: The folders of the checkpoints that were there when it was taken, in the order of their steps.
        record: The lock file's content.
    """

    def __init__(self, storage: Storage, number: int, manifests: list[str], record: dict[str, Any]) -> None:
        self._storage, self.number, self.manifests, self.record = storage, number, manifests, record
        stop = threading.Event()
        # The thread must not reference this object: see `_release`.
        name = f"evenstep lock {storage.where}"
        thread = threading.Thread(target=_renew_until, args=(stop, weakref.ref(self)), name=name, daemon=True)
        self._release = weakref.finalize(self, _release, stop, thread, storage, number, record)
        thread.start()

    def note_damaged(self, folder: str, why: str) -> None:
        """Record that a checkpoint is damaged. It is kept from then on."""
        _write(self._storage, self.number, self.record, damaged={**self.record["damaged"], folder: why})

    def note_resume(self, step: int) -> None:
        """Record the step from which this job continues. Durable."""
        resumes = [[lock, each] for lock, each in self.record["resumes"] if each < step]
        _write(self._storage, self.number, self.record, resumes=[*resumes, [self.number, step]])

    def confirm(self) -> None:
        """Check that this process still holds the lock. Called before every change that other jobs can see.

        Writes nothing, so that a save doesn't wait, unless the lock file was removed: then it is written again.

        Raises:
            LockedError: Another job has taken the lock, because this job seemed dead.
            OSError: The storage can't be reached.
        """
        top = read_top(self._storage)
        if top.number > self.number or top.record.get("key", self.record["key"]) != self.record["key"]:
            is_mine = _is_mine(top.record, self.record)
            who = "another Checkpointer of this process" if is_mine else f"pid {top.record.get('pid')}"
            raise LockedError(
                f"{self._storage.where} was taken over by {who} on {top.record.get('hostname')}, {_since(top.record)}: "
                f"{'a second one was made, or ' if is_mine else ''}this process had sent no heartbeat for "
                f"{EXPIRES_AFTER_S:.0f} s (was it stopped?), or its lock was removed. It saves nothing more there"
            )
        if top.number < self.number:
            self.renew()

    def renew(self) -> None:
        """Write a heartbeat. Durable, like the lock's content: the list of manifests must survive a power failure."""
        _write(self._storage, self.number, self.record)

    def release(self) -> None:
        """Release the lock, if this process still holds it. A second call does nothing."""
        self._release()


def take_lock(storage: Storage, owner: Mapping[str, object], *, wait_s: float = 0.0) -> Lock:
    """Lock out other jobs until this process ends or releases the lock.

    Args:
        storage: The storage to lock.
        owner: Information about this job for others, besides its process; JSON types.
        wait_s: How long to wait for the next heartbeat of a holder that can't be seen from here. If one comes, or the
            time has passed, that holder keeps the directory.

    Raises:
        LockedError: Another process has the lock, or may have it.
        OSError: The storage can't be written to.
    """
    me = {**owner, **_identity(), "key": secrets.token_hex(8)}
    began = time.monotonic()
    first: Top | None = None
    while True:
        top, age_s = read_top(storage), 0.0
        waited_s = time.monotonic() - began
        if top.number and not top.record.get("released"):
            try:
                age_s = storage.age_s(_name(top.number))
            except FileNotFoundError:
                continue  # a higher one was created meanwhile
        state = _state(top, max(age_s, waited_s if first is not None and first.record == top.record else 0.0), me)
        if state == "free":
            if (lock := _take(storage, top, me)) is not None:
                return lock
            continue  # another process was faster
        has_renewed = first is not None and first.record != top.record
        held_by = f"{_who(top.record)}, last heartbeat {age_s:.0f} s ago"
        if state == "held" or has_renewed or waited_s >= wait_s:
            raise LockedError(
                f"{storage.where} belongs to another job: {held_by}. Let it end, or give this job another directory. A "
                f"job that sends no heartbeat for {EXPIRES_AFTER_S:.0f} s loses the lock. If you know that it is gone: "
                f"evenstep checkpoint unlock {storage.where}"
            )
        if first is None:
            first = top
            say(
                f"evenstep: {storage.where} is locked by {held_by}, which can't be seen from here. Waiting for its "
                f"next heartbeat; {EXPIRES_AFTER_S:.0f} s after the last one the lock is taken over"
            )
        time.sleep(_POLL_EVERY_S)


def remove_lock(storage: Storage) -> str:
    """Remove the lock of any holder, unless that process is seen to run. Returns a line for the user.

    Raises:
        LockedError: The holder runs, or another job was faster.
        OSError: The storage can't be written to.
    """
    me = {**_identity(), "key": secrets.token_hex(8)}
    top = read_top(storage)
    if not top.number or top.record.get("released"):
        return f"{storage.where} is not locked"
    if _runs_here(top.record, me):
        raise LockedError(f"{storage.where} is locked by {_who(top.record)}, which runs on this host. End it first.")
    lock = _take(storage, top, me)
    if lock is None:
        raise LockedError(f"{storage.where} was locked by another job just now.")
    lock.release()
    return f"{storage.where}: removed the lock of {_who(top.record)}. If that job still runs, its next save fails"


def _take(storage: Storage, top: Top, me: Mapping[str, object]) -> Lock | None:
    """Create the lock that follows `top`; None: another process was faster."""
    places = [place.lock for place in map(place_of, top.names) if place is not None]
    of_run = {"run": top.record.get("run", secrets.token_hex(8)), "resumes": top.record.get("resumes", [])}
    number, record = 1 + max([top.number, *places]), {**me, **of_run, "manifests": None}
    storage.put_new(_name(number), json.dumps(record).encode())
    # Don't rely on the answer: a request whose answer was lost is sent twice, and another job may have created and
    # removed the number.
    now = read_top(storage)
    if now.record.get("key") != me["key"]:
        return None
    found = Top(top.number, top.record, now.names).manifests(storage)
    damaged = {folder: why for folder, why in top.damaged.items() if folder in found}
    _write(storage, number, record, manifests=found, damaged=damaged)
    for name in now.names:
        if _LOCK.fullmatch(name) and name != _name(number):
            with contextlib.suppress(OSError):  # the next job removes it
                storage.remove(name)
    return Lock(storage, number, found, record)


def _state(top: Top, age_s: float, me: Mapping[str, object]) -> str:
    """Whether a lock is "free", "held", or "unknown", because its holder can't be seen from here."""
    holder = top.record
    if not top.number or holder.get("released") or _is_mine(holder, me) or _is_earlier_attempt(holder, me):
        return "free"
    if _shares_kernel(holder, me):
        return "held" if _runs_here(holder, me) else "free"
    return "free" if age_s >= EXPIRES_AFTER_S else "unknown"


def _is_mine(holder: Mapping[str, object], me: Mapping[str, object]) -> bool:
    return all(holder.get(key) == me[key] for key in ("pid", "start", "boot", "processes"))


def _is_earlier_attempt(holder: Mapping[str, object], me: Mapping[str, object]) -> bool:
    """Whether a holder is an earlier attempt of this job or this run."""
    theirs, mine = holder.get("attempts"), me["attempts"]
    if not isinstance(theirs, dict) or not isinstance(mine, dict):
        return False
    return any(isinstance(theirs.get(name), int) and theirs[name] < count for name, count in mine.items())


def _shares_kernel(holder: Mapping[str, object], me: Mapping[str, object]) -> bool:
    """Whether both processes share a kernel and a PID namespace, so that one can see the other."""
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
        "processes": process_namespace(),
        "attempts": attempts(),
        "time": time.time(),
    }


def _start_of(pid: int) -> int | None:
    """The start time of a process that still runs."""
    state, start_ticks = state_and_start(pid)
    return None if state in ("", "Z") else start_ticks


def process_namespace() -> str:
    """A text that is equal for two processes of a host if they share a PID namespace; "" if it can't be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _since(holder: Mapping[str, object]) -> str:
    """The time at which a lock was taken, for messages. The file may have been edited."""
    try:
        began = time.localtime(float(str(holder["time"])))
    except (KeyError, ValueError, OverflowError, OSError):
        return "since an unknown time"
    return time.strftime("since %Y-%m-%d %H:%M:%S", began)


def _who(holder: Mapping[str, object]) -> str:
    return f"pid {holder.get('pid')} on {holder.get('hostname')}, {_since(holder)}"


# ---------------------------------------------------------------------- heartbeats


def _renew_until(stop: threading.Event, held: weakref.ref[Lock]) -> None:
    """Write heartbeats, in the thread. Ends early if another process has taken the lock."""
    while not stop.wait(RENEW_EVERY_S) and (lock := held()) is not None:
        with contextlib.suppress(OSError):  # the storage may become reachable again
            try:
                lock.confirm()
                lock.renew()
            except LockedError:
                return  # `confirm` raises it in the program's thread
        del lock


def _release(
    stop: threading.Event, thread: threading.Thread, storage: Storage, number: int, record: dict[str, Any]
) -> None:
    """End the heartbeats and release the lock. Must not reference the `Lock`: its finaliser calls this."""
    if os.getpid() != record["pid"]:
        return  # a forked child
    stop.set()
    if thread is not threading.current_thread():
        thread.join(RENEW_EVERY_S)  # a storage that hangs must not block the end of the process
    with contextlib.suppress(OSError):
        if read_top(storage).record.get("key") == record["key"]:
            _write(storage, number, record, released=True)


def _write(storage: Storage, number: int, record: dict[str, Any], **changes: object) -> None:
    """Rewrite a lock. Its content changes each time, so that waiting jobs notice the renewal."""
    record.update(changes, renewed=time.time())
    storage.put(_name(number), [json.dumps(record).encode()])


def _name(number: int) -> str:
    return f"lock-{number:05d}.json"


def _parsed(content: bytes) -> dict[str, object]:
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
