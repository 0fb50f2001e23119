"""Values and tensors of unknown sizes between all ranks, over any transport."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, MismatchError
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


def broadcast_value(transport: Transport, value: Any, src: int) -> Any:
    """Rank `src`'s value, on every rank.

    Collective: every rank calls this, in the same order.

    Args:
        transport: Carries the message, on the CPU.
        value: On rank `src`: what `encode` takes. Ignored elsewhere.
        src: The rank whose value counts.

    Raises:
        ConfigurationError: `encode` doesn't take the value. Raised on all ranks.
    """
    data, problem = b"", ""
    if transport.rank == src:
        try:
            data = encode(value)
        except ConfigurationError as error:
            problem = str(error)
            data = problem.encode()
    header = torch.tensor([len(data), len(problem) > 0])
    transport.broadcast(header, src).wait()
    payload = to_tensor(data) if transport.rank == src else torch.empty(int(header[0]), dtype=torch.uint8)
    if payload.numel():
        transport.broadcast(payload, src).wait()
    if header[1]:
        raise ConfigurationError(f"broadcast_object on rank {src}: {to_bytes(payload).decode()}")
    return decode(to_bytes(payload))


def gather_rows(transport: Transport, control: Transport, tensor: Tensor) -> Tensor:
    """All ranks' tensors, one after the other along the first dimension, in order of rank.

    Collective: every rank calls this, in the same order.

    Args:
        transport: Carries the tensors, on their device.
        control: Carries their sizes, on the CPU.
        tensor: [n, ...]; n may differ between ranks and be 0. A 0-dim tensor counts as [1].

    Returns:
        [sum of n, ...], on every rank, on `tensor`'s device.

    Raises:
        MismatchError: The ranks' dtypes or the shapes behind the first dimension differ. Raised on all ranks.
    """
    tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().contiguous()
    seen = exchange(control, {"shape": list(tensor.shape), "dtype": str(tensor.dtype)})
    for rank, other in enumerate(seen):
        if other["shape"][1:] != seen[0]["shape"][1:] or other["dtype"] != seen[0]["dtype"]:
            raise MismatchError(
                f"world.gather: rank 0 has {seen[0]['dtype']} {seen[0]['shape']}, rank {rank} has "
                f"{other['dtype']} {other['shape']}; only the first dimension may differ."
            )
    rows = [other["shape"][0] for other in seen]
    mine = torch.zeros((max(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    mine[: len(tensor)] = tensor
    if mine.numel() == 0:
        return tensor.new_empty((sum(rows), *tensor.shape[1:]))
    raw = mine.reshape(-1).view(torch.uint8)  # bytes: whatever the dtype, every backend carries them
    out = torch.empty(transport.world_size * raw.numel(), dtype=torch.uint8, device=raw.device)
    transport.all_gather(out, raw).wait()
    parts = out.view(tensor.dtype).reshape(transport.world_size, *mine.shape)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])
