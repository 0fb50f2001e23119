"""Calls between the processes of a run, over evenstep's own sockets: a client sends a call, a listener answers.

[Note: who may connect]
Processes of one host connect over a Unix socket in a folder of mode 0700, and the kernel reports the peer's process and
user. Between nodes they connect over TCP. On both, each side proves to the other that it has the run's key: an
HMAC-SHA256 over two fresh random numbers, the run, the attempt, the server and the rank. So a process of an earlier
attempt is refused, too. A stranger is refused with a message, and the run continues. Nothing is encrypted, and nothing
is ever unpickled: a frame is a JSON header of bounded length and the raw bytes of the tensors that it describes, up to
a limit.

[Note: a call is applied once]
A client numbers its calls and has one in flight. If its connection breaks, it connects again and repeats the call. For
a number that it has seen, a listener repeats its answer, or waits for the answer: each call is handled once. The client
confirms the receipt of an answer with tensors. The listener stores the answer only until then: otherwise it would hold
a copy of the parameters for each worker while the workers compute.

[Note: when a peer is lost]
If a connection ends and the peer's process has ended, the peer is lost. On one host that is known at once. Otherwise
the peer has `silent_s` to connect again: it may only have lost the connection. A client that finds nobody listening has
lost its server. Between nodes the kernels exchange keepalive probes: a node without power is lost, a busy or stopped
process isn't. TCP_USER_TIMEOUT can't distinguish the two: it also ends the connection to a process that reads slowly,
although the kernel there answers. So while bytes are unacknowledged, each turn of a wait checks when the other kernel
last answered. Waits are counted in such turns, so that a time in which this process itself was stopped doesn't count as
the peer's silence. Forked children, such as a loader's workers, close their copies of the sockets; else the end of a
connection would never be seen.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import math
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep.console import say
from evenstep.errors import CollectiveTimeoutError, EvenstepError, PeerLostError, UsageError
from evenstep.ground.host import network
from evenstep.ground.host.processes import is_running

_LENGTH = struct.Struct("!I")
_HELLO = struct.Struct("!I32s32s")  # the client's rank, its random number and its proof
_MOST_HEADER_BYTES = 1 << 24
_NUM_WAITING = 32  # the most connections that haven't proved their key yet
_HANDSHAKE_S = 5.0
_POLL_EVERY_S = 0.02
_TURN_S = 1.0  # the longest turn of a wait
_SAY_EVERY_S = 1.0
_LEAST_TRIES = 5  # the fewest tries to connect again, even if this process was stopped meanwhile
_NODE_IS_GONE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH)
_PEER_IDENTITY = struct.Struct("3i")  # pid, user and group of a Unix socket's other side
_TCP_INFO = struct.Struct("=3xB20xI28xI")  # unanswered probes, unacknowledged segments, ms since the last answer

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_open):
        each.close()


os.register_at_fork(after_in_child=_close_all)


class Message(NamedTuple):
    """A call or an answer, as sent.

    Attributes:
        head: The message's fields, in JSON types.
        tensors: The message's tensors, contiguous and on the CPU.
    """

    head: dict[str, Any]
    tensors: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Badge:
    """How a process proves that it belongs to a run.

    Attributes:
        key: The run's secret; b"": there is none, and a random text in `run` identifies the run.
        run: The run, the attempt and the server's role.
    """

    key: bytes
    run: str

    def proof(self, side: str, rank: int, numbers: bytes) -> bytes:
        """The proof of one side ("client", "server") of a connection, over both random numbers; 32 bytes."""
        return hmac.digest(self.key, f"{side} {rank} {self.run} ".encode() + numbers, hashlib.sha256)


class Listener:
    """Answers the calls of a run's other processes, with a thread for each connection.

    Args:
        where: A folder for a Unix socket; or this host's address on which to listen.
        badge: The listener's badge.
        answer: Called with a rank and its call, in a thread; returns the answer. An exception is answered as "error".
        lost: Called with a rank, in a thread, if the rank is lost without having closed its connection.
        most_bytes: The limit for the tensors of one call.
        silent_s: See [Note: when a peer is lost].

    Attributes:
        address: The address to pass to `Client`.

    Raises:
        OSError: The process can't listen at `where`.
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
            try:
                with _reached(where) as folder:
                    self._socket.bind(f"{folder}/socket")
            except OSError:
                self._socket.close()
                raise
            self._socket.listen(1024)
            self.address = f"unix:{where}"
        else:
            self._socket = network.listen(where, 0)
            self.address = json.dumps(self._socket.getsockname()[:2])
        _open.add(self._socket)
        self._lock = threading.Lock()
        self._waiting: deque[socket.socket] = deque()
        self._peers: dict[int, _Peer] = {}
        self._said_at = -math.inf
        self._is_closed = False
        self._door = threading.Thread(target=self._accept, name="evenstep servers' door", daemon=True)
        self._door.start()

    def __repr__(self) -> str:
        return f"<Listener {self.address}, {len(self._peers)} peers>"

    def close(self, patience_s: float) -> None:
        """Wait until all peers have left or are lost, or for the given time; then end all connections."""
        deadline = time.monotonic() + patience_s
        while any(each.connection is not None for each in list(self._peers.values())) and time.monotonic() < deadline:
            time.sleep(_POLL_EVERY_S / 10)
        with self._lock:
            self._is_closed = True
            connected = [each.connection for each in self._peers.values() if each.connection is not None]
            for each in [self._socket, *self._waiting, *connected]:
                _end(each)
        self._door.join()
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._socket.accept()
                _open.add(connection)
                with self._lock:
                    self._waiting.append(connection)
                self._make_room(_NUM_WAITING)
                threading.Thread(
                    target=self._attend, args=(connection, address), name="evenstep servers' peer", daemon=True
                ).start()
            except (
                OSError,
                RuntimeError,
            ) as error:  # the listener is closed; or strangers use all descriptors or threads
                if isinstance(error, RuntimeError):
                    connection.close()
                self._make_room(0)
                time.sleep(_POLL_EVERY_S)

    def _make_room(self, most: int) -> None:
        with self._lock:
            while len(self._waiting) > most:
                _end(self._waiting.popleft())

    def _attend(self, connection: socket.socket, address: Any) -> None:
        with connection:  # only this thread closes it: a closed descriptor's number may be in use again
            try:
                line = Line(connection, self._silent_s)
                rank = self._admit(line)
            except OSError as error:
                self._refuse(address, error)
                return
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._waiting.remove(connection)
            with self._lock:
                if self._is_closed:
                    return
                peer = self._peers.setdefault(rank, _Peer())
                before, peer.connection, peer.pid = peer.connection, connection, _identity(connection)[0]
            if before is not None:
                _end(before)
            end = self._answer_all(rank, peer, line)
        if end is None or not self._comes_back(peer, connection, end):
            peer.connection = None
            if end is not None:
                self._lost(rank)

    def _answer_all(self, rank: int, peer: _Peer, line: Line) -> OSError | None:
        """Answer the calls of a connection; returns the error that ended it, or None if the peer has left."""
        try:
            while self._answer_next(rank, peer, line):
                pass
            return None
        except OSError as error:
            return error
        finally:
            _end(line.socket)

    def _answer_next(self, rank: int, peer: _Peer, line: Line) -> bool:
        """Answer the next call of a connection; False: the peer has left. No reference to the call is left here."""
        message = line.receive(self._most_bytes, None)
        kind = message.head["kind"]
        if kind == "had":
            with self._lock:
                peer.forget(message.head["call"])
        elif kind != "bye":
            line.send(self._answer_once(rank, peer, message), None)
        return kind != "bye"  # type: ignore[no-any-return]

    def _admit(self, line: Line) -> int:
        """The rank of a new connection, after its proof.

        Raises:
            OSError: The proof is wrong or missing.
        """
        if line.socket.family == socket.AF_UNIX and _identity(line.socket)[1] != os.getuid():
            raise PermissionError(errno.EPERM, "another user's")
        mine = secrets.token_bytes(32)
        line.write(mine, _HANDSHAKE_S)
        rank, theirs, proof = _HELLO.unpack(line.read(_HELLO.size, _HANDSHAKE_S))
        if not hmac.compare_digest(proof, self._badge.proof("client", rank, mine + theirs)):
            raise PermissionError(errno.EPERM, "wrong key, or another run's or attempt's")
        line.write(self._badge.proof("server", rank, mine + theirs), _HANDSHAKE_S)
        return int(rank)

    def _refuse(self, address: Any, error: OSError) -> None:
        now = time.monotonic()
        with self._lock:
            if self._is_closed or now - self._said_at < _SAY_EVERY_S:
                return
            self._said_at = now
        where = f" from {address[0]}" if isinstance(address, tuple) else ""
        say(f"evenstep: parameter servers: a stranger's connection{where} was refused: {error.strerror or error}")

    def _answer_once(self, rank: int, peer: _Peer, message: Message) -> Message:
        """Handle a new call, or repeat the answer: see [Note: a call is applied once]."""
        number = message.head.pop("call")
        with self._lock:
            is_new = number > peer.number  # an older call comes from a broken connection; nobody waits for it
            if is_new:
                peer.number, peer.answer = number, Future()
            answer = peer.answer
        if is_new:
            try:
                answer.set_result(self._answer(rank, message))
            except Exception as error:
                answer.set_result(Message({"error": f"{type(error).__name__}: {error}"}))
        return answer.result()

    def _comes_back(self, peer: _Peer, connection: socket.socket, end: OSError) -> bool:
        """Whether a lost connection can be ignored: the peer connects again in time, or nobody waits for it.

        See [Note: when a peer is lost].
        """
        for _ in range(0 if end.errno in _NODE_IS_GONE else int(self._silent_s / _POLL_EVERY_S)):
            if peer.connection is not connection or self._is_closed:
                return True
            if peer.pid and not is_running(peer.pid):
                return False
            time.sleep(_POLL_EVERY_S)
        return peer.connection is not connection or self._is_closed


