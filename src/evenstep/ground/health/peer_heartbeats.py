"""The heartbeat pages of this node's other ranks, for ranks to read: under any launcher, or without one.

Under `evenstep run` every rank has a page from its start. Else `init` makes one, in a file that is removed as soon as
all have opened it: nothing is left behind, however a rank ends.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.ground.environment import node_identity
from evenstep.ground.health import heartbeat
from evenstep.ground.health.heartbeat import Heartbeat, parse_page, parse_sites

_SITES_S = 1.0
_PACKAGE = Path(__file__).resolve().parents[2]
_MACHINERY = (f"site-packages{os.sep}torch{os.sep}", "contextlib.py", "threading.py")

_maps: dict[int, mmap.mmap] = {}  # by pid, of this host's ranks
_ranks: dict[int, int] = {}  # by pid


def share_pages(exchange: Callable[[Any], Sequence[Any]], *, rank: int) -> Callable[[], None]:
    """Let the ranks of a host read each other's pages. Collective.

    Args:
        exchange: Gives every rank's value to all.
        rank: This rank.

    Returns:
        What ends it.
    """
    made = None
    if heartbeat.own_path() is None:
        fd, made = tempfile.mkstemp(prefix="evenstep-page-")
        os.close(fd)
        heartbeat.open_page(Path(made))
    mine = {"host": node_identity(), "pid": os.getpid(), "page": str(heartbeat.own_path())}
    try:
        for other, each in enumerate(exchange(mine)):
            if each["host"] == mine["host"]:
                _open(int(each["pid"]), other, Path(each["page"]))
        exchange(None)  # all have opened theirs
    finally:
        if made is not None:
            os.unlink(made)
    opened = list(_maps)

    def end() -> None:
        for pid in opened:
            _ranks.pop(pid, None)
            if pid in _maps:
                _maps.pop(pid).close()
        if made is not None:
            heartbeat.close_page()

    return end


def read(pid: int) -> Heartbeat | None:
    """The heartbeat of another rank's process; None if its page is missing or can't be read."""
    memory = _maps.get(pid)
    return None if memory is None else parse_page(memory[: heartbeat.CELL_BYTES])


def read_all() -> dict[int, Heartbeat]:
    """By rank, of this host's."""
    seen = {rank: read(pid) for pid, rank in _ranks.items()}
    return {rank: each for rank, each in sorted(seen.items()) if each is not None}


def rank_of_this_process() -> int | None:
    """The rank under which this process has shared its page; None: it hasn't."""
    return _ranks.get(os.getpid())


def exchange_sites(key: str, pids: Mapping[int, int]) -> str:
    """Exchange where in their scripts ranks are that disagree; waits a moment for the others.

    Args:
        key: Which call it is about, the same on all ranks.
        pids: By rank, of all of them.

    Returns:
        A sentence, the same on all ranks; "" if they have no pages.
    """
    if any(pid not in _maps for pid in pids.values()):
        return ""
    heartbeat.write_site(f"{key}\n{user_site()}")
    deadline = time.monotonic() + _SITES_S
    while True:
        said = {rank: _said_of(key, pid) for rank, pid in sorted(pids.items())}
        if None not in said.values() or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    sites = "; ".join(f"rank {rank}: {where or 'not said'}" for rank, where in said.items())
    return f" They were called here: {sites}."


def _said_of(key: str, pid: int) -> str | None:
    texts = (text.partition("\n") for text in parse_sites(_maps[pid]))
    return next((where for about, _, where in texts if about == key), None)


def user_site() -> str:
    """The innermost line of this thread's stack that belongs neither to evenstep nor to torch."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((str(_PACKAGE), "<")) and not any(part in name for part in _MACHINERY):
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "nowhere in a script"


def _open(pid: int, rank: int, path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # another user's temporary directory, a container of its own: then there is none to be read
    try:
        if os.fstat(fd).st_size == heartbeat.PAGE_BYTES:
            if pid in _maps:
                _maps.pop(pid).close()
            _maps[pid], _ranks[pid] = mmap.mmap(fd, heartbeat.PAGE_BYTES, prot=mmap.PROT_READ), rank
    finally:
        os.close(fd)


def _forget() -> None:
    _maps.clear()
    _ranks.clear()


os.register_at_fork(after_in_child=_forget)
