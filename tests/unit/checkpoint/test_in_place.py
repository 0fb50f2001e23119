"""Tensors that are read straight into the model's own parameters: which, and never before all is known to be good."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep import World
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.directory import read_manifest
from evenstep.checkpoint.load.layouts import in_place_targets
from evenstep.checkpoint.load.reader import fill, read_objects
from evenstep.checkpoint.store import LocalDirectory
from evenstep.errors import CheckpointError
from tests.checkpoint_runs import flip

STEP = "step-0000000-00001-1"


def save(directory: Path, **objects) -> Path:
    checkpoint = Checkpointer(directory, world=World.alone(device="cpu"), every_minutes=None, **objects)
    checkpoint.save()
    checkpoint.close()
    return directory


def load(storage, model: nn.Module) -> nn.Module:
    Checkpointer(storage, world=World.alone(device="cpu"), every_minutes=None, model=model).load(0)
    return model


def targets_of(directory: Path, model: nn.Module) -> dict[str, torch.Tensor]:
    return in_place_targets(read_manifest(LocalDirectory(directory), STEP).objects["model"], model)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def test_a_plain_model_is_filled_in_place_and_only_by_fill(tmp_path: Path):
    saved, model = network(), network()
    save(tmp_path, model=saved)
    found = targets_of(tmp_path, model)
    assert found.keys() == model.state_dict().keys()
    assert all(found[name] is tensor for name, tensor in model.state_dict(keep_vars=True).items())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    storage = LocalDirectory(tmp_path)
    manifest = read_manifest(storage, STEP)
    state = read_objects(storage, STEP, manifest, ["model"], targets={"model": found})["model"]
    assert all(state[name] is found[name] for name in found), "no second copy is made of them"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    fill(storage, STEP, manifest, "model", {"model": found})
    assert all(torch.equal(tensor, saved.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_parts_of_a_tensor_come_to_their_place(tmp_path: Path):
    """Also of one of more than a chunk, and of those without an element."""
    saved = nn.ParameterDict({"large": torch.randn(700, 999), "none": torch.empty(0, 3), "one": torch.tensor(2.5)})
    model = nn.ParameterDict({name: torch.zeros_like(tensor) for name, tensor in saved.items()})
    save(tmp_path, model=saved)
    assert len(targets_of(tmp_path, model)) == 3
    load(tmp_path, model)
    assert all(torch.equal(model[name], saved[name]) for name in saved)


class Turning(nn.Linear):
    """Saved in another orientation than it is held in: a square is written over while it is read, if in place."""

    def _load_from_state_dict(self, state, prefix, *rest):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


class Keeping(nn.Linear):
    def load_state_dict(self, state, *args, **kwargs):
        self.kept = state
        return super().load_state_dict(state, *args, **kwargs)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))

    def turn(module, state, prefix, *rest):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    model[0].register_load_state_dict_pre_hook(turn)
    return model


def wrapped() -> nn.Module:
    model = nn.Linear(3, 3)
    load_plainly = model.load_state_dict
    model.load_state_dict = lambda state, *rest, **options: load_plainly(state, *rest, **options)
    return model


@pytest.mark.parametrize("build", [lambda: nn.Sequential(Turning(3, 3)), hooked, lambda: Keeping(3, 3), wrapped])
def test_a_model_that_does_more_than_copying_has_no_targets(tmp_path: Path, build):
    saved, model, expected = build(), build(), build()
    save(tmp_path, model=saved)
    assert targets_of(tmp_path, model) == {}
    load(tmp_path, model)
    expected.load_state_dict({name: tensor.clone() for name, tensor in saved.state_dict().items()})
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_what_shares_memory_or_lies_otherwise_is_not_read_in_place(tmp_path: Path):
    """Two saved tensors and one place for them: the later one wins, as `load_state_dict` has it."""
    saved = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    save(tmp_path, model=saved)

    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        model[2].weight = nn.Parameter(torch.randn(3, 3).t())
        return model

    model, expected = tied(), tied()
    assert sorted(targets_of(tmp_path, model)) == ["0.bias", "1.bias", "2.bias"]
    load(tmp_path, model)
    expected.load_state_dict(saved.state_dict())
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_tensors_in_an_extra_state_are_loaded_and_are_no_parameters(tmp_path: Path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"weight": torch.ones(3, 3)}

        def set_extra_state(self, state):
            self.extra = state

    saved, model = (nn.ModuleDict({"a": Extra(3, 3)}) for _ in range(2))
    save(tmp_path, model=saved)
    assert sorted(targets_of(tmp_path, model)) == ["a.bias", "a.weight"]
    load(tmp_path, model)
    assert torch.equal(model["a"].extra["weight"], torch.ones(3, 3))
    assert torch.equal(model["a"].weight, saved["a"].weight)


def test_damage_leaves_the_model_as_it_was(tmp_path: Path):
    directory = save(tmp_path, model=network(), other=nn.Linear(3, 3))
    flip(directory / STEP / "other.safetensors", 8 * ((directory / STEP / "other.safetensors").stat().st_size - 1))
    model, other = network(), nn.Linear(3, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoint = Checkpointer(directory, world=World.alone(device="cpu"), model=model, other=other)
    with pytest.raises(CheckpointError, match=r"other.safetensors: tensor other/"):
        checkpoint.load(0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Unsteady(LocalDirectory):
    """Answers otherwise when a file is opened the third time: for its length, to be confirmed, to be used."""

    def __init__(self, root, change) -> None:
        super().__init__(root)
        self.opened, self.change = 0, change

    @contextlib.contextmanager
    def open(self, path):
        with super().open(path) as file:
            self.opened += path.endswith("model.safetensors")
            if self.opened == 3:
                self.change(self.root / path)
            yield file


def flip_last(path: Path) -> None:
    flip(path, 8 * (path.stat().st_size - 1))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


class Particular(torch.nn.Linear):
    def load_state_dict(self, *args, **kwargs):
        raise ValueError("it was another one.")


def test_what_an_object_says_of_its_state_ends_with_one_full_stop(tmp_path: Path):
    save(tmp_path, model=Particular(2, 2))
    with pytest.raises(CheckpointError, match=r"on rank 0: ValueError: it was another one\. The objects may"):
        load(tmp_path, Particular(2, 2))


@pytest.mark.parametrize(("change", "told"), [(flip_last, "its checksum is"), (cut, "ends after")])
def test_what_changes_after_it_was_confirmed_is_not_used_silently(tmp_path: Path, change, told):
    save(tmp_path, model=network())
    storage = Unsteady(tmp_path, change)
    with pytest.raises(CheckpointError, match=f"model on rank 0, when it was read again: .*{told}") as caught:
        load(storage, network())
    assert type(caught.value) is CheckpointError, "an earlier checkpoint is no way out: the model has been changed"
    assert "build them anew" in str(caught.value)
