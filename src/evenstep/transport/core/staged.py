"""Messages on the CPU over a transport that carries only GPU tensors."""

from __future__ import annotations

import dataclasses

import torch

from evenstep.transport.base import Collective, Work
from evenstep.transport.core.transport import JointWork, Transport

_ONLY_GPU = ("nccl",)


def for_messages(transport: Transport, device: torch.device) -> Transport:
    """A transport for messages on the CPU, in order with another transport's calls: that transport itself, if possible.

    Args:
        transport: Carries tensors on `device`.
        device: The device to which messages are copied if `transport` can't carry CPU tensors.
    """
    return StagedMessages(transport, device) if transport.name in _ONLY_GPU else transport


class StagedMessages(Transport):
    """Copies messages to a device, and received messages back to the CPU. For rare messages: waits for the device.

    Args:
        transport: Carries tensors on `device`; closed by its owner.
        device: The device to which messages are copied.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.name = transport.name
        super().__init__(transport.rank, transport.world_size, transport.recorded.name)
        self._transport = transport
        self._device = device

    def _start(self, call: Collective) -> Work:
        inputs = call.flat.to(self._device, copy=True)
        outputs = inputs if call.out is call.flat else torch.empty_like(call.out, device=self._device)
        there = dataclasses.replace(call, inputs=inputs, outputs=outputs)

        def finish() -> None:
            call.out.copy_(outputs)
            call.copy_back()

        return JointWork([self._transport.run(there)], finish)

    @property
    def parts(self) -> list[Transport]:
        """See `Transport.parts`."""
        return [self._transport]

    def split(self) -> Transport:
        """See `Transport.split`."""
        return StagedMessages(self._transport.split(), self._device)

    def close(self) -> None:
        """See `Transport.close`."""
