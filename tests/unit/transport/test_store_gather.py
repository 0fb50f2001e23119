"""Values that ranks exchange through a store. The ranks are threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore, Store

from evenstep.errors import CollectiveTimeoutError
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.store_gather import StoreGather


def meet(store: Store, rank: int, value: Any, timeout_s: float = 20.0) -> list[Any]:
    gather = StoreGather(store, rank, 3, timeout_s=timeout_s)
    first = exchange(gather, value)
    if rank < 2:
        first += exchange(gather.among([0, 1]), ["of two", rank])
    return first + exchange(gather, {"tensor": torch.full((rank,), 0.5)})


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_ranks_that_meet_again_in_a_store_get_what_is_new(tmp_path: Path, kind: str) -> None:
    stores = [FileStore(str(tmp_path / "store")) for _ in range(3)] if kind == "file" else [HashStore()] * 3
    for turn in range(2):
        with ThreadPoolExecutor(3) as ranks:
            runs = [ranks.submit(meet, stores[rank], rank, {"rank": rank, "turn": turn}) for rank in range(3)]
            results = [run.result(timeout=60) for run in runs]
        for rank, (*early, last) in enumerate(results):
            first, between = early[:3], early[3:-2]
            assert first == [{"rank": other, "turn": turn} for other in range(3)]
            assert between == ([["of two", 0], ["of two", 1]] if rank < 2 else [])
            assert torch.equal(last["tensor"], torch.full((2,), 0.5))


def test_ranks_that_do_not_come_are_named() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=60))
    gather = StoreGather(store, 1, 3, timeout_s=0.2)
    with pytest.raises(CollectiveTimeoutError, match=r"^ranks 0, 2 have not come within 0.2 s$"):
        exchange(gather, "here")