@dataclass
class _Peer:
    """A listener's record of a rank."""

    connection: socket.socket | None = None  # None: the rank has left, or is lost
    pid: int = 0  # 0: the process isn't visible from this host
    number: int = 0  # the number of the rank's newest call
    answer: Future[Message] = field(default_factory=Future)

    def forget(self, number: int) -> None:
        """Drop an answer that the rank has received: it won't repeat the call.

        A late repetition from a broken connection gets no answer.
        """
        if number == self.number:
            self.answer = Future()
            self.answer.set_result(Message({}))


class Client:
    """Calls one listener. Not for several threads at once.

    Args:
        address: The listener's address.
        badge: The same badge as the listener's.
        rank: This process's rank.
        who: This process, for messages.
        server: The listener, for messages.
        timeout_s: Seconds that an answer may take.
        silent_s: See [Note: when a peer is lost].
        most_bytes: The limit for the tensors of one message.

    Raises:
        PeerLostError: Nobody listens at the address, the listener is another process, or it refuses this process.
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
        self._answer: Future[Message] | None = None  # the answer to the call in flight
        self._is_sent = True
        self._error: EvenstepError | None = None  # the error after which this client gave up
        self._line = self._reach()

    def __repr__(self) -> str:
        return f"<Client of {self.server} at {self._address}, {self._number} calls>"

    def start(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> Callable[[], Message]:
        """Send a call, after the answer to an earlier call has arrived.

        Args:
            kind: The kind of call.
            tensors: The call's tensors. Don't change them until the answer has arrived.
            head: Further fields of the call, in JSON types.

        Returns:
            A function that waits for the answer. It raises PeerLostError if the server is lost, and
            CollectiveTimeoutError if it doesn't answer in time.

        Raises:
            UsageError: The tensors are larger than a message may be.
            EvenstepError: As the returned function raises; or an earlier call has failed.
        """
        if self._error is not None:
            raise self._error
        num_bytes = sum(each.numel() * each.element_size() for each in tensors)
        if num_bytes > self._most_bytes:
            raise UsageError(
                f"{self._who}: tensors of {num_bytes:,} bytes for {self.server}, but the model at the start had "
                f"{self._most_bytes:,}. Module buffers must keep their sizes."
            )
        self._finish_call()
        self._number += 1
        answer: Future[Message] = Future()
        self._call, self._answer = Message({"kind": kind, "call": self._number, **head}, tensors), answer
        self._is_sent = False
        self._finish_call(receives=False)

        def finish() -> Message:
            if not answer.done():
                self._finish_call()
            return answer.result()

        return finish

    def call(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> Message:
        """Send a call, and wait for the answer: see `start`."""
        return self.start(kind, tensors, **head)()

    def close(self) -> None:
        """Leave, so that the listener doesn't report a loss."""
        with contextlib.suppress(OSError):
            self._line.send(Message({"kind": "bye"}), _TURN_S)
        self._line.close()

    def _finish_call(self, *, receives: bool = True) -> None:
        """Send the call in flight, and receive its answer.

        If a transfer ends inside a frame, even by a signal handler's exception, the whole frame is sent again.

        Raises:
            PeerLostError: The server has ended.
            CollectiveTimeoutError: The answer takes too long.
        """
        while (answer := self._answer) is not None and (receives or not self._is_sent):
            try:
                if self._is_sent:
                    message = self._line.receive(self._most_bytes, self._timeout_s)
                    answer.set_result(message)
                    self._answer, self._call = None, Message({})  # drops references
                    if message.tensors:
                        self._line.send(Message({"kind": "had", "call": self._number}), self._timeout_s)
                else:
                    self._line.send(self._call, self._timeout_s)
                    self._is_sent = True
            except BaseException as error:
                self._line.close()
                self._is_sent = False
                if not isinstance(error, OSError):
                    raise
                self._begin_again(error)

    def _begin_again(self, error: OSError) -> None:
        """Connect again, unless the error shows that the server is lost."""
        try:
            if isinstance(error, TimeoutError) and error.errno is None:
                raise CollectiveTimeoutError(
                    f"{self._who} waited {self._timeout_s:g} s for {self.server}, which did not answer."
                ) from None
            if error.errno in (*_NODE_IS_GONE, errno.EBADMSG):
                raise self._lost(error) from None
            self._line = self._reach()
        except EvenstepError as end:
            self._error = end
            raise

    def _reach(self) -> Line:
        """Connect; retry for `silent_s`, unless nobody listens."""
        for _ in range(_LEAST_TRIES + int(self._silent_s / _POLL_EVERY_S)):
            try:
                return self._connect()
            except PeerLostError:
                raise
            except OSError as error:
                last = error
                if isinstance(error, ConnectionRefusedError | FileNotFoundError | TimeoutError):
                    break
            time.sleep(_POLL_EVERY_S)
        raise self._lost(last) from None

    def _connect(self) -> Line:
        """Open a connection to the server.

        Raises:
            OSError: The server can't be reached. TimeoutError: The server, or its node, doesn't answer.
        """
        if self._address.startswith("unix:"):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        else:
            made = socket.create_connection(tuple(json.loads(self._address)), timeout=self._silent_s)
        _open.add(made)
        try:
            if made.family == socket.AF_UNIX:
                with _reached(Path(self._address.removeprefix("unix:"))) as folder:
                    made.connect(f"{folder}/socket")
            line = Line(made, self._silent_s)
            theirs, mine = line.read(32, self._timeout_s), secrets.token_bytes(32)
            proof = self._badge.proof("client", self._rank, theirs + mine)
            line.write(_HELLO.pack(self._rank, mine, proof), self._timeout_s)
            try:
                answer = line.read(32, self._timeout_s)
            except ConnectionResetError as error:
                raise ConnectionResetError(
                    errno.ECONNRESET, "it refuses this process: is the secret file the same on all nodes?"
                ) from error
            if not hmac.compare_digest(answer, self._badge.proof("server", self._rank, theirs + mine)):
                raise PeerLostError(f"{self._who}: what listens at {self._address} is not {self.server} of this run.")
        except BaseException:
            made.close()
            raise
        return line

    def _lost(self, error: OSError) -> PeerLostError:
        return PeerLostError(
            f"{self._who} lost {self.server} ({error.strerror or error}). Its parameters are gone. Its output, or its "
            f"launcher's, says why."
        )


