"""All random streams: seeding, keys, capture and restore.

Until training starts, all ranks draw the same numbers: `random_split` and the initialisation of the model give the
same on each of them. From the first training forward on, every rank except 0 draws its own numbers (`diverge`), so that
dropout masks and augmentations are independent between replicas. Rank 0 draws the same numbers as a single process.

[Note: replicas' draws]

Who reseeds the streams when a model is first called in training:

| the model's world | random numbers |
| --- | --- |
| made by `init`, or a group of its ranks | every rank draws its own |
| adopted: the script never calls `init` | not reseeded: the script may use them to decide what all ranks do |
| in reproducible mode | keyed by virtual rank inside the loop, shared outside |

The number of a rank is its data rank in the model's world (`ground.coordination.mesh`). With tensor parallelism, ranks
with parts of one replica have the same number and keep equal streams: some of their computations are the same, and must
give equal results. The stages of a pipeline have the same number, too, because they need the same samples.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenstep import checks

_MASK_64 = (1 << 64) - 1
LARGEST_SEED = (1 << 63) - 1
_TWISTER_BYTES = 4 * 625
STREAMS = ("python", "torch", "numpy")  # torch's: on every device


def mix(*words: int) -> int:
    """Hash integers into 64 bits; their order matters. Pure.

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
        what: The function and the argument, for messages.
        seed: The given seed.
        otherwise: The meaning of None, for the message; "": None is refused.

    Raises:
        ConfigurationError: The seed isn't a whole number from 0 to 2**63 - 1.
    """
    if seed is None and otherwise:
        return None
    return checks.whole(f"{what}: seed", seed, least=0, most=LARGEST_SEED, otherwise=otherwise)


def seed_everything(seed: int) -> None:
    """Seed python's `random`, torch on every device, and numpy if it is installed."""
    random.seed(seed)
    _seed_torch(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed % (1 << 32))


def _seed_torch(seed: int) -> None:
    if _may_use_accelerators():
        torch.manual_seed(seed)  # CUDA's generators too, also those that are created later
    else:
        # Seed only the CPU: even without a device, torch would record the caller's whole stack for one, in half a
        # millisecond.
        torch.default_generator.manual_seed(seed)


@functools.cache
def _may_use_accelerators() -> bool:
    # Check only whether torch was built for the device: a query of the device itself would initialise it, and forked
    # processes couldn't use it.
    return torch.accelerator.current_accelerator() is not None


def diverge(rank: int, streams: Iterable[str] = STREAMS) -> None:
    """Reseed this rank's random streams, each from its own next number; rank 0 keeps its streams."""
    for name in streams if rank else ():
        _RESEED[name](rank)


def _reseed_python(rank: int) -> None:
    random.seed(mix(random.getrandbits(64), rank))


def _reseed_torch(rank: int) -> None:
    drawn = int(torch.randint(1 << 62, (), device="cpu").item())
    # Signed, because CUDA's generators accept signed seeds on every torch version.
    torch.manual_seed(mix(drawn, rank) >> 1)


def _reseed_numpy(rank: int) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None:  # if imported later, numpy seeds itself from the system's entropy
        key = mix(int.from_bytes(numpy.random.bytes(8), "little"), rank)
        numpy.random.seed([key & 0xFFFF_FFFF, key >> 32])  # numpy takes words of 32 bits


_RESEED = {"python": _reseed_python, "torch": _reseed_torch, "numpy": _reseed_numpy}


@dataclass(frozen=True)
class RandomState:
    """The state of every random stream of this process."""

    python: Any
    torch_cpu: Tensor  # [bytes], uint8
    torch_cuda: tuple[Tensor, ...]  # one per device, [bytes], uint8; empty before CUDA is used
    numpy: Any | None


def capture(*, with_devices: bool = True) -> RandomState:
    """Read the state of every stream, or of the CPU's alone. Neither starts CUDA nor imports numpy."""
    numpy = sys.modules.get("numpy")
    has_devices = with_devices and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = tuple(torch.cuda.get_rng_state_all()) if has_devices else ()
    return RandomState(
        python=random.getstate(),
        torch_cpu=torch.get_rng_state(),
        torch_cuda=cuda,
        numpy=None if numpy is None else numpy.random.get_state(),
    )


