"""Where ranks meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenstep.ground.coordination.rendezvous_store import open_store
from evenstep.ground.environment.placement import Placement


@pytest.mark.extended
def test_a_meeting_that_all_have_left_can_be_come_to_again(tmp_path: Path) -> None:
    """torch deleted the file of ranks that had closed it, and what others had just written for the next world."""
    file = tmp_path / "rendezvous-0"
    placements = [Placement(rank, 2, rank, 2, launcher="evenstep.launch", rendezvous_file=file) for rank in range(2)]
    stores = [open_store(placement, timeout_s=5.0) for placement in placements]
    for rank, store in enumerate(stores):
        store.set(f"rank {rank}", "is here")
    del store
    stores.clear()
    assert file.exists()
