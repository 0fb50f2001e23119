"""What is on a GPU, read on the host without waiting for it: asked for in one window, there in a later one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Coming = tuple[Tensor, Any]  # a copy on the host, and the event after which it is there


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
    """What was asked for, a window ago."""
    host, event = coming
    if event is not None:
        event.synchronize()  # it has happened
    values: list[float] = host.tolist()
    return values
