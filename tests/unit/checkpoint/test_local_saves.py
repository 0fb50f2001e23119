"""Saves to the disks of several nodes, played by threads: who writes what, and a kill before each effect."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from evenstep import World
from evenstep.checkpoint.directory import read_manifest
from evenstep.checkpoint.load.reader import check_checkpoint, read_objects
from evenstep.checkpoint.load.recovery import Holding
from evenstep.checkpoint.lock import place_of
from evenstep.checkpoint.save.commit import Saver
from evenstep.checkpoint.store import Hook, LocalDirectory
from tests.stub_worlds import on_threads


class Nodes:
    """Ranks of several nodes, a thread each, with a disk per node.

    Attributes:
        store: What the ranks post.
        disks: Of each node.
    """

    def __init__(self, root: Path, *sizes: int, hook: Hook = lambda *_: None) -> None:
        self.store, self.sizes = HashStore(), sizes
        self.disks = [LocalDirectory(root / str(node), hook=hook) for node in range(len(sizes))]

    def run(self, fn: Callable[[Saver, int], Any], objects: Callable[[int], dict[str, Any]]) -> list[Any]:
        """What fn returned on each rank, called with its saver."""

        def one(world: World) -> Any:
            world.store, world.timeout_s = self.store, 30.0
            saver = Saver(self.disks[world.node_rank], world, objects(world.rank), None)
            saver.open(1)
            return fn(saver, world.rank)

        return on_threads(one, *self.sizes)

    def holdings(self) -> list[Holding]:
        """What the nodes hold."""
        found = []
        for node, disk in enumerate(self.disks):
            for folder in disk.list():
                names = disk.list(folder)
                if place_of(folder) is not None and "manifest.json" in names:
                    manifest = read_manifest(disk, folder)
                    lengths = {name: (disk.root / folder / name).stat().st_size for name in names}
                    whole = {name for name, file in manifest.files.items() if lengths.get(name) == file.bytes}
                    found.append(Holding(node, folder, manifest, frozenset(whole)))
        return found


class Divided:
    """A state of which each rank has a part."""

    def __init__(self, rank: int, world_size: int, value: float) -> None:
        self.rank, self.world_size = rank, world_size
        self.whole = torch.arange(20.0) + value

    def state_shards(self):
        from types import SimpleNamespace

        cuts = [20 * rank // self.world_size for rank in range(self.world_size + 1)]
        begin, end = cuts[self.rank : self.rank + 2]
        return {"state": {}}, [
            SimpleNamespace(path=("state", 0), shape=(20,), offset_numel=begin, values=self.whole[begin:end].clone())
        ]

    def state_dict(self):
        raise AssertionError("nobody asks for the whole")

    def load_state_dict(self, state):
        raise NotImplementedError


def model_of(rank: int, *, large: bool = False) -> nn.Module:
    """Equal on all ranks but for a buffer."""
    torch.manual_seed(4)
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(6 if large else 0)), nn.Linear(2, 3))
    model.register_buffer("own", torch.tensor(float(rank)))
    model.register_buffer("alike", torch.tensor(7.0))
    return model


def save_once(saver: Saver, rank: int) -> str | None:
    saver.start(20, {"loss": 0.5})
    return saver.finish()


@pytest.mark.parametrize("sizes", [(1,), (2,), (1, 1), (2, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("large", [False, True])
def test_each_node_writes_all_that_its_ranks_hold_once(tmp_path: Path, sizes: tuple[int, ...], large: bool):
    nodes = Nodes(tmp_path, *sizes)
    models = [model_of(rank, large=large) for rank in range(sum(sizes))]
    assert nodes.run(
        save_once,
        lambda rank: {"model": models[rank], "optimizer": Divided(rank, sum(sizes), 0.0)},
    ) == [None] * sum(sizes)
    held = nodes.holdings()
    assert [each.node for each in held] == list(range(len(sizes)))
    manifests = {each.folder: each.manifest for each in held}
    (manifest,) = manifests.values()
    assert all(each.manifest == manifest for each in held), "the same bytes on every node"
    assert manifest.step == 20
    assert manifest.metrics == {"loss": 0.5}
    for each, size in zip(held, sizes, strict=True):
        own = {name for name, file in manifest.files.items() if file.node == each.node}
        assert each.files == own | {"random.safetensors"}, "its own, and everybody's random streams"
        assert len([name for name in own if name.startswith("model-")]) == (size if large else 1)
        alone = manifest.choose(each.files)
        assert (alone is not None) == (len(sizes) == 1), "the optimizer is divided over the nodes"
    for entry in manifest.objects["model"].tensors.values():
        assert len(entry.parts) == 1
        others = {manifest.files[part.file].node for part in entry.copies}
        assert len(others) == len(entry.copies)
    own = manifest.objects["model"].tensors["own"]
    assert own.copies == (), "it differs: what the first rank's node has counts"
    assert manifest.files[own.parts[0].file].node == 0
    assert len(manifest.objects["model"].tensors["alike"].copies) == len(sizes) - 1
    everything = LocalDirectory(tmp_path / "all")
    for disk in nodes.disks:
        for path in disk.root.glob("*/*"):
            everything.put(f"{path.parent.name}/{path.name}", [path.read_bytes()])
    assert check_checkpoint(everything, held[0].folder) == []
    state = read_objects(everything, held[0].folder, manifest, ["model", "optimizer"])
    assert torch.equal(state["optimizer"]["state"][0], torch.arange(20.0))
    assert all(torch.equal(value, state["model"][key]) for key, value in models[0].state_dict().items() if key != "own")


def test_the_store_does_not_grow_with_saves_good_or_failed(tmp_path: Path):
    failing = threading.Event()

    def hook(operation: str, path: str) -> None:
        if failing.is_set() and operation == "write" and "shards-00003" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    nodes = Nodes(tmp_path, 2, 1, hook=hook)
    counts = []

    def saves(saver: Saver, rank: int) -> None:
        for step in range(1, 9):
            if rank == 0:
                (failing.set if step in (4, 5, 6) else failing.clear)()
            saver._world.exchange(None)
            saver.start(step, {})
            failure = saver.finish()
            assert (failure is None) == (step not in (4, 5, 6)), failure
            assert failure is None or "rank 2: OSError: [Errno 5] Input/output error" in failure
            if rank == 0:
                counts.append(nodes.store.num_keys())
            saver._world.exchange(None)

    nodes.run(saves, lambda rank: {"model": model_of(rank), "optimizer": Divided(rank, 3, 0.0)})
    assert set(counts) == {1}, "that the last save was made is all that stays"
    assert {place_of(each.folder).step for each in nodes.holdings()} == {1, 2, 3, 7, 8}
    assert len(list(tmp_path.glob("*/step-*"))) == 10, "what was written of failed saves is removed on both nodes"
