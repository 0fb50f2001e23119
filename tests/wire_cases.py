"""A listener and what happens at it, and a proxy that cuts connections, for tests of `parameter_servers/wire.py`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from evenstep.ground.host.network import LOOPBACK
from evenstep.parameter_servers.wire import Badge, Client, Listener, Message

BADGE = Badge(b"a key", "run 1 server 0")
OTHER_KEY = Badge(b"another key", "run 1 server 0")
ATTEMPT_BEFORE = Badge(b"a key", "run 0 server 0")


def echo(rank: int, message: Message) -> Message:
    return Message({"rank": rank, **message.head}, message.tensors)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


@dataclass
class Place:
    """A listener, and what it has seen."""

    listener: Listener
    silent_s: float
    most_bytes: int
    calls: list[tuple[int, str]]
    lost: list[int]
    has_lost: threading.Event = field(default_factory=threading.Event)
    clients: list[Client] = field(default_factory=list)

    def client(
        self, rank: int = 0, *, badge: Badge = BADGE, address: str | None = None, timeout_s: float = 60.0
    ) -> Client:
        """One that ends with the place at the latest."""
        made = Client(
            address or self.listener.address,
            badge,
            rank,
            who=f"worker {rank}",
            server="server 0",
            timeout_s=timeout_s,
            silent_s=self.silent_s,
            most_bytes=self.most_bytes,
        )
        self.clients.append(made)
        return made

    def reached(self) -> socket.socket:
        """A connection that says nothing."""
        if not self.listener.address.startswith("unix:"):
            return socket.create_connection(tuple(json.loads(self.listener.address)), 30)
        descriptor = os.open(self.listener.address.removeprefix("unix:"), os.O_PATH)
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(30)
        try:
            made.connect(f"/proc/self/fd/{descriptor}/socket")
        finally:
            os.close(descriptor)
        return made


@contextlib.contextmanager
def listening(
    where: Path | str = LOOPBACK,
    answer: Callable[[int, Message], Message] = echo,
    *,
    most_bytes: int = 1 << 20,
    silent_s: float = 30.0,
) -> Iterator[Place]:
    """A listener. Where it is lost that a test ends, all clients end with it."""
    calls: list[tuple[int, str]] = []
    lost: list[int] = []
    has_lost = threading.Event()

    def count(rank: int, message: Message) -> Message:
        calls.append((rank, message.head["kind"]))
        return answer(rank, message)

    def lose(rank: int) -> None:
        lost.append(rank)
        has_lost.set()

    listener = Listener(where, BADGE, count, lose, most_bytes=most_bytes, silent_s=silent_s)
    place = Place(listener, silent_s, most_bytes, calls, lost, has_lost)
    try:
        yield place
    finally:
        for each in place.clients:
            each.close()
        listener.close(patience_s=0.5)


class Cuts:
    """A proxy before a listener on TCP, which ends a connection when so many bytes have gone one way.

    Attributes:
        address: For `Client`.
        limits: For each connection to come, the bytes that go (to the listener, back); None: all.
    """

    def __init__(self, address: str) -> None:
        self._target = tuple(json.loads(address))
        self._socket = socket.create_server((LOOPBACK, 0))
        self.address = json.dumps(self._socket.getsockname())
        self.limits: list[tuple[int | None, int | None]] = []
        self.num_connections = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Cuts:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        for each in self._threads:
            each.join()
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._socket.accept()
            except OSError:
                return
            self.num_connections += 1
            limits = self.limits.pop(0) if self.limits else (None, None)
            far = socket.create_connection(self._target)
            users = [near, far]  # one for each thread: the last closes both
            for source, target, limit in ((near, far, limits[0]), (far, near, limits[1])):
                self._threads.append(threading.Thread(target=_forward, args=(source, target, limit, users)))
                self._threads[-1].start()


def _forward(source: socket.socket, target: socket.socket, limit: int | None, users: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        while limit is None or limit > 0:
            data = source.recv(65536 if limit is None else limit)
            if not data:
                break
            target.sendall(data)
            limit = None if limit is None else limit - len(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
    users.pop()
    if not users:
        source.close()
        target.close()
