"""Which process is the rank, and which has only inherited its variables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenstep.ground.environment import Placement
from evenstep.ground.environment.inheritance import RankProcess, identity, is_inherited

RANK = Placement(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="torchrun", master_port=29500)


@pytest.mark.parametrize(
    ("pid", "start_ticks", "placement", "expected"),
    [
        (7, 100, RANK, False),
        (8, 100, RANK, True),
        (7, 101, RANK, True),
        (8, 100, replace(RANK, master_port=29501), False),
        (8, 100, replace(RANK, rank=0), False),
        (8, 100, replace(RANK, why="said otherwise", remark="and so"), True),
    ],
)
def test_another_process_with_the_same_variables_is_a_child(
    pid: int, start_ticks: int, placement: Placement, expected: bool
) -> None:
    """A process that has the number of one that has ended is another one; one with a launcher of its own is a rank."""
    exported = RankProcess.parse(str(RankProcess(7, 100, 1, 2, identity(RANK))))
    assert is_inherited(exported, placement, pid=pid, start_ticks=start_ticks) is expected


@pytest.mark.parametrize("text", ["", "7", "7 100 1 2", "7 100 1 2 ", "x 100 1 2 y", "7 100 1 y", "7 100 1 2 3 y"])
def test_what_no_rank_has_exported_says_nothing(text: str) -> None:
    assert RankProcess.parse(text) is None
    assert not is_inherited(None, RANK, pid=7, start_ticks=100)


def test_variables_that_say_nothing_are_inherited_too() -> None:
    """Those of a rank whose script has given it to `init_process_group`."""
    said = "WORLD_SIZE=2 is set, but RANK is not."
    exported = RankProcess(7, 100, 1, 2, identity(said))
    assert is_inherited(exported, said, pid=8, start_ticks=100)
    assert not is_inherited(exported, said, pid=7, start_ticks=100)
    assert not is_inherited(exported, Placement(), pid=8, start_ticks=100)
