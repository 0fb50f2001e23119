"""Before the processes connect: assigns the ranks' roles; builds, checks and compares the script's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from evenstep.checkpoint.format.plan import Policy
from evenstep.checks import counted
from evenstep.errors import ConfigurationError
from evenstep.ground.environment import Placement
from evenstep.parameter_servers.embedding.remote_embedding import RemoteEmbedding, find_tables
from evenstep.parameter_servers.embedding.table import Table
from evenstep.parameter_servers.shard import Division, Shard, plan_division
from evenstep.replica.normalization.sync_batchnorm import SyncBatchNorm

CALL = "evenstep.parameter_server"
WHO = f"{CALL}: "


@dataclass(frozen=True)
class Roles:
    """The roles of the ranks: the first ranks are workers, so that rank 0 is a worker; the last are servers.

    Attributes:
        rank: This process's rank.
        num_workers: Number of workers, at least 1.
        num_servers: Number of servers; 0 only in a world of one, where the worker is its own server.
    """

    rank: int
    num_workers: int
    num_servers: int

    @property
    def is_alone(self) -> bool:
        """Whether this one process is worker and server at once."""
        return self.num_servers == 0

    @property
    def is_server(self) -> bool:
        """Whether this process is only a server."""
        return self.rank >= self.num_workers

    @property
    def server(self) -> int:
        """Number of this server; 0 in a world of one."""
        return 0 if self.is_alone else self.rank - self.num_workers

    @property
    def name(self) -> str:
        """This process's name for people: "worker 0 (rank 0)", "server 1 (rank 4)"."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """A rank's name, for people."""
        return (
            f"worker {rank} (rank {rank})" if rank < self.num_workers else self.name_of_server(rank - self.num_workers)
        )

    def name_of_server(self, server: int) -> str:
        """A server's name, for people."""
        return f"server {server} (rank {self.num_workers + server})"


def assign_roles(placement: Placement, num_servers: int) -> Roles:
    """The roles of a run's ranks.

    Args:
        placement: This rank's place.
        num_servers: Number of ranks that are servers.

    Raises:
        ConfigurationError: There are several ranks, but no server or no worker.
    """
    world_size = placement.world_size
    if world_size == 1:
        return Roles(0, 1, 0)
    if num_servers == 0:
        raise ConfigurationError(
            f"evenstep.parameter_server: there is no server among {world_size} ranks. Start some beside the workers: "
            f"`evenstep run --servers 1 --nproc-per-node {world_size}`, `evenstep.launch(servers=1)`, or, with another "
            f"launcher, EVENSTEP_SERVERS=1 for all ranks, the last of which is then a server."
        )
    if num_servers >= world_size:
        raise ConfigurationError(
            f"evenstep.parameter_server: {counted(num_servers, 'server')} among {counted(world_size, 'rank')} leave no "
            f"worker. EVENSTEP_SERVERS counts the servers among the launcher's ranks: start more ranks, or fewer "
            f"servers."
        )
    return Roles(placement.rank, world_size - num_servers, num_servers)


@dataclass(frozen=True)
class Recipe:
    """The arguments of `evenstep.parameter_server`."""

    model_fn: Callable[[], Any]
    optimizer_fn: Callable[..., Any]
    scheduler_fn: Callable[..., Any] | None
    checkpoint: str | None
    policy: Policy
    device: torch.device
    interface: str | None
    timeout_s: float


