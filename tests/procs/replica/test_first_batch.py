"""A torch `DataLoader` left in a script of evenstep's is warned of, once; whatever divides its data is let alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import evenstep
from evenstep import world as worlds
from evenstep.ground.health import steps

DATA = TensorDataset(torch.arange(64.0).reshape(16, 4))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def loader_of(kind: str, world):
    if kind == "in order":
        return DataLoader(DATA, batch_size=2)
    if kind == "at random":
        return DataLoader(DATA, batch_size=2, shuffle=True)
    if kind == "no batches":
        return DataLoader(DATA, batch_size=None, shuffle=True)
    if kind == "a sampler of evenstep's":
        return DataLoader(DATA, batch_size=2, sampler=evenstep.DistributedSampler(DATA))
    if kind == "a sampler of torch's":
        return DataLoader(DATA, batch_size=2, sampler=DistributedSampler(DATA))
    if kind == "divided beforehand":
        return DataLoader(Subset(DATA, range(world.rank, 16, world.world_size)), batch_size=2, shuffle=True)
    if kind == "a stream":
        return DataLoader(Stream(), batch_size=2)
    if kind == "tensors":
        return [(torch.ones(2, 4),)] * 3
    return evenstep.DataLoader(DATA, global_batch_size=4, shuffle=True)


def told(kind: str) -> list[tuple[str, str]]:
    """The warnings of this rank, and the files whose lines they name."""
    steps._num_batches = 0  # tests before this one may have drawn some
    before = worlds.initialised()
    if before is not None:
        before.close()
    with evenstep.init(quiet=True, seed=0) as world, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = evenstep.DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        held = iter(DataLoader(DATA, batch_size=2)) if kind == "an evaluation's" else iter(())
        for _ in range(2):
            for batch in loader_of(kind, world):
                next(held, None)
                model(batch[0]).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [(str(each.message), each.filename) for each in caught if "same samples" in str(each.message)]


@pytest.mark.parametrize("kind", ["in order", "at random", "no batches"])
def test_a_loader_of_torchs_that_divides_nothing_is_warned_of_once(ranks, kind):
    ((text, file),), *others = ranks.run(told, 2, kind)
    assert text.startswith("ranks 0 and 1 train on the same samples: their first batches are equal")
    assert file == __file__
    assert others == [[]]


@pytest.mark.parametrize(
    "kind",
    [
        "a sampler of evenstep's",
        "a sampler of torch's",
        "divided beforehand",
        "a stream",
        "tensors",
        "evenstep's",
        "an evaluation's",
    ],
)
def test_what_divides_its_data_is_let_alone(ranks, kind):
    assert ranks.run(told, 2, kind) == [[], []]