def restore(state: RandomState) -> None:
    """Restore every stream to the state that `capture` read."""
    random.setstate(state.python)
    torch.set_rng_state(state.torch_cpu)
    if state.torch_cuda:
        torch.cuda.set_rng_state_all(list(state.torch_cuda))
    numpy = sys.modules.get("numpy")
    if numpy is not None and state.numpy is not None:
        numpy.random.set_state(state.numpy)


def seed_streams(key: int) -> None:
    """Seed the streams of the CPU: python's `random`, torch's, and numpy's if it is imported."""
    random.seed(key)
    torch.default_generator.manual_seed(key >> 1)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(key & 0xFFFF_FFFF)


class OwnStreams:
    """Random streams of one sampler or data set, which other draws don't change.

    Args:
        key: The seed of the streams.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._own: _Exchanged | None = None
        self._outside: _Exchanged | None = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside of the block, these streams replace python's, torch's and numpy's on the CPU."""
        outside = self._outside = _exchanged(self._outside)
        try:
            if self._own is None:
                seed_streams(self._key)
            else:
                self._own.restore(outside)
            yield
        finally:
            self._own = _exchanged(self._own)
            outside.restore(self._own)


class _Exchanged(NamedTuple):
    """States of the CPU's streams, read and written around each batch of a sampler.

    [Note: numpy's stream]
    numpy's own functions take 80 to 100 us to read or write it, word by word. So the memory of its generator (a
    Mersenne Twister's 624 words, and the position in them) is copied, in 1 us. That memory lacks one part of the state:
    normal numbers are drawn in pairs, and the second of a pair is stored elsewhere until it is used. While a second
    number is stored, numpy's functions read and write the whole state. If none was stored before and the memory is
    unchanged, none is stored now.

    Attributes:
        python: `random.getstate()`.
        torch: [bytes], uint8.
        memory: The memory of numpy's generator; b"" without numpy, or if the generator isn't a Mersenne Twister.
        numpy: `numpy.random.get_state()`; None if `memory` is the whole state.
    """

    python: Any
    torch: Tensor
    memory: bytes
    numpy: Any

    def restore(self, present: _Exchanged) -> None:
        """Set the streams to these states; `present` has their current states."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        if self.memory and self.numpy is None and present.numpy is None:
            generator = sys.modules["numpy"].random.get_bit_generator()
            with generator.lock:
                ctypes.memmove(generator.ctypes.state_address, self.memory, _TWISTER_BYTES)
        elif self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        elif self.memory:
            *words, place = memoryview(self.memory).cast("I")
            sys.modules["numpy"].random.set_state(("MT19937", words, place, 0, 0.0))


def _exchanged(before: _Exchanged | None) -> _Exchanged:
    """Read the current states of the CPU's streams; `before` has their states at an earlier time."""
    numpy, memory, whole = sys.modules.get("numpy"), b"", None
    if numpy is not None:
        if _can_copy_numpys():
            generator = numpy.random.get_bit_generator()
            if type(generator) is numpy.random.MT19937:
                memory = ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)
        if not memory or before is None or before.memory != memory or before.numpy is not None:
            whole = numpy.random.get_state()
            if memory and not whole[3]:
                whole = None
    return _Exchanged(random.getstate(), torch.get_rng_state(), memory, whole)


@functools.cache
def _can_copy_numpys() -> bool:
    """Whether the layout of a generator's memory is known: its words, then its position.

    `get_bit_generator` came with numpy 1.24.
    """
    numpy = sys.modules["numpy"]
    generator = numpy.random.MT19937(0)
    state, memory = generator.state["state"], ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)
    known = state["key"].tobytes() + int(state["pos"]).to_bytes(4, sys.byteorder)
    return hasattr(numpy.random, "get_bit_generator") and memory == known


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore every stream after the block."""
    state = capture()
    try:
        yield
    finally:
        restore(state)
