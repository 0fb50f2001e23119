"""A server's tables: what is looked up, and what is applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from evenstep.errors import MismatchError
from evenstep.parameter_servers.embeddings.rows import RowGradients, add_up, split_by_server
from evenstep.parameter_servers.embeddings.table import Table

TablesState = Mapping[str, Mapping[str, Tensor]]  # by table, then as of `Table.state_dict`


class Tables:
    """All tables of one server. Not for several threads at once.

    Args:
        tables: This server's shares.
    """

    def __init__(self, tables: Iterable[Table] = ()) -> None:
        self._tables = {each.spec.name: each for each in tables}

    def __repr__(self) -> str:
        return f"<Tables {list(self._tables.values())}>"

    def look_up(self, table: str, ids: Tensor) -> Tensor:
        """Rows of a table: see `Table.look_up`."""
        return self._tables[table].look_up(ids)

    def add_up(self, pushes: Sequence[Mapping[str, RowGradients]], weight: float) -> dict[str, RowGradients]:
        """The mean by weight of what was pushed, in the dtypes of the tables.

        Args:
            pushes: Those of the workers, in their order.
            weight: Sum of the weights.

        Raises:
            MismatchError: The workers want other rates.
        """
        found = {}
        for name, table in self._tables.items():
            pushed = [each[name] for each in pushes if name in each]
            if not pushed:
                continue
            rates = {each.lr for each in pushed}
            if len(rates) > 1:
                raise MismatchError(
                    f"RemoteEmbedding {name!r}: workers of one step have lr {' and '.join(map(str, sorted(rates)))}; "
                    f"all set the same."
                )
            ids, total = add_up([each.ids for each in pushed], [each.values.to(table.spec.dtype) for each in pushed])
            found[name] = RowGradients(ids, total / weight, pushed[0].lr)
        return found

    def apply(self, mean: Mapping[str, RowGradients], factor: float) -> None:
        """A step of every table that has gradients.

        Args:
            mean: See `add_up`.
            factor: What gradients are multiplied by, to clip them.
        """
        for name, (ids, values, lr) in mean.items():
            self._tables[name].apply(ids, values if factor == 1.0 else values * factor, lr)

    def state_dict(self) -> TablesState:
        """Of each table, by name: see `Table.state_dict`."""
        return {name: table.state_dict() for name, table in self._tables.items()}

    def load_state_dicts(self, saved: Sequence[TablesState]) -> None:
        """Take what all servers of a run had saved.

        Raises:
            MismatchError: They are of other tables.
            ConfigurationError: A table or its optimizer differs.
        """
        for each in saved:
            if each.keys() != self._tables.keys():
                raise MismatchError(
                    f"the saved tables of embeddings are {sorted(each)}, and those of the model {sorted(self._tables)}."
                )
        for name, table in self._tables.items():
            table.clear()
            for each in saved:
                table.load_state_dict(dict(each[name]))


def join_states(states: Sequence[TablesState]) -> dict[str, dict[str, Tensor]]:
    """What all servers had saved, as one server would have. Pure."""
    return {
        name: {key: torch.cat([each[name][key] for each in states]) for key in table}
        for name, table in states[0].items()
    }


def select_state(state: TablesState, server: int, num_servers: int) -> dict[str, dict[str, Tensor]]:
    """One server's part of what was saved. Pure."""
    found = {}
    for name, table in state.items():
        mine = split_by_server(table["ids"], num_servers)[server]
        found[name] = {key: tensor[mine] for key, tensor in table.items()}
    return found
