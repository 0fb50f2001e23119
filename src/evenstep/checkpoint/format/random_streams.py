"""The random streams of all ranks, as state that a checkpoint can store."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.ground.computing import randomness
from evenstep.ground.computing.randomness import RandomState
from evenstep.world import World

NAME = "random"


def capture_streams(world: World) -> dict[str, Any]:
    """This rank's streams, as plain data and tensors."""
    state = randomness.capture()
    version, words, gauss = state.python
    streams: dict[str, Any] = {
        "python": {"version": version, "words": _packed(words), "gauss": gauss},
        "torch": state.torch_cpu,
        "cuda": list(state.torch_cuda),
        "numpy": None,
        "has_diverged": world.draws_its_own,
        "data_rank": world.data_rank,
    }
    if state.numpy is not None:
        name, keys, position, has_gauss, cached = state.numpy
        streams["numpy"] = {
            "name": str(name),
            "words": _packed([int(key) for key in keys]),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return streams


def restore_streams(ranks: Sequence[Mapping[str, Any]], world: World) -> None:
    """Restore this rank's random streams.

    A rank that the saved run didn't have gets streams derived from rank 0's; or rank 0's own if all ranks draw the same
    numbers (before they diverge, in reproducible mode, or if the script has seeded them equally). Ranks that share
    samples on a mesh get the same streams.

    Args:
        ranks: Results of `capture_streams` on each rank of the run that saved.
        world: This rank and its world.
    """
    by_data_rank = {int(each.get("data_rank", rank)): each for rank, each in reversed(list(enumerate(ranks)))}
    in_order = [by_data_rank[data_rank] for data_rank in sorted(by_data_rank)]
    rank = world.data_rank
    mine = by_data_rank.get(rank, in_order[0])
    numpy_state = None
    if mine["numpy"] is not None:
        with contextlib.suppress(ImportError):
            import numpy  # before restoring: a later import would start with a fresh stream

            saved = mine["numpy"]
            keys = numpy.array(_unpacked(saved["words"]), dtype=numpy.uint32)
            numpy_state = (saved["name"], keys, saved["position"], saved["has_gauss"], saved["cached"])
    python = mine["python"]
    cuda: Sequence[Tensor] = mine["cuda"]
    if not torch.cuda.is_available() or len(cuda) != torch.cuda.device_count():
        cuda = ()  # saved on a host with a different number of GPUs
    randomness.restore(
        RandomState(
            python=(python["version"], _unpacked(python["words"]), python["gauss"]),
            torch_cpu=mine["torch"],
            torch_cuda=tuple(cuda),
            numpy=numpy_state,
        )
    )
    has_diverged = bool(mine["has_diverged"])
    if rank not in by_data_rank and has_diverged:
        randomness.diverge(rank, [name for name in randomness.STREAMS if not _is_shared(in_order, name)])
    world.draws_its_own = has_diverged


def _packed(words: Sequence[int]) -> Tensor:
    """[4 * len(words)], uint8: words of 32 bits, the least significant byte first."""
    return torch.frombuffer(bytearray(struct.pack(f"<{len(words)}I", *words)), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> tuple[int, ...]:
    """The inverse of `_packed`."""
    return struct.unpack(f"<{packed.numel() // 4}I", bytes(packed.tolist()))


def _is_shared(ranks: Sequence[Mapping[str, Any]], stream: str) -> bool:
    """Whether all ranks' streams are in the same state. False for a single rank: nothing is known about others."""
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
