"""`evenstep.parameter_server`: a script's training with parameter servers, and the worker's handle.

[Note: a server's process ends]

The script is the same for workers and servers. On a server the `with` statement serves until all workers have left it,
and python can't skip its body; so the server's process ends there, with status 0. What stands behind is the workers'.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from evenstep import checks, environment
from evenstep import world as worlds
from evenstep.coordination.rendezvous_store import choose_gloo_interface, open_store
from evenstep.errors import ConfigurationError, EvenstepError, MismatchError, NonFiniteError, PeerLostError, UsageError
from evenstep.health import excepthook
from evenstep.parameter_servers.connections import Connection, LocalConnection, untrained
from evenstep.parameter_servers.layout import Division, pack, plan_division, unpack
from evenstep.parameter_servers.preparation import WHO, compare, make_optimizer, validate_model
from evenstep.parameter_servers.roles import Roles, assign_roles
from evenstep.parameter_servers.shard import Answer, Mode, Pushed, Shard

MODES = ("sync", "async", "bounded")


def parameter_server(
    model_fn: Callable[[], nn.Module],
    optimizer_fn: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    *,
    mode: str = "async",
    max_staleness: int | None = None,
    delay_compensation: float = 0.0,
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
        delay_compensation: Of "async" and "bounded": lambda of Zheng et al., "Asynchronous Stochastic Gradient Descent
            with Delay Compensation", 2017: lambda * g * g * (w_now - w_then) is added to each gradient g. 0: not.
        device: Where a worker's model is. Servers compute on the CPU.
        interface: The network interface to listen on; None: loopback on one node, else the one that leads to rank 0.
        timeout_s: How long a worker waits for others in a step, and all at the start and the end.

    Raises:
        ConfigurationError: An argument is wrong, there is no server or no worker, or model or optimizer can't be
            trained so. On all of them.
        MismatchError: A process has another model. On all of them.
    """
    with excepthook.reporting_mistakes():
        checks.function(f"{WHO}model_fn", model_fn)
        checks.function(f"{WHO}optimizer_fn", optimizer_fn)
        name = checks.choice(f"{WHO}mode", mode, MODES)
        if name == "bounded":
            bound = checks.whole(f"{WHO}max_staleness", max_staleness, least=0)
        elif max_staleness is not None:
            raise checks.refuse(f"{WHO}max_staleness", max_staleness, f"only with mode='bounded', not {name!r}")
        else:
            bound = 0
        compensation = checks.number(f"{WHO}delay_compensation", delay_compensation, least=0)
        if compensation and name == "sync":
            raise checks.refuse(
                f"{WHO}delay_compensation", delay_compensation, "0 with mode='sync', where no gradient is late"
            )
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError):
            raise checks.refuse(f"{WHO}device", device, "a device, as 'cpu' or 'cuda:0'") from None
        if interface is not None:
            checks.text(f"{WHO}interface", interface, wanted="the name of a network interface", otherwise="None")
        timeout_s = checks.number(f"{WHO}timeout_s", timeout_s, above=0)
    return ParameterServer(model_fn, optimizer_fn, Mode(name, bound, compensation), chosen, interface, timeout_s)


