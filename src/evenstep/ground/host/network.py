"""Ports, addresses and interfaces of this host: reserve, listen, look up owners."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = "127.0.0.1"
_LISTENING = "0A"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class Reservation:
    """Reserves a port of the loopback interface on which no process listens.

    The socket is bound and never listens. With SO_REUSEADDR on both sides one process, a rank that hosts a store, can
    still listen there; without the reservation the system could give the port to another process in between. The
    reservation prevents accidents only: another user may still listen there first. So torch's own process groups
    rendezvous through a file (`rendezvous_store.meet_without_port`).
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((LOOPBACK, 0))
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def is_taken(host: str, port: int) -> bool:
    """Whether a process listens on a port of this host. False for addresses that aren't this host's."""
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
    """The process that listens on a port, as "pid 123 (python)"; "" if it can't be seen."""
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


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on one address of this host, and on no other.

    Raises:
        OSError: The address isn't this host's (EADDRNOTAVAIL), the port is in use (EADDRINUSE), or the name is unknown.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)  # all ranks may come at once
    except BaseException:
        listener.close()
        raise
    return listener


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this host alone."""
    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0]).is_loopback
    except (OSError, ValueError):
        return False


def bind_address(host: str) -> str:
    """The address on which to serve a store that other nodes reach as `host`.

    It is `host`'s own address, so that no process connects through another network. If `host` is a name that means
    loopback only on this host, such as a Debian host's own name (127.0.1.1), it is all addresses: other nodes resolve
    the name differently.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "0.0.0.0" if is_loopback(host) else host
    return host


def is_own_address(host: str) -> bool:
    """Whether a name or an address is this host's, other than loopback."""
    try:
        address = socket.getaddrinfo(host, None)[0][4][0]
    except OSError:
        return False
    return not is_loopback(host) and interface_of(str(address)) is not None


def address_towards(host: str, port: int) -> str | None:
    """This host's own address on the route to a host; None without a route."""
    with contextlib.suppress(OSError):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only reads the routing table
            return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The name of the interface with an address of this host; None without one. Linux."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    # Every address of 127.0.0.0/8 is the loopback interface's, which reports only its first address.
    otherwise = "lo" if wanted.version == 4 and wanted.is_loopback else None
    return next((name for name, own in _interfaces() if own == wanted), otherwise)


def addresses() -> dict[str, list[str]]:
    """The IPv4 and IPv6 addresses of every interface, without link-local ones. Linux."""
    found: dict[str, list[str]] = {}
    for name, address in _interfaces():
        if address.version == 4 or not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return found


def _interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Interfaces with their addresses: the first IPv4 address and all IPv6 addresses of each."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                yield name, ipaddress.IPv4Address(answer[20:24])
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        fields = line.split()
        yield fields[5], ipaddress.IPv6Address(int(fields[0], 16))
