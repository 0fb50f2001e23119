"""Small messages between all ranks, over any transport."""

from __future__ import annotations

from typing import Any

import torch

from evenstep.transport.base import Transport
from evenstep.transport.codec import decode, encode, to_bytes, to_tensor


def exchange(transport: Transport, value: Any) -> list[Any]:
    """Every rank's value, in order of rank, on every rank.

    Collective: every rank calls this, in the same order.

    Args:
        transport: Carries the messages, on the CPU.
        value: What `encode` takes.
    """
    data = encode(value)
    lengths = torch.empty(transport.world_size, dtype=torch.int64)
    transport.all_gather(lengths, torch.tensor([len(data)])).wait()
    longest = int(lengths.max())
    padded = to_tensor(data.ljust(longest, b"\0"))
    out = torch.empty(transport.world_size * longest, dtype=torch.uint8)
    transport.all_gather(out, padded).wait()
    return [
        decode(to_bytes(row[: int(length)]))
        for row, length in zip(out.view(transport.world_size, longest), lengths, strict=True)
    ]
