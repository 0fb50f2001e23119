"""One job per directory: a row of lock objects, the sign of life of the highest, and which manifests count.

[Note: who holds a lock]

    lock-00006.json     of a job that is gone; removed by the next one
    lock-00007.json     the highest number has the directory; its holder writes it again every `RENEW_EVERY_S`

    the process that wrote the highest                  it holds the lock
    has released it                                     no
    belongs to an earlier attempt of this job           no, wherever it is: the scheduler has started the job again
    is seen from here, and runs                         yes
    is seen from here no more                           no
    can't be seen from here: another node, container    while its signs of life come; when the last is
                                                        `EXPIRES_AFTER_S` old, no more

One process sees another if both share a kernel (the boot id says so) and a PID namespace. Names of hosts say nothing:
containers and virtual machines often have the same. An age is measured by the storage's clock: by the time of a file
that is put just now. The clocks of the hosts don't matter.

A takeover creates the next number, and creating is the one thing that only one of two jobs can do; nothing is deleted
and created again. So the highest number stays, also when it is released, and numbers are never used twice.

[Note: which manifests count]

A job that was stopped after it had looked at its lock, and has lost it meanwhile, goes on and writes a manifest. So a
folder's name says under which lock it was written; and whoever takes a lock lists in it, once it is created, the
manifests that are there. A manifest of an earlier number that isn't listed came later, and is no checkpoint. Where
nothing is listed, the taker was killed before it could change anything, or the lock can't be read: then all count. A
holder looks before each manifest and each removal, and once more before it reports that a manifest was saved.

[Note: what a lock remembers of the run]

`run` is made with the directory's first lock and copied by each that follows: nodes keep their local generations under
it. `resumes` has (number of the lock, step) of attempts that used them: each went on from that step, and what earlier
attempts have saved on some node behind it is void. An entry that a later one makes needless is dropped.
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
from evenstep.processes import state_and_start

RENEW_EVERY_S = 10.0
EXPIRES_AFTER_S = 60.0
_LOOK_EVERY_S = 0.5
_NUM_LOOKS = 20
_MAX_BYTES = 16 << 20
_LOCK = re.compile(r"lock-(\d{5,})\.json")
_FOLDER = re.compile(r"step-(\d{7,})-(\d{5,})-(\d+)")


class LockedError(CheckpointError):
    """Another job writes its checkpoints here."""


class Place(NamedTuple):
    """What the name of a checkpoint's folder says; of one step the larger is the later.

    Attributes:
        step: Optimizer steps.
        lock: Number of the lock under which it was written.
        save: Number of the save under this lock.
    """

    step: int
    lock: int
    save: int

    @property
    def folder(self) -> str:
        """The name."""
        return f"step-{self.step:07d}-{self.lock:05d}-{self.save}"


def place_of(folder: str) -> Place | None:
    """The inverse of `Place.folder`; None if it is the name of something else."""
    found = _FOLDER.fullmatch(folder)
    return None if found is None else Place(*map(int, found.groups()))


def step_of(folder: str) -> int:
    """The step of a checkpoint's folder."""
    place = place_of(folder)
    assert place is not None, folder
    return place.step


@dataclass(frozen=True)
class Top:
    """What lies in a directory: the highest lock, and the checkpoints.

    Attributes:
        number: Of the lock; 0: there is none.
        record: Its content; empty where it isn't JSON.
        names: Of everything there.
    """

    number: int
    record: Mapping[str, object]
    names: Sequence[str]

    @property
    def damaged(self) -> dict[str, str]:
        """By folder, what a resume has found wrong with it."""
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


def look(storage: Storage) -> Top:
    """Look at a directory. Needs no lock."""
    for left in reversed(range(_NUM_LOOKS)):
        names = storage.list()
        number = max((int(found[1]) for found in map(_LOCK.fullmatch, names) if found is not None), default=0)
        if number == 0:
            break
        try:
            return Top(number, _parsed(storage.read(_name(number), most_bytes=_MAX_BYTES)), names)
        except FileNotFoundError:  # a higher one has come meanwhile
            if not left:
                raise
            time.sleep(_LOOK_EVERY_S / 10)
    return Top(0, {}, names)


