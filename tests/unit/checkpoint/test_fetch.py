"""Nodes resume from what they hold between them, whatever has become of it. Ranks are threads, one on each node."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from evenstep import World
from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.manifest import FileEntry, Manifest, ObjectEntry, Part, TensorEntry
from evenstep.checkpoint.format.payload import bytes_of, entry_of, plan_layout
from evenstep.checkpoint.load import fetch, restore
from evenstep.checkpoint.load.fetch import recover
from evenstep.checkpoint.lock import Place
from evenstep.checkpoint.store import LocalDirectory
from tests.checkpoint_runs import Tensors, flip
from tests.stub_worlds import on_threads

NUM_NODES = 3


class Failing(LocalDirectory):
    """A disk that doesn't read its node's own files to their end, or stores nothing."""

    fails = ""

    @contextlib.contextmanager
    def open(self, path: str):
        with super().open(path) as reader:

            def read_into(offset: int, out: memoryview) -> int:
                is_own = f"/n{self.root.name[-1]}-" in path
                if self.fails == "read" and is_own and offset + len(out) > reader.num_bytes - 20:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return reader.read_into(offset, out)

            yield replace(reader, read_into=read_into)

    def put(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        if self.fails == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().put(path, chunks)


def write_generation(root: Path, step: int, generator: random.Random) -> tuple[dict[str, torch.Tensor], Manifest]:
    """Random tensors in random parts, each on some of the nodes."""
    values, entries = {}, {}
    files: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(generator.randrange(1, 5)):
        name = f"t{number}"
        values[name] = torch.arange(24.0) + step + number
        cuts = [0, *sorted(generator.sample(range(1, 24), generator.randrange(4))), 24]
        parts, copies = [], []
        for begin, end in itertools.pairwise(cuts):
            content = values[name][begin:end]
            for index, node in enumerate(sorted(generator.sample(range(NUM_NODES), generator.randrange(1, 4)))):
                file, key = f"n{node}-{generator.randrange(2)}.safetensors", f"{name}.{begin}"
                files.setdefault(file, {})[key] = content
                part = Part(file, key, begin, end - begin, zlib.crc32(bytes_of(content)))
                (copies if index else parts).append(part)
        entries[name] = TensorEntry("float32", (24,), tuple(parts), tuple(copies))
    folder, listed = Place(step, 1, step).folder, {}
    for file, tensors in files.items():
        layout = plan_layout([entry_of(key, tensor) for key, tensor in tensors.items()])
        content = layout.header + b"".join(bytes(bytes_of(tensors[entry.key])) for entry in layout.entries)
        listed[file] = FileEntry(len(content), len(layout.header), zlib.crc32(layout.header), int(file[1]))
        path = root / f"node{file[1]}" / folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    structure = {name: {"~tensor": name} for name in values}
    manifest = Manifest(step, 3, 0.0, {}, {}, {"tensors": ObjectEntry("Tensors", structure, entries)}, listed)
    for node in range(NUM_NODES):
        path = root / f"node{node}" / folder / manifests.NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(manifests.encode(manifest))
    return values, manifest


def damage(root: Path, generator: random.Random) -> set[Path]:
    """Flip a bit, cut off the end, remove a file, or a node's disk; returns the files that aren't good any more."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    if not paths:
        return set()
    path, what = generator.choice(paths), generator.randrange(8)
    if what == 0:
        gone = {each for each in paths if each.is_relative_to(root / path.relative_to(root).parts[0])}
        shutil.rmtree(root / path.relative_to(root).parts[0])
        return gone
    if what <= 2:
        path.unlink()
    elif what <= 4:
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path, generator.randrange(path.stat().st_size * 8))
    return {path}


def test_whatever_is_damaged_the_newest_step_that_is_whole_comes_back_with_its_bits(tmp_path: Path, fresh_seed):
    generator = random.Random(fresh_seed)
    resumed = []
    for trial in range(60):
        root = tmp_path / str(trial)
        saved = {step: write_generation(root, step, generator) for step in (20, 40)}
        bad = set().union(*(damage(root, generator) for _ in range(generator.randrange(7))))
        failing = generator.choices(["", "read", "write"], [6, 2, 1], k=NUM_NODES)
        bad |= {path for path in root.rglob("*") if failing[int(path.relative_to(root).parts[0][4:])] == "read"}
        least = 0
        for step, (_, manifest) in saved.items():
            folders = {file: root / f"node{file[1]}" / Place(step, 1, step).folder for file in manifest.files}
            good = {file for file, folder in folders.items() if not bad & {folder / file, folder / manifests.NAME}}
            least = step if manifest.choose(good) and "write" not in failing else least

        def work(world: World, root: Path = root, failing: list[str] = failing) -> Any:
            kept = Tensors({})
            storage = Failing(root / f"node{world.rank}")
            storage.fails = failing[world.rank]
            found = recover(storage, world, {"tensors": kept}, resumes=[], durable_step=None, strict=True)
            return None if found is None else (found[1].manifest.step, found[1].states["tensors"])

        with mock.patch.object(fetch, "_CHUNK_BYTES", 50), mock.patch.object(restore, "_PAUSES_S", ()):
            results = on_threads(work, 1, 1, 1)
        assert len({None if each is None else each[0] for each in results}) == 1
        step = 0 if results[0] is None else results[0][0]
        resumed.append(step)
        assert step >= least, f"trial {trial}"
        for each in results:
            if each is not None:
                assert each[1].keys() == saved[step][0].keys()
                assert all(torch.equal(value, saved[step][0][name]) for name, value in each[1].items())
    assert {0, 20, 40} == {*resumed}
