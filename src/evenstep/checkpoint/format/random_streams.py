"""The random streams of all ranks, as state that a checkpoint can hold."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep import randomness
from evenstep.randomness import RandomState, mix
from evenstep.world import World

NAME = "random"


def capture_streams(world: World) -> dict[str, Any]:
    """This rank's streams, as plain data and tensors."""
    state = randomness.capture()
    version, words, gauss = state.python
    streams: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "torch": state.torch_cpu,
        "cuda": list(state.torch_cuda),
        "numpy": None,
        "has_diverged": world.has_diverged,
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


def restore_streams(ranks: Sequence[Mapping[str, Any]], world: World) -> None:
    """Continue the stream that this rank had; a rank that is new gets one derived from rank 0's, or rank 0's own where
    all ranks draw the same (before they diverge, and in reproducible mode).

    Args:
        ranks: What `capture_streams` gave on each rank of the run that saved.
        world: Says which rank this is.
    """
    mine = ranks[world.rank] if world.rank < len(ranks) else ranks[0]
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
    if world.rank >= len(ranks) and ranks[0]["has_diverged"]:
        drawn = int(torch.randint(1 << 62, (), device="cpu").item())
        torch.manual_seed(mix(drawn, world.rank) >> 1)
    world.has_diverged = bool(ranks[0]["has_diverged"])
