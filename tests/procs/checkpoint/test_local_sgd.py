"""Runs of ranks that step on their own: what each rank's optimizer keeps is saved, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.errors import UsageError
from evenstep.testing import RankPool

KINDS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


class TwoWays(nn.Module):
    """A part that only rank 1 uses: its optimizer keeps something that others don't. One weight is channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.second, self.only_there = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, *, there: bool) -> Tensor:
        hidden = self.first(x).tanh().mean((2, 3))
        return self.second(hidden) + (self.only_there(hidden) if there else 0.0)


def build(kind: str, seed: int) -> tuple[Any, Any, evenstep.LocalSGD]:
    torch.manual_seed(seed)
    model = evenstep.DistributedDataParallel(TwoWays().double())
    optimizer = KINDS[kind](model.parameters())
    return model, optimizer, evenstep.LocalSGD(model, optimizer, every=3, warmup_steps=1)


def train(model: Any, optimizer: Any, local: evenstep.LocalSGD, steps: range, seed: int, checkpoint: Any) -> None:
    rank = model.world.rank
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
        x = torch.randn(5, 3, 4, 4, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        model.backward(model(x, there=rank == 1).square().mean())
        local.step()
        if checkpoint is not None:
            checkpoint.step()


def values_of(model: Any, optimizer: Any) -> list[Tensor]:
    kept = optimizer.state_dict()["state"]
    tensors = [value for number in sorted(kept) for _, value in sorted(kept[number].items(), key=lambda each: each[0])]
    return [p.detach().clone() for p in model.parameters()] + [t.clone() for t in tensors if isinstance(t, Tensor)]


def run(kind: str, seed: int, where: Path, resumes: bool) -> list[Tensor]:
    """Seven steps, of which the last three after a resume; what the last average left is step 4's."""
    evenstep.init(quiet=True)
    model, optimizer, local = build(kind, seed)
    with evenstep.Checkpointer(where, model=model, local_sgd=local, every_steps=1, every_minutes=None) as checkpoint:
        train(model, optimizer, local, range(4), seed, checkpoint)
    if resumes:
        model, optimizer, local = build(kind, seed + 1)
        with evenstep.Checkpointer(where, model=model, local_sgd=local, every_minutes=None) as checkpoint:
            checkpoint.resume()
            assert local.num_steps == 4
            train(model, optimizer, local, range(4, 7), seed, None)
    else:
        train(model, optimizer, local, range(4, 7), seed, None)
    kept = values_of(model, optimizer)  # `close` makes it equal
    local.close()
    return kept


@pytest.mark.parametrize(
    "kind", ["AdamW", *(pytest.param(kind, marks=pytest.mark.extended) for kind in KINDS if kind != "AdamW")]
)
def test_each_rank_goes_on_with_what_its_optimizer_kept(
    ranks: RankPool, fresh_seed: int, tmp_path: Path, kind: str
) -> None:
    resumed = ranks.run(run, 2, kind, fresh_seed, tmp_path / "resumed", True)
    alone = ranks.run(run, 2, kind, fresh_seed, tmp_path / "alone", False)
    for rank in range(2):
        assert len(resumed[rank]) == len(alone[rank]) > 6
        assert all(torch.equal(a, b) for a, b in zip(resumed[rank], alone[rank], strict=True))
    differs = [not torch.equal(a, b) for a, b in zip(resumed[0][6:], resumed[1][6:], strict=False)]
    assert any(differs), "ranks keep the same here, so nothing was tested"


def save(kind: str, seed: int, where: Path) -> list[Tensor]:
    evenstep.init(quiet=True)
    model, optimizer, local = build(kind, seed)
    with evenstep.Checkpointer(where, model=model, local_sgd=local, every_minutes=None) as checkpoint:
        train(model, optimizer, local, range(4), seed, checkpoint)
        checkpoint.save()
    return values_of(model, optimizer)


def load(kind: str, seed: int, where: Path) -> list[Tensor]:
    evenstep.init(quiet=True)
    model, optimizer, local = build(kind, seed)
    with evenstep.Checkpointer(where, model=model, local_sgd=local, every_minutes=None) as checkpoint:
        checkpoint.resume()
    return values_of(model, optimizer)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_other_numbers_of_ranks_have_the_mean(ranks: RankPool, fresh_seed: int, tmp_path: Path, num_ranks: int) -> None:
    saved = ranks.run(save, 2, "momentum", fresh_seed, tmp_path)
    # Rank 1 has momenta of two parameters more, which nobody else has had.
    kept = [(a + b) / 2 for a, b in zip(saved[0], saved[1], strict=False)] + saved[1][len(saved[0]) :]
    for loaded in ranks.run(load, num_ranks, "momentum", fresh_seed, tmp_path):
        assert len(loaded) == len(saved[1])
        for ours, wanted in zip(loaded, kept, strict=True):
            assert torch.allclose(ours, wanted, rtol=0, atol=1e-15)


def without(what: str, where: Path) -> None:
    evenstep.init(quiet=True)
    model, optimizer, local = build("momentum", 0)
    objects: dict[str, Any] = {"optimizer": optimizer}
    if what == "both":
        objects["local_sgd"] = local
    saved = torch.compile(model) if what == "compiled" else model
    with evenstep.Checkpointer(where, model=saved, every_minutes=None, **objects) as checkpoint:
        with pytest.raises(UsageError, match="LocalSGD"):
            checkpoint.save()
        with pytest.raises(UsageError, match=r"Leave it out|local_sgd=local"):
            train(model, optimizer, local, range(1), 0, checkpoint)
        local.close()


@pytest.mark.parametrize("what", ["alone", "both", "compiled"])
def test_a_checkpoint_without_local_updates_is_refused(ranks: RankPool, tmp_path: Path, what: str) -> None:
    ranks.run(without, 2, what, tmp_path)
