"""Which device a rank computes on."""

from __future__ import annotations

import torch

from evenstep.checks import counted
from evenstep.environment import Placement
from evenstep.errors import ConfigurationError


def parse_device(asked: str | torch.device) -> torch.device:
    """A device that ranks can compute on. Pure.

    Raises:
        ConfigurationError: There is no such device, or none of these.
    """
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigurationError(f"device={str(asked)!r} is no device; use 'cpu', 'cuda' or 'cuda:1'.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={str(asked)!r}: evenstep trains on 'cpu' and 'cuda'.")
    return device


def choose_device(asked: str | torch.device | None, placement: Placement, *, num_gpus: int) -> torch.device:
    """The device of one rank. Pure.

    Args:
        asked: "cpu", "cuda" (the rank's own GPU), "cuda:1" (that one, shared if need be), or None to take GPUs if
            there are any.
        placement: Where the rank stands among those of its host.
        num_gpus: GPUs that torch can use on this host.

    Raises:
        ConfigurationError: No such device, or more ranks than GPUs.
    """
    if asked is None:
        asked = "cuda" if num_gpus else "cpu"
    device = parse_device(asked)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is not None:
        if device.index >= num_gpus:
            raise ConfigurationError(f"device={str(asked)!r}, but this host has {_gpus(num_gpus)}.")
        return device
    if num_gpus == 1 and placement.has_one_gpu_of_its_own:
        return torch.device("cuda", 0)  # another one on every rank, all of them number 0
    if placement.local_world_size > num_gpus:
        most = counted(num_gpus, "rank")
        remedy = f"Start at most {most}, or pass device='cpu', or name one to be shared: device='cuda:0'."
        raise ConfigurationError(
            f"{counted(placement.local_world_size, 'rank')} on this host, but it has {_gpus(num_gpus)}: each rank "
            f"needs one of its own. " + (remedy if num_gpus else "Pass device='cpu'.")
        )
    return torch.device("cuda", placement.local_rank)


def _gpus(count: int) -> str:
    return {0: "no GPU that torch can use", 1: "1 GPU"}.get(count, f"{count} GPUs")