@dataclass
class Made:
    """A model, and its division over servers.

    Attributes:
        model: The whole model.
        trained: The trained parameters, by name.
        division: For each server the indices of its parameters.
        tables: The tables of embeddings, by name.
    """

    model: nn.Module
    trained: Mapping[str, Tensor]
    division: Division
    tables: dict[str, RemoteEmbedding]

    def names_of(self, server: int) -> list[str]:
        """Names of a server's parameters."""
        names = list(self.trained)
        return [names[index] for index in self.division[server]]

    @property
    def most_bytes(self) -> int:
        """The most bytes of the tensors in one message: the whole model, and each row with its id."""
        own = [*self.model.parameters(), *self.model.buffers()]
        rows = (each.num_embeddings * (8 + 8 * each.embedding_dim) for each in self.tables.values())
        return sum(each.numel() * each.element_size() for each in own) + sum(rows)

    def facts(self) -> dict[str, Any]:
        """Values that must be equal on all workers and servers, except parameters and module buffers; JSON types."""
        facts: dict[str, Any] = {"tables of embeddings": sorted(self.tables)}
        for name, each in self.tables.items():
            facts |= {f"table {name!r}: {key}": value for key, value in each.describe().items()}
        return facts

    def to(self, device: torch.device) -> None:
        """Move the model to a device."""
        self.model.to(device)
        self.trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def make_shard(self, server: int, recipe: Recipe) -> Shard:
        """Make a server's part of the model, with its optimizer.

        Raises:
            ConfigurationError: The optimizer can't be divided, or the schedule is another optimizer's.
        """
        # Copy, since even in a world of one the server's parameters may change only in a step.
        named = {name: nn.Parameter(self.trained[name].detach().to("cpu", copy=True)) for name in self.names_of(server)}
        optimizer = scheduler = None
        if named:
            optimizer = make_optimizer(recipe.optimizer_fn, list(named.items()))
            scheduler = make_scheduler(recipe.scheduler_fn, optimizer)
        tables = {name: Table(each.spec(name), server, len(self.division)) for name, each in self.tables.items()}
        return Shard(named, optimizer, scheduler, tables)


def make_model(model_fn: Callable[[], Any], num_servers: int) -> Made:
    """Make the model, and plan which server gets which of its parameters.

    Raises:
        ConfigurationError: `model_fn` doesn't return a model, or workers can't train the model independently.
    """
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"{WHO}model_fn returned a {type(model).__name__}; return the model, a torch.nn.Module."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigurationError(
            f"{WHO}model_fn returned a {type(model).__name__}, which averages gradients itself. Return the plain model."
        )
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
            raise ConfigurationError(
                f"{WHO}the model has a SyncBatchNorm ({name or 'the model itself'}), which waits for all workers in "
                f"every forward pass. Use BatchNorm, whose statistics are each worker's own, or LayerNorm."
            )
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigurationError(
                f"{WHO}parameter {name!r} has no shape yet (a lazy module). Run the model once inside model_fn."
            )
    tables = find_tables(model)
    if not trained and not tables:
        raise ConfigurationError(f"{WHO}the model has no parameter that requires a gradient.")
    sizes = [each.numel() * each.element_size() for each in trained.values()]
    return Made(model, trained, plan_division(sizes, max(1, num_servers)), tables)


def make_optimizer(optimizer_fn: Callable[..., Any], parameters: Sequence[tuple[str, Tensor]]) -> Optimizer:
    """Make a server's optimizer.

    Args:
        optimizer_fn: The user's function.
        parameters: The server's parameters, with their names.

    Raises:
        ConfigurationError: The result isn't an optimizer, needs all parameters at once, or has other parameters than
            the given ones.
    """
    optimizer = optimizer_fn(list(parameters))
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"{WHO}optimizer_fn returned a {type(optimizer).__name__}; return a torch.optim.Optimizer of the "
            f"parameters that it is given, as in lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigurationError(
            f"{WHO}{type(optimizer).__name__} evaluates the loss of all parameters again during its step; a server has "
            f"neither the loss nor the other servers' parameters. Use an optimizer whose step needs only gradients."
        )
    given = {id(parameter) for _, parameter in parameters}
    if any(id(parameter) not in given for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigurationError(
            f"{WHO}optimizer_fn returned an optimizer of other parameters than it was given. Pass its argument to the "
            f"optimizer: lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    return optimizer


def make_scheduler(scheduler_fn: Callable[..., Any] | None, optimizer: Optimizer) -> LRScheduler | None:
    """Make a server's learning-rate schedule; None: there is none.

    Raises:
        ConfigurationError: The result isn't a schedule, has another optimizer, or needs more than the number of
            updates.
    """
    if scheduler_fn is None:
        return None
    scheduler = scheduler_fn(optimizer)
    if not isinstance(scheduler, LRScheduler):
        raise ConfigurationError(
            f"{WHO}scheduler_fn returned a {type(scheduler).__name__}; return a schedule of the optimizer that it is "
            f"given, as in lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigurationError(
            f"{WHO}ReduceLROnPlateau needs a metric at each step, which servers don't have. Use a schedule that "
            f"depends only on the number of updates."
        )
    if scheduler.optimizer is not optimizer:
        raise ConfigurationError(f"{WHO}scheduler_fn returned a schedule of another optimizer than it was given.")
    return scheduler
