"""The other rank processes of this node: whether they are alive, and their heartbeat pages.

[Note: no descriptor for them]

A pidfd per rank would show the end of a process, but cost N - 1 descriptors in every rank. A program that closes
descriptors that it hasn't opened (`os.closerange`) would then make a living rank look dead, and its next file would get
the number of a descriptor that evenstep would close later. `/proc` gives the same answer without an open descriptor; if
no file can be opened, signal 0 does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evenstep.ground.health import peer_heartbeats
from evenstep.ground.health.heartbeat import Heartbeat
from evenstep.ground.host.processes import is_running, state_and_start


@dataclass(frozen=True)
class PeerProcess:
    """A rank's process. The start time distinguishes it from a later process with the same pid."""

    pid: int
    start_ticks: int


class PeerWatch:
    """Notices the end of other processes. See [Note: no descriptor for them].

    Args:
        peers: The ranks' processes, in order of rank.
    """

    def __init__(self, peers: Sequence[PeerProcess]) -> None:
        self._peers = peers

    def pid(self, rank: int) -> int:
        """The pid of a rank's process."""
        return self._peers[rank].pid

    def seen(self, rank: int) -> Heartbeat | None:
        """A rank's heartbeat page; None if it can't be read or doesn't exist."""
        return peer_heartbeats.read(self._peers[rank].pid)

    def is_gone(self, rank: int) -> bool:
        """Whether the process has ended, even if its parent has not collected its status yet."""
        peer = self._peers[rank]
        return not is_running(peer.pid, peer.start_ticks)

    def is_stopped(self, rank: int) -> bool:
        """Whether the process is stopped (SIGSTOP, a debugger)."""
        try:
            return state_and_start(self._peers[rank].pid)[0] in ("T", "t")
        except OSError:
            return False
