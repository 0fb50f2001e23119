"""The process that reads along: what it says while a script makes no step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from evenstep.tools.doctor.run import runs
from evenstep.tools.doctor.run.events import Event, EventFile


class Running:
    """A launcher whose ranks never end by themselves."""

    def poll(self) -> None:
        """Still there."""

    def kill(self) -> None:
        """Over."""


@pytest.mark.parametrize("has_stepped", [False, True])
def test_a_script_that_makes_no_step_is_told_of_while_it_runs(
    has_stepped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "_SAID_EVERY_S", 0.0)
    monkeypatch.setattr(runs, "_POLL_S", 0.01)
    events = [Event("start", facts={"pid": 1}), *[Event("stepped")] * has_stepped]
    idle = Event("idle", 1.0, places=[(str(tmp_path / "train.py"), 9)])
    (tmp_path / "events").write_text("".join(f"{each.as_line()}\n" for each in [*events, idle]))
    said: list[str] = []
    evidence = runs._follow(cast("Any", Running()), [EventFile(tmp_path / "events")], 0.1, said.append)
    assert evidence.is_late
    assert bool(said) is not has_stepped
    for each in said:
        assert (
            "no step of a torch optimizer after 0 s (rank 0 is at train.py:9): doctor waits for the first one" in each
        )
