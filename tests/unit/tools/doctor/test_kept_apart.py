"""What a script saves under watch goes to the run's directory, also where the watch wraps the saving function."""

from __future__ import annotations

from pathlib import Path

import torch

from evenstep.tools.doctor.run.events import EventFile, Plan
from evenstep.tools.doctor.run.probe import Probe
from evenstep.tools.observing.patching import Patches


def test_a_watched_script_overwrites_no_checkpoint(tmp_path: Path):
    mine = tmp_path / "model.pt"
    torch.save({"epoch": 7}, mine)
    directory = tmp_path / "run"
    directory.mkdir()
    plan = Plan(str(directory), 8, 1)
    with Patches() as patches:
        Probe(plan, 0, str(Path(__file__))).install(patches)
        torch.save({"module.weight": torch.ones(1)}, mine)
        torch.save({"epoch": 0, "name": "module.py"}, tmp_path / "new.pt")
        torch.save({"module.weight": torch.ones(1), "weight": torch.ones(1)}, tmp_path / "new.pt")
        assert torch.load(mine) == {"module.weight": torch.ones(1)}
    assert torch.load(mine) == {"epoch": 7}
    assert not (tmp_path / "new.pt").exists()
    events = EventFile(plan.file_of(0)).read()
    saved = [(Path(each["path"]).name, each["has_prefix"]) for each in events if each.kind == "save"]
    assert saved == [("model.pt", True), ("new.pt", False), ("new.pt", False)]
    assert [Path(each["path"]).name for each in events if each.kind == "write"] == ["model.pt", "new.pt", "new.pt"]
