"""Nodes played by network namespaces of this machine: own addresses, own process numbers, a wire of a given rate.

    with Namespaces(2, rate_mbit=1000) as hosts:
        for host in range(2):
            subprocess.Popen(hosts.evenstep_run(host, ["train.py"]), env={**os.environ, **hosts.environment(host)})

Needs root and the programs `ip`, `tc` and `unshare`; `why_not` says what is missing.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

from evenstep.errors import ConfigurationError

_INTERFACE = "eth0"
_PORT = 29500  # nobody else is there
_OURS = re.compile(r"(?:evs|evenstep-)(\d+)-?\S*")  # the process that made it
_num_made = 0
_open: list[Namespaces] = []
_handles_end = False


def why_not() -> str | None:
    """Why namespaces can't be had here; None if they can."""
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"evenstep-{os.getpid()}"
    tried = _run(["ip", "netns", "add", name], check=False)
    if tried.returncode != 0:
        return f"network namespaces are not permitted ({tried.stderr.strip()})"
    _run(["ip", "netns", "del", name], check=False)
    return None


def sweep() -> list[str]:
    """Remove the namespaces of processes that have ended without doing so; returns their names."""
    swept = []
    for line in _run(["ip", "netns", "list"], check=False).stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        maker = _OURS.fullmatch(name)
        if maker is not None and not os.path.exists(f"/proc/{maker[1]}"):
            _remove(name)
            swept.append(name)
    return swept


class Namespaces:
    """Hosts on one switch. A context manager: at its end they are gone, whoever still runs in them is killed.

    Also where the process ends by SIGTERM, or otherwise without leaving the context, unless it is killed outright: then
    the next process that uses this removes them (`sweep`).

    Args:
        num_hosts: How many.
        rate_mbit: How fast each host sends, in megabits per second; None: as fast as the kernel copies.

    Attributes:
        addresses: Of the hosts, in order.
    """

    def __init__(self, num_hosts: int, *, rate_mbit: float | None = None) -> None:
        global _num_made
        reason = why_not()
        if reason is not None:
            raise ConfigurationError(f"Namespaces: {reason}.")
        _num_made += 1
        self._prefix = f"evs{os.getpid()}-{_num_made}"
        self._rate_mbit = rate_mbit
        self.addresses = [f"10.83.{_num_made % 250}.{host + 1}" for host in range(num_hosts)]

    def __enter__(self) -> Namespaces:
        sweep()
        _open.append(self)
        _remove_at_the_end()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """How to start a program on a host. It is the first process there; what it starts ends with it."""
        return [*self._inside(host), "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *argv]

    def evenstep_run(self, host: int, arguments: Sequence[str]) -> list[str]:
        """`evenstep run` on a host of a run over all of them; `arguments` are more flags, the script and its own."""
        nodes = ["--nnodes", str(len(self.addresses)), "--node-rank", str(host)]
        meeting = ["--master-addr", self.addresses[0], "--master-port", str(_PORT)]
        return self.command(host, [sys.executable, "-m", "evenstep", "run", *nodes, *meeting, *arguments])

    def environment(self, host: int) -> dict[str, str]:
        """Variables that tell Gloo which address to use: it would ask for the machine's name."""
        return {"GLOO_SOCKET_IFNAME": _INTERFACE, "TP_SOCKET_IFNAME": _INTERFACE}

    def cut(self, host: int) -> None:
        """Pull a host's plug: what it sends is lost, nobody is told."""
        _run([*self._inside(host), "ip", "link", "set", _INTERFACE, "down"])

    def mend(self, host: int) -> None:
        """Put the plug back."""
        _run([*self._inside(host), "ip", "link", "set", _INTERFACE, "up"])

    def _inside(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._name(host)]

    def _name(self, host: int | str) -> str:
        return f"{self._prefix}-{host}"

    def _build(self) -> None:
        switch = self._name("switch")
        _run(["ip", "netns", "add", switch])
        _run(["ip", "-n", switch, "link", "add", "br0", "type", "bridge"])
        _run(["ip", "-n", switch, "link", "set", "br0", "up"])
        for host, address in enumerate(self.addresses):
            name, port = self._name(host), f"port{host}"
            _run(["ip", "netns", "add", name])
            _run(["ip", "-n", name, "link", "add", _INTERFACE, "type", "veth", "peer", "name", port, "netns", switch])
            _run(["ip", "-n", switch, "link", "set", port, "master", "br0", "up"])
            _run(["ip", "-n", name, "address", "add", f"{address}/24", "dev", _INTERFACE])
            _run(["ip", "-n", name, "link", "set", _INTERFACE, "up"])
            _run(["ip", "-n", name, "link", "set", "lo", "up"])
            if self._rate_mbit is not None:
                shape = ["rate", f"{self._rate_mbit}mbit", "burst", "256kb", "latency", "50ms"]
                _run([*self._inside(host), "tc", "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *shape])

    def _remove(self) -> None:
        for host in [*range(len(self.addresses)), "switch"]:
            _remove(self._name(host))
        if self in _open:
            _open.remove(self)

    def __repr__(self) -> str:
        rate = "" if self._rate_mbit is None else f", {self._rate_mbit:g} Mbit/s"
        return f"<Namespaces {len(self.addresses)} hosts{rate}>"


def _remove(name: str) -> None:
    pids = _run(["ip", "netns", "pids", name], check=False).stdout.split()
    if pids:
        _run(["kill", "-9", *pids], check=False)
    _run(["ip", "netns", "del", name], check=False)


def _remove_at_the_end() -> None:
    """Once: at this process's exit, and at SIGTERM where nobody else has asked for it."""
    global _handles_end
    if _handles_end:
        return
    _handles_end = True
    owner = os.getpid()

    def remove_all(*_: object) -> None:
        while _open and os.getpid() == owner:  # not in a copy of this process
            _open[-1]._remove()

    def terminated(number: int, _: object) -> None:
        remove_all()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    atexit.register(remove_all)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminated)


def _run(argv: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if check and done.returncode != 0:
        raise ConfigurationError(f"{' '.join(argv)} failed: {done.stderr.strip()}")
    return done
