from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenstep.errors import ConfigurationError
from evenstep.ground import environment
from evenstep.ground.environment import Placement, detect, placement_from_nodes, rank_variables
from tests.unit.ground.environment.recorded_environments import TORCHRUN

ON_TWO_HOSTS = Placement(
    rank=3,
    world_size=4,
    local_rank=1,
    local_world_size=2,
    node_rank=1,
    num_nodes=2,
    launcher="torchrun",
    restart_count=5,
)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Placement()),
        ({"EVENSTEP_DEVICE": "cpu"}, Placement(device="cpu")),
        (TORCHRUN, ON_TWO_HOSTS),
    ],
)
def test_detect(variables: dict[str, str], expected: Placement) -> None:
    assert detect(variables) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": None}, "RANK is not"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not"),
        ({"LOCAL_RANK": None}, "rank of a node"),
        ({"RANK": "x"}, "RANK='x' is not a whole number"),
        ({"RANK": "4"}, "RANK and WORLD_SIZE are inconsistent: 4 of 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK and LOCAL_WORLD_SIZE are inconsistent"),
        ({"RANK": "-1"}, "inconsistent"),
    ],
)
def test_contradictions_are_refused(changed: dict[str, str | None], message: str) -> None:
    variables = {k: v for k, v in (TORCHRUN | changed).items() if v is not None}
    with pytest.raises(ConfigurationError, match=message):
        detect(variables)


def test_what_launch_sets_is_what_detect_reads() -> None:
    variables = rank_variables(rank=1, world_size=3, device="cpu", restart_count=2)
    variables |= {"EVENSTEP_STORE": "/proc/7/fd/3", "EVENSTEP_PAGES": "/proc/7/fd/4 /proc/7/fd/5"}
    placement = detect({**TORCHRUN, **variables})
    assert placement == Placement(
        rank=1,
        world_size=3,
        local_rank=1,
        local_world_size=3,
        launcher="evenstep.launch",
        rendezvous_file=Path("/proc/7/fd/3"),
        restart_count=2,
        pages=("/proc/7/fd/4", "/proc/7/fd/5"),
        device="cpu",
    )


def test_ranks_of_several_hosts_meet_over_the_network() -> None:
    variables = TORCHRUN | environment.run_variables("run", num_nodes=2) | {"EVENSTEP_STORE": "/proc/7/fd/3"}
    placement = detect(variables)
    assert placement.launcher == "evenstep run"
    assert placement.rendezvous_file is None
    assert "GLOO_SOCKET_IFNAME" not in variables


def test_placement_from_nodes_that_alternate() -> None:
    placement = placement_from_nodes(["b", "a", "b", "a"], rank=3)
    assert (placement.local_rank, placement.local_world_size, placement.node_rank, placement.num_nodes) == (1, 2, 1, 2)


def test_announcement_counts_in_plain_words() -> None:
    line = environment.announcement(world_size=2, num_nodes=1, device="cpu", num_threads=1, transport="gloo")
    assert line == "evenstep: 2 ranks on 1 node, cpu, 1 thread per rank, gloo"
    line = environment.announcement(world_size=6, num_nodes=3, device="cuda", num_threads=4, fewest_nodes=2)
    assert line == "evenstep: 2 ranks on each of 2 to 3 nodes, cuda, 4 threads per rank"


def test_exported_restores_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENSTEP_TEST_KEPT", "before")
    with environment.exported({"EVENSTEP_TEST_KEPT": "inside", "EVENSTEP_TEST_NEW": "inside"}):
        assert os.environ["EVENSTEP_TEST_KEPT"] == os.environ["EVENSTEP_TEST_NEW"] == "inside"
    assert os.environ["EVENSTEP_TEST_KEPT"] == "before"
    assert "EVENSTEP_TEST_NEW" not in os.environ


@pytest.mark.parametrize(("text", "expected"), [("4", 4), ("", None), ("0", None), ("4,2", None)])
def test_openmp_threads(monkeypatch: pytest.MonkeyPatch, text: str, expected: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert environment.openmp_threads() == expected
