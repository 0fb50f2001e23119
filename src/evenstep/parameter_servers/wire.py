"""Calls between the processes of a run, over sockets of our own: a client asks, a listener answers.

[Note: who may connect]
Processes of one host meet at a Unix socket in a folder of mode 0700, and the kernel says whose process comes. Between
nodes they meet at a TCP port. On both, each side proves to the other that it has the run's key: an HMAC-SHA256 over two
fresh random numbers, the run, the attempt, the server and the rank. So a process of an attempt before is a stranger,
too. A stranger is refused and named, and ends nothing. Nothing is encrypted, and nothing is ever unpickled: a frame is
a JSON header of bounded length and the raw bytes of the tensors that it describes, at most as many as can be meant.

[Note: a call is applied once]
A client numbers its calls and has one in flight. Where its connection breaks it connects again and repeats the call.
A listener answers a number that it has seen from the answer that it has made, or is making: each call is handled once.

[Note: when a peer is lost]
The end of a connection is the end of a peer whose process has ended, which one host shows at once. Else the peer has
`silent_s` to come back: it may only have lost the connection. Between nodes the kernels ask each other whether they
are there: so a process that is busy or stopped isn't lost, and a node without power is. A client that finds nobody
listening has lost its server. Waits are counted in turns of a sleep: what this process itself has slept through is no
peer's silence. Children that are forked, as a loader's workers, close their copies of the sockets; else the end would
never be seen.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep import network
from evenstep.console import say
from evenstep.errors import CollectiveTimeoutError, PeerLostError
from evenstep.processes import is_running

_LENGTH = struct.Struct("!I")
_HELLO = struct.Struct("!I32s32s")  # the client's rank, its random number and its proof
_MOST_HEADER_BYTES = 1 << 24
_NUM_WAITING = 32  # connections that have not proved yet who they are
_HANDSHAKE_S = 5.0
_LOOK_EVERY_S = 0.02
_SAY_EVERY_S = 1.0
_PEER_IDENTITY = struct.Struct("3i")  # pid, user and group of a Unix socket's other side

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_close_all)


class Message(NamedTuple):
    """What travels.

    Attributes:
        head: In JSON types.
        tensors: On the CPU, contiguous.
    """

    head: dict[str, Any]
    tensors: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Badge:
    """How a process proves that it belongs to a run.

    Attributes:
        key: Secret of the run; empty between processes of one host.
        run: The run, the attempt and the server's role.
    """

    key: bytes
    run: str

    def proof(self, side: str, rank: int, numbers: bytes) -> bytes:
        """Of one side ("client", "server") of a connection, over both random numbers; 32 bytes."""
        return hmac.digest(self.key, f"{side} {rank} {self.run} ".encode() + numbers, hashlib.sha256)


class Listener:
    """Answers the calls of a run's other processes. A thread for each connection.

    Args:
        where: A folder for a Unix socket; or the address of this host at which to listen.
        badge: See there.
        answer: Called with a rank and its call, in a thread; returns the answer. What it raises is answered as "error".
        lost: Called with a rank, in a thread, when it is lost without having closed its connection.
        most_bytes: Of the tensors of one call.
        silent_s: See [Note: when a peer is lost].

    Attributes:
        address: For `Client`.

    Raises:
        OSError: It can't listen there.
    """

    def __init__(
        self,
        where: Path | str,
        badge: Badge,
        answer: Callable[[int, Message], Message],
        lost: Callable[[int], object],
        *,
        most_bytes: int,
        silent_s: float,
    ) -> None:
        self._badge, self._answer, self._lost = badge, answer, lost
        self._most_bytes, self._silent_s = most_bytes, silent_s
        if isinstance(where, Path):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with _reached(where) as folder:
                self._socket.bind(f"{folder}/socket")
            self._socket.listen(1024)
            self.address = f"unix:{where}"
        else:
            self._socket = network.listen(where, 0)
            self.address = json.dumps(self._socket.getsockname()[:2])
        _open.add(self._socket)
        self._lock = threading.Lock()
        self._waiting: deque[socket.socket] = deque()
        self._peers: dict[int, _Peer] = {}
        self._said_at = -_SAY_EVERY_S
        self._is_closed = False
        threading.Thread(target=self._accept, name="evenstep servers' door", daemon=True).start()

    def __repr__(self) -> str:
        return f"<Listener {self.address}, {len(self._peers)} peers>"

    def close(self, patience_s: float = 5.0) -> None:
        """Send the answers that are on their way, and end all connections."""
        deadline = time.monotonic() + patience_s
        while any(each.is_answering for each in list(self._peers.values())) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S / 10)
        self._is_closed = True
        for each in [self._socket, *self._waiting, *(peer.socket for peer in self._peers.values() if peer.socket)]:
            _end(each)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._socket.accept()
            except OSError:  # closed; or this process has no descriptor left, until the oldest stranger gives up one
                self._make_room(_NUM_WAITING // 2)
                time.sleep(_LOOK_EVERY_S)
                continue
            _open.add(connection)
            with self._lock:
                self._waiting.append(connection)
            self._make_room(_NUM_WAITING)
            threading.Thread(
                target=self._attend, args=(connection, address), name="evenstep servers' peer", daemon=True
            ).start()

    def _make_room(self, most: int) -> None:
        with self._lock:
            while len(self._waiting) > most:
                _end(self._waiting.popleft())

    def _attend(self, connection: socket.socket, address: Any) -> None:
        try:
            connection.settimeout(_HANDSHAKE_S)
            rank = self._admit(connection)
        except OSError as error:
            _end(connection)
            self._refuse(address, error)
            return
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(connection)
        _tend(connection, self._silent_s)
        with self._lock:
            peer = self._peers.setdefault(rank, _Peer())
            before, peer.socket, peer.pid = peer.socket, connection, _identity(connection)[0]
        if before is not None:
            _end(before)
        is_silent = has_left = False
        try:
            while not has_left:
                message = receive(connection, self._most_bytes, None, self._silent_s)
                has_left = message.head.get("kind") == "bye"
                if not has_left:
                    peer.is_answering = True
                    send(connection, self._answer_once(rank, peer, message))
                    peer.is_answering = False
        except OSError as error:
            is_silent = error.errno == errno.ETIMEDOUT
        finally:
            peer.is_answering = False
            _end(connection)
        if not has_left and not self._comes_back(peer, connection, is_silent=is_silent):
            self._lost(rank)

    def _admit(self, connection: socket.socket) -> int:
        """The rank of whoever connects, once it has proved that it is one.

        Raises:
            OSError: It hasn't.
        """
        if connection.family == socket.AF_UNIX and _identity(connection)[1] != os.getuid():
            raise PermissionError(errno.EPERM, "another user's")
        mine = secrets.token_bytes(32)
        connection.sendall(mine)
        rank, theirs, proof = _HELLO.unpack(_read(connection, _HELLO.size))
        if not hmac.compare_digest(proof, self._badge.proof("client", rank, mine + theirs)):
            raise PermissionError(errno.EPERM, "wrong key, or another run's or attempt's")
        connection.sendall(self._badge.proof("server", rank, mine + theirs))
        return int(rank)

    def _refuse(self, address: Any, error: OSError) -> None:
        now = time.monotonic()
        if self._is_closed or now - self._said_at < _SAY_EVERY_S:
            return
        self._said_at = now
        where = f" from {address[0]}" if isinstance(address, tuple) else ""
        say(f"evenstep: parameter servers: a stranger's connection{where} was refused: {error.strerror or error}")

    def _answer_once(self, rank: int, peer: _Peer, message: Message) -> Message:
        """[Note: a call is applied once]."""
        number = message.head.pop("call")
        with self._lock:
            is_new = peer.number != number
            if is_new:
                peer.number, peer.answer = number, Future()
            answer = peer.answer
        if is_new:
            try:
                answer.set_result(self._answer(rank, message))
            except Exception as error:
                answer.set_result(Message({"error": f"{type(error).__name__}: {error}"}))
        return answer.result()

    def _comes_back(self, peer: _Peer, connection: socket.socket, *, is_silent: bool) -> bool:
        """Whether a peer connects again in time, or nobody waits for it; see [Note: when a peer is lost]."""
        for _ in range(0 if is_silent else int(self._silent_s / _LOOK_EVERY_S)):
            if peer.socket is not connection or self._is_closed:
                return True
            if peer.pid and not is_running(peer.pid):
                return False
            time.sleep(_LOOK_EVERY_S)
        return peer.socket is not connection or self._is_closed


class _Peer:
    """What a listener knows of a rank."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.pid = 0  # 0: it can't be seen from here
        self.number = 0  # of its newest call
        self.answer: Future[Message] = Future()
        self.is_answering = False


