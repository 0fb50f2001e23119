"""After a failure the groups that `init` has made over NCCL are given up; those of the script are left to it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

import evenstep
from evenstep import joining
from evenstep import world as worlds


@pytest.mark.parametrize(
    ("transport", "adopted", "given_up"), [("nccl", None, 1), ("nccl", "the script's", 0), ("gloo", None, 0)]
)
def test_who_made_a_group_ends_it(
    monkeypatch: pytest.MonkeyPatch, transport: str, adopted: str | None, given_up: int
) -> None:
    left = SimpleNamespace(transport_name=transport, _adopted_group=adopted, close=lambda: None)
    calls: list[None] = []
    monkeypatch.setattr(worlds, "abandoned", [left])
    monkeypatch.setattr(joining, "_give_up_nccl", lambda: calls.append(None))
    assert not dist.is_initialized()
    with evenstep.init(quiet=True, device="cpu"):
        assert worlds.abandoned == []
    assert len(calls) == given_up
