"""The device of a rank, tensors grouped by device, and copies to the host in the background."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from evenstep.checks import counted
from evenstep.errors import ConfigurationError
from evenstep.ground.environment import Placement

Coming = tuple[Tensor, Any]  # a copy on the host, and the event after which it is complete


def parse_device(requested: str | torch.device) -> torch.device:
    """`requested` as a device on which ranks can compute. Pure.

    Raises:
        ConfigurationError: There is no such device, or ranks can't compute on it.
    """
    try:
        device = torch.device(requested)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigurationError(f"device={str(requested)!r} isn't a device; use 'cpu', 'cuda' or 'cuda:1'.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={str(requested)!r}: evenstep trains on 'cpu' and 'cuda'.")
    return device


def choose_device(requested: str | torch.device | None, placement: Placement, *, num_gpus: int) -> torch.device:
    """The device of one rank. Pure.

    Args:
        requested: "cpu", "cuda" (the rank's own GPU), "cuda:1" (that GPU, which ranks may share), or None: GPUs if
            there are any.
        placement: The rank's place among those of its node.
        num_gpus: GPUs that torch can use on this node.

    Raises:
        ConfigurationError: There is no such device, or there are more ranks than GPUs.
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
        return torch.device("cuda", 0)  # each rank sees a different GPU, as number 0
    if placement.local_world_size > num_gpus:
        most = counted(num_gpus, "rank")
        remedy = f"Start at most {most}, or pass device='cpu', or name one to be shared: device='cuda:0'."
        raise ConfigurationError(
            f"{counted(placement.local_world_size, 'rank')} on this node, but it has {_gpus(num_gpus)}: each rank "
            f"needs its own GPU. " + (remedy if num_gpus else "Pass device='cpu'.")
        )
    return torch.device("cuda", placement.local_rank)


def _gpus(count: int) -> str:
    return {0: "no GPU that torch can use", 1: "1 GPU"}.get(count, f"{count} GPUs")


def by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors that have elements, grouped into lists by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


def start_copy(values: Tensor) -> Coming:
    """Begin to copy values to the host."""
    if values.device.type != "cuda":
        return values.cpu().clone(), None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return host, event


def arrived(coming: Coming) -> list[float]:
    """The numbers that `start_copy` began to copy, one window earlier."""
    host, event = coming
    if event is not None:
        event.synchronize()  # usually returns at once: a window has passed
    values: list[float] = host.tolist()
    return values
