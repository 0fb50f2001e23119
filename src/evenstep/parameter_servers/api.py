"""`evenstep.parameter_server`: training with parameter servers, and a worker's handle.

[Note: a server's process ends]

The script is the same for workers and servers. On a server, entering the `with` statement serves until all workers have
left it. Python can't skip the statement's body, so the server's process ends there, with status 0. Only workers run the
body and the code after it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import checks
from evenstep import world as worlds
from evenstep.checkpoint.format.plan import Policy
from evenstep.checkpoint.save.stopping import StopSignals
from evenstep.errors import EXIT_PREEMPTED, ConfigurationError, NonFiniteError, UsageError
from evenstep.ground import environment
from evenstep.ground.compat.c_library import heap
from evenstep.ground.coordination.rendezvous_store import choose_gloo_interface, open_store
from evenstep.ground.environment import Placement
from evenstep.ground.health import excepthook
from evenstep.parameter_servers.batches import SharedBatches
from evenstep.parameter_servers.checkpoint import Checkpoints
from evenstep.parameter_servers.deciding.batch_queue import BatchQueue
from evenstep.parameter_servers.deciding.coordinator import Mode
from evenstep.parameter_servers.meeting import Meeting
from evenstep.parameter_servers.preparation import WHO, Made, Recipe, Roles, assign_roles, make_model
from evenstep.parameter_servers.server import Server
from evenstep.parameter_servers.shard import Shard, pack, unpack
from evenstep.parameter_servers.wire import Message
from evenstep.parameter_servers.worker import Direct, Servers
from evenstep.world import World

MODES = ("sync", "async", "bounded")


@excepthook.for_users
def parameter_server(
    model_fn: Callable[[], nn.Module],
    optimizer_fn: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    *,
    mode: str = "async",
    max_staleness: int | None = None,
    scheduler_fn: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
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
    serves until all workers have left, and the process ends there. In a world of one, the worker holds the parameters
    itself, without a port. Collective: every worker and server calls this. Don't call `evenstep.init` in the same
    script.

    Modes:

    - "sync": a step waits for all workers and applies the weighted mean of their gradients, as in one process.
    - "async": Downpour SGD (Dean et al., "Large Scale Distributed Deep Networks", 2012): each push is applied when it
      arrives, and nobody waits. A gradient may have been computed with older parameters than the ones it changes.
    - "bounded": stale synchronous parallel (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
      Parameter Server", 2013): like "async", but no worker is more than `max_staleness` steps ahead of the slowest.

    Args:
        model_fn: Makes the model, the same on all workers and servers. Its initial values may differ: the servers'
            values are used.
        optimizer_fn: Makes a server's optimizer from its share of the parameters, a list of (name, parameter), which
            torch's optimizers accept. Runs on servers only.
        mode: "sync", "async" or "bounded".
        max_staleness: For "bounded", in steps; 0: no worker begins a step before all have ended the step before.
        scheduler_fn: Makes a learning-rate schedule from a server's optimizer. It steps after every update: once for
            all workers in "sync", once for each push in the other modes.
        checkpoint: A directory for checkpoints, in the format of `Checkpointer`: a model, an optimizer, a loader and,
            with `scheduler_fn`, a scheduler. Each server writes its own part. The run begins with the newest
            checkpoint, if there is one. So it continues when the launcher has restarted all processes after the loss of
            a server. `optimizer_fn` is also called with all parameters, to number them. None: no checkpoints.
        every_steps: Save after each this many updates; None: not by updates.
        every_minutes: Save after each this many minutes; None: not by time. The last state is always saved.
        keep: Number of newest checkpoints to keep.
        device: The device of a worker's model. Servers compute on the CPU.
        interface: The network interface to listen on; None: loopback on one node, else the interface that leads to rank
            0.
        timeout_s: Seconds for which a worker waits for others in a step, and all processes wait at the start and the
            end.

    Raises:
        ConfigurationError: An argument is wrong, there is no server or no worker, or the model or the optimizer isn't
            supported. Raised on all processes.
        MismatchError: A process has another model, or other arguments. Raised on all processes.
    """
    checks.function(f"{WHO}model_fn", model_fn)
    checks.function(f"{WHO}optimizer_fn", optimizer_fn)
    if scheduler_fn is not None:
        checks.function(f"{WHO}scheduler_fn", scheduler_fn, otherwise="None")
    name, bound = checks.choice(f"{WHO}mode", mode, MODES), 0
    if name == "bounded":
        bound = checks.whole(f"{WHO}max_staleness", max_staleness, least=0)
    elif max_staleness is not None:
        raise checks.refuse(f"{WHO}max_staleness", max_staleness, f"only with mode='bounded', not {name!r}")
    policy = Policy(every_steps, every_minutes, keep)
    if checkpoint is None and every_steps is not None:
        raise checks.refuse(f"{WHO}every_steps", every_steps, "only with checkpoint=, the directory to save in")
    if checkpoint is not None and (not isinstance(checkpoint, str | os.PathLike) or not os.fspath(checkpoint)):
        raise checks.refuse(f"{WHO}checkpoint", checkpoint, "the path of a directory, or None")
    directory = None if checkpoint is None else str(os.fspath(checkpoint))
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise checks.refuse(f"{WHO}device", device, "a device, as 'cpu' or 'cuda:0'") from None
    if interface is not None:
        checks.text(f"{WHO}interface", interface, otherwise="None")
    timeout_s = checks.number(f"{WHO}timeout_s", timeout_s, above=0, most=worlds.LONGEST_TIMEOUT_S)
    recipe = Recipe(model_fn, optimizer_fn, scheduler_fn, directory, policy, chosen, interface, timeout_s)
    return ParameterServer(recipe, Mode(name, bound))


