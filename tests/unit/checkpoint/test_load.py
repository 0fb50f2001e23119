"""What a load makes of a model: what `load_state_dict` does, and nothing before all is known to be good."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from evenstep import World
from evenstep.checkpoint.checkpointer import Checkpointer
from evenstep.checkpoint.directory import DamagedError, read_manifest
from evenstep.checkpoint.format.regions import whole
from evenstep.checkpoint.load.layouts import Layout
from evenstep.checkpoint.load.reader import read_objects
from evenstep.checkpoint.store import LocalDirectory
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


def test_parts_of_a_tensor_come_to_their_place(tmp_path: Path):
    """Also of one of more than a chunk, and of those without an element."""
    saved = nn.ParameterDict({"large": torch.randn(700, 999), "none": torch.empty(0, 3), "one": torch.tensor(2.5)})
    model = nn.ParameterDict({name: torch.zeros_like(tensor) for name, tensor in saved.items()})
    save(tmp_path, model=saved)
    load(tmp_path, model)
    assert all(torch.equal(model[name], saved[name]) for name in saved)


class Turning(nn.Linear):
    """Saved in another orientation than it is held in."""

    def _load_from_state_dict(self, state, prefix, *rest):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))

    def turn(module, state, prefix, *rest):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    model[0].register_load_state_dict_pre_hook(turn)
    return model


@pytest.mark.parametrize("build", [lambda: nn.Sequential(Turning(3, 3)), hooked])
def test_a_model_may_do_more_than_copying(tmp_path: Path, build):
    saved, model, expected = build(), build(), build()
    save(tmp_path, model=saved)
    load(tmp_path, model)
    expected.load_state_dict({name: tensor.clone() for name, tensor in saved.state_dict().items()})
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_every_checksum_is_confirmed_whatever_else_the_ranks_of_a_node_read(tmp_path: Path):
    """Of a divided tensor one rank reads a part and another none; both read the other tensors of that file."""
    save(tmp_path, model=nn.ParameterDict({name: torch.randn(64) for name in ("divided", "one", "two", "three")}))
    storage = LocalDirectory(tmp_path)
    manifest = read_manifest(storage, STEP)
    layouts = [
        {"model": {"divided": Layout((64,), (whole((64,)),))}},
        {"model": {"divided": Layout((0,), ())}},
    ]
    path = tmp_path / STEP / "model.safetensors"
    for bit in range(manifest.files[path.name].header_bytes * 8, path.stat().st_size * 8, 64 * 32):
        flip(path, bit)
        found = 0
        for rank in range(2):
            with contextlib.suppress(DamagedError):
                read_objects(storage, STEP, manifest, ["model"], share=(rank, 2), layouts=layouts[rank])
                continue
            found += 1
        assert found == 1, bit
        flip(path, bit)
