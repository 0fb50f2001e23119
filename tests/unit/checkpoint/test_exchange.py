"""Checkpoints written for other programs, and read from them: safetensors and torch.distributed.checkpoint."""

from __future__ import annotations

import json
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from evenstep import World
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.dcp import read
from evenstep.checkpoint.exchange import export, import_file
from evenstep.errors import CheckpointError
from tests.checkpoint_runs import is_same

# Of torch.distributed.checkpoint without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def run(tmp_path: Path, fresh_seed: int):
    """A run's directory with a checkpoint of a model and of its optimizer, and these two."""
    torch.manual_seed(fresh_seed)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    world = World.alone(device="cpu")
    checkpoint = Checkpointer(tmp_path / "run", world=world, every_minutes=None, model=model, optimizer=optimizer)
    checkpoint.step()
    checkpoint.save()
    checkpoint.close()
    return str(tmp_path / "run"), model, optimizer


def resumed(path: Path) -> tuple[Tied, torch.optim.AdamW, int]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world = World.alone(device="cpu")
    checkpoint = Checkpointer(path, world=world, every_minutes=None, model=model, optimizer=optimizer)
    step = checkpoint.resume(strict=False)
    checkpoint.close()
    return model, optimizer, step


def test_one_file_of_safetensors_has_the_model_and_comes_back(run, tmp_path: Path):
    path, model, _ = run
    assert (
        export(path, str(tmp_path / "m.safetensors"), None, None)
        == f"{tmp_path}/m.safetensors: the tensors of model of step 1"
    )
    found = load_file(tmp_path / "m.safetensors")
    state = model.state_dict()
    assert set(state) - set(found) == {"head.weight"}, "what is tied is written once"
    assert all(torch.equal(found[key], state[key]) for key in found)
    assert import_file(str(tmp_path / "m.safetensors"), str(tmp_path / "second"), None, 7) == (
        f"{tmp_path}/second/step-0000007-00001-1: model"
    )
    assert is_same(dict(resumed(tmp_path / "second")[0].state_dict()), dict(state))


def test_pieces_and_their_index_are_as_model_hubs_have_them(run, tmp_path: Path):
    path, model, _ = run
    export(path, str(tmp_path / "hub"), None, None, max_shard_bytes=700)
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    state = model.state_dict()
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    assert index["metadata"]["total_size"] == sum(value.nbytes for key, value in state.items() if key != "head.weight")
    for file in files:
        found = load_file(tmp_path / "hub" / file)
        assert set(found) == {key for key, place in index["weight_map"].items() if place == file}
        assert sum(value.nbytes for value in found.values()) <= 700 or len(found) == 1
        assert all(torch.equal(value, state[key]) for key, value in found.items())
    import_file(str(tmp_path / "hub"), str(tmp_path / "second"), None, None)
    assert is_same(dict(resumed(tmp_path / "second")[0].state_dict()), dict(state))


def test_torch_reads_what_is_exported_for_it_and_back(run, tmp_path: Path):
    path, model, optimizer = run
    export(path, str(tmp_path / "dcp"), None, None, as_dcp=True)
    state = {"model": Tied().state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    wanted = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}
    for entry in state["optimizer"]["state"].values():
        entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])
    torch_dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert state["step"] == 1
    assert is_same({"model": dict(state["model"]), "optimizer": state["optimizer"]}, wanted)
    assert import_file(str(tmp_path / "dcp"), str(tmp_path / "second"), None, None).endswith(
        "step-0000001-00001-1: model, optimizer"
    )
    again, other, step = resumed(tmp_path / "second")
    assert step == 1
    assert is_same({"model": dict(again.state_dict()), "optimizer": other.state_dict()}, wanted)


def test_what_torch_has_written_is_read(tmp_path: Path, fresh_seed: int):
    """Several dtypes, numbers, lists, sizes of 0."""
    torch.manual_seed(fresh_seed)
    state = {
        "model": {"a.b": torch.randn(3, 4), "c": torch.ones((), dtype=torch.bfloat16), "none": torch.zeros(0, 3)},
        "notes": {"list": [1, 2.5, [torch.arange(3), "x"]], "nothing": None, "yes": True, "7": "seven"},
        "step": 5,
    }
    torch_dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    found = read(str(tmp_path / "dcp"))
    assert is_same(found, state)


