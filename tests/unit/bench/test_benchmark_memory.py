"""How `benchmarks/memory.py` counts what Python can't reach."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import modules


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = modules.ROOT / "benchmarks"
    for name in ("measuring", "models"):  # which it imports
        monkeypatch.setitem(sys.modules, name, modules.load(folder / f"{name}.py", monkeypatch))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's, when its optimizers are imported
        return modules.load(folder / "memory.py", monkeypatch)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"bucket_sizes": "1024"}, 1024),
        ({"bucket_sizes": "1024, 24", "has_rebuilt_buckets": 0, "rebuilt_bucket_sizes": ""}, 1048),
        ({"bucket_sizes": "1024, 24", "has_rebuilt_buckets": 1, "rebuilt_bucket_sizes": "500, 500, 48"}, 1048),
    ],
)
def test_buckets_are_those_that_torch_has_now(memory, told, expected):
    assert memory.torch_bucket_bytes(told) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_account_is_in_bytes_of_all_buckets(memory, tmp_path, dtype):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        check_account(memory, dtype)
    finally:
        dist.destroy_process_group()


def check_account(memory: Any, dtype: torch.dtype) -> None:
    """The model ends with it: one that outlives its process group may never end."""
    module = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4))).to(dtype)
    model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.5, gradient_as_bucket_view=True)
    for _ in range(3):  # it lays buckets out anew behind the first pass, and says so in the third
        model(torch.ones(2, 300, dtype=dtype)).sum().backward()
        told = model._get_ddp_logging_data()
        assert memory.torch_bucket_bytes(told) == sum(parameter.nbytes for parameter in model.parameters())
    assert told["has_rebuilt_buckets"] == 1
