"""What of a wrapped module is trained, and what goes with its gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from evenstep.health.telemetry import Recorder
from evenstep.replica.layout import BucketPolicy
from evenstep.replica.module_buffers import BufferBroadcast
from evenstep.replica.settings import Settings
from evenstep.transport.base import Transport
from evenstep.world import World


@dataclass(frozen=True)
class Trained:
    """What is trained now. The engine makes one, and every exchange of its gradients is made of it.

    Attributes:
        names: Of the parameters, for messages.
        parameters: Those with dense gradients in registration order, then those with sparse ones.
        num_dense: How many have dense gradients, and lie in buckets.
        world: Who takes part.
        policy: Sizes and dtype of buckets.
        module_buffers: Sent along.
        recorder: Of what happens when.
        transport: Carries buckets and headers, and what else belongs to the same pass.
    """

    names: list[str]
    parameters: list[nn.Parameter]
    num_dense: int
    world: World
    policy: BucketPolicy
    module_buffers: BufferBroadcast
    recorder: Recorder
    transport: Transport

    @classmethod
    def of(cls, module: nn.Module, world: World, settings: Settings, transport: Transport) -> Trained:
        """What there is in a module now.

        Args:
            module: The wrapped module.
            world: Who takes part.
            settings: Sizes of buckets, what is ignored, what is sparse.
            transport: Carries what belongs to its passes.
        """
        named = settings.trained(module)
        dense = [each for each in named if each[0] not in settings.sparse]
        named = [*dense, *(each for each in named if each[0] in settings.sparse)]
        return cls(
            names=[name for name, _ in named],
            parameters=[parameter for _, parameter in named],
            num_dense=len(dense),
            world=world,
            policy=settings.policy,
            module_buffers=BufferBroadcast(module, transport, settings.ignored, is_on=settings.sync_buffers),
            recorder=world.telemetry.open(),
            transport=transport,
        )
