"""What an object store holds is read once per node, whatever becomes of the copies."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from evenstep.checkpoint.directory import DamagedError
from evenstep.checkpoint.load import mirror, restore
from evenstep.checkpoint.load.mirror import find_once
from evenstep.checkpoint.store import LocalDirectory, Storage
from tests.checkpoint_runs import Training, assert_same, flip, world_for_this_test

FOLDER = "step-0000002-00001-1"
NODES = [0, 0, 1, 1]


def save(directory: Path):
    world = world_for_this_test()
    run = Training(directory, world, every_minutes=None, plain=True).run_to(2)
    run.checkpoint.save()
    state = run.everything()
    run.checkpoint.close()
    return state


class Counting(Storage):
    """What fsspec reaches, with the bytes read of each file."""

    counts: Counter[str]

    @contextlib.contextmanager
    def open(self, path):
        with super().open(path) as reader:

            def read_into(offset, out):
                got = reader.read_into(offset, out)
                self.counts[path.rpartition("/")[2]] += got
                return got

            yield replace(reader, read_into=read_into)


def load(directory: Path, fault: str):
    """What a rank loads, the bytes that it has read of each file, and what was printed."""
    world = world_for_this_test()
    node, lines = NODES[world.rank], []
    copy = mirror._copy

    def failing(storage, path, target):
        if fault == "full" and node == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        copy(storage, path, target)
        if fault == "flip" and node == 1 and target.name == "model.safetensors":
            flip(target, 8 * target.stat().st_size - 3)

    temporary = directory.with_name(f"temporary{node}")
    temporary.mkdir(exist_ok=True)
    storage = Counting(f"file://{directory}")
    storage.counts = Counter()
    local = {"node_rank": node, "local_rank": NODES[: world.rank].count(node), "local_world_size": 2}
    with (
        mock.patch.multiple(world, **local),
        mock.patch.object(tempfile, "tempdir", str(temporary)),
        mock.patch.object(mirror, "_copy", failing),
        mock.patch.object(mirror, "say", lines.append),
        mock.patch.object(restore, "_PAUSES_S", ()),
        contextlib.ExitStack() as also,
    ):
        if fault == "unseen" and world.rank == 3:
            also.enter_context(mock.patch.object(mirror, "LocalDirectory", lambda path: LocalDirectory(f"{path}/none")))
        run = Training(directory.with_name("unused"), world, every_minutes=None, plain=True, seed=9)
        found = find_once(storage, world, FOLDER, run.checkpoint.objects, strict=True)
        restore.apply(found, world, run.checkpoint.objects, FOLDER)
        world.exchange(None)
        assert not [*temporary.iterdir()]
    return run.everything(), storage.counts, lines


def read_over(results, directory: Path) -> dict[str, float]:
    """How often the ranks have read each file, between them."""
    counts = sum((each for _, each, _ in results), Counter())
    sizes = {path.name: path.stat().st_size for path in (directory / FOLDER).iterdir() if path.suffix != ".json"}
    return {name: counts[name] / size for name, size in sizes.items()}


def test_each_node_reads_each_file_once(ranks, tmp_path):
    """Where a node has no room for copies, its ranks read what they need, and a rank that can't see them the store."""
    saved = ranks.run(save, 4, tmp_path / "run")
    for fault in ("", "full", "unseen", "flip"):
        results = ranks.run(load, 4, tmp_path / "run", fault)
        for (state, _, lines), expected in zip(results, saved, strict=True):
            assert_same(state, expected)
            assert fault or not lines
        times = set(read_over(results, tmp_path / "run").values())
        assert times == {2.0} if not fault else max(times) > 2
        if fault == "full":
            assert "No space left" in results[0][2][0]


def test_a_damaged_file_is_damage(ranks, tmp_path):
    ranks.run(save, 4, tmp_path / "run")
    path = tmp_path / "run" / FOLDER / "model.safetensors"
    flip(path, 8 * path.stat().st_size - 3)
    with pytest.raises(DamagedError, match=r"model.safetensors: tensor model/"):
        ranks.run(load, 4, tmp_path / "run", "")