class Lock:
    """The lock of a directory, held by this process. A daemon thread gives its signs of life.

    It is released when it is no longer referenced, or when this process ends in an orderly way, at the latest.

    Attributes:
        number: Its own.
        manifests: The folders of the checkpoints that were there when it was taken, in the order of their steps.
        record: Its content.
    """

    def __init__(self, storage: Storage, number: int, manifests: list[str], record: dict[str, Any]) -> None:
        self._storage, self.number, self.manifests, self.record = storage, number, manifests, record
        stop = threading.Event()
        # The thread must not keep this object alive: see `_release`.
        name = f"evenstep lock {storage.where}"
        thread = threading.Thread(target=_renew_until, args=(stop, weakref.ref(self)), name=name, daemon=True)
        self._release = weakref.finalize(self, _release, stop, thread, storage, number, record)
        thread.start()

    def note_damaged(self, folder: str, why: str) -> None:
        """Note what is wrong with a checkpoint: it is kept from then on."""
        _write(self._storage, self.number, self.record, damaged={**self.record["damaged"], folder: why})

    def note_resume(self, step: int) -> None:
        """Note from which step this job goes on. Durable."""
        resumes = [[lock, each] for lock, each in self.record["resumes"] if each < step]
        _write(self._storage, self.number, self.record, resumes=[*resumes, [self.number, step]])

    def confirm(self) -> None:
        """Look whether this process still has it. Called before every change of what others see.

        Nothing is written, so that a save doesn't wait for it; but a lock that somebody removed is put back.

        Raises:
            LockedError: Another job has taken the lock: this one was taken for dead.
            OSError: The storage can't be reached.
        """
        top = look(self._storage)
        if top.number > self.number or top.record.get("key", self.record["key"]) != self.record["key"]:
            is_mine = _is_mine(top.record, self.record)
            who = "another Checkpointer of this process" if is_mine else f"pid {top.record.get('pid')}"
            raise LockedError(
                f"{self._storage.where} was taken over by {who} on {top.record.get('hostname')}, {_since(top.record)}: "
                f"{'a second one was made, or ' if is_mine else ''}this process had given no sign of life for "
                f"{EXPIRES_AFTER_S:.0f} s (was it stopped?), or its lock was removed. It saves nothing more there"
            )
        if top.number < self.number:
            self.renew()

    def renew(self) -> None:
        """Give a sign of life. Durable, as its content is: which manifests count must outlive a power failure."""
        _write(self._storage, self.number, self.record)

    def release(self) -> None:
        """End it, if this process still holds it. Twice is once."""
        self._release()


def take_lock(storage: Storage, owner: Mapping[str, object], *, wait_s: float = 0.0) -> Lock:
    """Lock out other jobs until this process ends, or releases the lock.

    Args:
        storage: What to lock.
        owner: What others may want to know of this job besides its process; JSON types.
        wait_s: How long to wait for the next sign of life of a holder that can't be seen from here. If there is one, or
            the time has passed, the directory stays that holder's.

    Raises:
        LockedError: Another process has it, or may have it.
        OSError: Nothing can be written here.
    """
    me = {**owner, **_identity(), "key": secrets.token_hex(8)}
    began = time.monotonic()
    first: Top | None = None
    while True:
        top, age_s = look(storage), 0.0
        waited_s = time.monotonic() - began
        if top.number and not top.record.get("released"):
            try:
                age_s = storage.age_s(_name(top.number))
            except FileNotFoundError:
                continue  # a higher one has come meanwhile
        state = _state(top, max(age_s, waited_s if first is not None and first.record == top.record else 0.0), me)
        if state == "free":
            if (lock := _take(storage, top, me)) is not None:
                return lock
            continue  # another process was faster
        has_renewed = first is not None and first.record != top.record
        held_by = f"{_who(top.record)}, last heartbeat {age_s:.0f} s ago"
        if state == "held" or has_renewed or waited_s >= wait_s:
            raise LockedError(
                f"{storage.where} belongs to another job: {held_by}. Let it end, or give this job a directory of its "
                f"own. A job that gives no sign of life for {EXPIRES_AFTER_S:.0f} s loses the lock. If you know that "
                f"it is gone: evenstep checkpoint unlock {storage.where}"
            )
        if first is None:
            first = top
            say(
                f"evenstep: {storage.where} is locked by {held_by}, which can't be seen from here. Waiting for its "
                f"next heartbeat; {EXPIRES_AFTER_S:.0f} s after the last one the lock is taken over"
            )
        time.sleep(_LOOK_EVERY_S)


