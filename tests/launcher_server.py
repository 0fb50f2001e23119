"""`python -m evenstep ...` without its seconds of imports: a process that has made them, and is forked for each call.

One per pytest process, started when first needed. What runs in a fork is `evenstep.cli.main.main`, with arguments,
variables, directory, path and streams as `python -m evenstep` has them; EVENSTEP_TEST_FRESH=1 starts new pythons
instead, and so do the tests of what python does at its start.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

MARK = "EVENSTEP_TEST_MARK"
_NO_MARK = "0" * 32
_LENGTH = struct.Struct("<Q")
_ROOT = Path(__file__).resolve().parents[1]


class _Become(BaseException):
    """Raised in a fork, to leave the server's stack."""


class ForkedCall:
    """A call, as `subprocess.Popen` shows one: `pid`, `returncode`, `poll`, `wait`, `send_signal`, `kill`."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit status, if it has ended."""
        return self._status() if self.returncode is None and self._has_ended(0) else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, as soon as it has ended."""
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired("evenstep", timeout or 0)
            self._status()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, which: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def _status(self) -> int:
        self.returncode = int(self._server.ask(["reap", self.pid]))
        os.close(self._pidfd)
        return self.returncode


class Server:
    """This process's end of the server."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "PET_", "OMP_NUM"))}
        env |= {MARK: _NO_MARK, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.launcher_server", str(theirs.fileno()), str(os.getpid())],
            env=env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        atexit.register(self.close)

    def start(
        self, arguments: Sequence[str], variables: Mapping[str, str], directory: Path, descriptors: Sequence[int]
    ) -> ForkedCall:
        """Call `python -m evenstep ARGUMENTS`."""
        order = ["start", list(arguments), dict(variables), str(directory)]
        return ForkedCall(self, int(self.ask(order, descriptors)))

    def ask(self, order: Sequence[object], descriptors: Sequence[int] = ()) -> object:
        """Send an order, and return the answer."""
        payload = json.dumps(order).encode()
        socket.send_fds(self._connection, [_LENGTH.pack(len(payload))], list(descriptors))
        self._connection.sendall(payload)
        return json.loads(_receive(self._connection))

    def close(self) -> None:
        """End the server."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


_server: Server | None = None


def server() -> Server:
    """This process's, started if need be."""
    global _server
    if _server is None:
        _server = Server()
    return _server


# ---------------------------------------------------------------------- in the server


def _receive(connection: socket.socket, head: bytes = b"") -> bytes:
    head += _exactly(connection, _LENGTH.size - len(head))
    return _exactly(connection, _LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _rewrite_mark(mark: str) -> None:
    """Change the variable that /proc/PID/environ shows: what this process was started with lies on its stack."""
    from evenstep.ground.host.processes import (
        stat_fields,  # a caller that only starts a server needs nothing of evenstep
    )

    fields = stat_fields("self")
    start, end = int(fields[47]), int(fields[48])
    where = ctypes.string_at(start, end - start).find(f"{MARK}={_NO_MARK}".encode())
    assert where >= 0
    assert len(mark) == len(_NO_MARK)
    ctypes.memmove(start + where + len(MARK) + 1, mark.encode(), len(mark))


def _serve(connection: socket.socket) -> None:
    while True:
        try:
            head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 3)
            order = json.loads(_receive(connection, head))
        except EOFError:
            os._exit(0)
        if order[0] == "reap":
            answer = os.waitstatus_to_exitcode(os.waitpid(order[1], 0)[1])
        else:
            pid = os.fork()
            if pid == 0:
                connection.close()
                _become(*order[1:], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = pid
        payload = json.dumps(answer).encode()
        connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _become(arguments: list[str], variables: dict[str, str], directory: str, descriptors: list[int]) -> None:
    from evenstep.launcher.spawn.zygote import become_fresh

    os.setsid()
    os.chdir(directory)
    _rewrite_mark(variables[MARK])
    become_fresh(variables, descriptors)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    given = [str(Path(entry)) for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    added = [str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    rest = [entry for entry in sys.path[1:] if entry not in added and entry not in given]
    sys.path[:] = [directory, *given, *rest]
    sys.argv = [str(Path(sys.modules["evenstep"].__file__ or "").with_name("__main__.py")), *arguments]
    sys.orig_argv = [sys.executable, "-m", "evenstep", *arguments]
    raise _Become


def _main() -> None:
    import evenstep.cli.main
    from evenstep.launcher.spawn.start_worker import die_with_parent

    die_with_parent(int(sys.argv[2]))
    with contextlib.suppress(Exception):
        __import__("torch._dynamo")
    with contextlib.suppress(_Become):
        _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(evenstep.cli.main.main())


if __name__ == "__main__":
    _main()
