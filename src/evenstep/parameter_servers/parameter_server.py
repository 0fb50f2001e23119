"""`evenstep.parameter_server`: a script's training with parameter servers, and the worker's handle.

[Note: a server's process ends]

The script is the same for workers and servers. On a server the `with` statement serves until all workers have left it,
and python can't skip its body; so the server's process ends there, with status 0. What stands behind is the workers'.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import Store

from evenstep import checks
from evenstep import world as worlds
from evenstep.data.loading.fetch import Loaded
from evenstep.data.position import Mark
from evenstep.errors import ConfigurationError, EvenstepError, MismatchError, NonFiniteError, PeerLostError, UsageError
from evenstep.ground import environment
from evenstep.ground.coordination.rendezvous_store import choose_gloo_interface, open_store
from evenstep.ground.health import excepthook
from evenstep.parameter_servers.embeddings.rows import Rows
from evenstep.parameter_servers.layout import pack, to_device, unpack
from evenstep.parameter_servers.preparation import WHO, compare
from evenstep.parameter_servers.recipe import Made, Recipe
from evenstep.parameter_servers.roles import Roles, assign_roles
from evenstep.parameter_servers.server.batch_queue import BatchQueue, Pass, Taken
from evenstep.parameter_servers.server.checkpoints import CheckpointOptions, Checkpoints
from evenstep.parameter_servers.server.coordinator import Mode
from evenstep.parameter_servers.server.shard import Answer, Pushed, Shard
from evenstep.parameter_servers.traffic import Traffic
from evenstep.parameter_servers.worker.connections import Connection, LocalConnection, untrained

Positioned = tuple[Mark, Loaded]  # with its position at the end
MODES = ("sync", "async", "bounded")
_TRANSFER_DTYPES = (torch.bfloat16, torch.float16)


@excepthook.for_users
def parameter_server(
    model_fn: Callable[[], nn.Module],
    optimizer_fn: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    *,
    mode: str = "async",
    max_staleness: int | None = None,
    scheduler_fn: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
    max_norm: float | None = None,
    transfer_dtype: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    every_steps: int | None = None,
    every_minutes: float | None = 10.0,
    keep: int = 3,
    device: str | torch.device = "cpu",
    interface: str | None = None,
    timeout_s: float = worlds.DEFAULT_TIMEOUT_S,
) -> ParameterServer:
    """Train with parameter servers: `with evenstep.parameter_server(...) as ps:`.

    On a worker it yields the handle, with `ps.model`, `ps.backward(loss, weight=)` and `ps.step()`. On a server it
    serves until all workers have left, and the process ends there. A world of one is a worker with its own parameters,
    in process and without a port. Collective: every worker and server comes here. Use no `evenstep.init` beside it.

    Modes:

    - "sync": a step waits for all workers and applies the weighted mean of their gradients, as one process would.
    - "async": Downpour SGD (Dean et al., "Large Scale Distributed Deep Networks", 2012): each push is applied when it
      comes, and nobody waits. A gradient may be of older parameters than those that it changes.
    - "bounded": stale synchronous parallel (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
      Parameter Server", 2013): the same, but no worker is more than `max_staleness` steps ahead of the slowest.

    Args:
        model_fn: Makes the model, the same on all workers and servers but for its values: those of the servers count.
        optimizer_fn: Makes a server's optimizer from its share of the parameters, a list of (name, parameter), which
            torch's optimizers take as it is. Runs on servers only.
        mode: "sync", "async" or "bounded".
        max_staleness: Of "bounded", in steps; 0: no worker begins a step before all have ended the one before.
        scheduler_fn: Makes a learning-rate schedule from a server's optimizer. It steps after every update: once for
            all workers in "sync", once for each push in the other modes.
        max_norm: Clip the gradient of each update to this norm, over the parameters of all servers: the mean over
            workers in "sync", each push by itself in the other modes.
        transfer_dtype: torch.bfloat16 or torch.float16: gradients and parameters travel in 16 bits. Servers add and
            keep them in the parameters' own dtype; workers compute with rounded ones. None: nothing is rounded.
        checkpoint: A directory for checkpoints, which are those of `Checkpointer`, with a model, an optimizer, a loader
            and, with `scheduler_fn`, a scheduler. The run begins with the newest that is there, also when the launcher
            starts all processes again after a server was lost. Server 0 holds a whole model and optimizer for it. None:
            no checkpoints.
        every_steps: Save after so many updates; None: not by their number.
        every_minutes: Save after so many minutes; None: not by time. The last state is always saved.
        keep: Number of newest checkpoints to keep.
        device: Where a worker's model is. Servers compute on the CPU.
        interface: The network interface to listen on; None: loopback on one node, else the one that leads to rank 0.
        timeout_s: How long a worker waits for others in a step, and all at the start and the end.

    Raises:
        ConfigurationError: An argument is wrong, there is no server or no worker, or model or optimizer can't be
            trained so. On all of them.
        MismatchError: A process has another model. On all of them.
    """
    checks.function(f"{WHO}model_fn", model_fn)
    checks.function(f"{WHO}optimizer_fn", optimizer_fn)
    if scheduler_fn is not None:
        checks.function(f"{WHO}scheduler_fn", scheduler_fn, otherwise="None")
    chosen_mode = _choose_mode(mode, max_staleness, max_norm)
    if transfer_dtype is not None and transfer_dtype not in _TRANSFER_DTYPES:
        raise checks.refuse(f"{WHO}transfer_dtype", transfer_dtype, "torch.bfloat16, torch.float16 or None")
    options = None
    if checkpoint is not None:
        if not isinstance(checkpoint, str | os.PathLike) or not os.fspath(checkpoint):
            raise checks.refuse(f"{WHO}checkpoint", checkpoint, "the path of a directory, or None")
        if every_steps is not None:
            checks.whole(f"{WHO}every_steps", every_steps, least=1, otherwise="None")
        if every_minutes is not None:
            checks.number(f"{WHO}every_minutes", every_minutes, above=0, otherwise="None")
        checks.whole(f"{WHO}keep", keep, least=1)
        options = CheckpointOptions(str(os.fspath(checkpoint)), every_steps, every_minutes, keep)
    elif every_steps is not None:
        raise checks.refuse(f"{WHO}every_steps", every_steps, "only with checkpoint=, the directory to save in")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise checks.refuse(f"{WHO}device", device, "a device, as 'cpu' or 'cuda:0'") from None
    if interface is not None:
        checks.text(f"{WHO}interface", interface, otherwise="None")
    timeout_s = checks.number(f"{WHO}timeout_s", timeout_s, above=0, most=worlds.LONGEST_TIMEOUT_S)
    recipe = Recipe(model_fn, optimizer_fn, scheduler_fn, chosen, transfer_dtype)
    return ParameterServer(recipe, chosen_mode, options, interface, timeout_s)


def _choose_mode(mode: Any, max_staleness: Any, max_norm: Any) -> Mode:
    """Raise for options that the mode doesn't have.

    Raises:
        ConfigurationError: See above.
    """
    name = checks.choice(f"{WHO}mode", mode, MODES)
    bound = 0
    if name == "bounded":
        bound = checks.whole(f"{WHO}max_staleness", max_staleness, least=0)
    elif max_staleness is not None:
        raise checks.refuse(f"{WHO}max_staleness", max_staleness, f"only with mode='bounded', not {name!r}")
    if max_norm is not None:
        max_norm = checks.number(f"{WHO}max_norm", max_norm, above=0, otherwise="None")
    return Mode(name, bound, max_norm)


class ParameterServer:
    """A worker's handle; made by `parameter_server`.

    Attributes:
        model: This worker's model, with the parameters of its last step or pull. Module buffers, as the statistics of
            BatchNorm, are this worker's own.
        worker: Number of this worker, from 0.
        num_workers: How many there are.
        num_servers: How many; 0 in a world of one.
    """

    CALLS = ("buffers",)  # by the first server, while it saves

    model: nn.Module
    worker: int
    num_workers: int
    num_servers: int

    def __init__(
        self, recipe: Recipe, mode: Mode, options: CheckpointOptions | None, interface: str | None, timeout_s: float
    ) -> None:
        self._recipe, self._mode, self._options = recipe, mode, options
        self._interface, self._timeout_s = interface, timeout_s
        self._connection: Connection | None = None
        self._checkpoints: Checkpoints | None = None  # in a world of one
        self._made: Made | None = None
        self._versions: list[int] = []
        self._state = "not begun"
        self._weight = 0.0
        self._num_steps = 0
        self._num_queues = 0
        self._restore = contextlib.ExitStack()

    def __repr__(self) -> str:
        return f"<ParameterServer {self._mode.name}, {self._state}, {self._num_steps} steps>"

    def __enter__(self) -> ParameterServer:
        with excepthook.reporting_mistakes():
            if self._state != "not begun":
                raise UsageError(
                    f"{WHO}{self!r} was used before. Call evenstep.parameter_server again for another run."
                )
            before = worlds.initialised()
            if before is not None and before.world_size > 1:
                raise UsageError(
                    f"{WHO}there is a world of {before.world_size} ranks (evenstep.init, or a process group), whose "
                    f"collectives would wait for servers. Leave it out: parameter_server connects workers and servers "
                    f"itself."
                )
            if environment.settings().measurement is not None:
                raise ConfigurationError(
                    f"{WHO}evenstep bench measures ranks that all train, and can't compare numbers of servers. Start "
                    f"the script with `evenstep run --servers N` and look at ps.traffic(), which evenstep.Logger "
                    f"writes: pushes and bytes a second, and the share of the time that is waited for each server."
                )
            placement = environment.current_placement()
            roles = assign_roles(placement, environment.num_servers())
            self._state = "beginning"
            self._traffic = Traffic(max(1, roles.num_servers))
            self.worker, self.num_workers, self.num_servers = roles.rank, roles.num_workers, roles.num_servers
            if roles.is_alone:
                self._begin_alone(roles)
            else:
                self._join(placement, roles)
            made = self._validate_made()
            made.tables.attach(
                f"{roles.name} (rank {roles.rank})",
                len(made.division),
                self._look_up,
                may_prefetch=self._mode.name != "sync",
            )
            self._state = "training"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                try:
                    self._leave(connection)
                except BaseException as late:
                    # Servers would wait for ever for whom this worker has given up.
                    with contextlib.suppress(EvenstepError):
                        connection.leave(f"worker {self.worker} failed: {type(late).__name__}: {late}")
                    connection.close(gracefully=False)
                    raise
                connection.close(gracefully=True)
            else:
                # The first error counts, whatever else goes wrong now.
                with contextlib.suppress(EvenstepError):
                    connection.leave(f"worker {self.worker} failed: {type(error).__name__}: {error}")
                connection.close(gracefully=False)
        finally:
            self._state = "ended"
            self._validate_made().tables.detach()
            self._restore.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, weight: float | Tensor = 1.0) -> None:
        """Add `weight` times the gradient of `loss` to those of this step.

        A step's gradient is the mean by weight: over all backward passes of all workers in "sync", and over this
        worker's in the other modes. With `weight=len(x)` and a mean loss that is the mean over samples.

        Args:
            loss: A scalar.
            weight: Not negative; 0: the loss counts for nothing, whatever its value.

        Raises:
            ConfigurationError: `loss` is no scalar, or `weight` no such number.
            UsageError: Not inside the `with` statement.
        """
        self._validate_training("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise checks.refuse("ps.backward: loss", loss, "a tensor of one number")
        number = checks.number("ps.backward: weight", weight, least=0)
        if number == 0:
            return
        loss.backward(torch.full_like(loss, number))  # type: ignore[no-untyped-call]
        self._weight += number

    def step(self) -> None:
        """Push the gradients of the passes since the last step, and take the parameters that come back.

        A worker without samples for a step calls it without `backward`: its step counts nothing. Gradients are
        released.

        Raises:
            NonFiniteError: A gradient is infinite or not a number, or too large for `transfer_dtype`; nothing was sent.
            UsageError: A gradient is sparse, or came without `ps.backward`, or this is not inside the `with` statement.
            PeerLostError: A server has gone, or another worker failed.
            CollectiveTimeoutError: The others have not come in time; the text names them.
        """
        connection = self._validate_training("step")
        made = self._validate_made()
        pushes = []
        rows = made.tables.gradients(len(made.division), self._recipe.transfer_dtype)
        for server, (indices, version) in enumerate(zip(made.division, self._versions, strict=True)):
            like = [made.trained[index] for index in indices]
            gradients = [parameter.grad for parameter in like]
            self._validate_layouts(indices, gradients)
            packed = pack(like, gradients, self._recipe.transfer_dtype)
            if not _are_finite([*packed, *(each.values for each in rows[server].values())]):
                raise self._explain_not_finite(indices, gradients)
            used = [each is not None for each in gradients]
            if self._weight == 0 and (any(used) or rows[server]):
                raise UsageError(
                    "ps.step: there are gradients, and no ps.backward since the last step. Call ps.backward(loss, "
                    "weight=len(x)) instead of loss.backward(): the weight travels with the gradients."
                )
            pushes.append(Pushed(self._weight, version, used, packed, rows[server]))
        self._release_gradients()
        self._load(self._ask(connection, pushes))
        made.tables.begin_step()
        self._num_steps += 1
        if self._checkpoints is not None:
            self._save_alone(connection, self._checkpoints)

    def queue(self, *, prefetch: Callable[[Any], object] | None = None) -> SharedBatches:
        """Divides the batches of a `DataLoader` over workers: each once an epoch, whoever is fastest.

        For `DataLoader(queue=)`, one for each loader; workers make their loaders in the same order. A batch counts as
        done when `ps.step` has pushed its gradients. What a worker holds when it leaves goes to the others.

        Args:
            prefetch: Called with a worker's next batch before the loop has the present one, as in `lambda batch:
                ps.model.users.prefetch(batch[0])`: rows of embeddings come while the present batch is computed, and
                are those of before its step (see `RemoteEmbedding.prefetch`). The loop calls `ps.step` once for each
                batch then. None: no batch is taken ahead.

        Raises:
            ConfigurationError: `prefetch` is no function.
            UsageError: Not inside the `with` statement.
        """
        self._validate_training("queue")
        if prefetch is not None:
            checks.function("ps.queue: prefetch", prefetch, otherwise="None")
        self._num_queues += 1
        return SharedBatches(self, self._num_queues, prefetch)

    def pull(self) -> None:
        """Take the newest parameters, as before an evaluation.

        Raises:
            UsageError: Not inside the `with` statement.
            PeerLostError: A server has gone, or a worker has failed.
        """
        self._load(self._ask(self._validate_training("pull"), None))

    def traffic(self) -> dict[str, float]:
        """This worker's numbers since the last call of this, for `Logger.log`.

        Local: the others need not call it.

        Returns:
            "pushes_per_s", "pulls_per_s", "lookups_per_s"; "sent_bytes_per_s" and "received_bytes_per_s", of tensors;
            "waiting_share", the part of the time in which this worker waited for servers; "staleness", the mean of its
            gradients that were applied (of all so far, and NaN before the first). Bytes and shares also for every
            server, as "server_0/waiting_share": a worker waits for all of them at once, so these overlap.

        Raises:
            UsageError: Not inside the `with` statement.
            PeerLostError: A server has gone.
        """
        counts = self.staleness(by_worker=True).get(self.worker, {})
        applied = sum(counts.values())
        mean = sum(late * count for late, count in counts.items()) / applied if applied else math.nan
        return self._traffic.rates() | {"staleness": mean}

    def staleness(self, *, by_worker: bool = False) -> Any:
        """How many gradients were applied how stale: {updates in between: gradients}.

        The number counts the updates between the parameters that a gradient was computed with and those that it has
        changed. What was pushed before the run was started again isn't counted.

        Args:
            by_worker: {worker: such a histogram} instead.

        Raises:
            UsageError: Not inside the `with` statement.
            PeerLostError: A server has gone.
        """
        found = self._validate_training("staleness").staleness()
        if by_worker:
            return found
        total: Counter[int] = Counter()
        for counts in found.values():
            total.update(counts)
        return dict(sorted(total.items()))

    def buffers(self) -> dict[str, Tensor]:
        """Copies of this worker's module buffers, by name."""
        return {name: each.detach().cpu().clone() for name, each in self.model.named_buffers()}

    # Beginning.

    def _begin_alone(self, roles: Roles) -> None:
        made = self._made = self._recipe.make(roles)
        self._versions = [0]
        shard, queue, version = self._recipe.make_shard(made, 0, self._mode), BatchQueue(), 0
        made.to(self._recipe.device)
        self.model = made.model
        if self._options is not None:
            self._checkpoints = self._recipe.make_checkpoints(self._options, roles)
            self._restore.callback(self._checkpoints.close)
            found = self._checkpoints.restore()
            if found is not None:
                version = found.version
                shard.load(found.shares[0])
                queue.load_state(found.queue)
                self._take_untrained(self._checkpoints.untrained())
        self._connection = LocalConnection(shard, self._mode, queue, version)
        self._load(self._connection.start(None, lambda _: None)())

    def _join(self, placement: environment.Placement, roles: Roles) -> None:
        # Only where it is used. Builds of torch without RPC may lack the module.
        if importlib.util.find_spec("torch.distributed.rpc") is None:
            raise ConfigurationError(f"{WHO}this build of torch has no torch.distributed.rpc.")
        from evenstep.parameter_servers.remote import Endpoint
        from evenstep.parameter_servers.worker.rpc_connection import RpcConnection

        hook = excepthook.install(placement)
        self._restore.callback(_restore_hook, hook)
        environment.claim_rank()
        choose_gloo_interface(placement)
        store = open_store(placement, self._timeout_s)
        error: Exception | None = None
        shard: Shard | None = None
        try:
            self._made = self._recipe.make(roles)
            if roles.is_server:
                shard = self._recipe.make_shard(self._made, roles.rank - roles.num_workers, self._mode)
        except Exception as raised:
            error = raised
        facts = {
            "mode": self._mode.name,
            **{name: value for name, value in asdict(self._mode).items() if name != "name"},
            **({} if self._made is None else self._made.tables.describe()),
            "transfer_dtype": str(self._recipe.transfer_dtype),
            "checkpoint": None if self._options is None else self._options.directory,
            "EVENSTEP_SERVERS": roles.num_servers,
        }
        compare(store, roles, facts, None if self._made is None else self._made.model, error)
        made = self._validate_made()
        if shard is not None:
            self._serve(store, roles, shard)
        self._versions = [0] * roles.num_servers
        made.to(self._recipe.device)
        self.model = made.model
        endpoint = Endpoint(store, roles.name, self, interface=self._interface, timeout_s=self._timeout_s)
        try:
            connection = RpcConnection(roles, store, endpoint, self._timeout_s)
        except BaseException:
            endpoint.close()
            raise
        self._connection = connection
        self._take_untrained(connection.initial())
        self._load(self._ask(connection, None))

    def _serve(self, store: Store, roles: Roles, shard: Shard) -> None:
        """Be a server: [Note: a server's process ends]."""
        from evenstep.parameter_servers.server.serving import Server

        made, recipe, mode = self._validate_made(), self._recipe, self._mode
        number = roles.rank - roles.num_workers
        checkpoints = None
        if self._options is not None and number == 0:
            checkpoints = recipe.make_checkpoints(self._options, roles)
        server = Server(
            roles,
            store,
            mode,
            shard,
            {name: tensor.detach().clone() for name, tensor in untrained(made.model).items()},
            checkpoints=checkpoints,
            has_checkpoints=self._options is not None,
            interface=self._interface,
            timeout_s=self._timeout_s,
        )
        self._made = None
        del made  # a server needs only its share
        server.serve()
        self._restore.close()
        raise SystemExit(0)

    def _take_untrained(self, tensors: Mapping[str, Tensor]) -> None:
        mine = untrained(self.model)
        with torch.no_grad():
            for name, tensor in tensors.items():
                mine[name].copy_(tensor)

    def _leave(self, connection: Connection) -> None:
        if self._checkpoints is not None:
            self._save_alone(connection, self._checkpoints, is_last=True)
        self._load(connection.leave(""))

    def _save_alone(self, connection: Connection, checkpoints: Checkpoints, *, is_last: bool = False) -> None:
        assert isinstance(connection, LocalConnection)
        stops = checkpoints.stop_reason is not None
        if is_last or stops or checkpoints.is_due(self._versions[0]):
            share, queue = connection.save()
            checkpoints.save([share], queue, self.buffers())
        if stops:
            checkpoints.stop()

    def _release_gradients(self) -> None:
        for parameter in self._validate_made().trained:
            parameter.grad = None
        self._validate_made().tables.release_gradients()
        self._weight = 0.0

    # Training.

    def _validate_training(self, doing: str) -> Connection:
        if self._connection is None:
            raise UsageError(
                f"ps.{doing}: {self!r} has no connection to servers. Call it inside "
                f"`with evenstep.parameter_server(...) as ps:`."
            )
        return self._connection

    def _validate_made(self) -> Made:
        assert self._made is not None
        return self._made

    def _validate_layouts(self, indices: list[int], gradients: list[Tensor | None]) -> None:
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise UsageError(
                    f"{self._gradient_of(index)} is sparse, which can't be pushed. Use sparse=False in the embedding."
                )

    def _explain_not_finite(self, indices: list[int], gradients: list[Tensor | None]) -> NonFiniteError:
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None and not _are_finite([gradient]):
                return NonFiniteError(
                    f"{self._gradient_of(index)} is infinite or not a number; nothing was sent. Look at the loss."
                )
        return NonFiniteError(
            f"worker {self.worker}, step {self._num_steps}: a gradient times its weight ({self._weight:g}) is too "
            f"large for transfer_dtype={self._recipe.transfer_dtype}; nothing was sent. Use torch.bfloat16, or smaller "
            f"weights."
        )

    def _gradient_of(self, index: int) -> str:
        name = self._validate_made().names[index]
        return f"worker {self.worker}, step {self._num_steps}: the gradient of {name!r}"

    def _ask(self, connection: Connection, pushed: Sequence[Pushed] | None) -> list[Answer]:
        kind, parts = ("pull", ()) if pushed is None else ("push", pushed)
        return self._traffic.call(kind, parts, lambda on_answer: connection.start(pushed, on_answer))()

    def _look_up(self, table: str, ids: Sequence[Tensor]) -> Callable[[], list[Rows]]:
        """See `StartLookup`."""
        connection = self._validate_training("model")
        return self._traffic.call("lookup", ids, lambda on_answer: connection.look_up(table, ids, on_answer))

    def _load(self, answers: list[Answer]) -> None:
        made = self._validate_made()
        for server, (indices, answer) in enumerate(zip(made.division, answers, strict=True)):
            if answer.failure:
                raise PeerLostError(
                    f"worker {self.worker} (rank {self.worker}): server {server} ends: {answer.failure}"
                )
            like = [made.trained[index] for index in indices]
            packed = to_device(answer.parameters, self._recipe.device)
            with torch.no_grad():
                for parameter, new in zip(like, unpack(like, packed), strict=True):
                    parameter.copy_(new)
            self._versions[server] = answer.version


class SharedBatches:
    """One loader's batches, divided over the workers of a run; made by `ParameterServer.queue`."""

    def __init__(self, ps: ParameterServer, number: int, prefetch: Callable[[Any], object] | None) -> None:
        self._ps, self._number, self._prefetch = ps, number, prefetch
        self._num_passes: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<SharedBatches {self._number} of {self._ps!r}>"

    def take(
        self, epoch: int, num_batches: int, facts: Mapping[str, Any], load: Callable[[int, int], Positioned]
    ) -> Iterator[Positioned]:
        """This worker's batches of an epoch, each taken when it is asked for, or, with `prefetch`, one before.

        In "sync" a worker without a batch takes part in the others' steps until all batches are done. In the other
        modes it goes on at once.

        Args:
            epoch: Number of the epoch.
            num_batches: Of it.
            facts: What decides which samples a batch has, in JSON types.
            load: Loads a batch, by its epoch and its number in it. The epoch is an earlier one where a batch of a
                worker came back late.

        Yields:
            What `load` returns.

        Raises:
            MismatchError: Another worker's loader has other batches.
            PeerLostError: A server has gone, or another worker failed.
            UsageError: Not inside the `with` statement, or, with `prefetch`, a batch without a step.
        """
        ps, text = self._ps, json.dumps(facts, sort_keys=True)
        # A pass that was left early, as by a look at a first batch, goes on: a new one would be the whole epoch again.
        wanted = (self._number, epoch, self._num_passes[epoch])
        ahead: _Ahead | None = None
        held: int | None = None
        try:
            while True:
                connection = ps._validate_training("queue")
                held = None
                if ahead is not None:
                    if connection.num_pushes + 1 != ahead.push:
                        raise UsageError("ps.queue(prefetch=): call ps.step once for each batch of the loop.")
                    present, ahead = ahead.loaded, None
                else:
                    taken = self._take(connection, (wanted, num_batches, text))
                    if taken.batch < 0:
                        if taken.is_over or ps._mode.name != "sync":
                            self._num_passes[epoch] += 1
                            return
                        ps.step()
                        continue
                    present = load(taken.epoch, taken.batch)
                if self._prefetch is not None:
                    ahead = self._take_ahead(connection, self._prefetch, (wanted, num_batches, text), load)
                held = connection.num_pushes + 1
                yield present
        finally:
            if ps._connection is not None:
                if held == ps._connection.num_pushes + 1:  # the loop was left before the batch's step
                    ps._connection.give_back(held)
                if ahead is not None:
                    ps._connection.give_back(ahead.push)

    def _take(self, connection: Connection, wanted: tuple[Pass, int, str]) -> Taken:
        """The batch of the next step."""
        ps = self._ps
        taken = connection.take(connection.num_pushes + 1, *wanted)
        if taken.failure:
            kind = MismatchError if "another loader" in taken.failure else PeerLostError
            raise kind(f"worker {ps.worker} (rank {ps.worker}): {taken.failure}")
        return taken

    def _take_ahead(
        self,
        connection: Connection,
        prefetch: Callable[[Any], object],
        wanted: tuple[Pass, int, str],
        load: Callable[[int, int], Positioned],
    ) -> _Ahead | None:
        """The batch after the present one; None: there is none now, and why is said when it is asked for again."""
        push = connection.num_pushes + 2
        taken = connection.take(push, *wanted)
        if taken.batch < 0:
            return None
        loaded = load(taken.epoch, taken.batch)
        prefetch(loaded[1].batch)
        return _Ahead(push, loaded)


class _Ahead(NamedTuple):
    """A batch that was taken before the step of the one before it.

    Attributes:
        push: With which its gradients come.
        loaded: It.
    """

    push: int
    loaded: Positioned


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    # A sum that is finite has no other parts. Flags of all elements take memory, and longer than all else in a step.
    return all(bool(torch.isfinite(each.sum())) or bool(torch.isfinite(each).all()) for each in tensors)


def _restore_hook(hook: Any) -> None:
    sys.excepthook = hook
