from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenstep.errors import ConfigurationError
from evenstep.ground import environment
from evenstep.ground.environment import Measurement, Placement, Settings, detect, placement_from_nodes, rank_variables
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
        (Settings(device="cpu").variables(), Placement(device="cpu")),
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
    mapped = {"store": "/proc/7/fd/3", "pages": ["/proc/7/fd/4", "/proc/7/fd/5"]}
    variables = rank_variables(rank=1, world_size=3, device="cpu", restart_count=2, **mapped)
    placement = detect({**TORCHRUN, **{name: value for name, value in variables.items() if value is not None}})
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


def test_placement_from_nodes_that_alternate() -> None:
    placement = placement_from_nodes(["b", "a", "b", "a"], rank=3)
    assert (placement.local_rank, placement.local_world_size, placement.node_rank, placement.num_nodes) == (1, 2, 1, 2)


@pytest.mark.parametrize(("text", "expected"), [("4", 4), ("", None), ("0", None), ("4,2", None), ("²", None)])
def test_openmp_threads(monkeypatch: pytest.MonkeyPatch, text: str, expected: int | None) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert environment.openmp_threads() == expected


def test_settings_travel_in_one_variable() -> None:
    measured = Measurement("/place", 5, global_batch_size=16, growth=2, watches_losses=True)
    given = Settings(
        "run",
        "/proc/7/fd/3",
        ("/proc/7/fd/4",),
        "cpu",
        "said",
        "id",
        "kill:rank=1,step=1",
        "step=3",
        True,
        measured,
    )
    assert Settings.parse(given.variables()) == given
    assert Settings.parse({}) == Settings.parse({"EVENSTEP_SETTINGS": ""}) == Settings()
    assert Settings().variables() == {"EVENSTEP_SETTINGS": "{}"}


@pytest.mark.parametrize("text", ["cpu", "[]", '{"colour": 1}', '{"measurement": 3}', '{"measurement": {"steps": 3}}'])
def test_settings_of_somebody_else_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"EVENSTEP_SETTINGS=.* was not written by this version"):
        detect({"EVENSTEP_SETTINGS": text})


def test_the_secret_of_a_run_is_read_once_and_its_place_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "_secret", b"")
    assert environment.run_secret() == b""
    file = tmp_path / "key"
    for content, mode, text in (
        ("k3y\n", 0o644, "other users may read"),
        ("\n", 0o600, "is empty"),
        (None, 0, "No such"),
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
            file.chmod(mode)
        monkeypatch.setenv("EVENSTEP_SECRET_FILE", str(file))
        with pytest.raises(ConfigurationError, match=text):
            environment.run_secret()
    file.write_text("k3y\n")
    file.chmod(0o600)
    monkeypatch.setenv(*environment.secret_variable(str(file)).popitem())
    assert environment.run_secret() == b"k3y"
    assert "EVENSTEP_SECRET_FILE" not in os.environ
    assert environment.run_secret() == b"k3y", "also in a later run of this process"
