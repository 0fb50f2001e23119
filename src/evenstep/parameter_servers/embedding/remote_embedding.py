"""`evenstep.RemoteEmbedding`: a table of embeddings on servers; this process has only the rows of its batch.

[Note: a row's way]

    worker    unique ids ── lookup ── rows, a leaf of the graph ── forward, backward ── gradients of rows ── ps.step
    server                  rows                                                       add, divide, optimizer

A lookup makes a leaf tensor of the batch's distinct rows, from which the output is gathered. When autograd has summed
the leaf's gradient, a hook removes it from the leaf and stores it with the ids until the step. So a forward pass
without a backward pass leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenstep import checks
from evenstep.errors import ConfigurationError, NonFiniteError, UsageError
from evenstep.ground.computing.randomness import LARGEST_SEED
from evenstep.ground.health import excepthook
from evenstep.parameter_servers.embedding.table import (
    DEFAULT_EPS,
    ROW_OPTIMIZERS,
    RowGradients,
    TableSpec,
    add_up,
    split_by_server,
)

_WHO = "evenstep.RemoteEmbedding: "
_POOLINGS = ("sum", "mean", "max")
_DTYPES = (torch.float32, torch.float64)


StartLookup = Callable[[str, list[Tensor]], Callable[[], list[Tensor]]]
"""Sends a lookup, from the table's name and the ids for each server; returns a function that waits for the rows."""


@dataclass
class _Attachment:
    """A table's connection to its servers. Copies of the module share it; a pickled module loses it."""

    name: str
    who: str
    num_servers: int
    start: StartLookup
    may_prefetch: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> _Attachment:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> None:
    return None


@dataclass
class _Lookup:
    """A request for rows, which may have arrived."""

    ids: Tensor  # [n], int64, ascending, each once
    positions: list[Tensor]  # for each server, the positions of its ids
    finish: Callable[[], list[Tensor]]
    has_begun: bool = False  # whether the step for which it was requested has begun