@pytest.mark.parametrize(
    ("step", "folder"),
    [
        (torch.tensor(500), "step-0000500-00001-1"),
        (7.5, "its step=7.5; a whole number, at least 0. Pass --step"),
        (True, "its step=True; a whole"),
        (-1, "its step=-1; a whole"),
    ],
)
def test_the_step_of_a_file_is_that_of_the_checkpoint_or_an_error(tmp_path: Path, step: Any, folder: str):
    """It was 0, where a file had the number as a tensor."""
    torch.save({"model": {"a": torch.zeros(2)}, "step": step}, tmp_path / "file.pt")
    try:
        said = import_file(str(tmp_path / "file.pt"), str(tmp_path / "run"), None, None)
    except CheckpointError as error:
        said = str(error)
    assert folder in said


def test_parameters_by_name_are_numbered_as_the_optimizer_has_them(run, tmp_path: Path):
    """What `get_state_dict` makes, as programs with FSDP2 save it."""
    _, model, optimizer = run
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    torch_dcp.save(states, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    import_file(str(tmp_path / "dcp"), str(tmp_path / "second"), None, 4)
    again, other, step = resumed(tmp_path / "second")
    assert step == 4
    assert is_same(dict(again.state_dict()), dict(model.state_dict()))
    assert is_same(other.state_dict(), optimizer.state_dict())


class Harm:
    def __reduce__(self):
        return print, ("this pickle was run",)


def test_no_pickle_of_others_is_run(tmp_path: Path, capsys):
    """Neither the index nor a value in a data file."""
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(CheckpointError, match=r"asks for builtins\.print, which no index has"):
        read(str(tmp_path / "index"))
    torch_dcp.save({"notes": {"bad": Harm()}}, checkpoint_id=str(tmp_path / "value"), no_dist=True)
    capsys.readouterr()
    with pytest.raises(CheckpointError, match=r"notes\.bad is more than tensors and plain data"):
        read(str(tmp_path / "value"))
    assert "was run" not in capsys.readouterr().out


def test_damage_is_an_error_of_one_line(tmp_path: Path, fresh_seed: int):
    generator = random.Random(fresh_seed)
    torch_dcp.save({"m": {"a": torch.arange(12.0)}}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    good = (tmp_path / "dcp" / ".metadata").read_bytes()
    for _ in range(200):
        bad = bytearray(good)
        bad[generator.randrange(len(bad))] ^= 1 << generator.randrange(8)
        (tmp_path / "dcp" / ".metadata").write_bytes(bytes(bad))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            message = ""
            try:
                read(str(tmp_path / "dcp"))
            except CheckpointError as error:
                message = str(error)
        assert "\n" not in message


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "bad.safetensors"}}', "isn't a safetensors file"),
        ("{", "isn't a safetensors index"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "isn't a file in the same directory"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors doesn't exist"),
        ('{"weight_map": {"b": "one.safetensors"}}', "lists 'b', which one.safetensors doesn't have"),
    ],
)
def test_an_index_that_says_something_wrong(tmp_path: Path, index, message):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        import_file(str(tmp_path), str(tmp_path / "run"), None, None)


def test_what_an_export_refuses(run, tmp_path: Path):
    path, _, _ = run
    (tmp_path / "there").mkdir()
    for options in ({"as_dcp": True}, {"max_shard_bytes": 100}):
        with pytest.raises(CheckpointError, match=r"there: File exists\. Pass a new name"):
            export(path, str(tmp_path / "there"), None, None, **options)
    with pytest.raises(CheckpointError, match=r"optimizer can't be written as safetensors.*'param_groups' isn't one"):
        export(path, str(tmp_path / "o.safetensors"), None, "optimizer")
    with pytest.raises(CheckpointError, match="No such file or directory"):
        export(path, str(tmp_path / "none" / "m.safetensors"), None, None)
    assert not (tmp_path / "o.safetensors").exists()
