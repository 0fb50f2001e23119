"""A server's share of one table, the optimizers of single rows, and the gradients that are sent.

[Note: optimizers of rows]

| name | state of a row | computes |
| --- | --- | --- |
| "sgd" | none | the same as `torch.optim.SGD` without momentum |
| "adagrad" | dim numbers | the same as `torch.optim.Adagrad` (1) |
| "rowwise_adagrad" | 1 number | Adagrad with one accumulator for a row: the mean of the squares in the row (2) |

(1) Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization", 2011.
(2) Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation
Models", 2022.

A row that isn't used in a step stays as it is, and so does its state. With each of these optimizers a gradient of zeros
leaves a row unchanged, so the result is the dense optimizer's. Adam is missing, because its first moment would move
rows that are in no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, MismatchError
from evenstep.parameter_servers.embedding.initial_rows import normal_rows

ROW_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
DEFAULT_EPS = 1e-10  # the default of torch's Adagrad


class RowGradients(NamedTuple):
    """A worker's gradients of one table's rows, for one server.

    Attributes:
        ids: [n], int64, each once, all of rows on that server.
        values: [n, dim], the weighted mean of this worker's gradients.
        lr: The rate of this step.
    """

    ids: Tensor
    values: Tensor
    lr: float


def split_by_server(ids: Tensor, num_servers: int) -> list[Tensor]:
    """For each server, the positions of its rows' ids, ascending.

    Row i is on server i modulo `num_servers`: tables are often sorted by frequency, and ranges would give one server
    all the frequent rows.

    Args:
        ids: [n], int64.
        num_servers: At least 1.
    """
    owner = ids % num_servers
    return [torch.nonzero(owner == server).flatten() for server in range(num_servers)]


def add_up(ids: Sequence[Tensor], values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Add the rows of equal ids, in the given order; returns each id once, ascending, with its sum.

    Args:
        ids: [n] each, int64.
        values: [n, dim] each.
    """
    if len(ids) == 1:  # each id comes once already
        return ids[0], values[0]
    unique, inverse = torch.unique(torch.cat(list(ids)), return_inverse=True)
    stacked = torch.cat(list(values))
    return unique, stacked.new_zeros(len(unique), stacked.shape[1]).index_add_(0, inverse, stacked)


