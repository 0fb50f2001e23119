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


def renamed(functional: Any, name: str, old: str) -> Any:
    """A functional collective, by the name that this torch doesn't warn of."""
    return getattr(functional, name, None) or getattr(functional, old)


def required_later() -> list[Any]:
    """A tensor that comes to require gradients while its sum is under way."""
    with both_groups() as (_, ours):
        found: list[Any] = []
        for numel in (4, 40_000):
            tensor = torch.ones(numel)
            work = dist.all_reduce(tensor, group=ours, async_op=True)
            tensor.requires_grad_()
            work.wait()
            found += [tensor.eq(ours.size()).all().item(), tensor.grad_fn]
        return found


def test_a_tensor_may_come_to_require_gradients_while_it_travels(ranks: RankPool) -> None:
    assert ranks.run(required_later, 2) == [[True, None, True, None]] * 2


def alone() -> list[Any]:
    """A group of one: results of strided tensors, and of one that requires gradients."""
    with both_groups() as (_, ours):
        group = dist.new_group([ours.rank()], backend="evenstep", use_local_synchronization=True)
        given = torch.arange(6.0).view(2, 3).t().requires_grad_()
        out, share = torch.empty(3, 2), torch.empty(3, 2)
        gather = renamed(dist, "all_gather_single", "all_gather_into_tensor")
        scatter = renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")
        gather(out, given, group=group)
        scatter(share, given, group=group)
        dist.destroy_process_group(group)
        return [out.tolist(), share.tolist(), out.requires_grad, share.requires_grad]


def test_one_rank_copies_without_a_trace_of_the_gradient(ranks: RankPool) -> None:
    rows = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert ranks.run(alone, 2) == [[rows, rows, False, False]] * 2


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
