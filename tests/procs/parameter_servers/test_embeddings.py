"""Tables of embeddings on several servers: the answer of one process, memory, bytes, and what goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evenstep
from evenstep.errors import MismatchError
from evenstep.ground.environment import current_placement
from tests.procs.parameter_servers.test_parameter_server import assert_same, group

DOUBLE = torch.float64
USERS, WORDS, DIM = 23, 17, 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def first_rows(num_rows: int) -> Callable[[Tensor], Tensor]:
    return lambda ids: torch.sin(ids.double()[:, None] * (1 + torch.arange(DIM)) + num_rows)


class Model(nn.Module):
    """A table of users, used twice, a table of bags of words, and parameters beside them."""

    def __init__(self, optimizer: str | None) -> None:
        super().__init__()
        options: dict[str, Any] = {"optimizer": optimizer, "lr": 0.1, "dtype": DOUBLE}
        if optimizer is None:
            users, words = (first_rows(n)(torch.arange(n)) for n in (USERS, WORDS))
            words[0] = 0
            self.users: nn.Module = nn.Embedding.from_pretrained(users, freeze=False)
            self.words: nn.Module = nn.EmbeddingBag.from_pretrained(words, freeze=False, mode="sum", padding_idx=0)
        else:
            self.users = evenstep.RemoteEmbedding(USERS, DIM, init_fn=first_rows(USERS), **options)
            self.words = evenstep.RemoteEmbedding(
                WORDS, DIM, init_fn=first_rows(WORDS), padding_idx=0, pooling="sum", **options
            )
        self.top = nn.Linear(2 * DIM, 3).double()

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        pair = self.users(users[:, 0]) * self.users(users[:, 1])
        return self.top(torch.cat([pair, self.words(words)], 1))


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for step in range(7):
        size = 1 if step == 3 else int(torch.randint(4, 20, (), generator=generator))  # step 3: empty shares
        yield (
            torch.randint(USERS, (size, 2), generator=generator),
            torch.randint(WORDS, (size, 4), generator=generator),
            torch.randint(3, (size,), generator=generator),
        )


def train(seed: int, optimizer: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the state at the start, and at the end), tables included."""
    with evenstep.parameter_server(lambda: Model(optimizer), OPTIMIZERS[optimizer], mode="sync") as ps:

        def state() -> dict[str, Tensor]:
            tables = {f"{name}.weight": getattr(ps.model, name).rows().clone() for name in ("users", "words")}
            return {name: each.clone() for name, each in ps.model.state_dict().items()} | tables

        def share(batch: tuple[Tensor, ...]) -> list[Tensor]:
            return [each[ps.worker :: ps.num_workers] for each in batch]

        start = state()
        for batch in batches(seed):
            users, words, y = share(batch)
            if len(y):
                ps.backward(F.cross_entropy(ps.model(users, words), y), weight=len(y))
            ps.step()
        ps.step()  # a worker reads the tables before the others leave: all have ended their steps
        end = state()
        ps.step()
    return start, end


def by_one_process(start: dict[str, Tensor], seed: int, optimizer: str) -> dict[str, Tensor]:
    model = Model(None)
    model.load_state_dict(start)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for users, words, y in batches(seed):
        F.cross_entropy(model(users, words), y).backward()
        stepper.step()
        stepper.zero_grad()
    return dict(model.state_dict())


def check(num_workers: int, num_servers: int, seed: int, optimizers: list[str]) -> None:
    with group(num_workers, num_servers) as ranks:
        for optimizer in optimizers:
            results = ranks.run(train, (seed, optimizer))[:num_workers]
            start, end = results[0]
            expected = by_one_process(start, seed, optimizer)
            assert any(not torch.equal(start[name], expected[name]) for name in start)
            for _, each in results:
                assert_same(end, each)
                assert_same(each, expected)


def test_tables_train_as_in_one_process(fresh_seed: int):
    check(2, 2, fresh_seed, ["adagrad"])


@pytest.mark.extended
@pytest.mark.parametrize(("num_workers", "num_servers"), [(3, 1), (2, 5)])
def test_tables_train_as_in_one_process_with_any_number_of_workers_and_servers(
    num_workers: int, num_servers: int, fresh_seed: int
):
    check(num_workers, num_servers, fresh_seed, ["sgd", "adagrad"])


def from_the_queue(seed: int) -> list[float]:
    """What all rows have lost when all batches of 3 epochs are applied.

    Each batch's rows are looked up ahead, and each of its ids takes 1 from its row.
    """
    with evenstep.parameter_server(
        lambda: evenstep.RemoteEmbedding(11, 1, optimizer="sgd", lr=1.0, init_std=0, dtype=DOUBLE),
        torch.optim.SGD,
        mode="async",
    ) as ps:
        ids = torch.randint(11, (40, 3), generator=torch.Generator().manual_seed(seed))
        queue = ps.queue(prefetch=ps.model.prefetch)  # type: ignore[arg-type]
        loader = evenstep.DataLoader(ids, global_batch_size=2, shuffle=True, queue=queue)
        for _ in loader.epochs(3):
            for batch in loader:
                ps.backward(ps.model(batch).sum())
                ps.step()
        while -ps.model.rows().sum() < 3 * ids.numel():  # type: ignore[operator]
            time.sleep(0.01)  # until the other's pushes have come: the test's limit ends it if one is lost
        rows = -ps.model.rows()[:, 0]  # type: ignore[operator]
        return rows.tolist()  # type: ignore[no-any-return]


@pytest.mark.extended
def test_each_push_of_rows_counts_once_in_every_mode(fresh_seed: int):
    with group(2, 2) as ranks:
        ids = torch.randint(11, (40, 3), generator=torch.Generator().manual_seed(fresh_seed))
        expected = 3.0 * torch.bincount(ids.flatten(), minlength=11)
        for rows in ranks.run(from_the_queue, (fresh_seed,))[:2]:
            assert rows == expected.tolist()


def other_table() -> None:
    rows = 5 if current_placement().rank == 1 else 4
    with evenstep.parameter_server(lambda: evenstep.RemoteEmbedding(rows, 2, name="users"), torch.optim.SGD):
        pass


@pytest.mark.extended
def test_tables_that_differ_end_the_run_with_the_reason():
    with pytest.raises(MismatchError, match="table 'users': num_embeddings is 4 on rank 0 and 5 on rank 1"):
        evenstep.launch(other_table, 2, servers=1, device="cpu", timeout_s=60)