class Line:
    """A connection that sends and receives frames as long as the other process's node answers.

    Args:
        connected: A connected socket.
        silent_s: See [Note: when a peer is lost].

    Attributes:
        socket: The socket.
    """

    def __init__(self, connected: socket.socket, silent_s: float) -> None:
        self.socket, self._silent_s = connected, silent_s
        self._turn_s = min(_TURN_S, silent_s / 5)
        connected.settimeout(self._turn_s)
        if connected.family != socket.AF_UNIX:
            every_s = max(1, int(silent_s / 6))
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5)

    def __repr__(self) -> str:
        return f"<Line {self.socket!r}>"

    def send(self, message: Message, patience_s: float | None) -> None:
        """Send a message; the kernel has it when this returns.

        Args:
            message: The message.
            patience_s: The time limit for its head, and for each of its tensors; None: no limit.

        Raises:
            OSError: The connection has ended. TimeoutError without an errno: sending took too long.
        """
        described = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in message.tensors]
        head = json.dumps({**message.head, "tensors": described}).encode()
        self.write(_LENGTH.pack(len(head)) + head, patience_s)
        for each in message.tensors:
            self._move(self.socket.send, _bytes_of(each), patience_s)

    def receive(self, most_bytes: int, patience_s: float | None) -> Message:
        """Receive a message.

        Args:
            most_bytes: The limit for the message's tensors.
            patience_s: As in `send`.

        Raises:
            OSError: As in `send`. With EBADMSG: the bytes aren't a message.
        """
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size, patience_s))
        if length > _MOST_HEADER_BYTES:
            raise OSError(errno.EBADMSG, f"a header of {length:,} bytes")
        try:
            head = json.loads(self.read(length, patience_s))
            described = [(getattr(torch, dtype), tuple(map(int, shape))) for dtype, shape in head.pop("tensors")]
            sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in described]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise OSError(errno.EBADMSG, f"a malformed header: {error}") from None
        if sum(sizes) > most_bytes or any(each < 0 for _, shape in described for each in shape):
            raise OSError(errno.EBADMSG, f"tensors of {sum(sizes):,} bytes, above the limit of {most_bytes:,}")
        tensors = [torch.empty(shape, dtype=dtype, device="cpu") for dtype, shape in described]
        for each in tensors:
            self._move(self.socket.recv_into, _bytes_of(each), patience_s)
        return Message(head, tensors)

    def write(self, data: bytes, patience_s: float | None) -> None:
        """Send bytes."""
        self._move(self.socket.send, memoryview(data), patience_s)

    def read(self, num_bytes: int, patience_s: float | None) -> bytes:
        """Receive bytes."""
        found = bytearray(num_bytes)
        self._move(self.socket.recv_into, memoryview(found), patience_s)
        return bytes(found)

    def close(self) -> None:
        """End the connection."""
        _end(self.socket)
        self.socket.close()

    def _move(self, act: Callable[[memoryview], int], view: memoryview, patience_s: float | None) -> None:
        waited_s = 0.0
        while len(view):
            began = time.monotonic()
            try:
                count = act(view)
                if not count:
                    raise ConnectionResetError(errno.ECONNRESET, "the connection has ended")
                view = view[count:]
            except TimeoutError as error:
                if error.errno is not None or self._node_is_silent():
                    raise OSError(errno.ETIMEDOUT, "its node doesn't answer") from None
            waited_s += min(self._turn_s, time.monotonic() - began)
            if patience_s is not None and waited_s >= patience_s and len(view):
                raise TimeoutError("timed out")

    def _node_is_silent(self) -> bool:
        """Whether the other node's kernel has not answered for `silent_s`, although it should have."""
        if self.socket.family == socket.AF_UNIX:
            return False
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        num_probes, num_unacknowledged, last_ms = map(int, _TCP_INFO.unpack(info))
        return (num_probes > 1 or num_unacknowledged > 0) and last_ms > 1000 * self._silent_s


def _bytes_of(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _identity(connection: socket.socket) -> tuple[int, int]:
    """(pid, user) of a Unix socket's other side; (0, 0) for other sockets."""
    if connection.family != socket.AF_UNIX:
        return 0, 0
    pid, user, _ = _PEER_IDENTITY.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_IDENTITY.size)
    )
    return pid, user


@contextlib.contextmanager
def _reached(folder: Path) -> Any:
    """A short path to a folder: a socket's path has at most 107 bytes, a temporary directory's may have more."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _end(connection: socket.socket) -> None:
    """End a connection. A thread that waits in it then closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