class ParameterServer:
    """A worker's handle; made by `parameter_server`.

    Attributes:
        model: This worker's model, with the parameters of its last step or pull. Module buffers, as the statistics of
            BatchNorm, are this worker's own.
        worker: Number of this worker, from 0.
        num_workers: How many there are.
        num_servers: How many; 0 in a world of one.
    """

    model: nn.Module
    worker: int
    num_workers: int
    num_servers: int

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        optimizer_fn: Callable[..., Any],
        mode: Mode,
        device: torch.device,
        interface: str | None,
        timeout_s: float,
    ) -> None:
        self._model_fn, self._optimizer_fn = model_fn, optimizer_fn
        self._mode, self._device = mode, device
        self._interface, self._timeout_s = interface, timeout_s
        self._connection: Connection | None = None
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
            placement = environment.current_placement()
            roles = assign_roles(placement, environment.num_servers())
            self._state = "beginning"
            self.worker, self.num_workers, self.num_servers = roles.rank, roles.num_workers, roles.num_servers
            if roles.is_alone:
                shard, _ = self._build(roles)
                assert shard is not None
                self._connection = LocalConnection(shard, {})
            else:
                self._join(placement, roles)
            self._state = "training"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if error is None or (isinstance(error, SystemExit) and not error.code):
                try:
                    self._load(connection.leave(""))
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
            NonFiniteError: A gradient is infinite or not a number; nothing was sent.
            UsageError: A gradient is sparse, or this is not inside the `with` statement.
            PeerLostError: A server has gone, or another worker failed.
            CollectiveTimeoutError: The others have not come in time; the text names them.
        """
        connection = self._validate_training("step")
        pushes = []
        for indices, version in zip(self._division, self._versions, strict=True):
            like = [self._trained[index] for index in indices]
            gradients = [parameter.grad for parameter in like]
            self._validate_gradients(indices, gradients)
            pushes.append(
                Pushed(self._weight, version, [each is not None for each in gradients], pack(like, gradients))
            )
        for parameter in self._trained:
            parameter.grad = None
        self._weight = 0.0
        self._load(connection.push(pushes))
        self._num_steps += 1

    def queue(self) -> SharedBatches:
        """Divides the batches of a `DataLoader` over workers: each once an epoch, whoever is fastest.

        For `DataLoader(queue=)`, one for each loader; workers make their loaders in the same order. A batch counts as
        done when `ps.step` has pushed its gradients. What a worker holds when it leaves goes to the others.

        Raises:
            UsageError: Not inside the `with` statement.
        """
        self._validate_training("queue")
        self._num_queues += 1
        return SharedBatches(self, self._num_queues)

    def pull(self) -> None:
        """Take the newest parameters, as before an evaluation.

        Raises:
            UsageError: Not inside the `with` statement.
            PeerLostError: A server has gone, or a worker has failed.
        """
        self._load(self._validate_training("pull").pull())

    def staleness(self) -> list[dict[int, int]]:
        """For each server how many gradients were applied how stale: {updates in between: gradients}.

        The number counts the updates of that server's parameters between those that a gradient was computed with and
        those that it has changed.

        Raises:
            UsageError: Not inside the `with` statement.
            PeerLostError: A server has gone.
        """
        return self._validate_training("staleness").staleness()

    # Beginning.

    def _join(self, placement: environment.Placement, roles: Roles) -> None:
        # Only where it is used. Builds of torch without RPC may lack the module.
        if importlib.util.find_spec("torch.distributed.rpc") is None:
            raise ConfigurationError(f"{WHO}this build of torch has no torch.distributed.rpc.")
        from evenstep.parameter_servers.remote import RpcConnection, open_rpc, serve

        hook = excepthook.install(placement)
        self._restore.callback(_restore_hook, hook)
        self._restore.callback(environment.claim_rank())
        choose_gloo_interface(placement)
        store = open_store(placement, self._timeout_s)
        model: nn.Module | None = None
        shard: Shard | None = None
        error: Exception | None = None
        try:
            shard, model = self._build(roles)
        except Exception as raised:
            error = raised
        facts = {
            "mode": self._mode.name,
            "max_staleness": self._mode.max_staleness,
            "delay_compensation": self._mode.delay_compensation,
            "EVENSTEP_SERVERS": roles.num_servers,
        }
        compare(store, roles, facts, model, error)
        assert model is not None
        open_rpc(
            store,
            roles,
            interface=self._interface,
            timeout_s=self._timeout_s,
            shard=shard,
            initial=untrained(model) if roles.is_server else {},
        )
        if shard is not None:
            del model, self.model, self._trained  # of which a server needs only its share
            serve(roles, shard, self._timeout_s)
            self._restore.close()
            raise SystemExit(0)  # [Note: a server's process ends]
        self._connection = RpcConnection(roles, self._timeout_s)
        mine = untrained(model)
        with torch.no_grad():
            for name, tensor in self._connection.initial().items():
                mine[name].copy_(tensor)
        self._load(self._connection.pull())

    def _build(self, roles: Roles) -> tuple[Shard | None, nn.Module]:
        """This process's model, and its shard if it has one."""
        model = validate_model(self._model_fn())
        self._names = [name for name, each in model.named_parameters() if each.requires_grad]
        self._trained = [each for each in model.parameters() if each.requires_grad]
        sizes = [each.numel() * each.element_size() for each in self._trained]
        self._division: Division = plan_division(sizes, max(1, roles.num_servers))
        self._versions = [0] * len(self._division)
        shard = None
        if roles.is_alone or roles.is_server:
            own = self._division[0 if roles.is_alone else roles.rank - roles.num_workers]
            # Copies: those of a world of one must change in a step only, as others do.
            named = [(self._names[i], nn.Parameter(self._trained[i].detach().cpu().clone())) for i in own]
            optimizer = make_optimizer(self._optimizer_fn, named) if named else None
            shard = Shard([each for _, each in named], optimizer, self._mode, roles.num_workers)
        if not roles.is_server:
            model.to(self._device)
            self._trained = [each for each in model.parameters() if each.requires_grad]
        self.model = model
        return shard, model

    # Training.

    def _validate_training(self, doing: str) -> Connection:
        if self._connection is None:
            raise UsageError(
                f"ps.{doing}: {self!r} has no connection to servers. Call it inside "
                f"`with evenstep.parameter_server(...) as ps:`."
            )
        return self._connection

    def _validate_gradients(self, indices: list[int], gradients: list[Tensor | None]) -> None:
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is None:
                continue
            where = f"worker {self.worker}, step {self._num_steps}: the gradient of {self._names[index]!r}"
            if gradient.layout != torch.strided:
                raise UsageError(f"{where} is sparse, which can't be pushed. Use sparse=False in the embedding.")
            if not bool(torch.isfinite(gradient).all()):
                raise NonFiniteError(f"{where} is infinite or not a number; nothing was sent. Look at the loss.")

    def _load(self, answers: list[Answer]) -> None:
        for server, (indices, answer) in enumerate(zip(self._division, answers, strict=True)):
            if answer.failure:
                raise PeerLostError(
                    f"worker {self.worker} (rank {self.worker}): server {server} ends: {answer.failure}"
                )
            like = [self._trained[index] for index in indices]
            with torch.no_grad():
                for parameter, new in zip(like, unpack(like, answer.parameters), strict=True):
                    parameter.copy_(new)
            self._versions[server] = answer.version


