"""A worker's way to the servers over RPC."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store
from torch.futures import Future

from evenstep.errors import CollectiveTimeoutError, EvenstepError, PeerLostError
from evenstep.parameter_servers.embeddings.rows import Rows
from evenstep.parameter_servers.remote import Endpoint, Peer
from evenstep.parameter_servers.roles import Roles
from evenstep.parameter_servers.server.batch_queue import Pass, Taken
from evenstep.parameter_servers.server.serving import BEGUN, ENDED
from evenstep.parameter_servers.server.shard import Answer, Pushed
from evenstep.parameter_servers.traffic import OnAnswer

_ASKS_S = 10.0  # for a short question after a deadline has passed
_POLL_S = 0.05


class RpcConnection:
    """This worker's calls of all servers: see `Connection`.

    Args:
        roles: This process's, and how many others there are.
        store: Of this run.
        endpoint: This process's.
        timeout_s: How long a call may take, and how long to wait for servers.

    Raises:
        PeerLostError: The servers have not begun in time, or have gone.
    """

    def __init__(self, roles: Roles, store: Store, endpoint: Endpoint, timeout_s: float) -> None:
        self._roles, self._store, self._endpoint, self._timeout_s = roles, store, endpoint, timeout_s
        self._servers: list[Peer] = []
        self._number = self._num_pulls = 0
        endpoint.register()
        self._join()

    def initial(self) -> dict[str, Tensor]:
        """See `Connection`."""
        found: dict[str, Tensor] = self._wait("the first pull", 0, self._call(0, "initial"))
        return found

    def start(self, pushed: Sequence[Pushed] | None, on_answer: OnAnswer) -> Callable[[], list[Answer]]:
        """See `Connection`."""
        if pushed is None:
            self._num_pulls += 1  # counted apart: a batch that was taken is known by the number of the next push
            number = -self._num_pulls
        else:
            self._number += 1
            number = self._number
        key = (self._roles.rank, number)
        parts: Sequence[Pushed | None] = [None] * len(self._servers) if pushed is None else pushed
        calls = [self._call(server, "ask", key, part, later=True) for server, part in enumerate(parts)]
        _report(calls, on_answer)
        return lambda: self._finish("pull" if pushed is None else "step", calls)

    def look_up(self, table: str, ids: Sequence[Tensor], on_answer: OnAnswer) -> Callable[[], list[Rows]]:
        """See `Connection`. Servers without ids aren't asked."""
        calls = [
            self._call(server, "look_up", self._roles.rank, table, each) if len(each) else _nothing()
            for server, each in enumerate(ids)
        ]
        _report(calls, on_answer)
        return lambda: self._finish("a lookup", calls)

    @property
    def num_pushes(self) -> int:
        """See `Connection`."""
        return self._number

    def take(self, push: int, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """See `Connection`."""
        call = self._call(0, "take", (self._roles.rank, push), wanted, num_batches, facts)
        taken: Taken = self._wait("taking a batch", 0, call)
        return taken

    def give_back(self, push: int) -> None:
        """See `Connection`."""
        self._wait("taking a batch", 0, self._call(0, "give_back", (self._roles.rank, push)))

    def leave(self, failure: str) -> list[Answer]:
        """See `Connection`."""
        before: list[Any] | None = None
        self._number += 1
        key = (self._roles.rank, self._number)
        while True:
            calls = [self._call(server, "leave", key, failure, later=True) for server in range(len(self._servers))]
            try:
                return self._finish("leave", calls)
            except CollectiveTimeoutError:
                # A slow worker may have much more left to do than the timeout of a step.
                progress = self._wait("leave", 0, self._call(0, "lagging", timeout_s=_ASKS_S))
                if progress == before:
                    raise
                before = progress

    def staleness(self) -> dict[int, dict[int, int]]:
        """See `Connection`."""
        found: dict[int, dict[int, int]] = self._wait("staleness", 0, self._call(0, "staleness"))
        return found

    def close(self, *, gracefully: bool) -> None:
        """See `Connection`."""
        roles: list[str] = []
        if gracefully:
            with contextlib.suppress(RuntimeError):
                roles = json.loads(self._store.get(ENDED))
        self._endpoint.close(roles=roles)

    def _join(self) -> None:
        """Join the run, once the servers have begun.

        Raises:
            PeerLostError: They have not begun in time, or have gone.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([BEGUN]):
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"{self._who} waited {self._timeout_s:g} s for the servers to begin. Look at what they say: each "
                    f"has to run and to come to `with evenstep.parameter_server`."
                )
            time.sleep(_POLL_S)
        self._servers = [Peer(*each) for each in json.loads(self._store.get(BEGUN))]
        me = self._endpoint.me
        failure = self._wait("the beginning", 0, self._call(0, "join", self._roles.rank, me.name, me.address))
        if failure:
            raise PeerLostError(f"{self._who}: {self._name_of(0)} ends: {failure}")

    # ------------------------------------------------------------------ calls

    def _call(
        self, server: int, method: str, *arguments: object, later: bool = False, timeout_s: float | None = None
    ) -> Future[Any]:
        return self._endpoint.call(self._servers[server], method, *arguments, later=later, timeout_s=timeout_s)

    def _finish(self, doing: str, calls: Sequence[Future[Any]]) -> list[Any]:
        return [self._wait(doing, server, call) for server, call in enumerate(calls)]

    def _wait(self, doing: str, server: int, call: Future[Any]) -> Any:
        try:
            return call.wait()
        except RuntimeError as error:
            raise self._explain(doing, server, error) from None

    def _explain(self, doing: str, server: int, error: RuntimeError) -> Exception:
        who, name = self._who, self._name_of(server)
        text = (str(error).splitlines() or [type(error).__name__])[0]
        if text.startswith("On WorkerInfo"):  # a function that it called has raised
            told = str(error).splitlines()[1:2] or [""]
            return EvenstepError(f"{who}: {name} failed in {doing}: {told[0]}")
        if "timeout" not in text.lower():
            return PeerLostError(
                f"{who} lost {name} in {doing}: {text}. Its parameters are gone; what it says itself, or its launcher, "
                f"tells why."
            )
        missing = ""
        try:
            lagging = self._call(0, "lagging", timeout_s=_ASKS_S).wait()
            missing = ", ".join(f"worker {worker} (has pushed {done} steps)" for worker, done in lagging)
        except RuntimeError:
            missing = f"{self._name_of(0)} itself"
        return CollectiveTimeoutError(
            f"{who} waited {self._timeout_s:g} s in {doing}. Missing: {missing or 'unknown'}."
        )

    @property
    def _who(self) -> str:
        return f"{self._roles.name} (rank {self._roles.rank})"

    def _name_of(self, server: int) -> str:
        return f"server {server} (rank {self._roles.num_workers + server})"


def _report(calls: Sequence[Future[Any]], on_answer: OnAnswer) -> None:
    for server, call in enumerate(calls):
        call.add_done_callback(lambda _, server=server: on_answer(server))  # type: ignore[misc]


def _nothing() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(Rows(torch.empty(0, device="cpu")))
    return future
