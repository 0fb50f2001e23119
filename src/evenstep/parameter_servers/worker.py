"""A worker's calls of all servers; in a world of one, of the server in its own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep.errors import EXIT_PREEMPTED, CollectiveTimeoutError, EvenstepError, PeerLostError
from evenstep.parameter_servers.deciding.batch_queue import Batch, Pass
from evenstep.parameter_servers.preparation import Roles
from evenstep.parameter_servers.server import Server
from evenstep.parameter_servers.wire import Client, Message


class Part(NamedTuple):
    """What goes to one server of a push.

    Attributes:
        head: The fields of `Pushed` without its tensors.
        tensors: Packed gradients, then ids and gradients of rows.
    """

    head: dict[str, Any]
    tensors: list[Tensor]


class Direct:
    """Calls the server of this process, as `Client` does others."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def start(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> Callable[[], Message]:
        """See `Client.start`."""
        answer = self._server.answer(0, Message({"kind": kind, **head}, tensors))
        self._server.look()
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
    """All servers, as a worker sees them. Not for several threads at once.

    Args:
        clients: One for each; the first decides.
        roles: This worker's.
        timeout_s: For messages.

    Attributes:
        num_pushes: That this worker has made.
    """

    def __init__(self, clients: Sequence[Client | Direct], roles: Roles, timeout_s: float) -> None:
        self._clients, self._roles, self._timeout_s = clients, roles, timeout_s
        self.num_pushes = self._num_pulls = 0

    def push(self, parts: Sequence[Part] | None, **head: Any) -> list[Message]:
        """End a step; returns each server's answer, when this worker may go on.

        Args:
            parts: For each server; None: this worker had no samples.
            head: See `Server._step`.
        """
        self.num_pushes += 1
        first: Part = Part({"weight": 0.0, "used": []}, [])
        if parts is not None:
            first = parts[0]
            others = zip(self._clients[1:], parts[1:], strict=True)
            kept = [client.start("hold", part.tensors, number=self.num_pushes, **part.head) for client, part in others]
            self._checked(
                [finish() for finish in kept], first=1
            )  # all others have it: see [Note: one order of updates]
        tensors = [*first.tensors, *head.pop("buffer_values")]
        return self._release("step", self.num_pushes, tensors, **first.head, **head)

    def pull(self) -> list[Message]:
        """The newest parameters of every server."""
        self._num_pulls += 1  # counted downwards: the number is the call's
        return self._release("pull", -self._num_pulls)

    def leave(self, failure: str) -> list[Message]:
        """Tell the servers that this worker has ended; waits until all have, and returns the last parameters."""
        return self._release("leave", self.num_pushes + 1, failure=failure)

    def look_up(self, table: str, ids: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Ask for rows of a table, for each server some ids; returns what waits for them."""
        calls = [
            client.start("lookup", [each], table=table) if len(each) else None
            for client, each in zip(self._clients, ids, strict=True)
        ]

        def finish() -> list[Tensor]:
            answers = self._checked(
                [Message({}, [torch.empty(0, device="cpu")]) if call is None else call() for call in calls]
            )
            return [each.tensors[0] for each in answers]

        return finish

    def take(self, wanted: Pass, num_batches: int, facts: str) -> dict[str, Any]:
        """This worker's next batch: see `BatchQueue.take`."""
        return self.first("take", wanted=wanted, num_batches=num_batches, facts=facts)

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Others take what this worker has taken."""
        self.first("give_back", batches=batches)

    def first(self, kind: str, **head: Any) -> dict[str, Any]:
        """Call the first server alone."""
        return self._checked([self._clients[0].call(kind, **head)])[0].head

    def initial(self) -> dict[str, Tensor]:
        """Tensors of the model that aren't trained, by name, as they are on the first server."""
        (message,) = self._checked([self._clients[0].call("initial")])
        return dict(zip(message.head["names"], message.tensors, strict=True))

    def close(self) -> None:
        """Leave in good order."""
        for client in self._clients:
            client.close()

    def _release(self, kind: str, number: int, tensors: Sequence[Tensor] = (), **head: Any) -> list[Message]:
        """Call the first server, and wait until all have released the call of a number."""
        calls = [self._clients[0].start(kind, tensors, number=number, **head)]
        calls += [client.start("await", number=number) for client in self._clients[1:]]
        answers = []
        for place, (client, finish) in enumerate(zip(self._clients, calls, strict=True)):
            (answer,) = self._checked([finish()], first=place)
            while answer.head.get("waits"):
                (answer,) = self._checked([client.call("await", number=number)], first=place)
            answers.append(answer)
        return answers

    def _checked(self, answers: list[Message], first: int = 0) -> list[Message]:
        """The answers of some servers, if they are no failures.

        Raises:
            PeerLostError: The run can't go on.
            CollectiveTimeoutError: Other workers have not come in time.
            SystemExit: With status 75: a stop was requested, and the run has been saved.
            EvenstepError: A server has failed in it.
        """
        who = self._roles.name
        for server, answer in enumerate(answers, start=first):
            head, name = answer.head, self._roles.name_of_server(server)
            if head.get("stops"):
                raise SystemExit(EXIT_PREEMPTED)
            if "failure" in head:
                raise PeerLostError(f"{who}: {name} ends: {head['failure']}")
            if "late" in head:
                raise CollectiveTimeoutError(f"{who} waited {self._timeout_s:g} s for others. Missing: {head['late']}.")
            if "error" in head:
                raise EvenstepError(f"{who}: {name} failed: {head['error']}")
        return answers
