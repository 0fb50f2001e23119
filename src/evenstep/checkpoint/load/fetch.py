"""Resuming from generations on the nodes' own disks: a node gets missing files from a peer.

Nothing is assumed in advance: a file that can't be sent, stored or read, or that is damaged, no longer counts as held,
and the plan is made again, with another copy, an older generation, or the durable checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from evenstep.checkpoint.directory import DamagedError, UnreadableError, read_manifest
from evenstep.checkpoint.format import manifest as manifests
from evenstep.checkpoint.format.manifest import Manifest
from evenstep.checkpoint.format.payload import bytes_of
from evenstep.checkpoint.format.random_streams import NAME as RANDOM
from evenstep.checkpoint.load.layouts import find_layouts, plan_copies
from evenstep.checkpoint.load.reader import damaged_files
from evenstep.checkpoint.load.recovery import Holding, Recovery, plan_recovery
from evenstep.checkpoint.load.restore import Found, find
from evenstep.checkpoint.store import Storage
from evenstep.console import say
from evenstep.errors import ConfigurationError, EvenstepError
from evenstep.world import World

_CHUNK_BYTES = 16 << 20


def recover(
    storage: Storage,
    world: World,
    objects: Mapping[str, Any],
    *,
    resumes: Sequence[tuple[int, int]],
    durable_step: int | None,
    strict: bool,
) -> tuple[str, Found] | None:
    """Collective: read the newest generation that the nodes together hold in full, and change nothing.

    Args:
        storage: This node's generations.
        world: The ranks.
        objects: Objects of this run, by name.
        resumes: As in `plan_recovery`.
        durable_step: As in `plan_recovery`.
        strict: As in `restore.find`.

    Returns:
        The generation's folder, and the state read from it; None: use the durable checkpoint, if there is one.

    Raises:
        CheckpointError: The generation is good, but doesn't fit the objects.
    """
    nodes = world.exchange(world.node_rank)
    leads = nodes.index(world.node_rank) == world.rank  # the first rank of its node
    holdings = _list_holdings(storage, world, nodes, leads=leads)
    while (plan := plan_recovery(holdings, resumes, durable_step)) is not None:
        here = {
            file
            for each in holdings
            if (each.folder, each.node) == (plan.folder, world.node_rank)
            for file in each.files
        }
        chosen = plan.manifest.choose(here, plan.holders)
        assert chosen is not None, "some node holds each part"
        mine = _parts_of_this_rank(chosen, objects)
        wanted = {part.file for item in mine.objects.values() for each in item.tensors.values() for part in each.parts}
        problem = _fetch(storage, world, nodes, plan, wanted - here, leads=leads)
        if not problem:
            try:
                return plan.folder, find(storage, world, plan.folder, objects, strict=strict, manifest=mine)
            except (DamagedError, UnreadableError) as error:
                problem = str(error)
        if world.is_main:
            say(f"evenstep: {plan.folder} on the disks of the nodes: {problem}")
        bad = damaged_files(storage, plan.folder, chosen, here) if leads else {}
        lost = {(plan.folder, nodes[rank], file) for rank, each in enumerate(world.exchange([*bad])) for file in each}
        fewer = [replace(h, files=frozenset(f for f in h.files if (h.folder, h.node, f) not in lost)) for h in holdings]
        # If all held files are good, a node can't store a file that it lacks.
        holdings = fewer if lost else [each for each in holdings if each.folder != plan.folder]
    return None


def _list_holdings(storage: Storage, world: World, nodes: Sequence[int], *, leads: bool) -> list[Holding]:
    """Collective: the holdings of all nodes. A disk that can't be read holds nothing."""
    listed, texts = [], {}
    if leads:
        with contextlib.suppress(OSError):
            for folder in storage.list():
                with contextlib.suppress(DamagedError, UnreadableError):
                    manifest = read_manifest(storage, folder)
                    text = manifests.encode(manifest).decode()
                    listed.append(
                        [folder, zlib.crc32(text.encode()), sorted(manifest.files.keys() & set(storage.list(folder)))]
                    )
                    texts[folder] = text
    known: dict[tuple[str, int], Manifest] = {}
    holdings = []
    for rank, of_rank in enumerate(world.exchange(listed)):
        for folder, checksum, files in of_rank:
            if (folder, checksum) not in known:
                text = world.broadcast_object(texts.get(folder), rank)
                known[folder, checksum] = manifests.decode(text.encode())
            holdings.append(Holding(nodes[rank], folder, known[folder, checksum], frozenset(files)))
    return holdings


