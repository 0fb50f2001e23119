"""The backend "evenstep" under what torch does to calls: autograd, torch.func, and modes that look at them."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.testing import RankPool
from evenstep.transport import fallback

from .test_backend import both_groups


def summed(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return (total * total).sum()


def transformed(numel: int) -> list[Any]:
    """What torch.vmap and torch.func.grad say of a sum over ranks, on Gloo and here; then an ordinary sum."""
    told: list[Any] = []
    with both_groups() as groups:
        for group in groups:
            total = functools.partial(summed, group)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with pytest.raises(RuntimeError) as refused:
                    torch.vmap(total)(torch.ones(3, numel))
            told.append(str(refused.value).partition("\n")[0])
            gradient = torch.func.grad(total)(torch.ones(numel))
            after = torch.ones(1)
            dist.all_reduce(after, group=group)
            told += [float(gradient[-1]), float(after)]
        told.append(fallback.counts())
    return told


@pytest.mark.parametrize("numel", [2, 30_000])
def test_torchs_transforms_find_what_they_find_on_gloo(ranks: RankPool, numel: int) -> None:
    for told in ranks.run(transformed, 2, numel):
        assert told[:3] == told[3:6]
        assert "Batching rule not implemented" in told[0]
        assert told[1:3] == [4.0, 2.0]
        assert told[6] == {"allreduce": 2}
