"""Ports: reserve one without listening, and say who holds one."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

_LISTENING = "0A"


class Reservation:
    """A port of the loopback interface that nobody else is given, and on which nobody listens.

    The socket is bound and never listens. With SO_REUSEADDR on both sides one process, the rank that hosts torch's
    store, can still listen there; without the reservation the system could hand the port to somebody else in between.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def is_taken(host: str, port: int) -> bool:
    """Whether somebody listens on a port of this host. False for addresses that aren't this host's."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return True
    return False


def owner_of(port: int) -> str:
    """ "pid 123 (python)" of the process that listens on a port, or "" where that can't be seen."""
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            inodes |= listening_inodes(table.read_text(), port)
    for descriptor in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:[") and target[len("socket:[") : -1] in inodes:
            process = descriptor.parent.parent
            return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def listening_inodes(table: str, port: int) -> set[str]:
    """From the text of /proc/net/tcp, the inodes of the sockets that listen on a port. Pure."""
    inodes = set()
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
            inodes.add(fields[9])
    return inodes
