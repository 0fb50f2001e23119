"""Reading an object store once per node: its first rank copies the files that every rank reads whole to a local disk.

    object store   model.safetensors   optimizer.safetensors   model-shards-00001-of-00004.safetensors ...
                        |  once per node     |                      |  by the ranks that read a part of it
    local disk     model.safetensors   optimizer.safetensors        |
                        |  by each rank      |                      |

No agreement is needed. A rank that can't see a copy reads the object store; if the disk is full, all ranks of the node
do. A damaged copy doesn't mean a damaged checkpoint: everything is read again from the object store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from evenstep.checkpoint.directory import DamagedError, UnreadableError, read_manifest
from evenstep.checkpoint.format.plan import is_shard_file
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.format.tree import unwrapped
from evenstep.checkpoint.load.restore import Found, find
from evenstep.checkpoint.store import LocalDirectory, Reader, Storage
from evenstep.console import say
from evenstep.errors import EvenstepError
from evenstep.ground.host.temporary import private_directory
from evenstep.world import World

_NUM_THREADS = 4  # each reads a file, in pieces: one connection wouldn't fill the network


class _Mirror(Storage):
    """An object store with copies of some files of a folder on the local disk."""

    def __init__(self, storage: Storage, copies: LocalDirectory) -> None:
        self.where, self._storage, self._copies = storage.where, storage, copies

    def list(self, folder: str = "") -> list[str]:
        """See `Storage.list`."""
        return self._storage.list(folder)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[Reader]:
        """See `Storage.open`."""
        with contextlib.ExitStack() as held:
            try:
                reader = held.enter_context(self._copies.open(path.rpartition("/")[2]))
            except OSError:  # there is no copy, or this rank can't see it
                reader = held.enter_context(self._storage.open(path))
            yield reader


def find_once(storage: Storage, world: World, folder: str, objects: Mapping[str, Any], *, strict: bool) -> Found:
    """Collective: `restore.find`, but each node reads each file of an object store only once.

    Args:
        storage: As in `find`. Directories are read directly, because nodes have a page cache for them.
        world: As in `find`.
        folder: As in `find`.
        objects: As in `find`.
        strict: As in `find`.

    Raises:
        CheckpointError: As in `find`.
    """
    own = ""
    with contextlib.ExitStack() as held:
        if world.local_rank == 0 and world.local_world_size > 1 and not isinstance(storage, LocalDirectory):
            try:
                directory = held.enter_context(private_directory("checkpoint"))
                objects_here = {**objects, RANDOM: None}
                files = {
                    part.file
                    for name, item in read_manifest(storage, folder).objects.items()
                    for tensor in item.tensors.values()
                    for part in tensor.parts
                    if name in objects_here
                    # Every rank reads the whole state of a ShardedOptimizer.
                    and (not is_shard_file(part.file) or hasattr(unwrapped(objects_here[name]), "state_shards"))
                }
                with ThreadPoolExecutor(_NUM_THREADS) as pool:
                    list(pool.map(lambda file: _copy(storage, f"{folder}/{file}", directory / file), files))
                own = str(directory)
            except (OSError, EvenstepError) as error:
                held.close()
                say(
                    f"evenstep: each rank of this node reads {storage.where}/{folder}, because there is no local copy: "
                    f"{error}"
                )
        if paths := dict(each for each in world.exchange((world.node_rank, own)) if each[1]):
            here = paths.get(world.node_rank)
            mirror = storage if here is None else _Mirror(storage, LocalDirectory(here))
            with contextlib.suppress(DamagedError, UnreadableError):  # perhaps only a copy is damaged or unreadable
                return find(mirror, world, folder, objects, strict=strict)
    return find(storage, world, folder, objects, strict=strict)


def _copy(storage: Storage, path: str, target: Path) -> None:
    with storage.open(path) as source, target.open("xb") as file:
        memory = memoryview(bytearray(source.chunk_bytes))
        for begin in range(0, source.num_bytes, source.chunk_bytes):
            file.write(memory[: source.read_into(begin, memory)])