@dataclass(frozen=True)
class TableSpec:
    """The definition of a table.

    Attributes:
        name: The table's own name, or the module's name in the model.
        num_embeddings: Rows.
        embedding_dim: Columns.
        dtype: float32 or float64.
        optimizer: A name in `ROW_OPTIMIZERS`.
        eps: Added to the root in Adagrad's denominator.
        seed: See `normal_rows`.
        std: See `normal_rows`.
        init_fn: Makes rows from ids instead; None: `normal_rows`.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype
    optimizer: str
    eps: float
    seed: int
    std: float
    init_fn: Callable[[Tensor], Tensor] | None = None

    def initial(self, ids: Tensor) -> Tensor:
        """The untrained values of some rows: a function of their ids.

        Raises:
            ConfigurationError: The user's function returned something else.
        """
        if self.init_fn is None:
            return normal_rows(ids, self.embedding_dim, table=self.name, seed=self.seed, std=self.std, dtype=self.dtype)
        rows = self.init_fn(ids)
        wanted = (len(ids), self.embedding_dim)
        if not isinstance(rows, Tensor) or rows.shape != wanted or not rows.is_floating_point():
            found = f"of shape {tuple(rows.shape)}, {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ConfigurationError(
                f"evenstep.RemoteEmbedding {self.name!r}: init_fn returned {found} for {len(ids)} ids; return a tensor "
                f"of shape {wanted} in floating point."
            )
        return rows.detach().to("cpu", self.dtype, copy=True).contiguous()  # a step changes them in place


class Table:
    """The rows `server`, `server + num_servers`, ... of a table, with their optimizer's state.

    Address space is reserved for all rows; the system allocates a page when a row on it is trained. An untrained row is
    computed at each request. Not for several threads at once.

    Args:
        spec: The definition of the whole table.
        server: This server's number.
        num_servers: Number of servers.
    """

    def __init__(self, spec: TableSpec, server: int, num_servers: int) -> None:
        self.spec = spec
        self._server, self._num_servers = server, num_servers
        count = len(range(server, spec.num_embeddings, num_servers))
        sizes = {"rows": spec.embedding_dim}
        if spec.optimizer != "sgd":
            sizes["sum"] = spec.embedding_dim if spec.optimizer == "adagrad" else 1
        self._kept = {name: torch.empty(count, size, dtype=spec.dtype, device="cpu") for name, size in sizes.items()}
        self._is_trained = torch.zeros(count, dtype=torch.bool, device="cpu")

    def __repr__(self) -> str:
        return f"<Table {self.spec.name!r} {len(self._is_trained)} rows, {int(self._is_trained.sum())} trained>"

    def look_up(self, ids: Tensor) -> Tensor:
        """Copies of some rows.

        Args:
            ids: [n], int64, of rows on this server.

        Returns:
            [n, dim].
        """
        places = self._places(ids)
        untrained = torch.nonzero(~self._is_trained[places]).flatten()
        if len(untrained) == len(ids):
            return self.spec.initial(ids)
        rows = self._kept["rows"][places]
        if len(untrained):
            rows[untrained] = self.spec.initial(ids[untrained])
        return rows

    def mean(self, pushes: Sequence[tuple[float, RowGradients]]) -> RowGradients:
        """The weighted mean of some workers' pushes.

        Args:
            pushes: Pairs (the worker's part of the total weight, its push).

        Raises:
            MismatchError: The workers have different rates.
        """
        rates = sorted({each.lr for _, each in pushes})
        if len(rates) > 1:
            raise MismatchError(
                f"RemoteEmbedding {self.spec.name!r}: workers of one step have lr {' and '.join(map(str, rates))}; set "
                f"the same on all."
            )
        ids, values = add_up(
            [each.ids for _, each in pushes],
            [each.values if part == 1 else each.values * part for part, each in pushes],
        )
        return RowGradients(ids, values, rates[0])

    def apply(self, gradients: RowGradients) -> None:
        """Make one optimizer step for some rows: see [Note: optimizers of rows]."""
        ids, values, lr = gradients
        places = self._places(ids)
        rows = self.look_up(ids)
        if "sum" in self._kept:
            sums = self._kept["sum"][places]
            sums[~self._is_trained[places]] = 0
            squares = values.square()
            sums += squares if self.spec.optimizer == "adagrad" else squares.mean(1, keepdim=True)
            rows.addcdiv_(values, sums.sqrt().add_(self.spec.eps).expand_as(rows), value=-lr)
            self._kept["sum"][places] = sums
        else:
            rows.add_(values, alpha=-lr)
        self._kept["rows"][places] = rows
        self._is_trained[places] = True

    def state_dict(self) -> dict[str, Tensor]:
        """The trained rows: "ids" [n], "rows" [n, dim], and the state of the optimizer, "sum" [n, size]."""
        places = torch.nonzero(self._is_trained).flatten()
        ids = places * self._num_servers + self._server
        return {"ids": ids, **{name: tensor[places] for name, tensor in self._kept.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load rows that one server has saved; skips rows that now belong to other servers.

        Called once for each server of the saved run.

        Raises:
            ConfigurationError: The table or the optimizer differs.
        """
        wanted = {"ids", *self._kept}
        who = f"evenstep.RemoteEmbedding {self.spec.name!r}: the saved table"
        if state.keys() != wanted:
            raise ConfigurationError(
                f"{who} has {', '.join(sorted(state))}, and optimizer={self.spec.optimizer!r} needs "
                f"{', '.join(sorted(wanted))}."
            )
        ids, dim = state["ids"], self.spec.embedding_dim
        most = int(ids.max()) if len(ids) else 0
        if state["rows"].shape != (len(ids), dim) or most >= self.spec.num_embeddings:
            raise ConfigurationError(
                f"{who} has rows of shape {tuple(state['rows'].shape[1:])} and ids up to {most}; this one has "
                f"{self.spec.num_embeddings} rows of {dim}."
            )
        mine = torch.nonzero(ids % self._num_servers == self._server).flatten()
        places = self._places(ids[mine])
        for name, tensor in self._kept.items():
            tensor[places] = state[name][mine].to(self.spec.dtype)
        self._is_trained[places] = True

    def _places(self, ids: Tensor) -> Tensor:
        return (ids - self._server) // self._num_servers
