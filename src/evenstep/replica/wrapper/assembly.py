"""What a wrapped module's engine is built of: its parameters, monitors, exchange, and the way its windows end."""

from __future__ import annotations

from torch import nn

from evenstep.replica.gradients.engine import Engine
from evenstep.replica.gradients.exchange.all_reduce import AllReduceExchange
from evenstep.replica.gradients.exchange.base import Exchange, Trained
from evenstep.replica.gradients.strategies import WindowEnd
from evenstep.replica.module_buffers import BufferBroadcast
from evenstep.replica.monitors.checks import Monitors, Replicas
from evenstep.replica.virtual_ranks.sums import VirtualRankSums
from evenstep.replica.wrapper.settings import Settings
from evenstep.transport.core.staged import for_messages
from evenstep.transport.core.transport import Transport
from evenstep.world import World


def build_engine(module: nn.Module, world: World, settings: Settings, transport: Transport) -> tuple[Engine, Monitors]:
    """Build the engine of a wrapped module, and its monitors.

    Args:
        module: The wrapped module; its trained parameters are laid out now.
        world: The ranks that take part.
        settings: Sizes of buckets, what is ignored, what is sparse.
        transport: Carries what belongs to the module's passes: see `channels`.
    """
    named = settings.trained(module)
    dense = [each for each in named if each[0] not in settings.sparse]
    named = [*dense, *(each for each in named if each[0] in settings.sparse)]
    names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
    control = for_messages(transport, parameters[0].device)
    replicas = None
    if world.world_size > 1:
        replicas = Replicas(world.rank, range(world.world_size), transport, control)
    monitors = Monitors(
        names,
        parameters,
        world,
        transport,
        control,
        on_nonfinite=settings.on_nonfinite,
        compare_every=settings.compare_every,
        starts_equal=settings.init_sync,
        replicas=replicas,
    )
    reproducible = world.virtual_ranks
    ending = WindowEnd(world.world_size) if reproducible is None else VirtualRankSums(reproducible, parameters)
    trained = Trained(
        names=names,
        parameters=parameters,
        num_dense=len(dense),
        world=world,
        policy=settings.policy,
        module_buffers=BufferBroadcast(module, transport, settings.ignored, is_on=settings.sync_buffers),
        recorder=world.telemetry.open(),
        transport=transport,
        control=control,
        observers=monitors.observers,
        ending=ending,
    )
    exchange = Exchange(parameters, ending) if world.world_size == 1 else AllReduceExchange(trained)
    return Engine(trained, exchange, ending, label=type(module).__name__), monitors
