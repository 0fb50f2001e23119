"""What a script saves under watch goes to the run's directory, also where the watch wraps the saving function."""

from __future__ import annotations

from pathlib import Path

import torch

from evenstep.tools.doctor.run.events import Plan
from evenstep.tools.doctor.run.record_output import Output
from evenstep.tools.doctor.run.recorder import Recorder
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.scratch import Scratch


def test_a_watched_script_overwrites_no_checkpoint(tmp_path: Path):
    mine = tmp_path / "model.pt"
    torch.save({"epoch": 7}, mine)
    directory = tmp_path / "run"
    directory.mkdir()
    output = Output(Recorder(Plan(str(directory), 8, 1), 0, str(tmp_path / "train.py")))
    with Patches() as patches:
        Scratch(directory, output.writes).install(patches)
        output.install(patches)
        torch.save({"epoch": 0}, mine)
        torch.save({"epoch": 0}, tmp_path / "new.pt")
        assert torch.load(mine) == {"epoch": 0}
    assert torch.load(mine) == {"epoch": 7}
    assert not (tmp_path / "new.pt").exists()
