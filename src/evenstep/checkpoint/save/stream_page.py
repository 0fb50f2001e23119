"""A rank's random streams of its last steps, in memory that others can read after it has been killed.

Every step writes the page, so it is made to be cheap: a stream that hasn't been drawn from is not written again, and
nothing is encoded. A kill between two stores leaves at most one entry that doesn't count: an entry's number is cleared
before it changes, and written last.

    entries    _NUM_ENTRIES times: number, step, where the streams lie
    places     _NUM_PLACES times: streams. More than there are entries, so that none is overwritten that one refers to

Of each step the last two entries are kept, however often it is written: a model that is trained by several windows a
step writes it for each. When a rank dies another one may be a step behind it, and it may be in the next step.
So three steps are kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import struct
import sys
from array import array
from pathlib import Path
from typing import Any

import torch

from evenstep.randomness import RandomState

_ENTRY = struct.Struct("=QQQ")
_NUMBER = struct.Struct("=Q")
_NUM_ENTRIES, _NUM_PLACES = 6, 8
_NUMPY = "MT19937"
_WORDS = 625  # of python's generator; numpy's has one less, and a position
_FIXED = struct.Struct("=?q?dI?I?d")  # diverged, python's version and gauss, bytes of torch's, numpy's
_PLACE_BYTES = 16 << 10
_PLACES = 1024
_PAGE_BYTES = _PLACES + _NUM_PLACES * _PLACE_BYTES


class StreamPage:
    """This rank's page, open for writing.

    Args:
        path: A new file.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _PAGE_BYTES)
            self._map = mmap.mmap(descriptor, _PAGE_BYTES)
        finally:
            os.close(descriptor)
        self._number = self._place = 0
        self._entries = [(0, 0, 0)] * _NUM_ENTRIES  # as in the page
        self._numpy = _NumpyStream()
        self._written: tuple[Any, ...] | None = None

    def write(self, step: int, *, has_diverged: bool) -> None:
        """Keep the streams as they are now as those of a step; nothing where numpy's generator isn't the usual one."""
        python, of_torch, of_numpy = random.getstate(), torch.get_rng_state().numpy().tobytes(), self._numpy.state()
        words = python[1]
        # Any draw moves the position, which is the last word; any seed changes the first ones.
        found = (has_diverged, words[-1], words[0], words[1], words[2], python[2], of_torch, of_numpy)
        if found != self._written:
            data = _pack(has_diverged, python, of_torch, of_numpy)
            if data is None:
                return
            taken = {place for number, _, place in self._entries if number}
            self._place = next(place for place in range(_NUM_PLACES) if place not in taken)
            begin = _PLACES + self._place * _PLACE_BYTES
            self._map[begin : begin + len(data)] = data
            self._written = found
        of_step = [entry for entry in self._entries if entry[0] and entry[1] == step]
        index = self._entries.index(min(of_step if len(of_step) > 1 else self._entries))
        at = index * _ENTRY.size
        self._number += 1
        self._entries[index] = (self._number, step, self._place)
        _NUMBER.pack_into(self._map, at, 0)
        _ENTRY.pack_into(self._map, at, 0, step, self._place)
        _NUMBER.pack_into(self._map, at, self._number)

    def close(self) -> None:
        """Unmap it. What was written stays to be read."""
        self._map.close()


def read_streams(path: Path, step: int) -> tuple[RandomState, bool] | None:
    """A rank's streams at a step, and whether they had diverged; None if its page doesn't have that step."""
    try:
        page = path.read_bytes()
    except OSError:
        return None
    if len(page) != _PAGE_BYTES:
        return None
    entries = sorted(_ENTRY.unpack_from(page, number * _ENTRY.size) for number in range(_NUM_ENTRIES))
    places = [place for number, of_step, place in entries if number and of_step == step]
    return _unpack(page[_PLACES + places[-1] * _PLACE_BYTES :]) if places else None


_NumpyState = tuple[str, bytes, int, int, float]


class _NumpyStream:
    """numpy's global generator, whose state takes 50 microseconds to get: so only when it has been drawn from."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._words: Any = None  # of the generator itself: 624, and the position
        self._mark: tuple[int, ...] = ()
        self._last: _NumpyState | None = None

    def state(self) -> _NumpyState | None:
        """Its state now; None where numpy isn't imported."""
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        has_name = hasattr(numpy.random, "get_bit_generator")
        generator: Any = numpy.random.get_bit_generator() if has_name else None
        if has_name and type(generator) is not numpy.random.MT19937:
            return "", b"", 0, 0, 0.0
        if generator is not self._generator:
            self._generator, self._last = generator, None
            self._words = (ctypes.c_uint32 * _WORDS).from_address(generator.ctypes.state_address)
        words, last = self._words, self._last
        mark = () if words is None else (words[_WORDS - 1], words[0], words[1], words[2])
        # A normal number that is kept for the next draw is taken without a trace.
        if last is None or not mark or mark != self._mark or last[3]:
            self._mark, self._last = mark, _numpy_state(numpy)
        return self._last


def _numpy_state(numpy: Any) -> _NumpyState:
    name, words, position, has_gauss, gauss = numpy.random.get_state()
    return str(name), words.tobytes(), int(position), int(has_gauss), float(gauss)


def _pack(has_diverged: bool, python: Any, of_torch: bytes, of_numpy: _NumpyState | None) -> bytes | None:
    version, words, gauss = python
    name, numpy_words, position, has_gauss, numpy_gauss = of_numpy or (_NUMPY, b"", 0, 0, 0.0)
    if name != _NUMPY:
        return None
    fixed = _FIXED.pack(
        has_diverged,
        version,
        gauss is not None,
        gauss or 0.0,
        len(of_torch),
        of_numpy is not None,
        position,
        bool(has_gauss),
        numpy_gauss,
    )
    data = b"".join((fixed, array("I", words).tobytes(), of_torch, numpy_words))
    return data if len(data) <= _PLACE_BYTES else None


def _unpack(data: bytes) -> tuple[RandomState, bool]:
    diverged, version, has_gauss, gauss, torch_bytes, has_numpy, position, numpy_has_gauss, numpy_gauss = (
        _FIXED.unpack_from(data)
    )
    begin = _FIXED.size
    words = array("I")
    words.frombytes(data[begin : begin + _WORDS * words.itemsize])
    begin += _WORDS * words.itemsize
    of_torch = torch.frombuffer(bytearray(data[begin : begin + torch_bytes]), dtype=torch.uint8)
    begin += torch_bytes
    of_numpy = None
    if has_numpy:
        with contextlib.suppress(ImportError):
            import numpy

            keys = numpy.frombuffer(data, dtype=numpy.uint32, count=_WORDS - 1, offset=begin)
            of_numpy = (_NUMPY, keys, position, int(numpy_has_gauss), numpy_gauss)
    python = (version, tuple(words), gauss if has_gauss else None)
    return RandomState(python=python, torch_cpu=of_torch, torch_cuda=(), numpy=of_numpy), diverged
