"""What survivors on several hosts have saved, each in its own memory: one checkpoint of it, on every host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.checkpoint.format.payload import bytes_of
from evenstep.checkpoint.storage.directory import folder_of, put_in_place, saving_folder
from evenstep.checkpoint.storage.storage import Storage
from evenstep.errors import CheckpointError
from evenstep.world import World

_CHUNK_BYTES = 16 << 20


def keeps_storage(world: World) -> bool:
    """Whether this rank is the one of its host that writes to the host's storage."""
    return world.local_rank == 0


def steps_on_hosts(world: World, own: Sequence[int]) -> dict[int, list[int]]:
    """Which ranks have which steps in the storage of their host. Collective.

    Args:
        world: The ranks.
        own: The steps of this host, on the rank that `keeps_storage`; ignored elsewhere.

    Returns:
        By step, the newest first: the ranks that keep a storage with it.
    """
    seen = world.exchange(list(own) if keeps_storage(world) else [])
    steps = sorted({step for each in seen for step in each}, reverse=True)
    return {step: [rank for rank, each in enumerate(seen) if step in each] for step in steps}


def bring_to_all(world: World, storage: Storage, step: int, holders: Sequence[int]) -> None:
    """Copy a step's checkpoint to the hosts that lack it. Collective; the checksums are for those who read it.

    Args:
        world: The ranks.
        storage: That of this rank's host.
        step: Of the checkpoint.
        holders: The ranks whose hosts have it.

    Raises:
        CheckpointError: A host can't read or write it. Raised on all ranks.
    """
    lacks = keeps_storage(world) and world.rank not in holders
    if not any(world.exchange(lacks)):
        return
    source, folder, temporary = holders[0], folder_of(step), saving_folder(step, "from-another-host")
    problem = None
    for name, num_bytes in _files(world, storage, folder, source):
        chunks = _broadcast(world, storage, f"{folder}/{name}", num_bytes, source)
        try:
            if lacks and problem is None:
                storage.write(f"{temporary}/{name}", (bytes_of(chunk) for chunk in chunks))
        except OSError as error:
            problem = f"rank {world.rank}: {error}"
        for _ in chunks:  # the others receive it, whatever happens to a file here
            pass
    if lacks and problem is None:
        try:
            put_in_place(storage, temporary, step)
        except OSError as error:
            problem = f"rank {world.rank}: {error}"
    problems = [each for each in world.exchange(problem) if each is not None]
    if problems:
        raise CheckpointError(
            f"{folder} of a survivor's memory, on the host of rank {source}, can't be brought to another host: "
            f"{problems[0]}. Make room there."
        )


def _files(world: World, storage: Storage, folder: str, source: int) -> list[tuple[str, int]]:
    mine: list[list[Any]] = []
    problem = None
    if world.rank == source:
        try:
            for name in storage.list(folder):
                with storage.open(f"{folder}/{name}") as file:
                    mine.append([name, file.num_bytes])
        except OSError as error:
            problem = f"{folder} can't be read on the host of rank {source}: {error}."
    mine, problem = world.broadcast_object([mine, problem], source)
    if problem is not None:
        raise CheckpointError(problem)
    return [(str(name), int(num_bytes)) for name, num_bytes in mine]


def _broadcast(world: World, storage: Storage, path: str, num_bytes: int, source: int) -> Iterator[Tensor]:
    """The bytes of a file of rank `source`, on every rank, in parts that the next one overwrites. Collective."""
    part = torch.empty(min(num_bytes, _CHUNK_BYTES), dtype=torch.uint8, device="cpu")
    for begin in range(0, num_bytes, _CHUNK_BYTES):
        chunk = part[: min(_CHUNK_BYTES, num_bytes - begin)]
        if world.rank == source:
            with contextlib.suppress(OSError), storage.open(path) as file:  # who receives it finds it damaged
                file.read_into(begin, bytes_of(chunk))
        world.control.broadcast(chunk, source).wait()
        yield chunk


def streams_of_hosts(
    world: World, own: Sequence[Mapping[str, Any] | None], saved: Sequence[Mapping[str, Any] | None]
) -> list[Mapping[str, Any] | None]:
    """The random streams of all ranks, from what the survivors on each host have left of them. Collective.

    Args:
        world: The ranks.
        own: What they have left on this host beside checkpoints, by rank of the run that saved; None: another host's.
        saved: As this host's checkpoint has them.

    Returns:
        By rank of the run that saved; None: lost with their host.
    """
    known = list(saved)
    for rank, left in enumerate(own[: len(known)]):
        known[rank] = known[rank] or left
    seen = world.exchange(known if keeps_storage(world) else [])
    return [next((each[rank] for each in seen if rank < len(each) and each[rank]), None) for rank in range(len(saved))]
