"""The tables of a worker's model, all at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from evenstep.errors import ConfigurationError
from evenstep.parameter_servers.embeddings.remote_embedding import RemoteEmbedding, StartLookup
from evenstep.parameter_servers.embeddings.rows import RowGradients
from evenstep.parameter_servers.embeddings.tables import Tables
from evenstep.parameter_servers.layout import rounded


class WorkerTables:
    """The tables in a model.

    Args:
        model: What `model_fn` has made.

    Raises:
        ConfigurationError: Two tables have one name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables: dict[str, RemoteEmbedding] = {}
        for path, module in find_tables(model):
            name = module.table_name or path or "the model"
            if name in self._tables:
                raise ConfigurationError(
                    f"evenstep.RemoteEmbedding: two tables of the model are named {name!r}, the second at {path!r}. "
                    f"Use one module in both places for one table, or other names for two."
                )
            self._tables[name] = module

    def __repr__(self) -> str:
        return f"<WorkerTables {', '.join(self._tables)}>"

    @property
    def there_are(self) -> bool:
        """Whether there are any."""
        return bool(self._tables)

    def describe(self) -> dict[str, Any]:
        """What must be the same on all workers and servers, in JSON types."""
        facts: dict[str, Any] = {"tables of embeddings": sorted(self._tables)}
        for name, each in self._tables.items():
            facts |= {f"table {name!r}: {key}": value for key, value in each.describe().items()}
        return facts

    def build(self, server: int, num_servers: int) -> Tables:
        """A server's shares.

        Raises:
            ConfigurationError: Rows can't be of the dtype that the model has.
        """
        return Tables(each.build_table(name, server, num_servers) for name, each in self._tables.items())

    def attach(self, who: str, num_servers: int, start: StartLookup, *, may_prefetch: bool) -> None:
        """Connect with the servers: see `RemoteEmbedding.attach`."""
        for name, each in self._tables.items():
            each.attach(name, who, num_servers, start, may_prefetch=may_prefetch)

    def detach(self) -> None:
        """The connection has ended."""
        for each in self._tables.values():
            each.detach()

    def gradients(self, num_servers: int, transfer_dtype: torch.dtype | None) -> list[dict[str, RowGradients]]:
        """What to push to each server, by table.

        Args:
            num_servers: At least 1.
            transfer_dtype: See `rounded`.

        Raises:
            NonFiniteError: A gradient is infinite or not a number.
        """
        pushes: list[dict[str, RowGradients]] = [{} for _ in range(num_servers)]
        for name, table in self._tables.items():
            for push, part in zip(pushes, table.gradients() or (), strict=False):
                if len(part.ids):
                    push[name] = part._replace(values=rounded(part.values, transfer_dtype))
        return pushes

    def release_gradients(self) -> None:
        """Forget the gradients of this step."""
        for each in self._tables.values():
            each.release_gradients()

    def begin_step(self) -> None:
        """A step has ended."""
        for each in self._tables.values():
            each.begin_step()


def find_tables(model: nn.Module) -> Iterator[tuple[str, RemoteEmbedding]]:
    """The tables in a model, with their paths."""
    for path, module in model.named_modules():
        if isinstance(module, RemoteEmbedding):
            yield path, module
