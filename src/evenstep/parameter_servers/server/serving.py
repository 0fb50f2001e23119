"""A server's process: what workers and other servers call, and how it goes on when one of them has gone.

[Note: eras]

The first server leads. An *era* begins when all servers are there, with the state that they begin with: what
`model_fn` has drawn, or a checkpoint. It ends when a server is lost. With checkpoints the run then waits until that
server's process is started again, and the next era begins, for all servers, with the newest one: parameters, the state
of optimizers and the queue of batches belong to one moment, so each batch counts once. Workers whose era has ended are
told so, or find a server gone; they join the next one.

A worker that is lost ends no era: see `Coordinator.lose`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch.distributed import Store
from torch.futures import Future

from evenstep.console import say
from evenstep.errors import EXIT_PREEMPTED, PeerLostError
from evenstep.parameter_servers.embeddings.rows import Rows
from evenstep.parameter_servers.remote import Endpoint, Peer
from evenstep.parameter_servers.roles import Roles
from evenstep.parameter_servers.server.batch_queue import BatchQueue, Key, Pass, Taken
from evenstep.parameter_servers.server.checkpoints import Checkpoints
from evenstep.parameter_servers.server.coordinator import Coordinator, Decision, Facts, Mode
from evenstep.parameter_servers.server.shard import (
    OUTDATED,
    OUTDATED_ROWS,
    Answer,
    Pushed,
    Shard,
    Share,
    failure_of,
)

ENDED = "ended"
ERAS = "eras"
_LOOK_EVERY_S = 0.05
_ANSWERS_S = 0.5  # for answers that are being sent when a server ends after a failure
_REJOIN_S = 20.0  # for workers to join a later era, before others go on without those that are gone
_WORKER_ANSWERS_S = 5.0
_BETWEEN_TRIES_S = 0.5


class Server:
    """See the top of the file. Its `CALLS` and `LATER` come in threads of RPC.

    Args:
        roles: This process's, and how many others there are.
        store: Of this run.
        mode: Who waits for whom.
        build: Makes this server's share of the parameters, with its optimizer.
        initial: Tensors of the model that aren't trained.
        checkpoints: Of the first server; None: there are none.
        has_checkpoints: The run has some.
        interface: See `Endpoint`.
        timeout_s: How long to wait for others at the start, and for one that is started again.
    """

    CALLS = (
        "join",
        "begin",
        "begin_passes",
        "take",
        "give_back",
        "look_up",
        "notice",
        "measured",
        "execute",
        "lagging",
        "staleness",
        "copy",
        "initial",
        "failed",
    )
    LATER = ("ask", "leave")

    def __init__(
        self,
        roles: Roles,
        store: Store,
        mode: Mode,
        build: Callable[[], Shard],
        initial: dict[str, Tensor],
        *,
        checkpoints: Checkpoints | None,
        has_checkpoints: bool,
        interface: str | None,
        timeout_s: float,
    ) -> None:
        self._roles, self._store, self._mode, self._build = roles, store, mode, build
        self._initial, self._checkpoints, self._has_checkpoints = initial, checkpoints, has_checkpoints
        self._timeout_s = timeout_s
        self._leads = roles.rank == roles.num_workers
        self._lock = threading.Lock()  # of the coordinator, and of the order of decisions
        self._changed = threading.Event()
        self._shard = build()
        self._era = 0
        self._coordinator: Coordinator | None = None  # of the first server, while there is an era
        self._queue = BatchQueue()
        self._num_members = 0
        self._others: list[Peer] = []  # the first server's: the other servers
        self._first: Peer | None = None  # the other servers': the first one
        self._workers: dict[int, Peer] = {}  # by member
        self._asked: dict[int, Future[Any] | None] = {}  # workers that have not come in time; None: never registered
        self._give_up_at = 0.0
        self._lost: dict[str, None] = {}  # roles of servers
        self._failure = ""
        self._error: Exception | None = None
        self._has_ended = False
        self._is_stopping = False
        self._endpoint = Endpoint(store, roles.name, self, interface=interface, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"<Server {self._roles.name}, era {self._era}, {self._shard!r}>"

    def serve(self) -> None:
        """Answer workers until all have left, and end RPC.

        Raises:
            PeerLostError: A worker has failed, or a server has gone and nothing brings it back.
            SystemExit: With status 75: a stop was requested, and the run has been saved.
            Exception: What the optimizer has raised.
        """
        if self._store.check([ENDED]):  # started again after that
            self._endpoint.close()
            return
        self._endpoint.register()
        try:
            if self._leads:
                self._lead()
            else:
                with self._staying_until_saved():
                    self._follow()
        except BaseException:
            self._endpoint.close()
            raise
        finally:
            if self._checkpoints is not None:
                self._checkpoints.close()
        if self._failure:
            time.sleep(_ANSWERS_S)
            self._endpoint.close()
            if self._error is not None:
                raise self._error
            raise PeerLostError(f"{self._who} ends: {self._failure}")
        names = json.loads(self._store.get(ENDED))
        self._endpoint.close(roles=names)

    # ------------------------------------------------------------------ the first server

    def _lead(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        workers: set[int] | None = None
        while not (self._has_ended or self._failure):
            self._begin_era(deadline, workers)
            self._run_era()
            if not (self._has_ended or self._failure):
                deadline = time.monotonic() + self._timeout_s
                workers = self._end_era()
                if not self._has_checkpoints:
                    self._failure = f"{self._names_of_lost()} was lost, and the run has no checkpoints"

    def _begin_era(self, deadline: float, workers: set[int] | None) -> None:
        lost, self._lost = self._lost, {}
        is_first = not self._store.add(ERAS, 0)
        while True:
            roles = [self._roles.name_of(rank) for rank in self._server_ranks() if rank != self._roles.rank]
            found = [self._endpoint.find(role) for role in roles]
            gone = {peer.name for peer in self._others if peer.role in lost}
            missing = [role for role, peer in zip(roles, found, strict=True) if peer is None or peer.name in gone]
            if not missing:
                peers = [peer for peer in found if peer is not None]
                begun = self._share_out(peers)
                if begun is not None:
                    break
                time.sleep(_BETWEEN_TRIES_S)  # until it is known which server has gone, and it comes back
            if self._checkpoints is not None and self._checkpoints.stop_reason is not None:
                self._checkpoints.stop()
            if time.monotonic() > deadline:
                self._failure = f"{', '.join(missing) or 'a server'} did not come within {self._timeout_s:g} s"
                return
            time.sleep(_LOOK_EVERY_S)
        era, version = begun
        with self._lock:
            self._others = peers
            self._lost = {}
            expected = range(self._roles.num_workers) if workers is None else workers
            self._coordinator = Coordinator(
                self._mode,
                self._roles.num_servers,
                expected,
                self._queue,
                first_member=self._num_members,
                version=version,
                ends_itself=self._checkpoints is None,
            )
            self._asked, self._give_up_at = {}, time.monotonic() + (self._timeout_s if is_first else _REJOIN_S)
        for peer in peers:
            self._endpoint.watch(peer, lambda peer=peer: self._lose_server(peer))  # type: ignore[misc]
        me = self._endpoint.me
        self._store.set(f"era-{era}", json.dumps([[each.role, each.name, each.address] for each in (me, *peers)]))
        if not is_first:
            where = "the beginning" if version == 0 else f"the checkpoint of step {version}"
            say(f"evenstep: parameter servers: all go on from {where}")

    def _share_out(self, peers: list[Peer]) -> tuple[int, int] | None:
        """Begin the next era on all servers; (its number, updates so far), or None if a server has gone meanwhile."""
        era = self._store.add(ERAS, 1)
        queue = BatchQueue()
        shares: list[Share | None] = [None] * self._roles.num_servers
        version = 0
        if self._checkpoints is not None and (found := self._checkpoints.restore()) is not None:
            shares, version = list(found.shares), found.version
            queue.load_state(found.queue)
        self.begin(era, shares[0], self._endpoint.me)
        self._queue = queue
        calls = [
            self._endpoint.call(peer, "begin", era, share, self._endpoint.me)
            for peer, share in zip(peers, shares[1:], strict=True)
        ]
        try:
            for call in calls:
                call.wait()
        except RuntimeError:
            return None
        return era, version

    def _run_era(self) -> None:
        while not (self._has_ended or self._lost or self._failure):
            self._changed.wait(_LOOK_EVERY_S)
            self._changed.clear()
            self._give_up_missing()
            coordinator = self._coordinator
            if self._checkpoints is not None:
                if self._checkpoints.stop_reason is not None:
                    self._save()
                    self._checkpoints.stop()
                # As it is before it is saved: while an earlier state is written, workers may come to their end.
                is_done = coordinator is not None and coordinator.is_done
                if coordinator is not None and (is_done or self._checkpoints.is_due(coordinator.version)):
                    has_saved = self._save()
                    # Only now: who restarts the last server of a run whose workers have gone has nobody to go on with.
                    if is_done and has_saved:
                        self._happen(lambda coordinator: coordinator.end())
        if self._has_ended and not self._failure:
            names = [self._roles.name_of(rank) for rank in self._server_ranks()]
            self._tell_of_untrained()
            self._store.set(ENDED, json.dumps([*names, *sorted({peer.role for peer in self._workers.values()})]))

    def _give_up_missing(self) -> None:
        """Go on without those that have not come in time and don't answer. A worker that does is in a long step, and
        joins after it. Waits for no answer: they are looked at when all are there."""
        coordinator = self._coordinator
        if coordinator is None or not all(call is None or call.done() for call in self._asked.values()):
            return
        if self._asked:
            silent = {worker for worker, call in self._asked.items() if call is None or not _is_answered(call)}
            missing = sorted(silent & coordinator.expected)
            self._asked, self._give_up_at = {}, time.monotonic() + _REJOIN_S
            if missing:
                say(f"evenstep: parameter servers: workers {missing} have not come; the others go on without them")
                self._happen(lambda coordinator: coordinator.give_up(missing))
        elif time.monotonic() > self._give_up_at:
            for worker in coordinator.expected:
                peer = self._endpoint.find(self._roles.name_of(worker))
                self._asked[worker] = peer and self._endpoint.call(peer, "", timeout_s=_WORKER_ANSWERS_S)

    def _tell_of_untrained(self) -> None:
        """Name what was lost with a worker when all others had ended their loops."""
        with self._lock:
            untrained = [] if self._coordinator is None else self._coordinator.untrained
        if untrained:
            named = ", ".join(f"batch {batch} of epoch {at[1]} (worker {worker})" for worker, at, batch in untrained)
            todo = " Start the same command again: it trains on them." if self._has_checkpoints else ""
            say(
                f"evenstep: parameter servers: not trained on, as their worker was lost after the others had ended: "
                f"{named}.{todo}"
            )

    def _end_era(self) -> set[int]:
        """After a server was lost. Returns the workers that will join the next one."""
        with self._lock:
            coordinator, self._coordinator = self._coordinator, None
            self._workers.clear()
        self._shard.end_era()
        say(
            f"evenstep: parameter servers: {self._names_of_lost()} was lost"
            + ("; waiting until it is started again" if self._has_checkpoints else "")
        )
        if coordinator is None:
            return set(range(self._roles.num_workers))
        self._num_members = coordinator.num_members
        return coordinator.workers

    def _names_of_lost(self) -> str:
        names = []
        for role in self._lost:
            names.append(f"{role} (rank {self._roles.num_workers + int(role.split()[1])})")
        return " and ".join(names)

    def _lose_server(self, peer: Peer) -> None:
        if not self._has_ended and peer in self._others:
            self._lost[peer.role] = None
            self._changed.set()

    def _lose_worker(self, member: int, worker: int) -> None:
        with self._lock:
            if self._has_ended:
                return
            trains = self._coordinator is not None and member in self._coordinator.members
            self._workers.pop(member, None)
        if trains:
            say(f"evenstep: parameter servers: worker {worker} was lost; its batches go to the others")
        self._happen(lambda coordinator: coordinator.lose(member))

    def _happen(self, decide: Callable[[Coordinator], list[Decision]]) -> bool:
        """Have all servers do what follows from an event; whether there is an era."""
        complete: list[Callable[[], None]] = []
        with self._lock:
            coordinator = self._coordinator
            if coordinator is None:
                return False
            todo = deque(decide(coordinator))
            while todo:
                decision = todo.popleft()
                for peer in self._others:
                    self._endpoint.call(peer, "execute", self._era, decision)
                outcome = self._shard.execute(decision)
                complete += outcome.complete
                for square in outcome.squares:
                    todo.extend(coordinator.measured(square))
                if outcome.error is not None:
                    self._error = outcome.error
                    todo.extend(coordinator.fail(f"{self._who}: {failure_of(outcome.error)}"))
                self._failure = self._failure or decision.failure
                self._has_ended = self._has_ended or outcome.has_ended
        for each in complete:
            each()
        if self._has_ended:
            self._changed.set()
        return True

    def _save(self) -> bool:
        """Save a checkpoint of one moment of all servers; False: one of them was lost, or has failed, meanwhile."""
        assert self._checkpoints is not None
        era, states, workers = self._era, [], dict(self._workers)
        saves: list[Decision] = []

        def decide(coordinator: Coordinator) -> list[Decision]:
            states.append(self._queue.state())
            saves.append(coordinator.save())
            return saves

        if not self._happen(decide):
            return False
        number = saves[0].number
        calls = [self._endpoint.call(peer, "copy", era, number) for peer in self._others]
        try:
            shares = [self.copy(era, number), *(call.wait() for call in calls)]
        except RuntimeError:
            return False
        whole = [share for share in shares if share is not None]
        if len(whole) < len(shares) or len({share.version for share in whole}) > 1:
            return False  # lost, or an update has failed on one of them, whose error ends the run
        self._checkpoints.save(whole, states[0], self._buffers(workers))
        return True

    def _buffers(self, workers: dict[int, Peer]) -> dict[str, Tensor]:
        """Module buffers of the worker with the lowest number that answers; {}: none does, or there are none."""
        if self._checkpoints is None or not self._checkpoints.has_buffers:
            return {}
        for _, peer in sorted(workers.items(), key=lambda each: each[1].role):
            try:
                buffers: dict[str, Tensor] = self._endpoint.call(peer, "buffers", timeout_s=_WORKER_ANSWERS_S).wait()
            except RuntimeError:
                continue
            return buffers
        return {}

    # ------------------------------------------------------------------ the other servers

    def _follow(self) -> None:
        alone_since: float | None = None
        while not (self._has_ended or self._failure):
            self._changed.wait(_LOOK_EVERY_S)
            self._changed.clear()
            if self._is_stopping and (self._lost or not self._era):  # before an era there is nothing to save
                raise SystemExit(EXIT_PREEMPTED)
            if not self._era and self._store.check([ENDED]):
                break
            if not self._lost:
                alone_since = None
            elif not self._has_checkpoints:
                self._failure = f"{self._names_of_lost()} was lost, and the run has no checkpoints"
            elif alone_since is None:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > self._timeout_s:
                self._failure = f"{self._names_of_lost()} was lost, and not started again in {self._timeout_s:g} s"

    @contextlib.contextmanager
    def _staying_until_saved(self) -> Iterator[None]:
        """Asked to stop, stay until the first server has gone: it saves then, and needs what is here."""

        def note(number: int, frame: FrameType | None) -> None:
            self._is_stopping = True

        if not self._has_checkpoints or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _lose_first(self, peer: Peer) -> None:
        if not self._has_ended and peer == self._first:
            self._shard.end_era()
            self._lost[peer.role] = None
            self._changed.set()

    # ------------------------------------------------------------------ what others call

    def begin(self, era: int, share: Share | None, first: Peer) -> None:
        """An era begins; `share` is what this server has then, None: what `model_fn` draws."""
        before, is_first_era = self._shard, self._era == 0
        self._era, self._first, self._lost = era, first, {}
        if not is_first_era or share is not None:
            self._shard = self._build()
            if share is not None:
                self._shard.load(share)
        if before is not self._shard:
            before.end_era()
        if not self._leads:
            self._endpoint.watch(first, lambda: self._lose_first(first))

    def join(self, worker: int, name: str, address: str) -> tuple[int, int, str]:
        """A worker's process begins: (era, its number as a member, why it can't)."""
        joined: list[int] = []

        def decide(coordinator: Coordinator) -> list[Decision]:
            member, decisions = coordinator.join(worker)
            joined.append(member)
            return decisions

        if self._failure:
            return 0, 0, self._failure
        if self._has_ended or not self._happen(decide):
            return 0, 0, ""
        peer = Peer(f"worker {worker}", name, address)
        self._workers[joined[0]] = peer
        self._endpoint.watch(peer, lambda: self._lose_worker(joined[0], worker))
        return self._era, joined[0], ""

    def ask(self, era: int, key: Key, pushed: Pushed | None) -> Future[Any]:
        """Push a step's gradients, or None, and have the parameters when this worker may go on: an `Answer`."""
        shard = self._shard
        if era != self._era:
            return _outdated()
        future, facts = shard.call(key, pushed)
        if self._leads:
            if pushed is None and not future.done():
                self._happen(lambda coordinator: coordinator.pull(key))
            elif facts is not None:
                self._happen(lambda coordinator: coordinator.push(key, facts))
        elif facts is not None and self._first is not None:
            self._endpoint.call(self._first, "notice", era, key, facts)
        return future

    def look_up(self, era: int, member: int, table: str, ids: Tensor) -> Rows:
        """Rows of a table of embeddings: see `Tables.look_up`."""
        shard = self._shard
        if era != self._era:
            return OUTDATED_ROWS
        try:
            return shard.look_up(member, table, ids)
        except Exception as error:
            failure = f"a lookup in table {table!r} failed: {type(error).__name__}: {error}"
            self._error = error
            if self._leads:
                self._happen(lambda coordinator: coordinator.fail(failure))
            elif self._first is not None:
                self._endpoint.call(self._first, "failed", era, failure)
            return Rows(OUTDATED_ROWS.values, failure)

    def leave(self, era: int, key: Key, failure: str, was_done: bool) -> Future[Any]:
        """A worker has ended, see `Coordinator.leave`: the last `Answer`, when all have."""
        if era != self._era:
            return _outdated()
        future, _ = self._shard.call(key, None)
        if self._leads and not future.done():
            self._happen(lambda coordinator: coordinator.leave(key, failure, was_done=was_done))
        return future

    def begin_passes(self, era: int, passes: Sequence[tuple[Pass, int, str]]) -> bool:
        """A worker has begun these before the servers went back: see `BatchQueue.begin`. Whether this is its era."""
        with self._lock:
            if era == self._era and self._coordinator is not None:
                for each in passes:
                    self._queue.begin(*each)
                return True
        return False

    def take(self, era: int, key: Key, worker: int, wanted: Pass, num_batches: int, facts: str) -> Taken | None:
        """A worker's next batch: see `BatchQueue.take`; None: its era has ended."""
        with self._lock:
            coordinator = self._coordinator
            if self._failure:
                return Taken(wanted[1], -1, failure=self._failure)
            if era != self._era or coordinator is None or key[0] not in coordinator.members:
                return None
            return self._queue.take(key, wanted, num_batches, facts, worker)

    def give_back(self, era: int, key: Key) -> None:
        """A worker won't push what it has taken for a push."""
        with self._lock:
            if era == self._era:
                self._queue.give_back(key[0], key)

    def notice(self, era: int, key: Key, facts: Facts) -> None:
        """Another server has a push."""
        if era == self._era:
            self._happen(lambda coordinator: coordinator.push(key, facts))

    def measured(self, era: int, square: float) -> None:
        """Another server has added up what was to be measured."""
        if era == self._era:
            self._happen(lambda coordinator: coordinator.measured(square))

    def execute(self, era: int, decision: Decision) -> None:
        """The first server has decided."""
        if era != self._era:
            return
        outcome = self._shard.execute(decision)
        assert self._first is not None
        for square in outcome.squares:
            self._endpoint.call(self._first, "measured", era, square)
        if outcome.error is not None:
            self._error = outcome.error
            # Before workers know: one of them would say that it has failed, and be named for it.
            self._endpoint.call(self._first, "failed", era, f"{self._who}: {failure_of(outcome.error)}")
        for each in outcome.complete:
            each()
        self._failure = self._failure or decision.failure
        if outcome.has_ended:
            self._has_ended = True
            self._changed.set()

    def failed(self, era: int, text: str) -> None:
        """Another server's optimizer has failed."""
        if era == self._era:
            self._happen(lambda coordinator: coordinator.fail(text))

    def copy(self, era: int, number: int) -> Share | None:
        """What a decision to save copies here, when that has happened; None: the era has ended."""
        deadline = time.monotonic() + self._timeout_s
        while self._era == era and time.monotonic() < deadline and not self._lost:
            if (share := self._shard.take_copy(number)) is not None:
                return share
            time.sleep(0.005)
        return None

    def lagging(self) -> list[tuple[int, int]]:
        """The workers that others wait for, each with the number of steps that it has pushed."""
        with self._lock:
            return [] if self._coordinator is None else self._coordinator.lagging()

    def staleness(self) -> dict[int, dict[int, int]]:
        """For each worker how many of its gradients were applied how many updates late."""
        with self._lock:
            if self._coordinator is None:
                return {}
            return {worker: dict(counts) for worker, counts in self._coordinator.staleness.items()}

    def initial(self) -> dict[str, Tensor]:
        """Tensors of the model that aren't trained, by name."""
        if self._checkpoints is not None:
            return self._checkpoints.untrained()
        return {name: tensor.detach().cpu() for name, tensor in self._initial.items()}

    # ------------------------------------------------------------------ both

    @property
    def _who(self) -> str:
        return f"{self._roles.name} (rank {self._roles.rank})"

    def _server_ranks(self) -> range:
        return range(self._roles.num_workers, self._roles.num_workers + self._roles.num_servers)


def _is_answered(call: Future[Any]) -> bool:
    try:
        call.value()
    except RuntimeError:
        return False
    return True


def _outdated() -> Future[Any]:
    future: Future[Any] = Future()
    answer: Answer = OUTDATED
    future.set_result(answer)
    return future
