"""RPC between the processes of a run: the only file that needs torch.distributed.rpc.

[Note: what torch's RPC does]

docs/reference/parameter-servers.md tells what torch's TensorPipe does besides: it listens on several ports of one
interface, and neither encrypts nor authenticates; what it receives it unpickles. An agent belongs to one process alone
([Note: an agent of its own] in compat/torch_distributed.py), and processes find each other in the run's store, where
each writes its agent's name and address under its role.

A connection that breaks fails all calls in flight at once, and later ones too. `Endpoint.watch` keeps one call in
flight for that alone.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.distributed import Store, rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from evenstep.errors import ConfigurationError
from evenstep.ground import environment
from evenstep.ground.compat import torch_distributed

_QUIET_S = 3.0  # for the others to come to their end
_POLL_S = 0.01

_served: object = None  # whose methods others call in this process
_staying: list[Future[Any]] = []


class Peer(NamedTuple):
    """Another process's agent.

    Attributes:
        role: "worker 0", "server 1".
        name: Of the agent.
        address: Where it listens.
        info: For torch; None: not reached yet.
    """

    role: str
    name: str
    address: str
    info: Any = None


class Endpoint:
    """This process's agent.

    Args:
        store: Of this run.
        role: This process's.
        served: Others call its methods: those in its `CALLS`, which are answered by what they return, and those in its
            `LATER`, which return futures.
        interface: Name of the network interface to listen on; None: the one that leads to the other ranks.
        timeout_s: How long a call may take.

    Raises:
        ConfigurationError: This torch has no RPC, or there is no such interface.
    """

    def __init__(self, store: Store, role: str, served: object, *, interface: str | None, timeout_s: float) -> None:
        global _served
        if not rpc.is_available():
            raise ConfigurationError("evenstep.parameter_server: this build of torch has no torch.distributed.rpc.")
        _served = served
        self.role, self.name = role, f"{role.replace(' ', '-')}-{secrets.token_hex(4)}"
        self._store, self._timeout_s = store, timeout_s
        self._reached: dict[str, Peer] = {}
        self._is_closing = False
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout_s)
        with environment.exported(environment.rpc_variables(interface)), warnings.catch_warnings():
            # torch's own use of what it has deprecated.
            warnings.filterwarnings("ignore", message="You are using a Backend")
            try:
                self.address = torch_distributed.rpc_listen(self.name, options)
            except RuntimeError as error:
                text = (str(error).splitlines() or [type(error).__name__])[0]
                raise ConfigurationError(
                    f"evenstep.parameter_server: {role} can't listen ({text}). Check that interface={interface!r} is "
                    f"one of this node's."
                ) from error

    def __repr__(self) -> str:
        return f"<Endpoint {self.name} at {self.address}>"

    @property
    def me(self) -> Peer:
        """This process, for others."""
        return Peer(self.role, self.name, self.address)

    def register(self) -> None:
        """Let others find this process by its role."""
        self._store.set(f"agent/{self.role}", json.dumps([self.name, self.address]))

    def find(self, role: str) -> Peer | None:
        """The process that has registered under a role; None: none has."""
        if not self._store.check([f"agent/{role}"]):
            return None
        name, address = json.loads(self._store.get(f"agent/{role}"))
        return Peer(role, name, address)

    def call(
        self, peer: Peer, method: str, *arguments: object, later: bool = False, timeout_s: float | None = None
    ) -> Future[Any]:
        """Call a method of what another process serves.

        Args:
            peer: The process.
            method: In its `CALLS`, or, `later`, in its `LATER`.
            arguments: Numbers, texts, tensors, and tuples of them.
            later: See above.
            timeout_s: 0: none; None: this endpoint's.
        """
        function = _answer_later if later else _answer
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            future: Future[Any] = rpc.rpc_async(
                self._reach(peer).info, function, (method, arguments), timeout=timeout_s
            )
        except RuntimeError as error:  # known to be broken before anything is sent
            future = Future()
            future.set_exception(error)
        return future

    def watch(self, peer: Peer, on_lost: Callable[[], object]) -> None:
        """Call `on_lost`, in another thread, when a process ends without having closed in good order."""

        def done(future: Future[Any]) -> None:
            try:
                future.value()
            except RuntimeError:
                if not self._is_closing:
                    threading.Thread(target=on_lost, name="evenstep lost peer", daemon=True).start()

        self.call(peer, "", later=True, timeout_s=0).add_done_callback(done)

    def close(self, *, roles: Sequence[str] = ()) -> None:
        """End it.

        Args:
            roles: Those that end now, too, and in good order: their connections close without a word. (): end at once.
        """
        global _served
        self._is_closing = True
        if roles:
            # Only then: an answer says that this process isn't lost, and may arrive before the connection breaks.
            for future in _staying:
                future.set_result(None)
        quiet = threading.Thread(target=torch_distributed.rpc_stop_complaining, name="evenstep end", daemon=True)
        if roles:
            quiet.start()
            quiet.join(_QUIET_S)
            self._store.set(f"quiet/{self.role}", "")
            deadline = time.monotonic() + _QUIET_S
            with contextlib.suppress(RuntimeError):  # the process that has the store was faster
                while not self._store.check([f"quiet/{role}" for role in roles]) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
        rpc.shutdown(graceful=False)
        if roles:
            # The calls that it waited for have failed now. The interpreter must not end while it is inside the agent.
            quiet.join(_QUIET_S)
        _staying.clear()
        _served = None

    def _reach(self, peer: Peer) -> Peer:
        known = self._reached.get(peer.name)
        if known is None:
            known = self._reached[peer.name] = peer._replace(info=torch_distributed.rpc_peer(peer.name, peer.address))
        return known


# What others call in this process. RPC finds functions by module and name.


def _answer(method: str, arguments: tuple[Any, ...]) -> Any:
    if not method:
        return None
    if method not in getattr(_served, "CALLS", ()):
        raise RuntimeError(f"this process has no {method!r} to call")
    return getattr(_served, method)(*arguments)


@async_execution  # type: ignore[untyped-decorator]
def _answer_later(method: str, arguments: tuple[Any, ...]) -> Future[Any]:
    if not method:
        _staying.append(Future())
        return _staying[-1]
    if method not in getattr(_served, "LATER", ()):
        raise RuntimeError(f"this process has no {method!r} to call")
    future: Future[Any] = getattr(_served, method)(*arguments)
    return future
