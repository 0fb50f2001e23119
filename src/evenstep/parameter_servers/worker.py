"""A worker's calls to all servers; in a world of one, to the server in its own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.errors import EXIT_PREEMPTED, CollectiveTimeoutError, EvenstepError, PeerLostError
from evenstep.parameter_servers.deciding.batch_queue import Batch
from evenstep.parameter_servers.preparation import Roles
from evenstep.parameter_servers.server import Server
from evenstep.parameter_servers.wire import Client, Message


class Direct:
    """Calls the server in this process, with the interface of `Client`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def start(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> Callable[[], Message]:
        """See `Client.start`."""
        answer = self._server.answer(0, Message({"kind": kind, **head}, tensors))
        self._server.poll()
        if self._server.error is not None:
            raise self._server.error
        if self._server.stops:
            raise SystemExit(EXIT_PREEMPTED)
        return lambda: answer

    def call(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> Message:
        """See `Client.call`."""
        return self.start(kind, tensors, **head)()

    def close(self) -> None:
        """See `Client.close`."""


class Servers:
    """A worker's connection to all servers. Not for several threads at once.

    Args:
        clients: A client for each server; the first server decides.
        roles: This worker's roles.
        timeout_s: The run's timeout, for messages.

    Attributes:
        who: This worker's name, for people.
        num_pushes: Number of this worker's pushes.
        begun: Batches that the loop received since the last backward pass.
        used: Batches whose gradients the next push has.
    """

    def __init__(self, clients: Sequence[Client | Direct], roles: Roles, timeout_s: float) -> None:
        self._clients, self._roles, self._timeout_s = clients, roles, timeout_s
        self.who = roles.name
        self.num_pushes = self._num_pulls = 0
        self.begun: list[Batch] = []
        self.used: list[Batch] = []

    def push(self, parts: Sequence[Message] | None, **head: Any) -> list[Message]:
        """End a step. Returns each server's answer as soon as this worker may continue.

        Args:
            parts: For each server the fields of `Pushed`, with packed gradients, then ids and gradients of rows; None:
                this worker had no samples.
            head: See `Server._step`.
        """
        self.num_pushes += 1
        batches, self.used, self.begun = [*self.used, *self.begun], [], []
        first, *others = [Message({"weight": 0.0, "used": []})] if parts is None else parts
        kept = [
            client.start("hold", part.tensors, number=self.num_pushes, **part.head)
            for client, part in zip(self._clients[1:], others, strict=False)
        ]
        for server, finish in enumerate(kept, start=1):  # the first server comes last: see [Note: one order of updates]
            self._checked(server, finish())
        tensors = [*first.tensors, *head.pop("buffer_values")]
        return self._release("step", self.num_pushes, tensors, batches=batches, **first.head, **head)

    def pull(self) -> list[Message]:
        """Request the newest parameters of every server."""
        self._num_pulls += 1  # pulls have negative call numbers, pushes positive ones
        return self._release("pull", -self._num_pulls)

    def leave(self, failure: str) -> list[Message]:
        """Report that this worker has ended; wait until all have, and return the last parameters."""
        return self._release("leave", self.num_pushes + 1, failure=failure)

    def look_up(self, table: str, ids: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Request rows of a table: some ids for each server. Returns a function that waits for the rows."""
        calls = [
            client.start("lookup", [each], table=table) if len(each) else None
            for client, each in zip(self._clients, ids, strict=True)
        ]

        def finish() -> list[Tensor]:
            nothing = torch.empty(0, device="cpu")
            return [
                nothing if call is None else self._checked(server, call()).tensors[0]
                for server, call in enumerate(calls)
            ]

        return finish

    def give_back(self, batches: Sequence[Batch]) -> None:
        """The loop was left: return its batches to the queue, except those whose gradients wait for a step."""
        self.begun = [each for each in self.begun if each not in batches]
        given = [each for each in batches if each not in self.used]
        if given and self._clients:
            with contextlib.suppress(EvenstepError, SystemExit):  # the error that ended the loop is raised instead
                self.first("give_back", batches=given)

    def first(self, kind: str, **head: Any) -> dict[str, Any]:
        """Call the first server alone."""
        return self._checked(0, self._clients[0].call(kind, **head)).head

    def join(self) -> dict[str, Tensor]:
        """Join the run; returns the model's untrained tensors by name, from the first server."""
        message = self._checked(0, self._clients[0].call("join"))
        return dict(zip(message.head["names"], message.tensors, strict=True))

    def close(self) -> None:
        """Leave in good order."""
        for client in self._clients:
            client.close()
        self._clients = ()

    def _release(self, kind: str, number: int, tensors: Sequence[Tensor] = (), **head: Any) -> list[Message]:
        """Call the first server, and wait until all servers have released the call with a number."""
        calls = [self._clients[0].start(kind, tensors, number=number, **head)]
        calls += [client.start("await", number=number) for client in self._clients[1:]]
        answers = []
        for server, (client, finish) in enumerate(zip(self._clients, calls, strict=True)):
            answer = self._checked(server, finish())
            while answer.head.get("waits"):
                answer = self._checked(server, client.call("await", number=number))
            answers.append(answer)
        return answers

    def _checked(self, server: int, answer: Message) -> Message:
        """Return a server's answer, or raise the failure that it reports.

        Raises:
            PeerLostError: The run can't continue.
            CollectiveTimeoutError: Other workers are late.
            SystemExit: With status 75: a stop was requested, and the run has been saved.
            EvenstepError: A server failed while it handled the call.
        """
        head, name = answer.head, self._roles.name_of_server(server)
        if head.get("stops"):
            raise SystemExit(EXIT_PREEMPTED)
        if "failure" in head:
            raise PeerLostError(f"{self.who}: {name} ends: {head['failure']}")
        if "late" in head:
            late = head["late"]
            raise CollectiveTimeoutError(f"{self.who} waited {self._timeout_s:g} s for others. Missing: {late}.")
        if "error" in head:
            raise EvenstepError(f"{self.who}: {name} failed: {head['error']}")
        return answer
