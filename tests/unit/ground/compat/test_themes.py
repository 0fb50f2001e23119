"""What single themes make of torch's private parts, where nothing else would notice on one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.data import DataLoader, Dataset, get_worker_info

from evenstep.ground.compat import torch_data, torch_distributed, torch_tensors


class WorkerIds(Dataset[int]):
    """Samples say what a worker sees inside the block, and behind it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> tuple[bool, bool, bool]:  # type: ignore[override]
        with torch_data.without_worker_info() as worker:
            inside = get_worker_info() is None
        return inside, worker is not None, get_worker_info() is worker


def test_a_worker_is_none_inside_the_block_and_one_again_behind_it() -> None:
    loader: DataLoader[int] = DataLoader(WorkerIds(), batch_size=None, num_workers=1)
    assert [list(sample) for sample in loader] == [[True, True, True]]  # type: ignore[call-overload]


def test_how_placements_divide() -> None:
    assert torch_tensors.split_of(Shard(1)) == (1, 1)
    assert torch_tensors.split_of(Replicate()) == (None, 1)
    assert torch_tensors.split_of(Partial()) is None


def test_a_group_of_some_ranks_is_not_split_from_one_that_is_bound_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would call NCCL's split on these ranks, which waits for all others. No GPU is needed to see that."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    default: Any = dist.group.WORLD
    try:
        default.bound_device_id = torch.device("cuda", 0)
        seen = []
        monkeypatch.setattr(dist, "new_group", lambda *_, **__: seen.append(default.bound_device_id))
        torch_distributed.make_group_alone([0], "nccl", timedelta(seconds=1))
        assert seen == [None]
        assert default.bound_device_id == torch.device("cuda", 0)
    finally:
        dist.destroy_process_group()
