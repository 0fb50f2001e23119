"""What is wrong on one rank alone, or differs between ranks, is the same error on all of them; nobody waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ConfigurationError, EvenstepError, MismatchError


def told(call):
    with pytest.raises(EvenstepError) as raised:
        call()
    return type(raised.value).__name__, str(raised.value)


def answers(directory):
    """What this rank is told, by case. Rank 1 is the odd one."""
    world = evenstep.init(quiet=True)
    odd = world.rank == 1

    def wrapped(**arguments):
        return evenstep.DistributedDataParallel(nn.Linear(2, 1), **arguments)

    def checkpointer(where=directory / "same", **arguments):
        return evenstep.Checkpointer(where, **{"model": nn.Linear(1, 1), "every_minutes": None, **arguments})

    def sharded(*kind, **arguments):
        return evenstep.ShardedOptimizer(model, *(kind or (torch.optim.SGD,)), **{"lr": 0.1, **arguments})

    model = wrapped()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {
        "dim of one rank": told(lambda: wrapped(dim="x" if odd else 0)),
        "nothing to train on one rank": told(
            lambda: evenstep.DistributedDataParallel(nn.ReLU() if odd else nn.Linear(2, 1))
        ),
        "init_sync": told(lambda: wrapped(init_sync=not odd)),
        "bucket sizes": told(lambda: wrapped(bucket_cap_mb=2 if odd else 3)),
        "directory": told(lambda: checkpointer(directory / str(world.rank))),
        "every_steps": told(lambda: checkpointer(every_steps=2 + odd)),
        "a Checkpointer of one rank": told(lambda: checkpointer(5 if odd else directory)),
        "a loader's samples": told(lambda: evenstep.DataLoader(range(8), 4, sample_seed=odd)),
        "a loader's function": told(lambda: evenstep.DataLoader(range(8), 4, collate_fn=3 if odd else None)),
        "a loader and a Checkpointer": told(lambda: checkpointer() if odd else evenstep.DataLoader(range(8), 4)),
        "every": told(lambda: evenstep.LocalSGD(model, sgd, every=2 + odd)),
        "the rate": told(lambda: sharded(lr=0.1 + odd)),
        "the optimizer of one rank": told(lambda: sharded(5 if odd else torch.optim.SGD)),
    }
    optimizer = sharded()
    found["a second optimizer"] = told(lambda: sharded(params=list(model.parameters())[: 1 if odd else 2]))
    stranger = {"params": [nn.Parameter(torch.ones(3))]}
    found["a group of one rank"] = told(
        lambda: optimizer.add_param_group(stranger if odd else {"params": [], "lr": 1.0})
    )
    assert len(optimizer.param_groups) == 1
    checkpoint = checkpointer()
    found["after"] = told(lambda: checkpoint.discard(after=world.rank))
    found["a metric of one rank"] = told(lambda: checkpoint.step(loss="low" if odd else 1.0))
    found["names of metrics"] = told(lambda: checkpoint.step(**{"loss" if odd else "lose": 1.0}))
    checkpoint.close()
    assert world.mean(world.rank) == 0.5, "the ranks are in step"
    return found


EXPECTED = {
    "dim of one rank": (ConfigurationError, "DistributedDataParallel on rank 1: dim='x'; a whole number."),
    "nothing to train on one rank": (ConfigurationError, "DistributedDataParallel on rank 1: ReLU has no parameter"),
    "init_sync": (MismatchError, "DistributedDataParallel: init_sync is True on rank 0 and False on rank 1."),
    "bucket sizes": (MismatchError, "DistributedDataParallel: bytes of a bucket is [1048576, 3145728] on rank 0 and"),
    "directory": (MismatchError, "Checkpointer: the directory is "),
    "every_steps": (MismatchError, "Checkpointer: every_steps is 2 on rank 0 and 3 on rank 1. Pass the same"),
    "a Checkpointer of one rank": (ConfigurationError, "Checkpointer on rank 1: directory=5; the path of a directory"),
    "a loader's samples": (MismatchError, "DataLoader: sample_seed is False on rank 0 and True on rank 1."),
    "a loader's function": (ConfigurationError, "DataLoader on rank 1: collate_fn=3; a function, or None."),
    "a loader and a Checkpointer": (MismatchError, "rank 0 is at DataLoader, and rank 1 at Checkpointer."),
    "every": (MismatchError, "LocalSGD: every is 2 on rank 0 and 3 on rank 1."),
    "the rate": (MismatchError, "ShardedOptimizer: lr of parameter group 0 is 0.1 on rank 0 and 1.1 on rank 1."),
    "the optimizer of one rank": (ConfigurationError, "ShardedOptimizer on rank 1: kind=5; a class of optimizers"),
    "a second optimizer": (ConfigurationError, "ShardedOptimizer: parameter 'weight' belongs to another"),
    "a group of one rank": (
        ConfigurationError,
        "ShardedOptimizer.add_param_group on rank 1: a parameter of shape [3] isn't a trained",
    ),
    "after": (MismatchError, "Checkpointer.discard: after is 0 on rank 0 and 1 on rank 1."),
    "a metric of one rank": (ConfigurationError, "checkpoint on rank 1: metric loss='low' isn't a number."),
    "names of metrics": (MismatchError, "checkpoint: the metrics are lose on rank 0 and loss on rank 1."),
}


def test_all_ranks_are_told_the_same(ranks, tmp_path):
    seen = ranks.run(answers, 2, tmp_path)
    assert seen[0] == seen[1]
    assert seen[0].keys() == EXPECTED.keys()
    for case, (kind, text) in EXPECTED.items():
        name, message = seen[0][case]
        assert name == kind.__name__, f"{case}: {message}"
        assert message.startswith(text), case
