"""A server's share of one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError
from evenstep.parameter_servers.embeddings.initial_rows import normal_rows
from evenstep.parameter_servers.embeddings.row_optimizers import RowOptimizer


@dataclass(frozen=True)
class TableSpec:
    """What a table is.

    Attributes:
        name: The module's name in the model, or its own.
        num_embeddings: Rows.
        embedding_dim: Columns.
        dtype: float32 or float64.
        optimizer: Of its rows.
        seed: See `normal_rows`.
        std: See `normal_rows`.
        init_fn: Makes rows of ids instead; None: `normal_rows`.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype
    optimizer: RowOptimizer
    seed: int
    std: float
    init_fn: Callable[[Tensor], Tensor] | None = None

    def initial(self, ids: Tensor) -> Tensor:
        """Rows before they are trained: a function of their ids.

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
        return rows.detach().to("cpu", self.dtype, copy=True).contiguous()  # a step changes it in place


class Table:
    """The rows `server`, `server + num_servers`, ... of a table, with their optimizer's state.

    Memory is reserved for all, and the system gives pages of it when rows on them are trained. An untrained row is
    computed whenever it is asked for.

    Args:
        spec: Of the whole table.
        server: This server's number.
        num_servers: How many there are.
    """

    def __init__(self, spec: TableSpec, server: int, num_servers: int) -> None:
        self.spec = spec
        self._server, self._num_servers = server, num_servers
        count = len(range(server, spec.num_embeddings, num_servers))
        self._rows = torch.empty(count, spec.embedding_dim, dtype=spec.dtype, device="cpu")
        self._state = {
            name: torch.empty(count, size, dtype=spec.dtype, device="cpu")
            for name, size in spec.optimizer.state_sizes(spec.embedding_dim).items()
        }
        self._is_trained = torch.zeros(count, dtype=torch.bool, device="cpu")

    def __repr__(self) -> str:
        trained = int(self._is_trained.sum())
        return f"<Table {self.spec.name!r} {len(self._rows)} rows, {trained} trained>"

    @property
    def num_trained(self) -> int:
        """Rows that a step has changed."""
        return int(self._is_trained.sum())

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows, as copies.

        Args:
            ids: [n], int64, of this server.

        Returns:
            [n, dim].
        """
        places = self._places(ids)
        untrained = torch.nonzero(~self._is_trained[places]).flatten()
        if len(untrained) == len(ids):
            return self.spec.initial(ids)
        rows = self._rows[places]
        if len(untrained):
            rows[untrained] = self.spec.initial(ids[untrained])
        return rows

    def apply(self, ids: Tensor, gradients: Tensor, lr: float) -> None:
        """A step of the optimizer on some rows.

        Args:
            ids: [n], int64, of this server, each once.
            gradients: [n, dim].
            lr: Rate.
        """
        places = self._places(ids)
        rows = self.look_up(ids)
        state = {name: tensor[places] for name, tensor in self._state.items()}
        untrained = ~self._is_trained[places]
        for tensor in state.values():
            tensor[untrained] = 0
        self.spec.optimizer.step(rows, gradients, state, lr)
        self._rows[places] = rows
        for name, tensor in state.items():
            self._state[name][places] = tensor
        self._is_trained[places] = True

    def state_dict(self) -> dict[str, Tensor]:
        """The trained rows: "ids" [n], "rows" [n, dim], and the state of the optimizer, [n, size] each.

        It says nothing of servers: that of any number can be loaded on any other.
        """
        places = torch.nonzero(self._is_trained).flatten()
        return {
            "ids": places * self._num_servers + self._server,
            "rows": self._rows[places],
            **{name: tensor[places] for name, tensor in self._state.items()},
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take rows that a server of another run had; those that are other servers' now are skipped.

        Called once for each server of that run.

        Raises:
            ConfigurationError: Another table, or another optimizer.
        """
        wanted = {"ids", "rows", *self._state}
        if state.keys() != wanted:
            raise ConfigurationError(
                f"evenstep.RemoteEmbedding {self.spec.name!r}: the saved table has {', '.join(sorted(state))}, and "
                f"optimizer={self.spec.optimizer.name!r} needs {', '.join(sorted(wanted))}."
            )
        ids, dim = state["ids"], self.spec.embedding_dim
        if state["rows"].shape != (len(ids), dim) or (len(ids) and int(ids.max()) >= self.spec.num_embeddings):
            raise ConfigurationError(
                f"evenstep.RemoteEmbedding {self.spec.name!r}: the saved table has rows of shape "
                f"{tuple(state['rows'].shape[1:])} and ids up to {int(ids.max()) if len(ids) else 0}; this one has "
                f"{self.spec.num_embeddings} rows of {dim}."
            )
        mine = torch.nonzero(ids % self._num_servers == self._server).flatten()
        places = self._places(ids[mine])
        self._rows[places] = state["rows"][mine].to(self.spec.dtype)
        for name, tensor in self._state.items():
            tensor[places] = state[name][mine].to(self.spec.dtype)
        self._is_trained[places] = True

    def clear(self) -> None:
        """All rows are untrained again, as before a saved table is loaded."""
        self._is_trained.zero_()

    def _places(self, ids: Tensor) -> Tensor:
        return (ids - self._server) // self._num_servers
