"""The device of a rank, tensors by device, and copies that nothing waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from evenstep.checks import counted
from evenstep.errors import ConfigurationError
from evenstep.ground.environment import Placement

Coming = tuple[Tensor, Any]  # a copy on the host, and the event after which it is there


def parse_device(requested: str | torch.device) -> torch.device:
    """A device that ranks can compute on. Pure.

    Raises:
        ConfigurationError: There is no such device, or none of these.
    """
    try:
        device = torch.device(requested)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigurationError(f"device={str(requested)!r} is no device; use 'cpu', 'cuda' or 'cuda:1'.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={str(requested)!r}: evenstep trains on 'cpu' and 'cuda'.")
    return device


def choose_device(requested: str | torch.device | None, placement: Placement, *, num_gpus: int) -> torch.device:
    """The device of one rank. Pure.

    Args:
        requested: "cpu", "cuda" (the rank's own GPU), "cuda:1" (that one, shared if need be), or None to take GPUs if
            there are any.
        placement: Where the rank stands among those of its node.
        num_gpus: GPUs that torch can use on this node.

    Raises:
        ConfigurationError: No such device, or more ranks than GPUs.
    """
    if requested is None:
        requested = "cuda" if num_gpus else "cpu"
    device = parse_device(requested)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None:
        if device.index >= num_gpus:
            raise ConfigurationError(f"device={str(requested)!r}, but this node has {_gpus(num_gpus)}.")
        return device
    if num_gpus == 1 and placement.has_one_gpu_of_its_own:
        return torch.device("cuda", 0)  # another one on every rank, all of them number 0
    if placement.local_world_size > num_gpus:
        most = counted(num_gpus, "rank")
        remedy = f"Start at most {most}, or pass device='cpu', or name one to be shared: device='cuda:0'."
        raise ConfigurationError(
            f"{counted(placement.local_world_size, 'rank')} on this node, but it has {_gpus(num_gpus)}: each rank "
            f"needs one of its own. " + (remedy if num_gpus else "Pass device='cpu'.")
        )
    return torch.device("cuda", placement.local_rank)


def _gpus(count: int) -> str:
    return {0: "no GPU that torch can use", 1: "1 GPU"}.get(count, f"{count} GPUs")


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Lists of tensors of one device and dtype, none of them without elements."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def start_copy(values: Tensor) -> Coming:
    """Ask for values."""
    if values.device.type != "cuda":
        return values.cpu().clone(), None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event


def arrived(coming: Coming) -> list[float]:
    """Return numbers that `start_copy` has begun to copy, a window ago."""
    host, event = coming
    if event is not None:
        event.synchronize()  # it has happened
    values: list[float] = host.tolist()
    return values
