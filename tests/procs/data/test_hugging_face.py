"""Streams and numbered data of `datasets` through `DataLoader`; `make test-peers` installs it."""

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
