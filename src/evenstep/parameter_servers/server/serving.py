"""A server's process: what workers and other servers call, and what happens when one of them has gone.

[Note: the first server leads]

The first server waits until all servers are there and tells each what it begins with: what `model_fn` has drawn, or a
checkpoint. Then workers join. It decides for all servers, and saves for all of them.

A server that is lost ends the run, on all others too: parameters, the state of optimizers and the queue of batches
belong to one moment. Started again, the run goes on from the newest checkpoint. A worker that is lost ends no run: see
`Coordinator.lose`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
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
from evenstep.parameter_servers.server.shard import GIVEN_UP, Pushed, Shard, Share, failure_of, no_rows

BEGUN = "begun"
ENDED = "ended"
_LOOK_EVERY_S = 0.05
_ANSWERS_S = 0.5  # for answers that are being sent when a server ends after a failure
_WORKER_ANSWERS_S = 5.0


class Server:
    """See the top of the file. Its `CALLS` and `LATER` come in threads of RPC.

    Args:
        roles: This process's, and how many others there are.
        store: Of this run.
        mode: Who waits for whom.
        shard: This server's share of the parameters, with its optimizer.
        initial: Tensors of the model that aren't trained.
        checkpoints: Of the first server; None: there are none.
        has_checkpoints: The run has some.
        interface: See `Endpoint`.
        timeout_s: How long to wait for others at the start.
    """

    CALLS = (
        "join",
        "begin",
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
        shard: Shard,
        initial: dict[str, Tensor],
        *,
        checkpoints: Checkpoints | None,
        has_checkpoints: bool,
        interface: str | None,
        timeout_s: float,
    ) -> None:
        self._roles, self._store, self._mode, self._shard = roles, store, mode, shard
        self._initial, self._checkpoints, self._has_checkpoints = initial, checkpoints, has_checkpoints
        self._timeout_s = timeout_s
        self._leads = roles.rank == roles.num_workers
        self._lock = threading.Lock()  # of the coordinator, and of the order of decisions
        self._changed = threading.Event()
        self._coordinator: Coordinator | None = None  # of the first server, from when all servers have begun
        self._queue = BatchQueue()
        self._others: list[Peer] = []  # the first server's: the other servers
        self._first: Peer | None = None  # the other servers': the first one
        self._has_lost_first = False
        self._workers: dict[int, Peer] = {}
        self._give_up_at = 0.0
        self._failure = ""
        self._error: Exception | None = None
        self._has_ended = False
        self._is_stopping = False
        self._endpoint = Endpoint(store, roles.name, self, interface=interface, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"<Server {self._roles.name}, {self._shard!r}>"

    def serve(self) -> None:
        """Answer workers until all have left, and end RPC.

        Raises:
            PeerLostError: A worker has failed, or a server has gone.
            SystemExit: With status 75: a stop was requested, and the run has been saved.
            Exception: What the optimizer has raised.
        """
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
        self._begin_run()
        while not (self._has_ended or self._failure):
            self._changed.wait(_LOOK_EVERY_S)
            self._changed.clear()
            self._give_up_missing()
            if self._checkpoints is not None:
                self._save_if_due(self._checkpoints)
        if not self._failure:
            names = [self._roles.name_of(rank) for rank in self._server_ranks()]
            self._tell_of_untrained()
            self._store.set(ENDED, json.dumps([*names, *sorted({peer.role for peer in self._workers.values()})]))

    def _begin_run(self) -> None:
        """Wait for the other servers and begin on all of them; then workers may join."""
        deadline = time.monotonic() + self._timeout_s
        roles = [self._roles.name_of(rank) for rank in self._server_ranks() if rank != self._roles.rank]
        while missing := [role for role in roles if self._endpoint.find(role) is None]:
            if self._checkpoints is not None and self._checkpoints.stop_reason is not None:
                self._checkpoints.stop()
            if time.monotonic() > deadline:
                self._failure = f"{', '.join(missing)} did not come within {self._timeout_s:g} s"
                return
            time.sleep(_LOOK_EVERY_S)
        peers = [peer for role in roles if (peer := self._endpoint.find(role)) is not None]
        shares: list[Share | None] = [None] * self._roles.num_servers
        version = 0
        if self._checkpoints is not None and (restored := self._checkpoints.restore()) is not None:
            shares, version = list(restored.shares), restored.version
            self._queue.load_state(restored.queue)
        me = self._endpoint.me
        self.begin(shares[0], me)
        calls = [self._endpoint.call(peer, "begin", share, me) for peer, share in zip(peers, shares[1:], strict=True)]
        for peer, call in zip(peers, calls, strict=True):
            try:
                call.wait()
            except RuntimeError as error:
                self._failure = f"{self._with_rank(peer)} did not begin: {error}"
                return
        self._others = peers
        self._coordinator = Coordinator(
            self._mode,
            self._roles.num_servers,
            range(self._roles.num_workers),
            self._queue,
            version=version,
            ends_itself=self._checkpoints is None,
        )
        self._give_up_at = time.monotonic() + self._timeout_s
        for peer in peers:
            self._endpoint.watch(peer, lambda peer=peer: self._lose_server(peer))  # type: ignore[misc]
        self._store.set(BEGUN, json.dumps([[each.role, each.name, each.address] for each in (me, *peers)]))

    def _save_if_due(self, checkpoints: Checkpoints) -> None:
        coordinator = self._led()
        if checkpoints.stop_reason is not None:
            self._save(checkpoints)
            checkpoints.stop()
        # As it is before it is saved: while an earlier state is written, workers may come to their end.
        is_done = coordinator.is_done
        if is_done or checkpoints.is_due(coordinator.version):
            has_saved = self._save(checkpoints)
            # Only now: if a server is lost before, the workers fail too, and the next attempt trains on what was lost.
            if is_done and has_saved:
                self._happen(lambda coordinator: coordinator.end())

    def _give_up_missing(self) -> None:
        """Go on without workers that have not come in time. One that comes later takes part from then on."""
        missing = sorted(self._led().expected)
        if missing and time.monotonic() > self._give_up_at:
            say(f"evenstep: parameter servers: workers {missing} have not come; the others go on without them")
            self._happen(lambda coordinator: coordinator.give_up(missing))

    def _tell_of_untrained(self) -> None:
        """Name what was lost with a worker when all others had ended their loops."""
        with self._lock:
            untrained = self._led().untrained
        if untrained:
            named = ", ".join(f"batch {batch} of epoch {at[1]} (worker {worker})" for worker, at, batch in untrained)
            todo = " Start the same command again: it trains on them." if self._has_checkpoints else ""
            say(
                f"evenstep: parameter servers: not trained on, as their worker was lost after the others had ended: "
                f"{named}.{todo}"
            )

    def _lose_server(self, peer: Peer) -> None:
        if not self._has_ended:
            self._happen(lambda coordinator: coordinator.fail(f"{self._with_rank(peer)} was lost"))

    def _lose_worker(self, worker: int) -> None:
        with self._lock:
            if self._has_ended:
                return
            trains = worker in self._led().members
            self._workers.pop(worker, None)
        if trains:
            say(f"evenstep: parameter servers: worker {worker} was lost; its batches go to the others")
        self._happen(lambda coordinator: coordinator.lose(worker))

    def _happen(self, decide: Callable[[Coordinator], list[Decision]]) -> None:
        """Have all servers do what follows from an event."""
        complete: list[Callable[[], None]] = []
        with self._lock:
            coordinator = self._led()
            todo = deque(decide(coordinator))
            while todo:
                decision = todo.popleft()
                for peer in self._others:
                    self._endpoint.call(peer, "execute", decision)
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

    def _save(self, checkpoints: Checkpoints) -> bool:
        """Save a checkpoint of one moment of all servers; False: one of them was lost, or has failed, meanwhile."""
        states, workers = [], dict(self._workers)
        saves: list[Decision] = []

        def decide(coordinator: Coordinator) -> list[Decision]:
            states.append(self._queue.state())
            saves.append(coordinator.save())
            return saves

        self._happen(decide)
        number = saves[0].number
        calls = [self._endpoint.call(peer, "copy", number) for peer in self._others]
        try:
            shares = [self.copy(number), *(call.wait() for call in calls)]
        except RuntimeError:
            return False
        whole = [share for share in shares if share is not None]
        if len(whole) < len(shares) or len({share.version for share in whole}) > 1:
            return False  # lost, or an update has failed on one of them, whose error ends the run
        checkpoints.save(whole, states[0], self._buffers(checkpoints, workers))
        return True

    def _buffers(self, checkpoints: Checkpoints, workers: dict[int, Peer]) -> dict[str, Tensor]:
        """Module buffers of the worker with the lowest number that answers; {}: none does, or there are none."""
        if not checkpoints.has_buffers:
            return {}
        for _, peer in sorted(workers.items()):
            try:
                buffers: dict[str, Tensor] = self._endpoint.call(peer, "buffers", timeout_s=_WORKER_ANSWERS_S).wait()
            except RuntimeError:
                continue
            return buffers
        return {}

    # ------------------------------------------------------------------ the other servers

    def _follow(self) -> None:
        while not (self._has_ended or self._failure):
            self._changed.wait(_LOOK_EVERY_S)
            self._changed.clear()
            if self._is_stopping and (
                self._has_lost_first or self._first is None
            ):  # before that nothing is to be saved
                raise SystemExit(EXIT_PREEMPTED)
            if self._has_lost_first and self._first is not None:
                self._failure = f"{self._with_rank(self._first)} was lost"
                self._shard.fail(self._failure)

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

    def _lose_first(self) -> None:
        self._has_lost_first = True
        self._changed.set()

    # ------------------------------------------------------------------ what others call

    def begin(self, share: Share | None, first: Peer) -> None:
        """The run begins; `share` is what this server has then, None: what `model_fn` has drawn."""
        if not self._leads:
            self._first = first
            self._endpoint.watch(first, self._lose_first)
        if share is not None:
            self._shard.load(share)

    def join(self, worker: int, name: str, address: str) -> str:
        """A worker begins; why it can't, or ""."""
        if self._failure:
            return self._failure
        peer = self._workers[worker] = Peer(f"worker {worker}", name, address)
        with self._lock:
            self._led().join(worker)
        self._endpoint.watch(peer, lambda: self._lose_worker(worker))
        return ""

    def ask(self, key: Key, pushed: Pushed | None) -> Future[Any]:
        """Push a step's gradients, or None, and have the parameters when this worker may go on: an `Answer`."""
        future, facts = self._shard.call(key, pushed)
        if self._leads:
            if pushed is None and not future.done():
                self._happen(lambda coordinator: coordinator.pull(key))
            elif facts is not None:
                self._happen(lambda coordinator: coordinator.push(key, facts))
        elif facts is not None and self._first is not None:
            self._endpoint.call(self._first, "notice", key, facts)
        return future

    def look_up(self, worker: int, table: str, ids: Tensor) -> Rows:
        """Rows of a table of embeddings: see `Tables.look_up`."""
        try:
            return self._shard.look_up(worker, table, ids)
        except Exception as error:
            failure = f"a lookup in table {table!r} failed: {type(error).__name__}: {error}"
            self._error = error
            if self._leads:
                self._happen(lambda coordinator: coordinator.fail(failure))
            elif self._first is not None:
                self._endpoint.call(self._first, "failed", failure)
            return no_rows(failure)

    def leave(self, key: Key, failure: str) -> Future[Any]:
        """A worker has ended, see `Coordinator.leave`: the last `Answer`, when all have."""
        future, _ = self._shard.call(key, None)
        if self._leads and not future.done():
            self._happen(lambda coordinator: coordinator.leave(key, failure))
        return future

    def take(self, key: Key, wanted: Pass, num_batches: int, facts: str) -> Taken:
        """A worker's next batch: see `BatchQueue.take`."""
        with self._lock:
            if self._failure:
                return Taken(wanted[1], -1, failure=self._failure)
            if key[0] not in self._led().members:
                return Taken(wanted[1], -1, failure=GIVEN_UP)
            return self._queue.take(key, wanted, num_batches, facts)

    def give_back(self, key: Key) -> None:
        """A worker won't push what it has taken for a push."""
        with self._lock:
            self._queue.give_back(key[0], key)

    def notice(self, key: Key, facts: Facts) -> None:
        """Another server has a push."""
        self._happen(lambda coordinator: coordinator.push(key, facts))

    def measured(self, square: float) -> None:
        """Another server has added up what was to be measured."""
        self._happen(lambda coordinator: coordinator.measured(square))

    def execute(self, decision: Decision) -> None:
        """The first server has decided."""
        outcome = self._shard.execute(decision)
        assert self._first is not None
        for square in outcome.squares:
            self._endpoint.call(self._first, "measured", square)
        if outcome.error is not None:
            self._error = outcome.error
            # Before workers know: one of them would say that it has failed, and be named for it.
            self._endpoint.call(self._first, "failed", f"{self._who}: {failure_of(outcome.error)}")
        for each in outcome.complete:
            each()
        self._failure = self._failure or decision.failure
        if outcome.has_ended:
            self._has_ended = True
            self._changed.set()

    def failed(self, text: str) -> None:
        """Another server's optimizer has failed."""
        self._happen(lambda coordinator: coordinator.fail(text))

    def copy(self, number: int) -> Share | None:
        """What a decision to save copies here, when that has happened; None: it can't any more."""
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline and not (self._failure or self._has_lost_first):
            if (share := self._shard.take_copy(number)) is not None:
                return share
            time.sleep(0.005)
        return None

    def lagging(self) -> list[tuple[int, int]]:
        """The workers that others wait for, each with the number of steps that it has pushed."""
        with self._lock:
            return self._led().lagging()

    def staleness(self) -> dict[int, dict[int, int]]:
        """For each worker how many of its gradients were applied how many updates late."""
        with self._lock:
            return {worker: dict(counts) for worker, counts in self._led().staleness.items()}

    def initial(self) -> dict[str, Tensor]:
        """Tensors of the model that aren't trained, by name."""
        if self._checkpoints is not None:
            return self._checkpoints.untrained()
        return {name: tensor.detach().cpu() for name, tensor in self._initial.items()}

    # ------------------------------------------------------------------ both

    @property
    def _who(self) -> str:
        return f"{self._roles.name} (rank {self._roles.rank})"

    def _with_rank(self, server: Peer) -> str:
        return f"{server.role} (rank {self._roles.num_workers + int(server.role.split()[1])})"

    def _led(self) -> Coordinator:
        assert self._coordinator is not None  # workers, and what is said of them, come after the beginning
        return self._coordinator

    def _server_ranks(self) -> range:
        return range(self._roles.num_workers, self._roles.num_workers + self._roles.num_servers)