def remove_lock(storage: Storage) -> str:
    """Take a lock away, whoever holds it, unless that process is seen to run; returns a line for the user.

    Raises:
        LockedError: The holder runs, or another job was faster.
        OSError: Nothing can be written here.
    """
    me = {**_identity(), "key": secrets.token_hex(8)}
    top = look(storage)
    if not top.number or top.record.get("released"):
        return f"{storage.where} is not locked"
    if _runs_here(top.record, me):
        raise LockedError(f"{storage.where} is locked by {_who(top.record)}, which runs on this host. End it first.")
    lock = _take(storage, top, me)
    if lock is None:
        raise LockedError(f"{storage.where} was locked by another job just now.")
    lock.release()
    return f"{storage.where}: removed the lock of {_who(top.record)}. If that job runs after all, its next save fails"


def _take(storage: Storage, top: Top, me: Mapping[str, object]) -> Lock | None:
    """Create the lock that follows `top`; None: another process was faster."""
    places = [place.lock for place in map(place_of, top.names) if place is not None]
    of_run = {"run": top.record.get("run", secrets.token_hex(8)), "resumes": top.record.get("resumes", [])}
    number, record = 1 + max([top.number, *places]), {**me, **of_run, "manifests": None}
    storage.put_new(_name(number), json.dumps(record).encode())
    # Whatever it said: a request whose answer got lost was made twice, and a number may have come and gone.
    now = look(storage)
    if now.record.get("key") != me["key"]:
        return None
    found = Top(top.number, top.record, now.names).manifests(storage)
    damaged = {folder: why for folder, why in top.damaged.items() if folder in found}
    _write(storage, number, record, manifests=found, damaged=damaged)
    for name in now.names:
        if _LOCK.fullmatch(name) and name != _name(number):
            with contextlib.suppress(OSError):  # the next one does it
                storage.remove(name)
    return Lock(storage, number, found, record)


def _state(top: Top, age_s: float, me: Mapping[str, object]) -> str:
    """Whether a lock is "free", "held", or "unknown": its holder can't be seen from here."""
    holder = top.record
    if not top.number or holder.get("released") or _is_mine(holder, me) or _is_earlier_attempt(holder, me):
        return "free"
    if _shares_kernel(holder, me):
        return "held" if _runs_here(holder, me) else "free"
    return "free" if age_s >= EXPIRES_AFTER_S else "unknown"


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
        "processes": process_namespace(),
        "attempts": attempts(),
        "time": time.time(),
    }


def _start_of(pid: int) -> int | None:
    """The start time of a process that still runs."""
    state, start_ticks = state_and_start(pid)
    return None if state in ("", "Z") else start_ticks


def process_namespace() -> str:
    """A text that two processes of a host share where a process has the same number for both; "" if that isn't seen."""
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


def _who(holder: Mapping[str, object]) -> str:
    return f"pid {holder.get('pid')} on {holder.get('hostname')}, {_since(holder)}"


# ---------------------------------------------------------------------- signs of life


def _renew_until(stop: threading.Event, held: weakref.ref[Lock]) -> None:
    """Give signs of life: the work of the thread. Ends early if another process has taken the lock."""
    while not stop.wait(RENEW_EVERY_S) and (lock := held()) is not None:
        with contextlib.suppress(OSError):  # the storage may come back
            try:
                lock.confirm()
                lock.renew()
            except LockedError:
                return  # raised by `confirm`, where somebody hears it
        del lock


def _release(
    stop: threading.Event, thread: threading.Thread, storage: Storage, number: int, record: dict[str, Any]
) -> None:
    """End the signs of life and release the lock. Must not refer to the `Lock`, whose end calls it."""
    if os.getpid() != record["pid"]:
        return  # a child that was forked
    stop.set()
    if thread is not threading.current_thread():
        thread.join(RENEW_EVERY_S)  # a storage that hangs must not hold up the end of the process
    with contextlib.suppress(OSError):
        if look(storage).record.get("key") == record["key"]:
            _write(storage, number, record, released=True)


def _write(storage: Storage, number: int, record: dict[str, Any], **changes: object) -> None:
    """Write a lock again. Its content is another each time: whoever waits sees that it is renewed."""
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
