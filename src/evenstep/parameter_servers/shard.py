"""The division of parameters over servers, and one server's part with its optimizer. No sockets here."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from evenstep.parameter_servers.embedding.table import RowGradients, Table

Division = list[list[int]]


class Pushed(NamedTuple):
    """A worker's push to one server, for one step.

    Attributes:
        weight: The sum of the worker's weights, greater than 0.
        used: Whether each parameter has a gradient.
        gradients: The worker's weighted mean gradients, packed.
        rows: The gradients of rows of embeddings, by table.
    """

    weight: float
    used: Sequence[bool]
    gradients: Sequence[Tensor]
    rows: Mapping[str, RowGradients]


class Shard:
    """The parameters of one server. One thread changes them; other threads may look rows up at the same time.

    Args:
        parameters: The parameters by name: CPU tensors that nothing else changes.
        optimizer: The optimizer of these parameters; None if there are no parameters.
        scheduler: Sets the optimizer's rate after each update; None: the rate is constant.
        tables: This server's shares of embedding tables, by name.

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
        self._packed: tuple[int, list[Tensor]] | None = None  # (version, packed parameters)

    def __repr__(self) -> str:
        return f"<Shard {len(self.parameters)} parameters, {len(self.tables)} tables, version {self.version}>"

    def packed(self) -> list[Tensor]:
        """A copy of the present parameters, which isn't changed later."""
        if self._packed is None or self._packed[0] != self.version:
            like = list(self.parameters.values())
            self._packed = self.version, pack(like, like)
        return self._packed[1]

    def look_up(self, table: str, ids: Tensor) -> Tensor:
        """Look up rows of a table: see `Table.look_up`. In any thread."""
        with self._rows:
            return self.tables[table].look_up(ids)

    def apply(self, pushes: Sequence[Pushed]) -> None:
        """Make one step of the optimizer, with the weighted mean of some workers' pushes.

        Args:
            pushes: The pushes, in the order of summation; the first push's tensors are changed in place.
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


def plan_division(sizes: Sequence[int], num_servers: int) -> Division:
    """The parameters of each server: the largest first, each to the server that has the fewest bytes.

    No server has more bytes than the mean plus one parameter. Parameters stay whole, because optimizers may depend on
    their shapes.

    Args:
        sizes: [num_parameters], in bytes.
        num_servers: At least 1; with fewer parameters than servers, some servers have none.

    Returns:
        For each server the indices of its parameters, ascending.
    """
    loads = [0] * num_servers
    division: Division = [[] for _ in range(num_servers)]
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        server = min(range(num_servers), key=lambda each: (loads[each], len(division[each]), each))
        division[server].append(index)
        loads[server] += sizes[index]
    return [sorted(each) for each in division]


def pack(like: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Copy tensors into one flat CPU tensor for each dtype, in order of the dtypes' first occurrence.

    Args:
        like: Tensors with the shapes and dtypes.
        tensors: A tensor, or None for zeros, for each of `like`.

    Returns:
        A tensor [numel of its dtype] for each dtype.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for model, tensor in zip(like, tensors, strict=True):
        piece = torch.zeros_like(model) if tensor is None else tensor
        by_dtype.setdefault(model.dtype, []).append(piece.detach().reshape(-1))
    # `cat` of one tensor copies, too: packed tensors must not change while they are sent.
    return [torch.cat(pieces).cpu() for pieces in by_dtype.values()]


def unpack(like: Sequence[Tensor], packed: Sequence[Tensor]) -> list[Tensor]:
    """Unpack tensors, as views of `packed` in the shapes of `like`."""
    dtypes = list(dict.fromkeys(each.dtype for each in like))
    offsets = dict.fromkeys(dtypes, 0)
    views = []
    for model in like:
        offset = offsets[model.dtype]
        flat = packed[dtypes.index(model.dtype)]
        views.append(flat[offset : offset + model.numel()].view(model.shape))
        offsets[model.dtype] = offset + model.numel()
    return views
