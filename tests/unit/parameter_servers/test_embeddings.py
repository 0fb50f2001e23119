"""Tables of embeddings: first rows, optimizers of rows, a server's share, and the module in a world of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evenstep
from evenstep.errors import ConfigurationError, MismatchError, NonFiniteError, UsageError
from evenstep.parameter_servers.embedding.initial_rows import normal_rows
from evenstep.parameter_servers.embedding.table import (
    DEFAULT_EPS,
    RowGradients,
    Table,
    TableSpec,
    split_by_server,
)

DOUBLE = torch.float64


def spec(optimizer: str = "adagrad", *, rows: int = 50, dim: int = 3, name: str = "t", **more: Any) -> TableSpec:
    return TableSpec(name, rows, dim, DOUBLE, optimizer, DEFAULT_EPS, more.pop("seed", 0), 1.0, **more)


def drawn(ids: Tensor, **other: Any) -> Tensor:
    options: dict[str, Any] = {"dim": 8, "table": "users", "seed": 3, "std": 1.0, "dtype": DOUBLE}
    return normal_rows(ids, **(options | other))


def test_first_rows_are_functions_of_their_numbers(fresh_seed: int):
    torch.manual_seed(fresh_seed)
    ids = torch.randperm(20_000)  # more than a block
    rows = drawn(ids)
    some = torch.randint(20_000, (7,))
    assert torch.equal(drawn(ids[some]), rows[some])
    assert torch.equal(drawn(ids, std=0.5), rows * 0.5)
    for other in ({"table": "items"}, {"seed": 4}):
        assert (drawn(ids, **other) - rows).abs().min() > 0
    huge = torch.tensor([2**40, 2**40 + 1])
    assert drawn(huge).isfinite().all()
    assert not torch.equal(*drawn(huge))


def test_first_rows_are_pinned():
    """Tables of a saved run go on from them."""
    expected = torch.tensor(
        [0.9719989323047994, 0.7311545911002021, -0.500488562718718, 1.1094589871219362], dtype=DOUBLE
    )
    torch.testing.assert_close(drawn(torch.tensor([0, 7]), dim=2), expected.view(2, 2), rtol=0, atol=1e-12)


def steps(num_rows: int, dim: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for _ in range(12):
        ids = torch.randperm(num_rows)[: num_rows // 3]
        found.append((ids, torch.randn(len(ids), dim, dtype=DOUBLE)))
    return found


def by_torch(make: Callable[[Any], torch.optim.Optimizer], table: Tensor, given: list[tuple[Tensor, Tensor]]) -> Tensor:
    weight = nn.Parameter(table.clone())
    optimizer = make([weight])
    for ids, gradients in given:
        weight.grad = torch.zeros_like(weight).index_add_(0, ids, gradients)
        optimizer.step()
    return weight.detach()


def row_adagrad(table: Tensor, given: list[tuple[Tensor, Tensor]], lr: float) -> Tensor:
    rows, total = table.clone(), [0.0] * len(table)
    for ids, gradients in given:
        for row, gradient in zip(ids.tolist(), gradients, strict=True):
            total[row] += float((gradient**2).mean())
            rows[row] -= lr * gradient / (total[row] ** 0.5 + 1e-10)
    return rows


REFERENCES: dict[str, Callable[[Tensor, list[tuple[Tensor, Tensor]]], Tensor]] = {
    "sgd": lambda table, given: by_torch(lambda p: torch.optim.SGD(p, lr=0.1), table, given),
    "adagrad": lambda table, given: by_torch(lambda p: torch.optim.Adagrad(p, lr=0.1), table, given),
    "rowwise_adagrad": lambda table, given: row_adagrad(table, given, 0.1),
}


@pytest.mark.parametrize("optimizer", REFERENCES)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_rows_change_as_a_reference_says(optimizer: str, num_servers: int, fresh_seed: int):
    torch.manual_seed(fresh_seed)
    what = spec(optimizer, rows=20)
    shares = [Table(what, server, num_servers) for server in range(num_servers)]
    start = what.initial(torch.arange(20))
    given = steps(20, 3)
    for ids, gradients in given:
        for share, part in zip(shares, split_by_server(ids, num_servers), strict=True):
            share.apply(RowGradients(ids[part], gradients[part], 0.1))
    everything = torch.arange(20)
    found = torch.empty_like(start)
    for share, part in zip(shares, split_by_server(everything, num_servers), strict=True):
        found[part] = share.look_up(everything[part])
    torch.testing.assert_close(found, REFERENCES[optimizer](start, given), rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", REFERENCES)
def test_saved_by_some_servers_loaded_by_others(optimizer: str, fresh_seed: int):
    torch.manual_seed(fresh_seed)
    what, everything = spec(optimizer, rows=31), torch.arange(31)
    given = steps(31, 3)
    whole = Table(what, 0, 1)
    for ids, gradients in given[:6]:
        whole.apply(RowGradients(ids, gradients, 0.1))
    saved = [whole.state_dict()]
    num_trained = len({int(each) for ids, _ in given[:6] for each in ids})
    for num_servers in (3, 2, 1):
        shares = [Table(what, server, num_servers) for server in range(num_servers)]
        for share in shares:
            for each in saved:
                share.load_state_dict(each)
        saved = [each.state_dict() for each in shares]
        assert sum(len(each["ids"]) for each in saved) == num_trained, "only what was trained"
    back = Table(what, 0, 1)
    back.load_state_dict(saved[0])
    for table in (whole, back):
        for ids, gradients in given[6:]:
            table.apply(RowGradients(ids, gradients, 0.1))
    assert torch.equal(whole.look_up(everything), back.look_up(everything))


def test_what_was_saved_must_fit():
    saved = Table(spec("sgd"), 0, 1).state_dict()
    with pytest.raises(ConfigurationError, match="needs ids, rows, sum"):
        Table(spec("adagrad"), 0, 1).load_state_dict(saved)
    table = Table(spec("sgd"), 0, 1)
    table.apply(RowGradients(torch.tensor([49]), torch.ones(1, 3, dtype=DOUBLE), 0.1))
    for other in (spec("sgd", rows=49), spec("sgd", dim=2)):
        with pytest.raises(ConfigurationError, match="the saved table has rows"):
            Table(other, 0, 1).load_state_dict(table.state_dict())


def test_one_step_has_one_rate():
    pushes = [(0.5, RowGradients(torch.tensor([i]), torch.ones(1, 3, dtype=DOUBLE), 0.1 * (1 + i))) for i in range(2)]
    with pytest.raises(MismatchError, match=r"workers of one step have lr 0.1 and 0.2"):
        Table(spec("sgd"), 0, 1).mean(pushes)


# ------------------------------------------------------------------ the module, in a world of one


class Plain(nn.Module):
    """The model with torch's own tables."""

    def __init__(self, weights: dict[str, Tensor], padding: int | None, pooling: str | None) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(weights["words"].clone(), freeze=False, padding_idx=padding)
        self.bags = nn.EmbeddingBag.from_pretrained(
            weights["bags"].clone(), freeze=False, mode=pooling or "sum", padding_idx=padding
        )
        self.top = nn.Linear(4, 3).double()

    def forward(self, words: Tensor, bags: Tensor) -> Tensor:
        return self.top(torch.cat([self.words(words).mean(1), self.bags(bags)], 1))


