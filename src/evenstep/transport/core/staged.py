"""Messages on the CPU over a transport that carries only what is on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from evenstep.transport.base import Carrier, Op, Transport, Work

_ONLY_GPU = ("nccl",)


def for_messages(transport: Transport, device: torch.device) -> Carrier:
    """What carries messages on the CPU in order with the other calls of a transport: itself, if it can.

    Args:
        transport: Carries tensors on `device`.
        device: Where messages are copied to otherwise.
    """
    return StagedMessages(transport, device) if transport.name in _ONLY_GPU else transport


class StagedMessages:
    """Copies messages to a device, and what comes back to the CPU. Waits for the device, so it is for rare messages.

    Args:
        transport: Carries tensors on `device`.
        device: Of the tensors that travel.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.rank, self.world_size = transport.rank, transport.world_size
        self._transport = transport
        self._device = device

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Work:
        """See `Transport.all_reduce`."""
        there = tensor.to(self._device, copy=True)
        return _StagedWork(self._transport.all_reduce(there, op), there, tensor)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """See `Transport.broadcast`."""
        there = tensor.to(self._device, copy=True)
        return _StagedWork(self._transport.broadcast(there, src), there, tensor)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Work:
        """See `Transport.all_gather`."""
        there = torch.empty_like(out, device=self._device)
        return _StagedWork(self._transport.all_gather(there, tensor.to(self._device, copy=True)), there, out)


class _StagedWork:
    """A call whose result is copied to the CPU when it is there."""

    def __init__(self, work: Work, there: Tensor, here: Tensor) -> None:
        self._work = work
        self._there = there
        self._here = here

    def wait(self) -> None:
        self._work.wait()
        self._here.copy_(self._there)

    def is_completed(self) -> bool:
        return self._work.is_completed()