class RemoteEmbedding(nn.Module):
    """An embedding table on the servers of `evenstep.parameter_server`; a worker sees only the rows of its batch.

    It is a part of the model that `model_fn` makes, and is used like `torch.nn.Embedding` or, with `pooling`, like
    `torch.nn.EmbeddingBag`. It has no parameters on workers: `ps.step` pushes the gradients of the used rows, and the
    servers' own optimizer of the table changes these rows, in the same step as the model's parameters. Rows of all
    tables are divided over the servers: row i is on server i modulo their number.

    The first value of a row is a function of `seed`, the table's name and the row's number; it doesn't depend on the
    number of servers. Servers allocate memory as rows are trained.

    Args:
        num_embeddings: Number of rows.
        embedding_dim: Number of columns.
        padding_idx: The number of a row of zeros, which is never trained and is left out of bags; None: no such row.
        pooling: None: a row for each id. "sum", "mean", "max": one row for each bag of ids.
        optimizer: "sgd", "adagrad" (Duchi et al., 2011) or "rowwise_adagrad" (one accumulator for a row). A row that
            isn't used in a step stays as it is, and so does its state.
        lr: Learning rate. `module.lr` may be set between steps; in "sync" on all workers.
        eps: Added to the denominator of "adagrad" and "rowwise_adagrad".
        init_std: The first rows are drawn from a normal distribution with this standard deviation.
        init_fn: Makes the first rows instead, from ids [n]: rows [n, embedding_dim], always the same for an id. Runs on
            servers.
        seed: The seed of the first rows.
        name: The name of the table; None: the module's name in the model.

    Attributes:
        lr: The learning rate.

    Raises:
        ConfigurationError: An argument is wrong.
    """

    like: Tensor  # [0]: an empty tensor with the rows' dtype and device, so that `.double()` and `.to()` work as usual

    @excepthook.for_users
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        pooling: str | None = None,
        optimizer: str = "adagrad",
        lr: float = 0.01,
        eps: float = DEFAULT_EPS,
        init_std: float = 1.0,
        init_fn: Callable[[Tensor], Tensor] | None = None,
        seed: int = 0,
        name: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = checks.whole(f"{_WHO}num_embeddings", num_embeddings, least=1)
        self.embedding_dim = checks.whole(f"{_WHO}embedding_dim", embedding_dim, least=1)
        self.padding_idx: int | None = None
        if padding_idx is not None:
            lowest, highest = -self.num_embeddings, self.num_embeddings - 1
            given = checks.whole(f"{_WHO}padding_idx", padding_idx, least=lowest, most=highest, otherwise="None")
            self.padding_idx = given % self.num_embeddings
        if pooling is not None:
            checks.choice(f"{_WHO}pooling", pooling, _POOLINGS, otherwise="None")
        self.pooling = pooling
        checks.choice(f"{_WHO}optimizer", optimizer, ROW_OPTIMIZERS)
        self.lr = checks.number(f"{_WHO}lr", lr, least=0)
        self._optimizer, self._eps = optimizer, checks.number(f"{_WHO}eps", eps, least=0)
        self._std = checks.number(f"{_WHO}init_std", init_std, least=0)
        if init_fn is not None:
            checks.function(f"{_WHO}init_fn", init_fn, otherwise="None")
        self._init_fn = init_fn
        self._seed = checks.whole(f"{_WHO}seed", seed, least=0, most=LARGEST_SEED)
        if name is not None:
            checks.text(f"{_WHO}name", name, otherwise="None for the module's name")
        self.table_name = name
        self.register_buffer("like", torch.empty(0, dtype=dtype, device="cpu"), persistent=False)
        self._attachment: _Attachment | None = None
        self._pushed: list[tuple[Tensor, Tensor]] = []  # ids and gradients of this step's lookups
        self._ahead: list[_Lookup] = []

    def extra_repr(self) -> str:
        """See `nn.Module.extra_repr`."""
        where = "no servers" if self._attachment is None else checks.counted(self._attachment.num_servers, "server")
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, padding_idx={self.padding_idx}, pooling={self.pooling!r}, "
            f"optimizer={self._optimizer!r}, lr={self.lr}, {where}"
        )

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up the rows of ids, or of bags of ids.

        Waits for the servers, unless `prefetch` was called with these ids.

        Args:
            ids: int64 or int32, any shape. With `pooling` [bags, size], or [n] with `offsets`.
            offsets: [bags], the first position of each bag in `ids`. Only with `pooling`.
            per_sample_weights: The factor of each row, in the shape of `ids`. Only with `pooling="sum"`.

        Returns:
            [*ids.shape, embedding_dim], or [bags, embedding_dim].

        Raises:
            ConfigurationError: `offsets` or `per_sample_weights` without `pooling`.
            UsageError: An id isn't in the table, `ids` isn't a tensor of ids, or this is outside of `with
                evenstep.parameter_server(...)`.
            PeerLostError: A server has gone, or another worker failed.
        """
        if self.pooling is None and (offsets is not None or per_sample_weights is not None):
            raise ConfigurationError(
                f"{self._who()}: offsets and per_sample_weights need pooling='sum', 'mean', 'max'."
            )
        ids = self._validate_ids(ids)
        unique, inverse = torch.unique(ids, return_inverse=True)
        rows = self._finish(self._take_ahead(unique) or self._start(unique)).to(self.like.device)
        padding = None
        if self.padding_idx is not None and bool((unique == self.padding_idx).any()):
            padding = int(torch.searchsorted(unique, self.padding_idx))
            rows[padding] = 0
        if torch.is_grad_enabled():
            rows.requires_grad_()
            note: Any = rows.register_post_accumulate_grad_hook
            note(lambda leaf: self._note(leaf, unique, padding))
        inverse = inverse.to(self.like.device)
        if self.pooling is None:
            return F.embedding(inverse, rows, padding)
        return F.embedding_bag(
            inverse, rows, offsets, mode=self.pooling, per_sample_weights=per_sample_weights, padding_idx=padding
        )

    def prefetch(self, ids: Tensor) -> None:
        """Request rows that a later `forward` of this step or the next one needs, without waiting for them.

        If this is called for the next batch before the present batch is computed, the transfer is hidden behind the
        computation. `forward` uses the requested rows if it is called with the same set of ids. The values are those at
        the time of the request, without later steps, even without this worker's own last step.

        Args:
            ids: As in `forward`.

        Raises:
            ConfigurationError: In "sync", because each step needs the rows of the step before.
            UsageError: An id isn't in the table, `ids` is no tensor of ids, or this is outside of
                `with evenstep.parameter_server(...)`.
        """
        if not self._validate_attached("prefetch").may_prefetch:
            raise ConfigurationError(
                f"{self._who()}: prefetch in mode='sync' would compute the next step with rows from before the present "
                f"step. Leave prefetch out, or use mode='async' or 'bounded'."
            )
        self._ahead.append(self._start(torch.unique(self._validate_ids(ids))))

    def rows(self, first: int = 0, last: int | None = None) -> Tensor:
        """A range of rows with their present values, for an export.

        Args:
            first: The first row.
            last: One more than the last row; None: to the end.

        Returns:
            [last - first, embedding_dim], on the CPU.

        Raises:
            ConfigurationError: There are no such rows.
            UsageError: Outside of `with evenstep.parameter_server(...)`.
        """
        first = checks.whole(f"{self._who()}: first", first, least=0, most=self.num_embeddings)
        last = self.num_embeddings if last is None else last
        last = checks.whole(f"{self._who()}: last", last, least=first, most=self.num_embeddings, otherwise="None")
        rows = self._finish(self._start(torch.arange(first, last, device="cpu")))
        if self.padding_idx is not None and first <= self.padding_idx < last:
            rows[self.padding_idx - first] = 0
        return rows

    # Methods that `evenstep.parameter_server` calls.

    def attach(self, name: str, who: str, num_servers: int, start: StartLookup, *, may_prefetch: bool) -> None:
        """Connect with the servers' tables.

        Args:
            name: The table's name.
            who: This worker, for messages.
            num_servers: Number of servers, at least 1.
            start: Sends a lookup.
            may_prefetch: Whether rows may lack the steps since they were looked up; not in "sync".
        """
        self._attachment = _Attachment(name, who, num_servers, start, may_prefetch)

    def detach(self) -> None:
        """Called when the connection has ended."""
        self._attachment, self._pushed, self._ahead = None, [], []

    def spec(self, name: str) -> TableSpec:
        """The table's specification for the servers.

        Raises:
            ConfigurationError: Rows can't have the model's dtype.
        """
        if self.like.dtype not in _DTYPES:
            raise ConfigurationError(
                f"{_WHO}table {name!r} would have rows of {self.like.dtype}, in which small steps are lost. Use "
                f"float32 or float64: apply `.half()` and `.bfloat16()` only to the rest of the model."
            )
        rows, dim, dtype = self.num_embeddings, self.embedding_dim, self.like.dtype
        return TableSpec(name, rows, dim, dtype, self._optimizer, self._eps, self._seed, self._std, self._init_fn)

    def describe(self) -> dict[str, Any]:
        """Values that must be equal on all workers and servers, in JSON types."""
        facts = dict(vars(self.spec(""))) | {"padding_idx": self.padding_idx, "lr": self.lr}
        del facts["init_fn"], facts["name"]
        return facts | {"dtype": str(self.like.dtype)}

    def scale(self, factor: float) -> None:
        """Multiply the gradients collected in this step by a factor."""
        self._pushed = [(ids, gradient * factor) for ids, gradient in self._pushed]

    def gradients(self) -> list[RowGradients]:
        """The gradients of this step's lookups, for each server; [] if there are none.

        Raises:
            NonFiniteError: A gradient is infinite or not a number.
        """
        if not self._pushed:
            return []
        attachment = self._validate_attached("ps.step")
        lr = checks.number(f"{self._who()}: lr", self.lr, least=0)
        ids, values = add_up([each for each, _ in self._pushed], [each.cpu() for _, each in self._pushed])
        is_finite = torch.isfinite(values).all(1)
        if not bool(is_finite.all()):
            wrong = ids[~is_finite]
            raise NonFiniteError(
                f"{self._who()}: the gradient of row {int(wrong[0])}"
                f"{f' and of {len(wrong) - 1} others' if len(wrong) > 1 else ''} is infinite or not a number; nothing "
                f"was sent. Check the loss."
            )
        parts = split_by_server(ids, attachment.num_servers)
        return [RowGradients(ids[part], values[part], lr) for part in parts]

    def release_gradients(self) -> None:
        """Drop the gradients of this step."""
        self._pushed = []

    def begin_step(self) -> None:
        """Called after a step: drop unused lookups for that step."""
        self._ahead = [each for each in self._ahead if not each.has_begun]
        for lookup in self._ahead:
            lookup.has_begun = True

    # Inside.

    def _who(self) -> str:
        attachment = self._attachment
        if attachment is None:
            return "RemoteEmbedding" + (f" {self.table_name!r}" if self.table_name else "")
        return f"RemoteEmbedding {attachment.name!r} on {attachment.who}"

    def _validate_attached(self, doing: str) -> _Attachment:
        if self._attachment is None:
            raise UsageError(
                f"{self._who()}: {doing}: no server has this table. Make the table in the model_fn of "
                f"evenstep.parameter_server, and use ps.model inside the `with` statement."
            )
        return self._attachment

    def _validate_ids(self, ids: Any) -> Tensor:
        """Check ids; returns them as int64 on the CPU."""
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            found = f"a tensor of {ids.dtype}" if isinstance(ids, Tensor) else checks.shown(ids)
            raise UsageError(f"{self._who()}: ids are {found}; pass a tensor of int64 or int32.")
        ids = ids.detach().to("cpu", torch.int64)  # a copy only if needed
        if ids.numel():
            least, most = (int(each) for each in torch.aminmax(ids))
            if least < 0 or most >= self.num_embeddings:
                raise UsageError(
                    f"{self._who()}: there is no row {least if least < 0 else most}; the table has rows 0 to "
                    f"{self.num_embeddings - 1}."
                )
        return ids  # type: ignore[no-any-return]

    def _start(self, ids: Tensor) -> _Lookup:
        attachment = self._validate_attached("forward")
        positions = split_by_server(ids, attachment.num_servers)
        finish = attachment.start(attachment.name, [ids[each] for each in positions])
        return _Lookup(ids, positions, finish)

    def _take_ahead(self, ids: Tensor) -> _Lookup | None:
        for index, each in enumerate(self._ahead):
            if torch.equal(each.ids, ids):
                return self._ahead.pop(index)
        return None

    def _finish(self, lookup: _Lookup) -> Tensor:
        rows = torch.empty(len(lookup.ids), self.embedding_dim, dtype=self.like.dtype, device="cpu")
        for positions, values in zip(lookup.positions, lookup.finish(), strict=True):
            if len(positions):
                rows[positions] = values
        return rows

    def _note(self, leaf: Tensor, ids: Tensor, padding: int | None) -> None:
        """Move the gradient from a leaf to the gradients to push: see [Note: a row's way]."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if padding is not None:
            trained = torch.arange(len(ids), device="cpu") != padding
            ids, gradient = ids[trained], gradient[trained.to(gradient.device)]
        self._pushed.append((ids, gradient))


def find_tables(model: nn.Module) -> dict[str, RemoteEmbedding]:
    """The tables in a model, by name.

    Raises:
        ConfigurationError: Two tables have one name.
    """
    found: dict[str, RemoteEmbedding] = {}
    for path, module in model.named_modules():
        if isinstance(module, RemoteEmbedding):
            name = module.table_name or path or "the model"
            if name in found:
                raise ConfigurationError(
                    f"{_WHO}two tables of the model are named {name!r}, the second at {path!r}. For one table, use one "
                    f"module in both places; for two tables, give them different names."
                )
            found[name] = module
    return found