class Remote(Plain):
    def __init__(self, weights: dict[str, Tensor], padding: int | None, pooling: str | None, optimizer: str) -> None:
        nn.Module.__init__(self)
        options: dict[str, Any] = {"padding_idx": padding, "optimizer": optimizer, "lr": 0.1, "dtype": DOUBLE}
        self.words = evenstep.RemoteEmbedding(12, 2, init_fn=lambda ids: weights["words"][ids], **options)  # type: ignore[assignment]
        self.bags = evenstep.RemoteEmbedding(  # type: ignore[assignment]
            9, 2, pooling=pooling or "sum", init_fn=lambda ids: weights["bags"][ids], **options
        )
        self.top = nn.Linear(4, 3).double()


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
@pytest.mark.parametrize(("padding", "pooling"), [(None, "sum"), (0, "mean"), (8, "max")])
def test_one_process_trains_as_with_torchs_tables(optimizer: str, padding: int | None, pooling: str, fresh_seed: int):
    torch.manual_seed(fresh_seed)
    weights = {"words": torch.randn(12, 2, dtype=DOUBLE), "bags": torch.randn(9, 2, dtype=DOUBLE)}
    if padding is not None:
        weights["words"][padding] = weights["bags"][padding] = 0
    make: Callable[..., torch.optim.Optimizer] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[optimizer]
    plain = Plain(weights, padding, pooling)
    stepper = make(plain.parameters(), lr=0.1)
    with evenstep.parameter_server(
        lambda: Remote(weights, padding, pooling, optimizer), lambda p: make(p, lr=0.1), mode="sync"
    ) as ps:
        plain.top.load_state_dict(ps.model.top.state_dict())  # type: ignore[union-attr, operator]
        batches = [
            (torch.randint(12, (6, 3)), torch.randint(9, (6, 4), dtype=torch.int32), torch.randint(3, (6,)))
            for _ in range(8)
        ]
        for step, (words, bags, y) in enumerate(batches):
            F.cross_entropy(plain(words, bags), y).backward()
            stepper.step()
            stepper.zero_grad()
            for part in (slice(0, 2), slice(2, 6)) if step != 4 else (slice(0, 6),):  # accumulated
                ps.backward(F.cross_entropy(ps.model(words[part], bags[part]), y[part]), weight=len(y[part]))
            with torch.no_grad():
                ps.model(words, bags)
            ps.model(words, bags)  # without a backward pass: it counts for nothing
            ps.step()
        found = {name: getattr(ps.model, name).rows() for name in ("words", "bags")}
    torch.testing.assert_close(found["words"], plain.words.weight.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["bags"], plain.bags.weight.detach(), rtol=0, atol=1e-12)


