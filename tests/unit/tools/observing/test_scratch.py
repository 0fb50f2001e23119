"""What an observed script writes goes elsewhere, and is read from there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import evenstep
from evenstep.tools.observing.launch import remove_made
from evenstep.tools.observing.patching import Patches
from evenstep.tools.observing.scratch import Scratch


@pytest.fixture
def patches() -> Iterator[Patches]:
    with Patches() as made:
        yield made


@pytest.fixture
def scratch(tmp_path: Path, patches: Patches) -> Iterator[Scratch]:
    """Installed for a test; what lay in the folder "work" before is the same afterwards."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "old.txt").write_text("old")
    (work / "run").mkdir()
    (work / "run" / "metrics.csv").write_text("step,loss\n")
    before = contents(work)
    made = Scratch(tmp_path / "scratch")
    made.install(patches)
    yield made
    patches.restore()
    assert contents(work) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_text(path: Path, x: np.ndarray) -> None:
    path.write_text(json.dumps(x.tolist()))


def read_text(path: Path) -> np.ndarray:
    return np.array(json.loads(path.read_text()))


WAYS: dict[str, tuple[Callable[[Path, np.ndarray], object], Callable[[Path], np.ndarray]]] = {
    "pathlib": (write_text, read_text),
    "numpy": (lambda path, x: np.save(path, x), lambda path: np.load(path)),
    "torch": (lambda path, x: torch.save(torch.from_numpy(x), path), lambda path: torch.load(path).numpy()),
    "torch, by name": (
        lambda path, x: torch.save(obj=torch.from_numpy(x), f=str(path)),
        lambda path: torch.load(f=str(path)).numpy(),
    ),
    "safetensors": (
        lambda path, x: safetensors.torch.save_file({"x": torch.from_numpy(x)}, path),
        lambda path: safetensors.torch.load_file(path)["x"].numpy(),
    ),
    "safetensors of numpy": (
        lambda path, x: safetensors.numpy.save_file({"x": x}, path),
        lambda path: safetensors.numpy.load_file(path)["x"],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_files_go_elsewhere_and_are_read_from_there(
    way: str, tmp_path: Path, scratch: Scratch, patches: Patches, fresh_seed: int
) -> None:
    save, load = WAYS[way]
    x, y = np.random.default_rng(fresh_seed).standard_normal((2, 5))
    patches.restore()
    best = tmp_path / "best.npy"
    save(best, x)
    scratch.install(patches)
    new = tmp_path / "work" / "run" / "new.npy"
    assert np.array_equal(load(best), x), "what was there before is read"
    save(best, y)
    save(new, y)
    assert np.array_equal(load(best), y), "and then what this run has saved"
    assert np.array_equal(load(new), y)
    assert new.exists()
    assert best.stat().st_size > 0
    patches.restore()
    assert np.array_equal(load(best), x)
    assert not new.exists()
    assert scratch.saved == [str(best), str(new)]


def test_other_ranks_read_what_one_has_written(tmp_path: Path, scratch: Scratch, patches: Patches) -> None:
    old, new = tmp_path / "work" / "old.txt", tmp_path / "work" / "new.txt"
    new.write_text("new")
    old.unlink()
    patches.restore()
    Scratch(tmp_path / "scratch").install(patches)
    assert new.read_text() == "new"
    assert not old.exists()


def test_appending_goes_on_with_a_copy(tmp_path: Path, scratch: Scratch) -> None:
    metrics = tmp_path / "work" / "run" / "metrics.csv"
    for line in ("1,0.5\n", "2,0.4\n"):
        with metrics.open("a") as file:
            file.write(line)
    assert metrics.read_text() == "step,loss\n1,0.5\n2,0.4\n"


def test_a_removed_file_is_gone_for_the_script_alone(tmp_path: Path, scratch: Scratch) -> None:
    old = tmp_path / "work" / "old.txt"
    os.remove(old)
    assert not old.exists()
    with pytest.raises(FileNotFoundError):
        old.read_text()
    old.write_text("again")
    assert old.read_text() == "again"


def test_a_file_is_made_beside_its_place_and_renamed(tmp_path: Path, scratch: Scratch) -> None:
    old, beside = tmp_path / "work" / "old.txt", tmp_path / "work" / "old.tmp"
    beside.write_text("written")
    os.replace(beside, old)
    assert old.read_text() == "written"
    assert not beside.exists()


def test_a_folder_is_emptied_for_the_script_alone(tmp_path: Path, scratch: Scratch) -> None:
    run = tmp_path / "work" / "run"
    shutil.rmtree(run)
    assert not (run / "metrics.csv").exists()
    os.makedirs(run)
    (run / "metrics.csv").write_text("anew")
    assert (run / "metrics.csv").read_text() == "anew"


def test_errors_are_the_systems(tmp_path: Path, scratch: Scratch) -> None:
    with pytest.raises(FileNotFoundError):
        (tmp_path / "nowhere" / "x").write_text("x")
    with pytest.raises(FileExistsError):
        (tmp_path / "work" / "old.txt").open("x")
    with pytest.raises(IsADirectoryError):
        (tmp_path / "work").open("w")


def test_temporary_folders_and_devices_are_as_ever(scratch: Scratch) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "x").write_text("x")
        assert os.listdir(name) == ["x"]
    assert not os.path.exists(name)
    with open(os.devnull, "w") as file:
        file.write("x")
    assert scratch.saved == []


def test_a_logger_writes_elsewhere(tmp_path: Path, patches: Patches) -> None:
    """Or its file would have lines of steps that no training has made."""
    world = evenstep.World.alone()

    def log() -> None:
        with evenstep.Logger(directory=tmp_path / "run", world=world) as logger:
            logger.log({"loss": 1.0}, step=0)

    log()
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert len(before) == 1
    scratch = Scratch(tmp_path / "scratch")
    scratch.install(patches)
    log()
    log()
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
    assert scratch.saved == [str(tmp_path / "run")]
    assert {path.name for path in (tmp_path / "scratch").rglob("metrics.*")} == {"metrics.jsonl"}


def test_directories_that_the_script_makes_go_if_they_are_empty(tmp_path: Path, patches: Patches) -> None:
    """Or a script that makes its own with `os.makedirs` would fail in its next run."""
    Scratch(tmp_path / "run").install(patches)
    os.makedirs(tmp_path / "out" / "images")
    (tmp_path / "out" / "images" / "1.txt").write_text("elsewhere")
    os.mkdir(tmp_path / "full")
    os.close(os.open(tmp_path / "full" / "database", os.O_CREAT))
    patches.restore()
    remove_made(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["full", "run"]
