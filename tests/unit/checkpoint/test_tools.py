"""What `evenstep checkpoint` does where a directory or a state is not the usual one."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path

import numpy
import pytest
import torch

from evenstep import World
from evenstep.checkpoint import exchange, tools
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.cli.main import main


class Notes:
    def __init__(self, state) -> None:
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state) -> None:
        self.state = state


def save(directory: Path, state) -> str:
    checkpoint = Checkpointer(directory, world=World.alone(device="cpu"), every_minutes=None, notes=Notes(state))
    checkpoint.save()
    checkpoint.close()
    return str(directory)


def test_an_export_is_read_without_trust_also_where_the_state_has_something_of_numpys(tmp_path: Path):
    state = {
        "array": numpy.arange(3),
        "lr": numpy.float64(0.25),
        "zero": numpy.array(2),
        "deep": OrderedDict(a=[(numpy.int64(3), "x")]),
        "milestones": Counter({3: 1}),
        "size": torch.Size([2]),
    }
    path = save(tmp_path / "run", state)
    exchange.export(path, str(tmp_path / "all.pt"), None, None)
    found = torch.load(tmp_path / "all.pt", weights_only=True)["notes"]
    assert torch.equal(found["array"], torch.arange(3))
    assert torch.equal(found["zero"], torch.tensor(2))
    assert type(found["lr"]) is float
    assert (found["lr"], found["deep"], found["milestones"], found["size"]) == (
        0.25,
        OrderedDict(a=[(3, "x")]),
        Counter({3: 1}),
        torch.Size([2]),
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (torch.ones(2, 3), 1.5, "torch.float32 [2, 3] and 1.5"),
        (None, torch.ones(2, 3), "None and torch.float32 [2, 3]"),
        (numpy.ones(2), [1.0, 1.0], "only in the first"),
        (torch.tensor(3), 3, "torch.int64 [] and 3"),
        (1, True, "1 and True"),
        (1, 1.0, "1 and 1.0"),
        ([], {}, "[] and {}"),
        ({}, {"a": 1}, "only in the first"),
        (float("nan"), float("nan"), None),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), None),
        (torch.tensor([float("nan"), 1]), torch.tensor([float("nan"), 2]), "1 of 2 elements differ, by 1 at most"),
        (torch.ones(2), torch.ones(3), "torch.float32 [2] and torch.float32 [3]"),
    ],
)
def test_whatever_stands_at_one_place_is_compared(tmp_path: Path, ours, theirs, told):
    paths = [save(tmp_path / name, {"it": each}) for name, each in (("a", ours), ("b", theirs))]
    lines = tools.difference_lines(*paths, None, None)
    found = [line for line in lines if line.startswith("notes['it']:")]
    assert found == ([] if told is None else [f"notes['it']: {told}"])


def test_two_steps_of_one_run_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    notes = Notes({"it": 1})
    checkpoint = Checkpointer(tmp_path, world=World.alone(device="cpu"), every_minutes=None, notes=notes)
    checkpoint.save()
    checkpoint.step()
    notes.state = {"it": 2}
    checkpoint.close()
    status = main(["checkpoint", "diff", "--step", "0", "--second-step", "1", str(tmp_path), str(tmp_path)])
    assert (status, "notes['it']: 1 and 2" in capsys.readouterr().out) == (1, True)
