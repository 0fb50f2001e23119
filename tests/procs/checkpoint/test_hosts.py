"""What survivors on one host have saved comes to the others. Played: a directory per rank stands for a host."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import evenstep
from evenstep.checkpoint.load import hosts
from evenstep.checkpoint.storage.directory import folder_of, steps_in
from evenstep.checkpoint.storage.storage import LocalDirectory
from evenstep.errors import CheckpointError
from evenstep.testing import RankPool


def files_of(seed: int) -> dict[str, bytes]:
    """None, small, and larger than what travels at once."""
    sizes = {"empty": 0, "manifest.json": 300, "model.safetensors": (16 << 20) + 12_345}
    stream = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(256, [n], generator=stream, dtype=torch.uint8).numpy().tobytes()
        for name, n in sizes.items()
    }


def bring(root: str, seed: int, holders: list[int], full: int | None) -> tuple[dict[int, list[int]], Any]:
    """The steps on hosts, and the checksums of the files that this one has then; or why it has none."""
    with evenstep.init(quiet=True) as world:
        world.local_rank = 0  # as if every rank were on a host of its own
        fault = no_room if world.rank == full else none
        storage = LocalDirectory(Path(root) / str(world.rank), durable=False, fault=fault)
        if world.rank in holders:
            for name, data in files_of(seed).items():
                storage.write(f"{folder_of(7)}/{name}", [data])
        found = hosts.steps_on_hosts(world, steps_in(storage))
        try:
            hosts.bring_to_all(world, storage, 7, found[7])
        except CheckpointError as error:
            return found, str(error)
        folder = storage.root / folder_of(7)
        return found, {path.name: zlib.crc32(path.read_bytes()) for path in folder.iterdir()}


def none(operation: str, path: str) -> None:
    """No fault of the disk."""


def no_room(operation: str, path: str) -> None:
    if operation == "write" and "model" in path:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("holders", [[0], [2], [0, 2]])
def test_every_host_gets_it(ranks: RankPool, tmp_path: Path, fresh_seed: int, holders: list[int]) -> None:
    seed = fresh_seed
    wanted = {name: zlib.crc32(data) for name, data in files_of(seed).items()}
    for found, files in ranks.run(bring, 3, str(tmp_path), seed, holders, None):
        assert found == {7: holders}, seed
        assert files == wanted, seed


def test_a_host_without_room_is_named_on_all(ranks: RankPool, tmp_path: Path) -> None:
    for _, problem in ranks.run(bring, 3, str(tmp_path), 1, [0], 1):
        assert re.search(r"on the host of rank 0, .* another host: rank 1: .*No space left on device", problem), problem
