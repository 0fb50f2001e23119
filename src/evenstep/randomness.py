"""Every random stream: seeding, keys, capture and restore.

Until training starts, all ranks draw the same numbers: `random_split` and the initialisation of the model give the
same on each of them. From the first training forward on, every rank except 0 draws its own (`diverge`), so that
dropout masks are independent between replicas, and rank 0 draws what a single process would have drawn.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenstep import checks

_MASK_64 = (1 << 64) - 1
LARGEST_SEED = (1 << 63) - 1


def mix(*words: int) -> int:
    """Hash integers into 64 bits, the order mattering. Pure.

    SplitMix64's finaliser (Steele, Lea and Flood, 2014) applied word by word; neighbouring inputs give unrelated
    outputs, so that (seed, epoch) or (seed, rank) can be used as keys.
    """
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & _MASK_64)) & _MASK_64
        state = (state + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state


def validate_seed(what: str, seed: Any, *, otherwise: str = "None to seed nothing") -> int | None:
    """A seed as python's own number. Pure.

    Args:
        what: Who was given it.
        seed: What was given.
        otherwise: What None means; "": it is refused.

    Raises:
        ConfigurationError: No whole number from 0 to 2**63 - 1.
    """
    if seed is None and otherwise:
        return None
    return checks.whole(f"{what}: seed", seed, least=0, most=LARGEST_SEED, otherwise=otherwise)


def seed_everything(seed: int) -> None:
    """Seed python's `random`, torch on every device, and numpy if it has been or can be imported."""
    random.seed(seed)
    _seed_torch(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed % (1 << 32))


def _seed_torch(seed: int) -> None:
    if _may_use_accelerators():
        torch.manual_seed(seed)  # CUDA's generators too, now or when they come to be
    else:
        # Without a device to come, torch would still note for it who asked, with the whole stack: half a millisecond.
        torch.default_generator.manual_seed(seed)


@functools.cache
def _may_use_accelerators() -> bool:
    # Whether torch was built for any: to ask the device itself would start it, and forked processes couldn't use it.
    return torch.accelerator.current_accelerator() is not None


def diverge(rank: int) -> None:
    """Give torch's streams of this rank a life of their own; rank 0 keeps its own."""
    if rank != 0:
        # Signed, because that is what CUDA's generators accept on every torch version.
        torch.manual_seed(mix(torch.initial_seed(), rank) >> 1)


@dataclass(frozen=True)
class RandomState:
    """The state of every random stream of this process."""

    python: Any
    torch_cpu: Tensor  # [bytes], uint8
    torch_cuda: tuple[Tensor, ...]  # one per device, [bytes], uint8; empty before CUDA is used
    numpy: Any | None


def capture() -> RandomState:
    """Take the state of every stream, without starting CUDA or importing numpy."""
    numpy = sys.modules.get("numpy")
    cuda = tuple(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return RandomState(
        python=random.getstate(),
        torch_cpu=torch.get_rng_state(),
        torch_cuda=cuda,
        numpy=None if numpy is None else numpy.random.get_state(),
    )


def restore(state: RandomState) -> None:
    """Put every stream back to where `capture` found it."""
    random.setstate(state.python)
    torch.set_rng_state(state.torch_cpu)
    if state.torch_cuda:
        torch.cuda.set_rng_state_all(list(state.torch_cuda))
    numpy = sys.modules.get("numpy")
    if numpy is not None and state.numpy is not None:
        numpy.random.set_state(state.numpy)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside leaves no trace."""
    state = capture()
    try:
        yield
    finally:
        restore(state)