@pytest.fixture
def table() -> Any:
    """A table of 10 rows in a world of one, and its handle."""
    with evenstep.parameter_server(
        lambda: evenstep.RemoteEmbedding(10, 2, name="users", optimizer="sgd", lr=1.0), lambda p: torch.optim.SGD(p)
    ) as ps:
        yield ps


def test_ids_that_are_not_in_the_table(table: Any):
    for ids, row in (([3, 10], 10), ([-1, 2], -1)):
        for call in (table.model, table.model.prefetch):
            with pytest.raises(UsageError, match=rf"'users' on worker 0 \(rank 0\): there is no row {row}; .* 0 to 9"):
                call(torch.tensor(ids))
    for wrong, shown in ((torch.ones(2), "a tensor of torch.float32"), ([1, 2], r"\[1, 2\]")):
        with pytest.raises(UsageError, match=f"ids are {shown}"):
            table.model(wrong)
    with pytest.raises(ConfigurationError, match="need pooling"):
        table.model(torch.tensor([1]), torch.tensor([0]))
    for first, last in ((-1, 3), (4, 3), (0, 11)):
        with pytest.raises(ConfigurationError, match="users"):
            table.model.rows(first, last)


def test_a_gradient_that_is_not_finite(table: Any):
    rows = table.model(torch.tensor([2, 5, 7]))
    table.backward((rows * torch.tensor([[1.0], [float("nan")], [float("inf")]])).sum())
    with pytest.raises(NonFiniteError, match=r"'users'.* the gradient of row 5 and of 1 others"):
        table.step()


def test_the_rate_may_change(table: Any):
    before = table.model.rows()
    for lr in (1.0, 0.25):
        table.model.lr = lr
        table.backward(table.model(torch.tensor([4])).sum())
        table.step()
    assert torch.equal(before[4] - 1.25, table.model.rows(4, 5)[0])


@pytest.mark.parametrize(("mode", "bound"), [("async", None), ("bounded", 2)])
def test_rows_that_were_looked_up_ahead_are_those_of_then(mode: str, bound: int | None):
    """And a forward pass with other ids, or after the step that they were for, has those of now."""
    with evenstep.parameter_server(
        lambda: evenstep.RemoteEmbedding(5, 2, optimizer="sgd", lr=1.0, init_std=0),
        torch.optim.SGD,
        mode=mode,
        max_staleness=bound,
    ) as ps:
        ids = torch.tensor([1, 2])

        def step() -> None:
            ps.backward(ps.model(ids[:1]).sum())  # takes 1 from both columns of row 1
            ps.step()

        def look(ids: Tensor) -> float:
            with torch.no_grad():
                return float(ps.model(ids).sum())

        ps.model.prefetch(ids)  # type: ignore[operator]
        step()
        assert [look(ids[:1]), look(ids), look(ids)] == [-2, 0, -2]
        ps.model.prefetch(ids)  # type: ignore[operator]
        step()
        step()
        assert look(ids) == -6


def test_sync_looks_nothing_up_ahead():
    """Its steps are those of one process, to the last digit: rows of before a step would not be."""
    with evenstep.parameter_server(
        lambda: evenstep.RemoteEmbedding(5, 2, name="users"), torch.optim.SGD, mode="sync"
    ) as ps:
        with pytest.raises(
            ConfigurationError, match=r"'users' on worker 0 .*: prefetch in mode='sync'.*Leave prefetch out"
        ):
            ps.model.prefetch(torch.tensor([1]))  # type: ignore[operator]
        loader = evenstep.DataLoader(torch.arange(5), 2, queue=ps.queue(prefetch=ps.model.prefetch))  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="prefetch in mode='sync'"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_embeddings": 0}, "num_embeddings=0"),
        ({"padding_idx": 4}, "padding_idx=4"),
        ({"pooling": "min"}, "pooling='min'"),
        ({"optimizer": "lamb"}, "optimizer='lamb'; 'sgd', 'adagrad'"),
        ({"lr": -1}, "lr=-1"),
        ({"init_fn": 3}, "init_fn=3"),
        ({"name": ""}, "name=''"),
    ],
)
def test_what_is_refused(options: dict[str, Any], text: str):
    given: dict[str, Any] = {"num_embeddings": 4, "embedding_dim": 2} | options
    with pytest.raises(ConfigurationError, match=f"RemoteEmbedding: {text}"):
        evenstep.RemoteEmbedding(**given)


@pytest.mark.parametrize("wrong", [torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.int64), None])
def test_first_rows_of_another_shape(wrong: Any):
    with (
        evenstep.parameter_server(
            lambda: evenstep.RemoteEmbedding(4, 2, init_fn=lambda ids: wrong), torch.optim.SGD
        ) as ps,
        pytest.raises(ConfigurationError, match="init_fn returned"),
    ):
        ps.model(torch.tensor([1]))