class Client:
    """Calls one listener; not for several threads at once.

    Args:
        address: Of the listener.
        badge: The same as the listener's.
        rank: This process's.
        who: This process, for messages.
        server: The listener's, for messages.
        timeout_s: How long an answer may take.
        silent_s: See [Note: when a peer is lost].
        most_bytes: Of the tensors of one answer.

    Raises:
        PeerLostError: Nobody listens there, or it isn't who it should be.
    """

    def __init__(
        self,
        address: str,
        badge: Badge,
        rank: int,
        *,
        who: str,
        server: str,
        timeout_s: float,
        silent_s: float,
        most_bytes: int,
    ) -> None:
        self._address, self._badge, self._rank, self._who, self.server = address, badge, rank, who, server
        self._timeout_s, self._silent_s, self._most_bytes = timeout_s, silent_s, most_bytes
        self._number = 0
        self._call = Message({})
        self._future: Future[Message] | None = None  # of the call in flight
        try:
            self._socket = self._connect()
        except OSError as error:
            raise PeerLostError(
                f"{who} was not let in by {server} ({error.strerror or error}). Do all nodes have the same secret file?"
            ) from None

    def __repr__(self) -> str:
        return f"<Client of {self.server} at {self._address}, {self._number} calls>"

    def start(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> Callable[[], Message]:
        """Send a call. An earlier one that nobody has waited for is waited for first.

        Args:
            kind: Of the call.
            tensors: Nobody may write to them until the answer has come.
            head: More of the call, in JSON types.

        Returns:
            What waits for the answer. It raises PeerLostError where the server is lost, and CollectiveTimeoutError
            where it doesn't answer in time.
        """
        self._settle()
        self._number += 1
        answer: Future[Message] = Future()
        self._call, self._future = Message({"kind": kind, "call": self._number, **head}, tensors), answer
        self._deliver()

        def finish() -> Message:
            if not answer.done():
                self._settle()
            return answer.result()

        return finish

    def call(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> Message:
        """`start`, and wait."""
        return self.start(kind, tensors, **head)()

    def close(self) -> None:
        """Leave in good order; nobody is lost."""
        with contextlib.suppress(OSError):
            send(self._socket, Message({"kind": "bye"}))
        _end(self._socket)

    def _settle(self) -> None:
        """Wait for the answer of the call in flight."""
        if self._future is None or self._future.done():
            return
        while True:
            try:
                self._future.set_result(receive(self._socket, self._most_bytes, self._timeout_s, self._silent_s))
                return
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno is None:
                    raise CollectiveTimeoutError(
                        f"{self._who} waited {self._timeout_s:g} s for {self.server}, which did not answer."
                    ) from None
                self._recover(error)
                self._deliver()

    def _deliver(self) -> None:
        while True:
            try:
                send(self._socket, self._call)
                return
            except OSError as error:
                self._recover(error)

    def _recover(self, error: OSError) -> None:
        """Connect again after the connection has ended.

        Raises:
            PeerLostError: The server has gone.
        """
        _end(self._socket)
        for _ in range(0 if error.errno == errno.ETIMEDOUT else int(self._silent_s / _LOOK_EVERY_S)):
            try:
                self._socket = self._connect()
                return
            except PeerLostError:
                raise
            except OSError as again:
                error = again
                time.sleep(_LOOK_EVERY_S)
        raise self._lost(error)

    def _connect(self) -> socket.socket:
        try:
            if self._address.startswith("unix:"):
                made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                with _reached(Path(self._address.removeprefix("unix:"))) as folder:
                    made.connect(f"{folder}/socket")
            else:
                made = socket.create_connection(tuple(json.loads(self._address)), timeout=self._silent_s)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise self._lost(error) from None
        _open.add(made)
        try:
            made.settimeout(self._silent_s)
            theirs, mine = _read(made, 32), secrets.token_bytes(32)
            made.sendall(_HELLO.pack(self._rank, mine, self._badge.proof("client", self._rank, theirs + mine)))
            if not hmac.compare_digest(_read(made, 32), self._badge.proof("server", self._rank, theirs + mine)):
                raise PeerLostError(f"{self._who}: what listens at {self._address} is not {self.server} of this run.")
        except BaseException:
            _end(made)
            raise
        _tend(made, self._silent_s)
        return made

    def _lost(self, error: OSError) -> PeerLostError:
        return PeerLostError(
            f"{self._who} lost {self.server} ({error.strerror or error}). Its parameters are gone; what it says "
            f"itself, or its launcher, tells why."
        )


def send(connection: socket.socket, message: Message) -> None:
    """Send a message; the kernel has it when this returns."""
    described = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in message.tensors]
    head = json.dumps({**message.head, "tensors": described}).encode()
    connection.sendall(_LENGTH.pack(len(head)) + head)
    for each in message.tensors:
        if each.numel():
            connection.sendall(_bytes_of(each))


def receive(connection: socket.socket, most_bytes: int, idle_s: float | None, silent_s: float) -> Message:
    """Receive a message.

    Args:
        connection: From whom.
        most_bytes: Of its tensors.
        idle_s: How long to wait for its first byte; None: for ever.
        silent_s: How long to wait for each of the others.

    Raises:
        OSError: The connection has ended, or what comes is no message. TimeoutError without a number: it took too long.
    """
    connection.settimeout(idle_s)
    first = _read(connection, 1)
    connection.settimeout(silent_s)
    (length,) = _LENGTH.unpack(first + _read(connection, _LENGTH.size - 1))
    if length > _MOST_HEADER_BYTES:
        raise ConnectionError(f"a header of {length:,} bytes")
    try:
        head = json.loads(_read(connection, length))
        described = [(getattr(torch, dtype), tuple(map(int, shape))) for dtype, shape in head.pop("tensors")]
        sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in described]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConnectionError(f"a header that is none: {error}") from None
    if min(sizes, default=0) < 0 or sum(sizes) > most_bytes:
        raise ConnectionError(f"tensors of {sum(sizes):,} bytes, and at most {most_bytes:,} can be meant")
    tensors = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in described]
    for each in tensors:
        if each.numel():
            _fill(connection, _bytes_of(each))
    return Message(head, tensors)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    found = bytearray(num_bytes)
    _fill(connection, memoryview(found))
    return bytes(found)


def _fill(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError(errno.ECONNRESET, "the connection has ended")
        view = view[count:]


def _tend(connection: socket.socket, silent_s: float) -> None:
    """Have the kernel find out when the other node has gone."""
    if connection.family == socket.AF_UNIX:
        return
    turn = max(1, int(silent_s / 6))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, turn)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, turn)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_s))


def _identity(connection: socket.socket) -> tuple[int, int]:
    """(pid, user) of a Unix socket's other side; (0, 0) of another."""
    if connection.family != socket.AF_UNIX:
        return 0, 0
    pid, user, _ = _PEER_IDENTITY.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_IDENTITY.size)
    )
    return pid, user


@contextlib.contextmanager
def _reached(folder: Path) -> Any:
    """A short path to a folder: a socket's has at most 107 bytes, and temporary directories may have longer ones."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _end(connection: socket.socket) -> None:
    """End a connection, also where another thread waits in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