class ParameterServer:
    """A worker's handle. `parameter_server` makes it.

    Attributes:
        model: This worker's model, with the parameters of its last step or pull. Module buffers, such as the statistics
            of BatchNorm, are this worker's own.
        mode: "sync", "async" or "bounded".
        worker: Number of this worker, from 0.
        num_workers: Number of workers.
        num_servers: Number of servers; 0 in a world of one.
    """

    model: nn.Module
    worker: int
    num_workers: int
    num_servers: int

    def __init__(self, recipe: Recipe, mode: Mode) -> None:
        self._recipe, self._mode, self.mode = recipe, mode, mode.name
        self._servers: Servers | None = None
        self._made: Made
        self._shard: Shard  # the server in this process
        self._versions: list[int] = []
        self._state = "not begun"
        self._weight = 0.0
        self._buffers: dict[str, Tensor] = {}  # values of the module buffers when they were last sent
        self._leads = False
        self._num_steps = self._num_queues = 0
        self._signals: World | None = None
        self._at_end = contextlib.ExitStack()

    def __repr__(self) -> str:
        return f"<ParameterServer {self.mode}, {self._state}, {self._num_steps} steps>"

    def __enter__(self) -> ParameterServer:
        with excepthook.reporting_mistakes():
            if self._state != "not begun":
                raise UsageError(f"{WHO}{self!r} was used before. Call evenstep.parameter_server again for a new run.")
            before = worlds.initialised()
            if before is not None and before.world_size > 1:
                raise UsageError(
                    f"{WHO}there is a world of {before.world_size} ranks (evenstep.init, or a process group), whose "
                    f"collectives would wait for servers. Leave evenstep.init or the process group out: "
                    f"parameter_server connects workers and servers itself."
                )
            if environment.settings().measurement is not None:
                raise ConfigurationError(
                    f"{WHO}evenstep bench measures ranks that all train, and can't compare numbers of servers. Start "
                    f"the script with `evenstep run --servers N`, and time its steps."
                )
            placement = environment.current_placement()
            roles = self._roles = assign_roles(placement, environment.num_servers())
            self.worker, self.num_workers, self.num_servers = roles.rank, roles.num_workers, roles.num_servers
            self._state = "beginning"
            heap.keep_freed_memory()
            try:
                self._begin_alone(roles) if roles.is_alone else self._join(placement, roles)
            except BaseException:
                self._at_end.__exit__(*sys.exc_info())
                raise
            for name, table in self._made.tables.items():
                table.attach(
                    name,
                    roles.name,
                    len(self._made.division),
                    lambda table, ids: self.servers("model").look_up(table, ids),
                    may_prefetch=self.mode != "sync",
                )
            self._state = "training"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        servers = self._servers
        if servers is None:
            return
        try:
            if worlds.ended_well(error):
                try:
                    self._load(servers.leave(""))
                except Exception as late:
                    error = late  # report it: the servers would wait for ever for the missing workers
                    raise
        finally:
            has_stopped = isinstance(error, SystemExit) and error.code == EXIT_PREEMPTED  # the servers know of it
            if not (has_stopped or worlds.ended_well(error)):  # only the first error is raised
                self._fail(servers, error)
            self._servers, self._state = None, "ended"
            servers.close()
            for table in self._made.tables.values():
                table.detach()
            self._at_end.__exit__(kind, error, tb)

    def _fail(self, servers: Servers, error: BaseException | None) -> None:
        """Send the servers, if they run, the reason why this worker ends."""
        with contextlib.suppress(Exception, SystemExit):
            servers.leave(f"worker {self.worker} failed: {type(error).__name__}: {error}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, weight: float | Tensor = 1.0) -> None:
        """Add the gradient of `loss` to this step's gradient, the weighted mean over the step's backward passes.

        `p.grad` always holds that mean, so that it can be clipped before `step`. In "sync" the applied gradient is the
        weighted mean over all workers, too. With `weight=len(x)` and a mean loss, it is the mean over samples.

        Args:
            loss: A scalar.
            weight: Not negative; 0: the loss is ignored, even if it is NaN.

        Raises:
            ConfigurationError: `loss` isn't a scalar, or `weight` isn't a number of at least 0.
            UsageError: Not inside the `with` statement.
        """
        servers = self.servers("backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise checks.refuse("ps.backward: loss", loss, "a tensor of one number")
        number = checks.number("ps.backward: weight", weight, least=0)
        servers.used, servers.begun = [*servers.used, *servers.begun], []
        if number == 0:
            return
        before, self._weight = self._weight, self._weight + number
        if before:
            part = before / self._weight
            gradients = [each.grad for each in self._made.trained.values() if each.grad is not None]
            torch._foreach_mul_(gradients, part)
            for table in self._made.tables.values():
                table.scale(part)
        loss.backward(torch.full_like(loss, number / self._weight))  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Push the gradients of the backward passes since the last step, and load the new parameters.

        A worker without samples for a step calls this without `backward`: its step has the weight 0. Gradients are
        dropped afterwards.

        Raises:
            NonFiniteError: A gradient is infinite or not a number. Nothing was sent, and the step's gradients are
                dropped. The step's batches are counted as done with the next step.
            UsageError: A gradient is sparse, or was computed without `ps.backward`; or the call is outside of the
                `with` statement.
            PeerLostError: A server has gone, or another worker failed.
            CollectiveTimeoutError: Other workers are late; the message names them.
            SystemExit: With status 75: a stop was requested, and the run has been saved.
        """
        servers = self.servers("step")
        try:
            parts = self._parts()
        except NonFiniteError:
            self._release_gradients()
            raise
        if self._signals is not None and self._signals.stop_reason is not None:
            self._signals.stop_reason = None
            servers.first("stop")
        buffers = self._changed_buffers() if self._leads else {}
        self._release_gradients()
        names, values = list(buffers), list(buffers.values())
        self._load(servers.push(parts, version=self._versions[0], buffers=names, buffer_values=values))
        for table in self._made.tables.values():
            table.begin_step()
        self._num_steps += 1

    def queue(self, *, prefetch: Callable[[Any], object] | None = None) -> SharedBatches:
        """Divide the batches of a `DataLoader` over workers: each batch once an epoch, each worker at its own speed.

        Pass the result to `DataLoader(queue=)`, one for each loader. Workers make their loaders in the same order. A
        batch counts as done when `ps.step` has pushed its gradients. Batches that a worker holds when it leaves go to
        the others.

        Args:
            prefetch: Called with a worker's next batch before the loop has the present one, as in `lambda batch:
                ps.model.users.prefetch(batch[0])`: rows of embeddings arrive while the present batch is computed, with
                their values before its step (see `RemoteEmbedding.prefetch`). The loop then has to call `ps.step` once
                for each batch. None: no batch is taken ahead.

        Raises:
            ConfigurationError: `prefetch` isn't a function.
            UsageError: Not inside the `with` statement.
        """
        self.servers("queue")
        if prefetch is not None:
            checks.function("ps.queue: prefetch", prefetch, otherwise="None")
        self._num_queues += 1
        step = self.step if self.mode == "sync" else None
        return SharedBatches(lambda: self.servers("queue"), step, self._num_queues, prefetch)

    def pull(self) -> None:
        """Load the newest parameters, as before an evaluation.

        Raises:
            UsageError: Not inside the `with` statement.
            PeerLostError: A server has gone, or a worker has failed.
        """
        self._load(self.servers("pull").pull())

    def staleness(self, *, by_worker: bool = False) -> Any:
        """A histogram of the staleness of gradients: {staleness: number of gradients}.

        The staleness of a gradient is the number of updates from the parameters with which it was computed to the
        parameters that it changed. Pushes from before a restart of the run aren't counted.

        Args:
            by_worker: Return {worker: its histogram} instead.

        Raises:
            UsageError: Not inside the `with` statement.
            PeerLostError: A server has gone.
        """
        found = {worker: dict(counts) for worker, counts in self.servers("staleness").first("staleness")["staleness"]}
        if by_worker:
            return found
        total: Counter[int] = Counter()
        for counts in found.values():
            total.update(counts)
        return dict(sorted(total.items()))

    # ------------------------------------------------------------------ a step

    def servers(self, doing: str) -> Servers:
        """The connection to the servers.

        Raises:
            UsageError: There is no connection.
        """
        if self._servers is None:
            raise UsageError(
                f"ps.{doing}: {self!r} has no connection to servers. Call it inside "
                f"`with evenstep.parameter_server(...) as ps:`."
            )
        return self._servers

    def _release_gradients(self) -> None:
        self._weight = 0.0
        for parameter in self._made.trained.values():
            parameter.grad = None
        for table in self._made.tables.values():
            table.release_gradients()

    def _parts(self) -> list[Message] | None:
        """The parts of the push, one for each server; None: this worker had no samples."""
        trained, names = list(self._made.trained.values()), list(self._made.trained)
        of_tables = {name: table.gradients() for name, table in self._made.tables.items()}
        parts = []
        for server, indices in enumerate(self._made.division):
            like = [trained[index] for index in indices]
            gradients = [each.grad for each in like]
            for index, gradient in zip(indices, gradients, strict=True):
                if gradient is not None and gradient.layout != torch.strided:
                    raise UsageError(
                        f"{self._gradient_of(names[index])} is sparse, which can't be pushed. Use sparse=False in the "
                        f"embedding."
                    )
            packed = pack(like, gradients) if self._weight else []
            if not _are_finite(packed):
                wrong = next(
                    names[index]
                    for index, gradient in zip(indices, gradients, strict=True)
                    if gradient is not None and not _are_finite([gradient])
                )
                raise NonFiniteError(
                    f"{self._gradient_of(wrong)} is infinite or not a number; nothing was sent. Check the loss."
                )
            rows = {name: found[server] for name, found in of_tables.items() if found and len(found[server].ids)}
            used = [each is not None for each in gradients]
            if not self._weight and (any(used) or rows):
                raise UsageError(
                    "ps.step: there are gradients, but no ps.backward since the last step. Call ps.backward(loss, "
                    "weight=len(x)) instead of loss.backward(): the servers need the weight of the gradients."
                )
            head = {"weight": self._weight, "used": used, "rows": [[name, each.lr] for name, each in rows.items()]}
            tensors = [tensor for each in rows.values() for tensor in (each.ids, each.values)]
            parts.append(Message(head, [*packed, *tensors]))
        return parts if self._weight else None

    def _gradient_of(self, name: str) -> str:
        return f"worker {self.worker}, step {self._num_steps}: the gradient of {name!r}"

    def _changed_buffers(self) -> dict[str, Tensor]:
        """Copies of the module buffers that changed since they were sent.

        Values are compared: torch's version counters miss some writes.
        """
        found = {}
        for name, each in self.model.named_buffers():
            before, now = self._buffers.get(name), each.detach().cpu()
            if before is None or before.dtype != now.dtype or not torch.equal(before, now):
                found[name] = self._buffers[name] = now.clone()
        return found

    def _load(self, answers: Sequence[Any]) -> None:
        trained = list(self._made.trained.values())
        for indices, answer in zip(self._made.division, answers, strict=True):
            like = [trained[index] for index in indices]
            packed = [each.to(self._recipe.device) for each in answer.tensors]  # one copy to the device per dtype
            with torch.no_grad():
                torch._foreach_copy_([each.detach() for each in like], unpack(like, packed)) if like else None
        self._versions = [answer.head["version"] for answer in answers]
        self._leads = answers[0].head["leads"]

    # ------------------------------------------------------------------ beginning

    def _begin_alone(self, roles: Roles) -> None:
        self._made = make_model(self._recipe.model_fn, 1)
        self._shard = self._made.make_shard(0, self._recipe)
        server = self._make_server(World.alone(device="cpu"))
        self._take(Servers([Direct(server)], roles, self._recipe.timeout_s))

    def _join(self, placement: Placement, roles: Roles) -> None:
        recipe = self._recipe
        hook = excepthook.install(placement)
        self._at_end.callback(setattr, sys, "excepthook", hook)
        environment.claim_rank()
        choose_gloo_interface(placement)
        store = open_store(placement, recipe.timeout_s)
        meeting = Meeting(
            store,
            placement,
            roles,
            interface=recipe.interface,
            secret=environment.run_secret(),
            timeout_s=recipe.timeout_s,
        )

        def prepare() -> dict[str, Any]:
            self._made = make_model(recipe.model_fn, roles.num_servers)
            if roles.is_server:
                self._shard = self._made.make_shard(roles.server, recipe)
            facts = {"mode": self.mode, "max_staleness": self._mode.max_staleness, "checkpoint": recipe.checkpoint}
            return facts | self._made.facts()

        meeting.agree(prepare)
        meeting.find(self._made)
        if roles.is_server:
            self._serve(meeting)
        clients = [meeting.connect(server) for server in range(roles.num_servers)]
        servers = Servers(clients, roles, recipe.timeout_s)
        try:
            if recipe.checkpoint is not None:
                self._signals = World.alone(device="cpu")
                self._at_end.callback(StopSignals(self._signals).close)
            self._take(servers)
        except BaseException as failed:
            self._fail(servers, failed)
            raise

    def _take(self, servers: Servers) -> None:
        """Load the servers' parameters at the start."""
        self._made.to(self._recipe.device)
        self.model, self._servers = self._made.model, servers
        mine = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        with torch.no_grad():
            for name, tensor in servers.join().items():
                mine[name].copy_(tensor)
        self._buffers = {name: each.detach().cpu().clone() for name, each in self.model.named_buffers()}
        self._load(servers.pull())

    def _serve(self, meeting: Meeting) -> None:
        """Serve, and end the process: see [Note: a server's process ends]."""
        world = World.alone(device="cpu") if self._recipe.checkpoint is None else meeting.open_world()
        server = self._make_server(world)
        del self._made  # a server needs only its share
        leader = None if self._roles.server == 0 else meeting.connect(0)
        server.serve(meeting.listen(server, self._at_end), leader)
        self._at_end.close()
        raise SystemExit(0)

    def _make_server(self, world: World) -> Server:
        recipe, made, shard, queue, checkpoints = self._recipe, self._made, self._shard, BatchQueue(), None
        trained = {id(each) for each in made.trained.values()}
        untrained = {
            name: each.detach().cpu().clone()
            for name, each in [*made.model.named_parameters(), *made.model.named_buffers()]
            if id(each) not in trained
        }
        if recipe.checkpoint is not None:
            untrained = world.broadcast_object(untrained)
            checkpoints = Checkpoints(recipe, made, shard, world)
            self._at_end.push(lambda kind, error, _: checkpoints.close(error))
            state, saved = checkpoints.restore(shard, untrained)
            queue.load_state(state)
            untrained |= saved
        return Server(self._roles, self._mode, shard, untrained, queue, checkpoints, timeout_s=recipe.timeout_s)


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    # If the sum is finite, all elements are. A flag for each element would need memory, and more time than the rest of
    # a step.
    return all(bool(torch.isfinite(each.sum())) or bool(torch.isfinite(each).all()) for each in tensors)
