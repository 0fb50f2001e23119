"""Digests of samples and records. Processes compare digests to find out whether they read the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.ground.computing.pytrees import children_of

_MOST_RECORDS = 32  # the most records of a step that are read
_MOST_NUMBERS = 64  # the most numbers of a tensor or array that are read
_MOST_BYTES = 4096  # the most bytes of a text that are read


def digest_of(records: Sequence[Any]) -> int:
    """A digest of records, in their order: of their number, and of the contents of some of them. Pure.

    It is the same in every process, and positive in int64. Of objects other than numbers, texts, tensors and containers
    only the type is included.
    """
    found = hashlib.blake2b(b"%d" % len(records), digest_size=7)
    for record in records[:: -(-len(records) // _MOST_RECORDS) or 1]:
        _add(found, record)
    return int.from_bytes(found.digest(), "little")


def _add(found: Any, node: Any) -> None:
    found.update(type(node).__name__.encode())
    if isinstance(node, str | bytes):
        found.update(_some_of(node))
    elif node is None or isinstance(node, bool | int | float | complex):
        found.update(repr(node).encode())
    elif hasattr(node, "dtype") and hasattr(node, "shape"):  # a tensor or numpy's array; scalars of numpy have both
        found.update(f"{node.dtype}{tuple(node.shape)}".encode())
        found.update(_some_numbers(node))
    elif (parts := children_of(node)) is not None:
        found.update(b"%d" % len(parts[0]))
        for child in (*node, *parts[0]) if hasattr(node, "keys") else parts[0]:
            _add(found, child)


def _some_of(text: str | bytes) -> bytes:
    """The beginning, middle and end of a text, and its length."""
    third, middle = _MOST_BYTES // 3, len(text) // 2
    pieces = [text] if len(text) <= _MOST_BYTES else [text[:third], text[middle : middle + third], text[-third:]]
    return b"%d" % len(text) + b"".join(p if isinstance(p, bytes) else p.encode(errors="surrogatepass") for p in pieces)


def _some_numbers(array: Any) -> bytes:
    """Numbers at even distances; none if the array can't be read in this way (sparse, quantised, of objects)."""
    try:
        tensor = array.detach() if isinstance(array, Tensor) else torch.as_tensor(array, device="cpu")
        flat = tensor.resolve_conj().reshape(-1)
        some = flat[:: -(-len(flat) // _MOST_NUMBERS) or 1].contiguous().cpu()
        return some.view(torch.uint8).numpy().tobytes()
    except (TypeError, RuntimeError, NotImplementedError):
        return b""
