"""The other rank processes of this host: are they alive, and what are they doing?"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evenstep.health import peer_pages
from evenstep.health.page import Seen


@dataclass(frozen=True)
class PeerProcess:
    """A rank's process, told apart from a later one of the same pid by the time at which it started."""

    rank: int
    pid: int
    start_ticks: int


def this_process(rank: int) -> PeerProcess:
    """This rank's own process."""
    return PeerProcess(rank, os.getpid(), _stat(os.getpid())[1])


class PeerWatch:
    """Notices the end of other processes, through a pidfd each, or through `/proc` where there is none."""

    def __init__(self, peers: Sequence[PeerProcess]) -> None:
        self._peers = {peer.rank: peer for peer in peers}
        self._pidfds: dict[int, int] = {}
        for peer in peers:
            try:
                self._pidfds[peer.rank] = os.pidfd_open(peer.pid)
            except (OSError, AttributeError):
                continue  # an old kernel, or a sandbox that refuses it

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        return self._peers[rank].pid

    def seen(self, rank: int) -> Seen | None:
        """What a rank's page says; None if it has none that can be read."""
        return peer_pages.read(self._peers[rank].pid)

    def is_gone(self, rank: int) -> bool:
        """Whether the process has ended, also if nobody has collected its status yet."""
        fd = self._pidfds.get(rank)
        peer = self._peers[rank]
        if fd is not None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if poll.poll(0):
                return True
        state, start_ticks = _stat(peer.pid)
        # A pidfd taken too late would be another process's: the start time tells.
        return state in ("", "Z", "X") or start_ticks != peer.start_ticks

    def is_stopped(self, rank: int) -> bool:
        """Whether the process is stopped (SIGSTOP, a debugger) and so can't come."""
        return _stat(self._peers[rank].pid)[0] in ("T", "t")

    def close(self) -> None:
        """Let go of the pidfds."""
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])


def _stat(pid: int) -> tuple[str, int]:
    """State and start time of a process; ("", 0) if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[19])
