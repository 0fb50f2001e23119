"""Streams and numbered data of `datasets`, and webdataset, through `DataLoader`; `make test-peers` installs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A table with a fingerprint of its own: computing one pickles it, which is no part of this.
PROGRAM = """
import datasets
import evenstep
import pyarrow
import torch

columns = {"number": list(range(41)), "text": [f"s{i}" for i in range(41)], "pair": [[i, -i] for i in range(41)]}
table = datasets.Dataset(pyarrow.table(columns), fingerprint="some")
with evenstep.init(quiet=True) as world:
    for num_workers in (0, 2):
        for numbered in (table, table.with_format("torch")):
            loader = evenstep.DataLoader(numbered, 8, shuffle=True, seed=3, num_workers=num_workers)
            seen = []
            for batch in loader:
                number = batch["number"]
                assert number.dtype == torch.int64
                assert batch["text"] == [f"s{i}" for i in number.tolist()]
                if numbered is not table:
                    assert batch["pair"].shape == (len(number), 2) and torch.equal(batch["pair"][:, 1], -number)
                seen += world.gather(number).tolist()
            assert sorted(seen) == list(range(41))
            world.print(seen)
    # By shard, where there are as many as ranks times workers; else by record.
    for num_shards, num_workers in ((1, 0), (6, 0), (6, 2)):
        stream = table.to_iterable_dataset(num_shards=num_shards)
        loader = evenstep.DataLoader(stream, 8, num_workers=num_workers)
        parts = [batch["number"] for batch in loader]
        by_shard = num_shards >= world.world_size * max(1, num_workers) > 1
        assert loader._source.by_shard is by_shard
        assert len({*world.exchange(len(parts))}) == 1
        seen = world.gather(torch.cat(parts)).tolist()
        assert sorted(seen) == list(range(41))
    try:
        evenstep.DataLoader(datasets.DatasetDict(train=table), 8)
    except evenstep.EvenstepError as error:
        world.print(error)
"""


@pytest.mark.extended
def test_other_libraries_data(tmp_path: Path) -> None:
    """The last global batch has one sample: ranks without one get the same columns, empty."""
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("datasets is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    said = []
    for nproc in (1, 2, 3):
        command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", str(nproc), "program.py"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] == said[2]
    assert "keys such as 'train': " in said[0]
    assert len({line for line in said[0].splitlines() if line.startswith("[")}) == 1, "for any workers and format"


STREAM = """
import evenstep
import torch
import webdataset

with evenstep.init(quiet=True) as world:
    if world.is_main:
        numbers = iter(range(41))
        for shard, size in enumerate((9, 11, 11, 10)):
            with webdataset.TarWriter(f"shard-{shard:04d}.tar") as tar:
                for number in (next(numbers) for _ in range(size)):
                    tar.write({"__key__": f"{number:05d}", "cls": number})
    world.barrier()
    urls = "shard-{0000..0003}.tar"
    stream = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=None, workersplitter=None)
    for num_workers in (0, 2):
        loader = evenstep.DataLoader(stream.decode().to_tuple("cls"), 8, num_workers=num_workers)
        seen = loader.gather(torch.cat([torch.as_tensor(numbers) for (numbers,) in loader])).tolist()
        assert sorted(seen) == list(range(41)), seen
        world.print(len(seen))
"""


@pytest.mark.extended
def test_other_libraries_streams(tmp_path: Path) -> None:
    """webdataset's own division over ranks and workers is switched off, as the page on streams says."""
    if importlib.util.find_spec("webdataset") is None:
        pytest.skip("webdataset is not installed")
    (tmp_path / "program.py").write_text(STREAM)
    command = [sys.executable, "-m", "evenstep", "run", "--nproc-per-node", "2", "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["41", "41"]
