"""Checkpoints to which each server writes its part: read by other numbers of servers, with all that a model has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evenstep
from tests.procs.parameter_servers.test_parameter_server import assert_same, group

pytestmark = pytest.mark.extended
STEPS = 8


class Model(nn.Module):
    """A tied weight, statistics of a batch norm, a frozen weight, a module buffer that isn't saved, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)
        self.double()
        self.users = evenstep.RemoteEmbedding(11, 4, optimizer="rowwise_adagrad", lr=0.1, dtype=torch.float64)

    def forward(self, words: Tensor, users: Tensor) -> Tensor:
        hidden = self.norm(self.words(words) + self.users(users))
        return self.out(hidden * self.frozen * self.scale)


def optimizer_of(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Two groups, of which a server may have one alone."""
    decayed = [each for name, each in named if "words" in name]
    others = [each for name, each in named if "words" not in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return torch.optim.AdamW([each for each in groups if each["params"]], lr=0.05)


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def train(path: str, seed: int, first: int, last: int) -> tuple[dict[str, Tensor], Tensor]:
    """(the model's state, the table's rows)."""
    torch.manual_seed(5)
    with evenstep.parameter_server(
        Model, optimizer_of, mode="sync", scheduler_fn=schedule, checkpoint=path, every_steps=2
    ) as ps:
        generator = torch.Generator().manual_seed(seed)
        for step in range(last):
            words, users, y = (torch.randint(7, (6,), generator=generator) for _ in range(3))
            if step >= first:
                ps.backward(F.cross_entropy(ps(words, users), y), weight=6)
                ps.step()
        rows = ps.model.users.rows()  # type: ignore[union-attr, operator]
    return {name: each.detach().clone() for name, each in ps.model.state_dict().items()}, rows


def test_other_numbers_of_servers_go_on(tmp_path: Path, fresh_seed: int):
    """Through 2, 5 and no servers as in one run alone; some of 5 have no parameters."""
    expected, expected_rows = train(str(tmp_path / "through"), fresh_seed, 0, STEPS)
    for num_servers, first, last in ((2, 0, 3), (5, 3, 6)):
        with group(1, num_servers) as ranks:
            ranks.run(train, (str(tmp_path / "parts"), fresh_seed, first, last))
        (folder,) = (tmp_path / "parts").glob(f"step-{last:07d}-*")
        manifest = json.loads((folder / "manifest.json").read_text())
        written = [name for name in manifest["files"] if name.startswith("tables-shards")]
        assert len(written) == num_servers, "each server has written its own rows"
    found, rows = train(str(tmp_path / "parts"), fresh_seed, 6, STEPS)
    assert_same(found, {name: expected[name] for name in found})
    assert found.keys() == expected.keys()
    torch.testing.assert_close(rows, expected_rows, rtol=0, atol=1e-12)
