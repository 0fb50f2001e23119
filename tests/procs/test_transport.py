"""One conformance suite for every transport, on 1 to 5 ranks."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

import evenstep
from evenstep.testing import RankPool
from evenstep.testing.transport import UNSIGNED, Coverage, check_transport, ops_of
from evenstep.transport.base import Op
from evenstep.transport.host import connect_shared_memory
from evenstep.transport.local import LocalTransport
from evenstep.transport.process_group import ProcessGroupTransport
from evenstep.transport.shared_memory import SharedMemoryTransport

TIMEOUT_S = 60.0


def new_shared_memory() -> SharedMemoryTransport:
    made = connect_shared_memory(evenstep.init(quiet=True).control, timeout_s=TIMEOUT_S)
    assert isinstance(made, SharedMemoryTransport), made
    return made


def new_gloo() -> ProcessGroupTransport:
    evenstep.init(quiet=True)
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    return ProcessGroupTransport(group, name="gloo", timeout_s=TIMEOUT_S, owns_group=True)


def gloo_carries(op: Op, dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return op in ("max", "min", "product", "band", "bor", "bxor")  # the sum of two is 2
    if dtype.is_complex:
        return op in ("sum", "mean")
    return dtype not in (torch.int16, *UNSIGNED[1:])


def check_shared_memory(seed: int) -> int:
    return check_transport(new_shared_memory, Coverage(seed=seed))


def check_gloo(seed: int) -> int:
    shapes = ((), (1,), (3, 5), (1000,), (16385,))
    return check_transport(new_gloo, Coverage(shapes=shapes, carries=gloo_carries, seed=seed))


def test_local_conforms() -> None:
    assert check_transport(LocalTransport) > 1000


@pytest.mark.timeout(600)
@pytest.mark.parametrize("nproc", [2, 3, 4, 5])
def test_shared_memory_conforms(ranks: RankPool, nproc: int, fresh_seed: int) -> None:
    counts = ranks.run(check_shared_memory, nproc, fresh_seed, timeout_s=500)
    assert min(counts) > 1000


@pytest.mark.parametrize("nproc", [2, 3])
def test_gloo_conforms(ranks: RankPool, nproc: int, fresh_seed: int) -> None:
    assert min(ranks.run(check_gloo, nproc, fresh_seed, timeout_s=150)) > 500


def test_every_dtype_has_ops() -> None:
    assert ops_of(torch.bool) == ("sum", "product", "max", "min", "band", "bor", "bxor")
    assert "mean" not in ops_of(torch.int32)