def _parts_of_this_rank(manifest: Manifest, objects: Mapping[str, Any]) -> Manifest:
    """A manifest of only the parts that this rank reads."""
    kept = {}
    for name in (*objects, RANDOM):
        if (item := manifest.objects.get(name)) is not None:
            layouts = {}
            with contextlib.suppress(ConfigurationError):  # the load reports it, on all ranks
                layouts = find_layouts(name, item, objects[name]) if name in objects else {}
            tensors = {
                key: replace(tensor, parts=tuple(p for p in tensor.parts if plan_copies(p, tensor.shape, layouts[key])))
                if key in layouts
                else tensor
                for key, tensor in item.tensors.items()
            }
            kept[name] = replace(item, tensors=tensors)
    return replace(manifest, objects=kept)


def _fetch(
    storage: Storage, world: World, nodes: Sequence[int], plan: Recovery, wanted: set[str], *, leads: bool
) -> str:
    """Collective: copy to each node the files that its ranks need and it lacks.

    Returns:
        Why a node can't send a file, equal on all ranks. A node that can't store a file still lacks it.
    """
    of_ranks = world.exchange(sorted(wanted))
    taken = {
        file for node, files in zip(nodes, of_ranks, strict=True) if leads and node == world.node_rank for file in files
    }
    for file in sorted({file for files in of_ranks for file in files}):
        if problem := _copy(storage, world, nodes.index(plan.holders[file]), plan, file, takes=file in taken):
            return problem
    if taken:
        with contextlib.suppress(OSError):  # with the manifest this node is a holder, in case a peer is lost later
            storage.put(f"{plan.folder}/{manifests.NAME}", [manifests.encode(plan.manifest)])
    return ""


def _copy(storage: Storage, world: World, src: int, plan: Recovery, file: str, *, takes: bool) -> str:
    """Collective: send a file from rank `src` to the ranks that need it.

    Returns why `src` can't, equal on all ranks.
    """
    path, num_bytes, problems = f"{plan.folder}/{file}", plan.manifest.files[file].bytes, [""]

    def receive() -> Iterator[memoryview]:
        for begin in range(0, num_bytes, _CHUNK_BYTES):
            own = _chunk(storage, path, begin, min(_CHUNK_BYTES, num_bytes - begin)) if world.rank == src else None
            chunk = world.broadcast_object(own, src)
            if isinstance(chunk, str):
                problems[0] = chunk
                raise OSError(errno.EIO, chunk)
            yield bytes_of(chunk)

    received = receive()
    drop = partial(deque[memoryview], maxlen=0)
    consumers: list[Callable[[Iterator[memoryview]], object]] = [partial(storage.put, path), drop] if takes else [drop]
    for consume in consumers:  # to the end, as on every rank: bytes that don't fit on a full disk are dropped
        try:
            consume(received)
        except OSError as error:
            if isinstance(error, EvenstepError):  # a peer is lost
                raise
            if not problems[0]:
                say(f"evenstep: not copied to node {world.node_rank}: {path}: {error.strerror or error}")
    return problems[0]


def _chunk(storage: Storage, path: str, begin: int, num_bytes: int) -> Tensor | str:
    """Bytes of a file, [num_bytes] uint8, or why they can't be read.

    Bytes after the file's end are undefined, so that the checksum is wrong.
    """
    chunk = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    try:
        with storage.open(path) as source:
            source.read_into(begin, bytes_of(chunk))
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return chunk
