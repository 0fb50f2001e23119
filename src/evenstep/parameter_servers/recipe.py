"""What a script has given to make models and optimizers from, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenstep.parameter_servers.embeddings.worker_tables import WorkerTables
from evenstep.parameter_servers.layout import Division, plan_division
from evenstep.parameter_servers.preparation import make_optimizer, make_scheduler, validate_model
from evenstep.parameter_servers.roles import Roles
from evenstep.parameter_servers.server.checkpoints import CheckpointOptions, Checkpoints
from evenstep.parameter_servers.server.coordinator import Mode
from evenstep.parameter_servers.server.shard import Shard


@dataclass(frozen=True)
class Recipe:
    """See the arguments of `evenstep.parameter_server`."""

    model_fn: Callable[[], Any]
    optimizer_fn: Callable[..., Any]
    scheduler_fn: Callable[[Optimizer], Any] | None
    device: torch.device
    transfer_dtype: torch.dtype | None

    def make(self, roles: Roles) -> Made:
        """A model, and which server has which of its parameters.

        Raises:
            ConfigurationError: It is no model that can be trained so.
        """
        model = validate_model(self.model_fn())
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        sizes = [each.numel() * each.element_size() for each in trained.values()]
        division = plan_division(sizes, max(1, roles.num_servers))
        return Made(model, list(trained), list(trained.values()), division, WorkerTables(model))

    def make_shard(self, made: Made, server: int, mode: Mode) -> Shard:
        """A server's part of a model, with its optimizer.

        Raises:
            ConfigurationError: It is no optimizer that can be divided, or no schedule of it.
        """
        # Copies: those of a world of one must change in a step only, as others do.
        named = {
            made.names[index]: nn.Parameter(made.trained[index].detach().cpu().clone())
            for index in made.division[server]
        }
        optimizer: Optimizer | None = None
        scheduler: LRScheduler | None = None
        if named:
            optimizer = make_optimizer(self.optimizer_fn, list(named.items()))
            scheduler = make_scheduler(self.scheduler_fn, optimizer)
        tables = made.tables.build(server, len(made.division))
        return Shard(named, optimizer, mode, scheduler=scheduler, transfer_dtype=self.transfer_dtype, tables=tables)

    def make_checkpoints(self, options: CheckpointOptions, roles: Roles) -> Checkpoints:
        """The checkpoints of a run, with a model of their own."""
        made = self.make(roles)
        return Checkpoints(
            options,
            made.model,
            made.names,
            made.division,
            self.optimizer_fn,
            self.scheduler_fn,
            has_tables=made.tables.there_are,
        )


@dataclass
class Made:
    """A model in parts.

    Attributes:
        model: Whole.
        names: Of the parameters that are trained.
        trained: These parameters.
        division: For each server the indices of its parameters.
        tables: Those of embeddings.
    """

    model: nn.Module
    names: list[str]
    trained: list[Tensor]
    division: Division
    tables: WorkerTables

    def to(self, device: torch.device) -> None:
        """Move the model."""
        self.model.to(device)
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
