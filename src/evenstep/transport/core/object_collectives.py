"""Collectives of plain values, of tensors of unknown sizes, and of means, over any transport."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, MismatchError
from evenstep.transport.core.codec import decode, encode, to_bytes, to_tensor
from evenstep.transport.core.store_gather import StoreGather
from evenstep.transport.core.transport import Transport

_NAME_BYTES = 64  # length of a call's name, for the error if ranks make different calls


def exchange(transport: Transport | StoreGather, value: Any, *, what: str = "an exchange of values") -> list[Any]:
    """Every rank's value, in order of rank, on every rank.

    Collective: every rank calls this, in the same order.

    Args:
        transport: Carries the messages, on the CPU.
        value: A value that `encode` accepts.
        what: The call's name. If ranks make calls with different names, they get an error instead of wrong values.

    Raises:
        MismatchError: Ranks make different calls. Raised on all ranks.
        ConfigurationError: `encode` doesn't accept some rank's value. Raised on all ranks.
    """
    data, is_problem = _encode_or_explain(value)
    own = what.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0") + bytes([is_problem]) + data
    received = transport.gather_bytes(own) if isinstance(transport, StoreGather) else _gather_bytes(transport, own)
    calls = [each[:_NAME_BYTES].rstrip(b"\0").decode(errors="replace") for each in received]
    if len(set(calls)) > 1:
        where = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(calls))
        raise MismatchError(
            f"the ranks make different calls. {where}. Every rank must make the same calls, in the same order: look "
            f"for a loop that is shorter on some ranks, and for a branch that only some ranks take, such as a "
            f"state_dict on rank 0 alone."
        )
    values = [each[_NAME_BYTES + 1 :] for each in received]
    for rank, each in enumerate(received):
        if each[_NAME_BYTES]:
            raise ConfigurationError(f"exchange: on rank {rank} {values[rank].decode()}")
    return [decode(each) for each in values]


def _gather_bytes(transport: Transport, data: bytes) -> list[bytes]:
    """Every rank's bytes, of any length."""
    size = transport.world_size
    lengths = torch.empty(size, dtype=torch.int64, device="cpu")
    transport.all_gather(lengths, torch.tensor([len(data)], device="cpu")).wait()
    longest = int(lengths.max())
    out = torch.empty(size * longest, dtype=torch.uint8, device="cpu")
    transport.all_gather(out, to_tensor(data.ljust(longest, b"\0"))).wait()
    return [to_bytes(row[:length]) for row, length in zip(out.view(size, longest), lengths.tolist(), strict=True)]


def broadcast_value(transport: Transport, value: Any, src: int) -> Any:
    """Rank `src`'s value, on every rank.

    Collective: every rank calls this, in the same order.

    Args:
        transport: Carries the message, on the CPU.
        value: On rank `src`, a value that `encode` accepts. Ignored on other ranks.
        src: The rank whose value is sent.

    Raises:
        ConfigurationError: `encode` doesn't accept the value. Raised on all ranks.
    """
    data, is_problem = _encode_or_explain(value) if transport.rank == src else (b"", False)
    header = torch.tensor([len(data), is_problem], device="cpu")
    transport.broadcast(header, src).wait()
    payload = to_tensor(data) if transport.rank == src else torch.empty(int(header[0]), dtype=torch.uint8, device="cpu")
    if payload.numel():
        transport.broadcast(payload, src).wait()
    if header[1]:
        raise ConfigurationError(f"broadcast_object on rank {src}: {to_bytes(payload).decode()}")
    return decode(to_bytes(payload))


def check_rows(tensor: Any, *, rank: int, what: str = "world.gather") -> None:
    """Raise a ConfigurationError if `gather_rows` doesn't accept this value. Pure."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        kind = f"{tensor.layout} tensor" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ConfigurationError(f"{what} on rank {rank}: got a {kind}; pass a dense tensor.")


def gather_rows(transport: Transport, control: Transport, tensor: Tensor) -> Tensor:
    """Concatenate all ranks' tensors along the first dimension, in order of rank.

    Collective: every rank calls this, in the same order.

    Args:
        transport: Carries the tensors, on their device.
        control: Carries their sizes, on the CPU.
        tensor: [n, ...]; n may differ between ranks and be 0. A 0-dim tensor counts as [1].

    Returns:
        [sum of n, ...], on every rank, on `tensor`'s device.

    Raises:
        MismatchError: The ranks' dtypes or the shapes beyond the first dimension differ. Raised on all ranks.
    """
    tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().contiguous()
    seen = exchange(control, {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}, what="world.gather")
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
    raw = mine.reshape(-1).view(torch.uint8)  # as bytes, which every backend carries, for any dtype
    out = torch.empty(transport.world_size * raw.numel(), dtype=torch.uint8, device=raw.device)
    transport.all_gather(out, raw).wait()
    parts = out.view(tensor.dtype).reshape(transport.world_size, *mine.shape)
    return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])


def check_mean(value: Any, weight: Any, *, rank: int) -> tuple[Tensor, float | Tensor]:
    """Validate the arguments of a weighted mean. Pure; a weight on a GPU is not read.

    Raises:
        ConfigurationError: The value isn't a real number or a tensor, or the weight is negative, infinite or not a
            number.
    """
    where = f"world.mean on rank {rank}"
    if not isinstance(value, Tensor):
        try:
            value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
        except (TypeError, ValueError):
            raise ConfigurationError(f"{where}: value={value!r} is neither a real number nor a tensor.") from None
    if value.is_complex():
        raise ConfigurationError(f"{where}: the value is complex; take the mean of its real and imaginary parts.")
    if isinstance(weight, Tensor) and weight.numel() == 1 and weight.device.type != "cpu":
        return value.detach(), weight.detach().reshape(())
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(f"{where}: weight={weight!r} isn't a number.") from None
    if isinstance(weight, str) or not 0 <= number < float("inf"):
        raise ConfigurationError(f"{where}: weight={weight!r}; a finite number of at least 0.")
    return value.detach(), number


def weighted_mean(transport: Transport, value: Tensor, weight: float | Tensor) -> Tensor:
    """The sum of `weight * value` over ranks divided by the sum of `weight`; NaN if all weights are 0.

    Collective: every rank calls this, in the same order.

    Args:
        transport: Carries tensors on the value's device.
        value: Any shape, the same on all ranks. Ignored, even if it is NaN, on ranks whose weight is 0.
        weight: A number or a 0-dim tensor.

    Returns:
        `value`'s shape and dtype; float64 for integers and bool, which float32 rounds above 2^24.
    """
    total = torch.empty(value.numel() + 1, dtype=torch.float64, device=value.device)
    total[-1] = weight
    total[:-1] = torch.where(total[-1] == 0, 0.0, value.reshape(-1).double() * total[-1])
    transport.all_reduce(total).wait()
    mean = total[:-1] / total[-1]
    return mean.reshape(value.shape).to(value.dtype if value.is_floating_point() else torch.float64)


def _encode_or_explain(value: Any) -> tuple[bytes, bool]:
    """The encoded value, or the reason why it can't be sent.

    An error on one rank alone would leave the others waiting.
    """
    try:
        return encode(value), False
    except ConfigurationError as error:
        return str(error).encode(), True
