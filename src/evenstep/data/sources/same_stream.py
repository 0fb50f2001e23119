"""Comparing what the processes that run through one stream are given: the same records, in the same order.

A stream that is divided by record is run through by every worker of every rank, and each takes its part. If the stream
shuffles itself otherwise in one of them, some records come twice and others never, without a word. So a process makes a
digest of the records of each step. A rank compares those of its workers, of which each has the steps of the others,
too, and in every step the ranks compare theirs, before the step's batch is yielded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from evenstep.data.loading.fetch import Loaded
from evenstep.errors import MismatchError
from evenstep.pytrees import children_of
from evenstep.transport.core.object_collectives import exchange
from evenstep.transport.core.transport import Transport

_MOST_RECORDS = 32  # of a step, that are looked at
_MOST_NUMBERS = 64  # of a tensor or array, likewise
_MOST_BYTES = 4096  # of a text, likewise
_ADVICE = (
    "Every rank and every worker runs through the whole stream and takes its part, so some records would come twice "
    "and others never. While the stream runs, python's, torch's and numpy's random numbers are keyed by (seed, epoch); "
    "random generators of its own must be, too (its set_epoch(epoch) is called), and files or sets come in a fixed "
    "order (sorted). What is random about single records belongs in collate_fn."
)


def same_everywhere(
    batches: Iterator[Loaded], transport: Transport, epoch: int, first_step: int, num_workers: int
) -> Iterator[Loaded]:
    """Yield batches as long as all processes have the same records, and the one that shows the end of the stream.

    Collective: every rank iterates, in step.

    Args:
        batches: Of this rank, with digests; endless after the stream's end.
        transport: Of these batches alone.
        epoch: For messages.
        first_step: Of the batches.
        num_workers: Of this rank; at least 1.

    Raises:
        MismatchError: A process has other records. Raised on all ranks.
    """
    seen: dict[int, int] = {}  # digests of the latest steps, by whichever worker came to them first
    for step, loaded in enumerate(batches, first_step):
        others = enumerate(reversed(loaded.digests))
        workers_differ = any(seen.setdefault(step - back, digest) != digest for back, digest in others)
        seen.pop(step - num_workers, None)
        own = loaded.digests[-1]
        extremes = torch.tensor([own, -own, workers_differ], dtype=torch.int64, device="cpu")
        transport.all_reduce(extremes, "max").wait()
        largest, smallest, is_wrong = extremes[0], -extremes[1], extremes[2]
        if is_wrong or largest != smallest:
            raise _mismatch(exchange(transport, (own, workers_differ)), epoch, step)
        yield loaded
        if not loaded.num_samples:
            return


def _mismatch(of_ranks: list[tuple[int, bool]], epoch: int, step: int) -> MismatchError:
    digests = [digest for digest, _ in of_ranks]
    rank = next((rank for rank, (_, workers_differ) in enumerate(of_ranks) if workers_differ), None)
    if rank is not None:
        who = f"the workers of rank {rank} are given different records"
    else:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        ended = next((rank for rank in (0, other) if digests[rank] == digest_of([])), None)
        who = f"rank {other} is given other records than rank 0"
        if ended is not None:
            who = f"it has ended on rank {ended} and goes on on rank {other if ended == 0 else 0}"
    return MismatchError(
        f"DataLoader: the stream isn't the same everywhere. In epoch {epoch}, step {step}, {who}. {_ADVICE}"
    )


def digest_of(records: Sequence[Any]) -> int:
    """A digest of some records, in their order: of their number, and of what some of them hold. Pure.

    It is the same in every process, and positive in int64. Objects that are no numbers, texts, tensors or containers
    count by their type alone.
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
    """Beginning, middle and end of a text, and its length."""
    third, middle = _MOST_BYTES // 3, len(text) // 2
    pieces = [text] if len(text) <= _MOST_BYTES else [text[:third], text[middle : middle + third], text[-third:]]
    return b"%d" % len(text) + b"".join(p if isinstance(p, bytes) else p.encode(errors="surrogatepass") for p in pieces)


def _some_numbers(array: Any) -> bytes:
    """Numbers at even distances; none of an array that can't be read so (sparse, quantised, of objects)."""
    try:
        tensor = array.detach() if isinstance(array, Tensor) else torch.as_tensor(array, device="cpu")
        flat = tensor.resolve_conj().reshape(-1)
        some = flat[:: -(-len(flat) // _MOST_NUMBERS) or 1].contiguous().cpu()
        return some.view(torch.uint8).numpy().tobytes()
    except (TypeError, RuntimeError, NotImplementedError):
        return b""
