"""The random streams of all ranks, as state that a checkpoint can hold."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evenstep import randomness
from evenstep.randomness import RandomState
from evenstep.transport.core.codec import decode, encode
from evenstep.world import World

NAME = "random"


def capture_streams(world: World) -> dict[str, Any]:
    """This rank's streams, as plain data and tensors."""
    return as_data(randomness.capture(), has_diverged=world.draws_its_own, data_rank=world.data_rank)


def as_data(state: RandomState, *, has_diverged: bool, data_rank: int) -> dict[str, Any]:
    """A rank's streams as plain data and tensors. Pure.

    Args:
        state: What `randomness.capture` has found.
        has_diverged: `World.draws_its_own` at that time.
        data_rank: Of the rank.
    """
    version, words, gauss = state.python
    streams: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "torch": state.torch_cpu,
        "cuda": list(state.torch_cuda),
        "numpy": None,
        "has_diverged": has_diverged,
        "data_rank": data_rank,
    }
    if state.numpy is not None:
        name, keys, position, has_gauss, cached = state.numpy
        words = torch.tensor([int(key) for key in keys], dtype=torch.int64, device="cpu")
        streams["numpy"] = {
            "name": str(name),
            "words": words,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return streams


def leave_streams(directory: Path, step: int, ranks: Sequence[Mapping[str, Any] | None]) -> None:
    """Write a step's streams of some ranks to a file of their own; None: of another node's."""
    written = directory / f".streams-{step}-{os.getpid()}"
    written.write_bytes(encode(list(ranks)))
    written.rename(_streams_file(directory, step, len(ranks)))


def left_streams(directory: Path, step: int, num_ranks: int) -> list[Mapping[str, Any] | None]:
    """What `leave_streams` has written of so many ranks, by rank; nothing if it hasn't."""
    with contextlib.suppress(OSError):
        found: list[Mapping[str, Any] | None] = decode(_streams_file(directory, step, num_ranks).read_bytes())
        return found
    return []


def forget_streams(directory: Path, *, before: int) -> None:
    """Remove what `leave_streams` has written of earlier steps."""
    for path in directory.glob("streams-*-of-*"):
        if int(path.name.split("-")[1]) < before:
            path.unlink(missing_ok=True)


def _streams_file(directory: Path, step: int, num_ranks: int) -> Path:
    return directory / f"streams-{step}-of-{num_ranks}"


def restore_streams(ranks: Sequence[Mapping[str, Any] | None], world: World) -> None:
    """Restore this rank's random streams.

    A new rank, or one whose streams are lost, gets streams derived from the first rank's; or these themselves where all
    ranks draw the same (before they diverge, in reproducible mode, and where the script has seeded them alike). Ranks
    that share samples on a mesh get the same.

    Args:
        ranks: Results of `capture_streams` on each rank of the run that saved; None: lost.
        world: This rank and its world.
    """
    known = [(rank, each) for rank, each in enumerate(ranks) if each is not None]
    by_data_rank = {int(each.get("data_rank", rank)): each for rank, each in reversed(known)}
    in_order = [by_data_rank[data_rank] for data_rank in sorted(by_data_rank)]
    rank = world.data_rank
    mine = by_data_rank.get(rank, in_order[0])
    numpy_state = None
    if mine["numpy"] is not None:
        with contextlib.suppress(ImportError):
            import numpy  # before restoring: imported later it would begin with a fresh stream

            saved = mine["numpy"]
            keys = numpy.array(saved["words"].tolist(), dtype=numpy.uint32)
            numpy_state = (saved["name"], keys, saved["position"], saved["has_gauss"], saved["cached"])
    python = mine["python"]
    cuda: Sequence[Tensor] = mine["cuda"]
    if not torch.cuda.is_available() or len(cuda) != torch.cuda.device_count():
        cuda = ()  # saved on a host with other GPUs
    randomness.restore(
        RandomState(
            python=(python["version"], tuple(python["words"].tolist()), python["gauss"]),
            torch_cpu=mine["torch"],
            torch_cuda=tuple(cuda),
            numpy=numpy_state,
        )
    )
    has_diverged = bool(mine["has_diverged"])
    if rank not in by_data_rank and has_diverged:
        randomness.diverge(rank, [name for name in randomness.STREAMS if not _is_shared(in_order, name)])
    world.draws_its_own = has_diverged


def _is_shared(ranks: Sequence[Mapping[str, Any]], stream: str) -> bool:
    """Whether several ranks drew the same numbers; of one alone, that isn't known."""
    parts = ("torch", "cuda") if stream == "torch" else (stream,)
    return len(ranks) > 1 and all(_equal(each[part], ranks[0][part]) for each in ranks[1:] for part in parts)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
