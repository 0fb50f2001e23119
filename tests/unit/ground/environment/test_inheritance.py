"""Which process is the rank, and which has only inherited its variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evenstep.ground import environment
from evenstep.ground.environment import Placement, Settings
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


ASKS = """
import json, os, sys
from evenstep.ground import environment
p = environment.current_placement()
around = sorted(environment.surroundings().variables)
given = environment.run_variables("run", store="/new")
print(json.dumps([p.world_size, p.launcher, str(p.rendezvous_file), p.device, p.remark, around, given]))
"""


def asks(**variables: str) -> list[object]:
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", ASKS], env=env, capture_output=True, text=True, check=True)
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.extended
def test_a_child_of_a_rank_is_a_world_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Until the rank claims its variables, a child may be the rank: a script may do its work in one."""
    variables = environment.rank_variables(rank=1, world_size=2, store=str(tmp_path / "store"), device="cpu")
    for name, value in {**variables, "EVENSTEP_SERVERS": "1"}.items():
        monkeypatch.setenv(name, value or "")
    monkeypatch.setenv("EVENSTEP_SETTINGS", environment.changed_settings(inject="kill")["EVENSTEP_SETTINGS"])
    assert asks()[:2] == [2, "evenstep.launch"]
    environment.claim_rank()
    assert environment.current_placement().world_size == 2, "this process is the rank"
    world_size, launcher, store, device, remark, around, given = asks()
    assert (world_size, launcher, store, device, around) == (1, "none", "None", "cpu", ["EVENSTEP_SETTINGS"])
    assert f"rank 1 of 2 is pid {os.getpid()}" in str(remark)
    settings = Settings(launcher="run", store="/new", device="cpu")
    assert given == {
        **settings.variables(),
        "EVENSTEP_RANK_PROCESS": None,
        "EVENSTEP_SERVERS": None,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    other = environment.rank_variables(rank=0, world_size=3, store=str(tmp_path / "other"))
    assert asks(**{name: value or "" for name, value in other.items()})[:2] == [3, "evenstep.launch"], (
        "a launcher of the child's own"
    )


def test_variables_that_say_nothing_are_inherited_too() -> None:
    """Those of a rank whose script has given it to `init_process_group`."""
    said = "WORLD_SIZE=2 is set, but RANK is not."
    exported = RankProcess(7, 100, 1, 2, identity(said))
    assert is_inherited(exported, said, pid=8, start_ticks=100)
    assert not is_inherited(exported, said, pid=7, start_ticks=100)
    assert not is_inherited(exported, Placement(), pid=8, start_ticks=100)
