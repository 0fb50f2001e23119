"""A server: the calls of workers and other servers, and the one thread that executes decisions.

[Note: who does what]
Each connection's thread stores a worker's pushes, records its requests, and waits for the answers. The main thread
executes decisions in their order: only this thread changes parameters, packs answers and saves. So no thread holds a
lock while an optimizer steps, an answer is packed or a file is written; only lookups wait for a step of their table.

The first server decides (`Coordinator`); the others request the decisions that follow their last one. The loss of a
server ends the run everywhere, because parameters, optimizer states and the queue of batches must have the same number
of updates. A restarted run continues from the newest checkpoint. The loss of a worker doesn't end the run: see
`Coordinator.lose`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from evenstep.console import say
from evenstep.errors import EXIT_PREEMPTED, PeerLostError
from evenstep.parameter_servers.checkpoint import Checkpoints
from evenstep.parameter_servers.deciding.batch_queue import Batch, BatchQueue
from evenstep.parameter_servers.deciding.coordinator import Coordinator, Decision, Key, Mode, Push, decoded
from evenstep.parameter_servers.embedding.table import RowGradients
from evenstep.parameter_servers.preparation import Roles
from evenstep.parameter_servers.shard import Pushed, Shard
from evenstep.parameter_servers.wire import Client, Listener, Message

_POLL_EVERY_S = 0.05
TURN_S = 5.0  # longest wait in one call; then the caller asks again
_PARTING_S = 10.0  # time for the others to leave at the end
_FAILING_S = 0.5  # time to answer waiting calls with the failure
_GIVEN_UP = "the servers have lost this worker, and other workers train on its batches"


class Server:
    """A server of the run: see [Note: who does what]. `answer` and `lose` run in threads of connections.

    Args:
        roles: This process's role, and the numbers of workers and servers.
        mode: When gradients are applied, and which workers wait.
        shard: This server's share of the parameters, with its optimizer.
        untrained: Tensors of the model that aren't trained, by name.
        queue: The queue of batches; used on the first server.
        checkpoints: The run's checkpoints; None: there are none.
        timeout_s: Seconds to wait for a step, or for a worker's start.

    Attributes:
        error: The exception of the optimizer, or of one of the script's functions, on this server; None: there was
            none.
        stops: Whether a stop was requested and the run has been saved.
    """

    def __init__(
        self,
        roles: Roles,
        mode: Mode,
        shard: Shard,
        untrained: Mapping[str, Tensor],
        queue: BatchQueue,
        checkpoints: Checkpoints | None,
        *,
        timeout_s: float,
    ) -> None:
        self._roles, self._shard, self._checkpoints, self._timeout_s = roles, shard, checkpoints, timeout_s
        self._untrained, self._queue = dict(untrained), queue
        self._coordinator = Coordinator(
            mode, range(roles.num_workers), queue, version=shard.version, saves_at_end=checkpoints is not None
        )
        self._changed = threading.Condition()  # guards all attributes below
        self._held: dict[Key, Pushed] = {}
        self._answers: dict[Key, Message] = {}  # answers to released calls, until they are fetched
        self._gone: set[int] = set()
        self._decisions: dict[int, Decision] = {}  # on the first server: decisions until all servers have them
        self._had = dict.fromkeys(range(roles.num_workers + 1, roles.num_workers + roles.num_servers), 0)  # by rank
        self._done = 0  # number of the last executed decision
        self._began_at = time.monotonic()
        self._moved_at = self._began_at  # time of the last executed decision; infinite during one
        self._failure = ""
        self.error: Exception | None = None
        self._has_ended = self._asked_to_stop = self.stops = False
        self._kinds: dict[str, Callable[..., Message | None]] = {
            "join": self._join,
            "hold": self._hold,
            "step": self._step,
            "pull": self._pull,
            "await": self._await,
            "leave": self._leave,
            "lookup": self._look_up,
            "take": self._take,
            "give_back": self._give_back,
            "staleness": self._staleness,
            "stop": self._stop,
            "decisions": self._decisions_behind,
        }

    def __repr__(self) -> str:
        return f"<Server {self._roles.name}, {self._shard!r}>"

    # ------------------------------------------------------------------ the thread that executes

    def serve(self, listener: Listener, leader: Client | None) -> None:
        """Execute decisions until all workers have left.

        Args:
            listener: Calls `answer` and `lose`.
            leader: The first server; None: this server is the first.

        Raises:
            PeerLostError: A worker has failed, or a server has gone.
            SystemExit: With status 75: a stop was requested, and the run has been saved.
            Exception: The optimizer raised it.
        """
        try:
            while not self._has_ended:
                if leader is None:
                    self.execute(self._wait_for_decisions(self._done, _POLL_EVERY_S))
                    self.poll()
                else:
                    failure = "" if self.error is None else self._failure
                    answer = leader.call("decisions", after=self._done, stops=self._is_to_stop, failure=failure)
                    self.execute(map(decoded, answer.head["decisions"]))
        except PeerLostError as error:
            self._end(str(error))
        except BaseException as error:
            self._end(f"{self._roles.name} failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._end(self._failure)
            if leader is not None:
                leader.close()
            # Workers get the stop as the answer to their next call, to any server.
            listener.close(self._timeout_s if self.stops else _FAILING_S if self._failure else _PARTING_S)
        if self.error is not None:
            raise self.error
        if self.stops:
            raise SystemExit(EXIT_PREEMPTED)
        if self._failure:
            raise PeerLostError(f"{self._roles.name} ends: {self._failure}")
        self._name_untrained()

    def execute(self, decisions: Any) -> None:
        """Execute decisions, in their order."""
        for decision in decisions:
            if self._has_ended:  # decisions after the end are executed by no server
                return
            self._done, self._moved_at = decision.number, math.inf
            answers: Sequence[Tensor] = []
            try:
                if decision.applied and self.error is None:
                    with self._changed:
                        pushes = [self._held.pop(key) for key in decision.applied]
                    self._shard.apply(pushes)
                if decision.saves is not None and self._checkpoints is not None:
                    self._save(self._checkpoints, decision)
                if decision.released and self.error is None:
                    answers = self._shard.packed()
            except Exception as error:
                self._fail(f"{self._roles.name}: {type(error).__name__}: {error}", error)
            with self._changed:
                self._gone |= set(decision.gone)
                for kept in (self._held, self._answers):
                    for key in [key for key in kept if key[0] in self._gone]:
                        del kept[key]
                if self.error is None:
                    self._answers |= {
                        key: Message({"version": self._shard.version, "leads": self._leads(key[0])}, answers)
                        for key in decision.released
                        if key[0] not in self._gone
                    }
                self._moved_at = time.monotonic()
                self._failure = self._failure or decision.failure
                self._has_ended = self._has_ended or decision.has_ended or self.stops
                self._changed.notify_all()

    def _save(self, checkpoints: Checkpoints, decision: Decision) -> None:
        """Save with the other servers. A failed server takes part, too; otherwise they would wait for it."""
        assert decision.saves is not None
        try:
            with self._changed:
                untrained = dict(self._untrained)
            failure = "" if self.error is None else self._failure
            checkpoints.save(self._shard, decision.saves, untrained, waits=decision.is_last, failure=failure)
        except SystemExit:  # raised by the checkpointer after a signal, on all servers
            self.stops = True
        self.stops = self.stops or decision.stops
        if decision.stops and self._roles.server == 0:
            what = (
                f"saved {checkpoints!r}, from which the run continues" if self._shard.version else "nothing to save yet"
            )
            say(f"evenstep: stop requested; {what}")

    def poll(self) -> None:
        """Take the actions that depend on time, on the first server."""
        missing = sorted(self._coordinator.expected)
        if missing and time.monotonic() - self._began_at > self._timeout_s:
            say(f"evenstep: parameter servers: workers {missing} have not joined; the others continue without them")
            self._happen(lambda coordinator: coordinator.give_up(missing))
        if self._checkpoints is None or self._has_ended:
            return
        if self._is_to_stop:
            self._stop(self._roles.rank)
        elif self._checkpoints.is_due(self._shard.version):
            self._checkpoints.note(self._shard.version)
            self._happen(lambda coordinator: coordinator.save())

    @property
    def _is_to_stop(self) -> bool:
        """Whether this process must stop."""
        return self._checkpoints is not None and self._checkpoints.stop_reason is not None

    def _fail(self, failure: str, error: Exception) -> None:
        self.error, self._failure = self.error or error, self._failure or failure
        if self._roles.server == 0:
            self._happen(lambda coordinator: coordinator.fail(failure))

    def _end(self, failure: str) -> None:
        with self._changed:
            self._failure, self._has_ended = failure, True
            self._changed.notify_all()

    def _name_untrained(self) -> None:
        """Print the batches that nobody trains on, because a worker was lost after all others had ended their loops."""
        untrained = self._coordinator.untrained
        if untrained:
            named = ", ".join(f"batch {n} of epoch {at[1]} (worker {worker})" for worker, (at, n) in untrained)
            todo = "" if self._checkpoints is None else " Start the same command again: it trains on them."
            say(
                f"evenstep: parameter servers: not trained on, because their worker was lost after the others had "
                f"ended:  "
                f"{named}.{todo}"
            )

    # ------------------------------------------------------------------ calls

    def answer(self, rank: int, message: Message) -> Message:
        """Answer a call of a rank."""
        head = message.head
        kind = head.pop("kind")
        if message.tensors:
            head["tensors"] = message.tensors
        return self._kinds[kind](rank, **head) or Message({})

    def lose(self, rank: int) -> None:
        """Called when a process has ended without having left."""
        if self._roles.server != 0:
            return  # the first server also notices it, and decides for all
        if rank >= self._roles.num_workers:
            self._happen(lambda coordinator: coordinator.fail(f"{self._roles.name_of(rank)} was lost"))
            return
        with self._changed:
            self._gone.add(rank)
            trains = rank in self._coordinator.members and not self._has_ended
        if trains:
            say(f"evenstep: parameter servers: worker {rank} was lost; its batches go to the others")
        self._happen(lambda coordinator: coordinator.lose(rank))

    def _happen(self, decide: Callable[[Coordinator], Sequence[Decision]]) -> None:
        with self._changed:
            self._decisions |= {each.number: each for each in decide(self._coordinator)}
            self._changed.notify_all()
        if self._roles.is_alone:
            self.execute(self._wait_for_decisions(self._done, 0))

    def _wait_for_decisions(self, after: int, timeout_s: float) -> list[Decision]:
        with self._changed:
            self._changed.wait_for(lambda: after + 1 in self._decisions or self._has_ended, timeout_s)
            had = min([self._done, *self._had.values()])
            self._decisions = {number: each for number, each in self._decisions.items() if number > had}
            return [each for number, each in self._decisions.items() if number > after]

    def _leads(self, worker: int) -> bool:
        """Whether this worker's module buffers are saved: those of the lowest worker are."""
        return self._checkpoints is not None and worker == min(self._coordinator.members, default=worker)

    def _decisions_behind(self, rank: int, *, after: int, stops: bool, failure: str) -> Message:
        """Answer another server's request for the decisions that follow number `after`.

        The other server reports whether it must stop or has failed.
        """
        self._had[rank] = after
        if stops:
            self._stop(rank)
        if failure:
            self._happen(lambda coordinator: coordinator.fail(failure))
        return Message({"decisions": self._wait_for_decisions(after, _POLL_EVERY_S * 10)})

    def _refusal(self, rank: int) -> Message | None:
        """The answer to a worker's call if the run, or the worker's part in it, has ended; else None."""
        if self.stops:
            return Message({"stops": True})
        if self._failure or self._has_ended:
            return Message({"failure": self._failure or "all others have left"})
        return Message({"failure": _GIVEN_UP}) if rank in self._gone else None

    def _join(self, rank: int) -> Message:
        """Let a worker join; the answer has the model's untrained tensors."""
        with self._changed:
            if (refusal := self._refusal(rank)) is not None:
                return refusal
            self._coordinator.join(rank)
            return Message({"names": list(self._untrained)}, [each.contiguous() for each in self._untrained.values()])

    def _hold(self, rank: int, *, number: int, **pushed: Any) -> None:
        """Store a worker's push until it is applied."""
        with self._changed:
            if rank not in self._gone:
                self._held[rank, number] = self._unpacked(**pushed)

    def _step(
        self,
        rank: int,
        *,
        number: int,
        version: int,
        batches: Sequence[Any],
        buffers: Sequence[str] = (),
        tensors: Sequence[Tensor] = (),
        **pushed: Any,
    ) -> Message:
        """End a worker's step. The other servers have its gradients already. Module buffers come last in `tensors`."""
        count = len(tensors) - len(buffers)
        with self._changed:
            self._untrained |= dict(zip(buffers, tensors[count:], strict=True))
            if pushed["weight"] and rank not in self._gone:
                self._held[rank, number] = self._unpacked(tensors=tensors[:count], **pushed)
        push = Push(pushed["weight"], version, [_batch(each) for each in batches])
        self._happen(lambda coordinator: coordinator.push((rank, number), push))
        return self._await(rank, number=number)

    def _unpacked(
        self, *, weight: float, used: Sequence[bool], rows: Sequence[Any] = (), tensors: Sequence[Tensor] = ()
    ) -> Pushed:
        count = len(tensors) - 2 * len(rows)
        of_tables = zip(rows, tensors[count::2], tensors[count + 1 :: 2], strict=True)
        return Pushed(
            weight,
            used,
            tensors[:count],
            {name: RowGradients(ids, values, lr) for (name, lr), ids, values in of_tables},
        )

    def _pull(self, rank: int, *, number: int) -> Message:
        self._happen(lambda coordinator: coordinator.pull((rank, number)))
        return self._await(rank, number=number)

    def _leave(self, rank: int, *, number: int, failure: str) -> Message:
        self._happen(lambda coordinator: coordinator.leave((rank, number), failure))
        return self._await(rank, number=number)

    def _await(self, rank: int, *, number: int) -> Message:
        """Answer with the parameters if a worker may continue, else after a while with "waits": then it asks again."""
        key = (rank, number)
        with self._changed:
            self._changed.wait_for(lambda: key in self._answers or self._refusal(rank) is not None, TURN_S)
            found = self._answers.pop(key, None) or self._refusal(rank)
            if found is not None:
                return found
            lagging = self._coordinator.lagging() if self._roles.server == 0 else []
            if lagging and time.monotonic() - self._moved_at > self._timeout_s:
                return Message(
                    {"late": ", ".join(f"worker {worker} (has pushed {done} steps)" for worker, done in lagging)}
                )
        return Message({"waits": True})

    def _look_up(self, rank: int, *, table: str, tensors: Sequence[Tensor] = ()) -> Message:
        if (refusal := self._refusal(rank)) is not None:
            return refusal
        try:
            return Message({}, [self._shard.look_up(table, tensors[0])])
        except Exception as error:
            if self._roles.is_alone:
                raise
            self._fail(f"a lookup in table {table!r} failed: {type(error).__name__}: {error}", error)
            return Message({"failure": self._failure})

    def _take(self, rank: int, *, wanted: Any, num_batches: int, facts: str) -> Message:
        """A worker's next batch: see `BatchQueue.take`."""
        with self._changed:
            if (refusal := self._refusal(rank)) is not None:
                return refusal
            taken = self._queue.take(rank, tuple(wanted), num_batches, facts)
        return Message({"batch": taken.batch, "is_over": taken.is_over, "differs": taken.failure})

    def _give_back(self, rank: int, *, batches: Sequence[Any]) -> None:
        with self._changed:
            self._queue.give_back(rank, [_batch(each) for each in batches])

    def _staleness(self, rank: int) -> Message:
        with self._changed:
            found = [[worker, list(counts.items())] for worker, counts in self._coordinator.staleness.items()]
        return Message({"staleness": found})

    def _stop(self, rank: int) -> None:
        """Save once more, and end, because a process of the run must stop."""
        with self._changed:
            is_first, self._asked_to_stop = not self._asked_to_stop, True
        if is_first and self._checkpoints is not None:
            self._happen(lambda coordinator: coordinator.save(is_last=True, stops=True))


def _batch(values: Any) -> Batch:
    """Decode a batch from JSON."""
    (loader, epoch, iteration), number = values
    return (loader, epoch, iteration), number
