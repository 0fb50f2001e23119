"""Digests of samples, facts of loaders, and random states of data sets, for a watched rank."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.computing import randomness
from evenstep.tools.observing.models import digest

_MOST_ROWS = 64  # samples of a batch whose digests are kept
_STREAMS = (numpy.random.Generator, numpy.random.RandomState, random.Random, torch.Generator)


def row_digests(batch: Any) -> list[str]:
    """A digest of each sample of a batch, over all tensors with as many rows as the first; [] for computed batches."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    tensors = [leaf.detach() for leaf in leaves if leaf.dim() > 0]
    if not tensors or any(leaf.requires_grad for leaf in leaves):
        return []
    alike = [each[:_MOST_ROWS] for each in tensors if len(each) == len(tensors[0])]
    return [_short("".join(digest(row) for row in rows)) for rows in zip(*alike, strict=True)]


def facts_of(loader: Any) -> dict[str, Any]:
    """A loader's batch size, sampler, lengths and other facts, as far as it has them."""
    sampler, dataset = getattr(loader, "sampler", None), getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    is_stream = isinstance(dataset, IterableDataset)
    return {
        "library": type(loader).__module__.partition(".")[0],
        "is_plain": type(loader) is TorchDataLoader,
        "dataset": id(dataset),
        "is_stream": is_stream,
        "num_samples": None if is_stream else _length(dataset),
        "sampler": type(sampler).__name__,
        "is_whole": type(sampler) in (RandomSampler, SequentialSampler) and type(batches).__name__ == "BatchSampler",
        "is_shuffled": isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False)),
        "of_rank": None if is_stream else _length(sampler),
        "padded_to": getattr(sampler, "total_size", None),
        "is_distributed": hasattr(sampler, "num_replicas"),
        "num_workers": getattr(loader, "num_workers", 0),
        "batch_size": getattr(loader, "batch_size", None),
        "num_batches": _length(loader),
        "epoch": getattr(sampler, "epoch", None),
    }


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def first_looks(loader: Any) -> dict[str, Any]:
    """Digests of three samples, read with the same random numbers on every rank, to compare ranks' data sets."""
    dataset: Any = getattr(loader, "dataset", None)
    count = _length(dataset)
    if isinstance(dataset, IterableDataset) or not count or type(loader) is not TorchDataLoader:
        return {}
    looks: list[str] = []
    # If the data set raises here, it raises again when the script reads it.
    with contextlib.suppress(Exception), randomness.preserved():
        for index in (0, count // 2, count - 1):
            twice = []
            for _ in range(2):  # samples drawn from the data set's own generator differ each time
                randomness.seed_streams(randomness.mix(index))
                leaves = pytree.tree_leaves(dataset[index])
                twice.append([digest(leaf) if isinstance(leaf, Tensor) else _short(repr(leaf)) for leaf in leaves])
            looks += twice[0] if twice[0] == twice[1] else []
    return {"looks": looks}


def streams_of(dataset: Any) -> dict[str, str]:
    """By name, digests of the states of all random streams that a data set may draw from."""
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
    }
    for name, stream in _own_streams(dataset, depth=3):
        if isinstance(stream, random.Random):
            found[name] = stream.getstate()
        else:
            found[name] = (
                stream.bit_generator.state if isinstance(stream, numpy.random.Generator) else stream.get_state()
            )
    return {name: digest(each) if isinstance(each, Tensor) else _short(repr(each)) for name, each in found.items()}


def _own_streams(thing: Any, depth: int, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, generator) for each random generator that an object holds, directly or through its attributes."""
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        if isinstance(value, _STREAMS):
            yield f"self.{prefix}{name}", value
        elif depth and hasattr(value, "__dict__") and not isinstance(value, type | Tensor):
            yield from _own_streams(value, depth - 1, f"{prefix}{name}.")


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