class SharedBatches:
    """One loader's batches, divided over the workers of a run; made by `ParameterServer.queue`."""

    def __init__(self, ps: ParameterServer, number: int) -> None:
        self._ps, self._number = ps, number
        self._num_passes: Counter[int] = Counter()

    def __repr__(self) -> str:
        return f"<SharedBatches {self._number} of {self._ps!r}>"

    def take(self, epoch: int, num_batches: int, facts: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
        """This worker's batches of an epoch, each taken when it is asked for.

        In "sync" a worker without a batch takes part in the others' steps until all batches are done. In the other
        modes it goes on at once.

        Args:
            epoch: Number of the epoch.
            num_batches: Of it.
            facts: What decides which samples a batch has, in JSON types.

        Yields:
            (epoch, number of the batch in it). The epoch is an earlier one where a batch of a worker came back late.

        Raises:
            MismatchError: Another worker's loader has other batches.
            PeerLostError: A server has gone, or another worker failed.
            UsageError: Not inside the `with` statement.
        """
        ps, text = self._ps, json.dumps(facts, sort_keys=True)
        wanted = (self._number, epoch, self._num_passes[epoch])
        self._num_passes[epoch] += 1
        while True:
            taken = ps._validate_training("queue").take(wanted, num_batches, text)
            if taken.failure:
                kind = MismatchError if "another loader" in taken.failure else PeerLostError
                raise kind(f"worker {ps.worker} (rank {ps.worker}): {taken.failure}")
            if taken.batch >= 0:
                yield taken.epoch, taken.batch
            elif taken.is_over or ps._mode.name != "sync":
                return
            else:
                ps.step()


def _restore_hook(hook: Any) -> None:
    sys.excepthook = hook
