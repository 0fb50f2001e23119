"""Which server has which parameters, and tensors packed into few. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Division = list[list[int]]


def plan_division(sizes: Sequence[int], num_servers: int) -> Division:
    """The parameters of each server: the largest first, each to the server that has the fewest bytes.

    No server has more than the mean and one parameter. Parameters stay whole, because optimizers may look at their
    shapes.

    Args:
        sizes: [num_parameters], bytes.
        num_servers: At least 1; some have none if there are fewer parameters.

    Returns:
        For each server the indices of its parameters, ascending.
    """
    loads = [0] * num_servers
    division: Division = [[] for _ in range(num_servers)]
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        server = min(range(num_servers), key=lambda each: (loads[each], len(division[each]), each))
        division[server].append(index)
        loads[server] += sizes[index]
    return [sorted(each) for each in division]


def pack(like: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Copies of the tensors in one flat CPU tensor for each dtype, in order of its first occurrence.

    Args:
        like: Shapes and dtypes; for None zeros are packed.
        tensors: As many.

    Returns:
        [numel of that dtype] each.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for model, tensor in zip(like, tensors, strict=True):
        piece = torch.zeros_like(model) if tensor is None else tensor
        by_dtype.setdefault(model.dtype, []).append(piece.detach().reshape(-1))
    # `cat` of one tensor copies, too: what is packed must not change while it is sent.
    return to_host([torch.cat(pieces) for pieces in by_dtype.values()])


def unpack(like: Sequence[Tensor], packed: Sequence[Tensor]) -> list[Tensor]:
    """What was packed, as views of `packed` in the shapes of `like`."""
    dtypes = list(dict.fromkeys(each.dtype for each in like))
    offsets = dict.fromkeys(dtypes, 0)
    views = []
    for model in like:
        offset = offsets[model.dtype]
        flat = packed[dtypes.index(model.dtype)]
        views.append(flat[offset : offset + model.numel()].view(model.shape))
        offsets[model.dtype] = offset + model.numel()
    return views


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors on the CPU; those of a GPU come through pinned memory, which torch keeps for the next time."""
    found, streams = [], []
    for tensor in tensors:
        if tensor.device.type == "cuda":
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            found.append(host.copy_(tensor, non_blocking=True))
            streams.append(torch.cuda.current_stream(tensor.device))
        else:
            found.append(tensor.cpu())
    for stream in streams:  # before anybody reads them
        stream.synchronize()
    return found


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Flat tensors on a device, one copy for each; to a GPU through pinned memory, without waiting."""
    if device.type != "cuda":
        return list(tensors)
    return [each.pin_memory().to(device, non_blocking=True) for each in tensors]
