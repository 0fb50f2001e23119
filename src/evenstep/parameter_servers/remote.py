"""RPC between workers and servers.

[Note: what torch's RPC does]

Workers call servers, and servers call nobody: a worker may end at any time without a server that waits for it. Some
functions are called by name, on the one shard that a server has. docs/how-to/parameter-server.md tells what
torch's TensorPipe does besides: it listens on several ports of one interface, and neither encrypts nor authenticates;
what it receives it unpickles.

A connection that breaks fails all calls in flight at once, and later ones too. torch's graceful shutdown waits for all
processes, and for ever by default, so it is for runs in which all are there at the end.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from evenstep import environment
from evenstep.errors import CollectiveTimeoutError, ConfigurationError, EvenstepError, PeerLostError
from evenstep.parameter_servers.batch_queue import Pass, Taken
from evenstep.parameter_servers.roles import Roles
from evenstep.parameter_servers.shard import Answer, Pushed, Shard

_SCHEME = "evenstep-rpc"
_ANSWERS_S = 0.5  # for answers that are being sent when a server ends after a failure
_ASKS_S = 10.0  # for a short question after a deadline has passed

_shard: Shard | None = None  # of this process, if it is a server
_initial: dict[str, Tensor] = {}
_store: Store | None = None


class RpcConnection:
    """This worker's calls of all servers, over torch's RPC.

    Args:
        roles: This process's, and how many others there are.
        timeout_s: How long a call may take.
    """

    def __init__(self, roles: Roles, timeout_s: float) -> None:
        self._roles, self._timeout_s = roles, timeout_s

    def initial(self) -> dict[str, Tensor]:
        """See `Connection`."""
        found: dict[str, Tensor] = self._finish("the first pull", [self._start(0, _initial_tensors)])[0]
        return found

    def pull(self) -> list[Answer]:
        """See `Connection`."""
        return self._finish(
            "pull", [self._start(server, _pull, self._roles.rank) for server in range(self._roles.num_servers)]
        )

    def push(self, pushed: Sequence[Pushed]) -> list[Answer]:
        """See `Connection`."""
        calls = [self._start(server, _push, self._roles.rank, each) for server, each in enumerate(pushed)]
        return self._finish("step", calls)

    def take(self, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """See `Connection`."""
        call = self._start(0, _take, self._roles.rank, wanted, num_batches, facts)
        taken: Taken = self._finish("taking a batch", [call])[0]
        return taken

    def leave(self, failure: str) -> list[Answer]:
        """See `Connection`."""
        servers = range(self._roles.num_servers)
        before: list[Any] | None = None
        while True:
            calls = [self._start(server, _leave, self._roles.rank, failure) for server in servers]
            try:
                return self._finish("leave", calls)
            except CollectiveTimeoutError:
                # A slow worker may have much more left to do than the timeout of a step.
                asked = [self._start(server, _lagging, timeout_s=_ASKS_S) for server in servers]
                progress = self._finish("leave", asked)
                if progress == before:
                    raise
                before = progress

    def staleness(self) -> list[dict[int, int]]:
        """See `Connection`."""
        return self._finish("staleness", [self._start(s, _staleness) for s in range(self._roles.num_servers)])

    def close(self, *, gracefully: bool) -> None:
        """See `Connection`."""
        shut_down(self._timeout_s, gracefully=gracefully)

    def _start(
        self, server: int, function: Callable[..., Any], *arguments: object, timeout_s: float = 0
    ) -> Future[Any]:
        timeout_s = timeout_s or self._timeout_s
        try:
            future: Future[Any] = rpc.rpc_async(_name(self._roles, server), function, arguments, timeout=timeout_s)
        except RuntimeError as error:  # known to be broken before anything is sent
            future = Future()
            future.set_exception(error)
        return future

    def _finish(self, doing: str, calls: Sequence[Future[Any]]) -> list[Any]:
        answers = []
        for server, call in enumerate(calls):
            try:
                answers.append(call.wait())
            except RuntimeError as error:
                raise self._explain(doing, server, error) from None
        return answers

    def _explain(self, doing: str, server: int, error: RuntimeError) -> Exception:
        who = f"{self._roles.name} (rank {self._roles.rank})"
        rank = self._roles.num_workers + server
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if text.startswith("On WorkerInfo"):  # a function that it called has raised
            told = str(error).splitlines()[1:2] or [""]
            return EvenstepError(f"{who}: server {server} (rank {rank}) failed in {doing}: {told[0]}")
        if "timeout" not in text.lower():
            return PeerLostError(
                f"{who} lost server {server} (rank {rank}) in {doing}: {text}. Its parameters are gone; what it says "
                f"itself, or its launcher, tells why."
            )
        missing = ""
        try:
            lagging = self._start(server, _lagging, timeout_s=_ASKS_S).wait()
            missing = ", ".join(f"worker {worker} (has pushed {done} steps)" for worker, done in lagging)
        except RuntimeError:
            missing = f"server {server} (rank {rank}) itself"
        return CollectiveTimeoutError(
            f"{who} waited {self._timeout_s:g} s in {doing}. Missing: {missing or 'unknown'}."
        )


def serve(roles: Roles, shard: Shard, timeout_s: float) -> None:
    """Answer workers until all have left. RPC is shut down then.

    Raises:
        PeerLostError: A worker has failed.
        Exception: What the optimizer has raised.
    """
    while not shard.ended.wait(1.0):
        pass  # in stretches, so that signals are handled
    failure = shard.pull().failure
    if failure:
        time.sleep(_ANSWERS_S)
    shut_down(timeout_s, gracefully=not failure)
    if shard.error is not None:
        raise shard.error
    if failure:
        raise PeerLostError(f"{roles.name} (rank {roles.rank}) ends: {failure}")


def open_rpc(
    store: Store,
    roles: Roles,
    *,
    interface: str | None,
    timeout_s: float,
    shard: Shard | None,
    initial: dict[str, Tensor],
) -> None:
    """Connect this process with all others of the run, on one interface. Collective.

    Args:
        store: Of this run.
        roles: This process's, and how many others there are.
        interface: Name of the network interface to listen on; None: the one that leads to the other ranks.
        timeout_s: How long to wait for the others.
        shard: A server's; None on workers.
        initial: A server's tensors that aren't trained.

    Raises:
        ConfigurationError: This torch has no RPC, or there is no such interface.
    """
    global _shard, _initial, _store
    if not rpc.is_available():
        raise ConfigurationError("evenstep.parameter_server: this build of torch has no torch.distributed.rpc.")
    _shard, _initial, _store = shard, initial, store
    with contextlib.suppress(RuntimeError):  # registered by an earlier call
        dist.register_rendezvous_handler(_SCHEME, _rendezvous)  # type: ignore[no-untyped-call]
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout_s, init_method=f"{_SCHEME}://")
    with environment.exported(environment.rpc_variables(interface)), warnings.catch_warnings():
        # torch's own use of what it has deprecated.
        warnings.filterwarnings("ignore", message="You are using a Backend")
        try:
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                _name(roles, roles.rank - roles.num_workers) if roles.is_server else f"worker-{roles.rank}",
                rank=roles.rank,
                world_size=roles.num_workers + roles.num_servers,
                rpc_backend_options=options,
            )
        except RuntimeError as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigurationError(
                f"evenstep.parameter_server: {roles.name} (rank {roles.rank}) could not connect with the others "
                f"({text}). Check that all ranks run, and that interface={interface!r} is one of this node's."
            ) from error


def shut_down(timeout_s: float, *, gracefully: bool) -> None:
    """End RPC in this process; gracefully is collective."""
    global _shard, _store
    rpc.shutdown(graceful=gracefully, **({"timeout": timeout_s} if gracefully else {}))
    _shard, _store = None, None
    _initial.clear()


def _rendezvous(url: str, timeout: timedelta | None = None, **_: object) -> Iterator[tuple[Store, int, int]]:
    """torch's handler of our scheme: the store that this process already has."""
    assert _store is not None
    query = parse_qs(urlparse(url).query)
    yield _store, int(query["rank"][0]), int(query["world_size"][0])


def _name(roles: Roles, server: int) -> str:
    return roles.name_of(roles.num_workers + server).replace(" ", "-")


# What workers call on a server. RPC finds functions by module and name.


def _own() -> Shard:
    if _shard is None:
        raise RuntimeError("this process is no server")
    return _shard


def _initial_tensors() -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in _initial.items()}


def _pull(worker: int) -> Answer:
    return _own().pull(worker)


@async_execution  # type: ignore[untyped-decorator]
def _push(worker: int, pushed: Pushed) -> Future[Any]:
    return _own().push(worker, pushed)


def _take(worker: int, wanted: Pass, num_batches: int, facts: str) -> Taken:
    return _own().take(worker, wanted, num_batches, facts)


@async_execution  # type: ignore[untyped-decorator]
def _leave(worker: int, failure: str) -> Future[Any]:
    return _own().leave(worker, failure)


def _lagging() -> list[tuple[int, int]]:
    return _own().lagging()


def _staleness() -> dict[int, int]:
    return dict(_own().staleness)
