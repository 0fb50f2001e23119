"""One server's part of the parameters and tables, and its optimizer. No threads and no sockets here."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenstep.parameter_servers.embedding.rows import RowGradients
from evenstep.parameter_servers.embedding.table import Table
from evenstep.parameter_servers.shares import pack, unpack


class Pushed(NamedTuple):
    """What a worker gives a server for a step.

    Attributes:
        weight: Sum of its weights, above 0.
        used: Which parameters have a gradient.
        gradients: The worker's mean by weight, packed.
        rows: The same of rows of embeddings, by table.
    """

    weight: float
    used: Sequence[bool]
    gradients: Sequence[Tensor]
    rows: Mapping[str, RowGradients]


class Shard:
    """The parameters of one server. One thread changes them; others look rows up meanwhile.

    Args:
        parameters: By name: CPU tensors that nobody else changes.
        optimizer: Of these parameters; None where there are none.
        scheduler: Sets the optimizer's rate after each update; None: it stays.
        tables: Its shares of tables of embeddings, by name.

    Attributes:
        version: Number of updates.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        tables: Mapping[str, Table],
    ) -> None:
        self.parameters, self.optimizer, self.scheduler, self.tables = parameters, optimizer, scheduler, tables
        self.version = 0
        self._rows = threading.Lock()
        self._packed: tuple[int, list[Tensor]] | None = None  # with the version that it is of

    def __repr__(self) -> str:
        return f"<Shard {len(self.parameters)} parameters, {len(self.tables)} tables, version {self.version}>"

    def packed(self) -> list[Tensor]:
        """The parameters as they are, in memory that doesn't change any more."""
        if self._packed is None or self._packed[0] != self.version:
            like = list(self.parameters.values())
            self._packed = self.version, pack(like, like)
        return self._packed[1]

    def look_up(self, table: str, ids: Tensor) -> Tensor:
        """Rows of a table: see `Table.look_up`. In any thread."""
        with self._rows:
            return self.tables[table].look_up(ids)

    def apply(self, pushes: Sequence[Pushed]) -> None:
        """One step of the optimizer, on the mean by weight of what some workers have pushed.

        Args:
            pushes: In the order of their sum; what the first one pushed is changed.
        """
        weight = sum(each.weight for each in pushes)
        parts = [each.weight / weight for each in pushes]
        like = list(self.parameters.values())
        total = list(pushes[0].gradients)
        if len(pushes) > 1 and like:
            torch._foreach_mul_(total, parts[0])
            for part, each in zip(parts[1:], pushes[1:], strict=True):
                torch._foreach_add_(total, list(each.gradients), alpha=part)
        try:
            for index, (parameter, gradient) in enumerate(zip(like, unpack(like, total), strict=True)):
                parameter.grad = gradient if any(each.used[index] for each in pushes) else None
            if self.optimizer is not None:
                self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        finally:
            for parameter in like:
                parameter.grad = None
        for name, table in self.tables.items():
            pushed = [(part, each.rows[name]) for part, each in zip(parts, pushes, strict=True) if name in each.rows]
            if pushed:
                with self._rows:
                    table.apply(table.mean(pushed))
        self.version += 1
