"""Builds the engine of a wrapped module from its parameters, monitors, exchange, and the way its windows end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from evenstep.ground.health.telemetry import Recorder
from evenstep.replica.gradients.engine import Engine
from evenstep.replica.gradients.exchange.all_reduce import AllReduceExchange
from evenstep.replica.gradients.exchange.base import Exchange, Trained
from evenstep.replica.gradients.strategies import WindowEnd
from evenstep.replica.module_buffers import BufferExchange
from evenstep.replica.monitors.checks import Monitors, Replicas
from evenstep.replica.virtual_ranks.sums import VirtualRankSums
from evenstep.replica.wrapper.settings import Settings
from evenstep.transport.core.staged import for_messages
from evenstep.transport.core.transport import Transport
from evenstep.world import World


@dataclass(frozen=True)
class Divided:
    """The exchange of gradients for a model that FSDP2 or tensor parallelism has divided over ranks.

    Attributes:
        data: The transport of the data ranks.
        find_replicas: Finds the ranks that have the same parts of parameters. Collective.
        exchange: Builds the exchange.
    """

    data: Transport
    find_replicas: Callable[[Sequence[nn.Parameter]], Replicas | None]
    exchange: Callable[[Trained], Exchange]


def build_engine(
    module: nn.Module,
    world: World,
    settings: Settings,
    transport: Transport,
    divided: Divided | None = None,
    *,
    recorder: Recorder,
) -> tuple[Engine, Monitors]:
    """Build the engine of a wrapped module, and its monitors.

    Args:
        module: The wrapped module; its trained parameters are laid out now.
        world: The ranks that take part.
        settings: Sizes of buckets, and names of ignored and of sparse parameters.
        transport: Carries the messages of the module's passes: see `channels`.
        divided: The exchange of a divided model; None: every rank has the whole model.
        recorder: Records the times of the model's steps.
    """
    named = settings.trained(module)
    dense = [each for each in named if each[0] not in settings.sparse]
    named = [*dense, *(each for each in named if each[0] in settings.sparse)]
    names, parameters = [name for name, _ in named], [parameter for _, parameter in named]
    control = for_messages(transport, parameters[0].device if divided is None else world.device)
    data, replicas = transport, None
    if divided is not None:
        data = divided.data
        if settings.compare_every != 0:
            replicas = divided.find_replicas(parameters)
    elif world.world_size > 1:
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
        is_divided=divided is not None,
    )
    virtual_ranks = world.virtual_ranks
    ending = WindowEnd(data.world_size) if virtual_ranks is None else VirtualRankSums(virtual_ranks, parameters)
    is_on = settings.sync_buffers and data.world_size > 1
    trained = Trained(
        names=names,
        parameters=parameters,
        num_dense=len(dense),
        world=world,
        policy=settings.policy,
        module_buffers=BufferExchange(module, data, settings.ignored, settings.buffer_rules, is_on=is_on),
        recorder=recorder,
        transport=transport,
        control=control,
        observers=monitors.observers,
        ending=ending,
    )
    if divided is not None:
        exchange = divided.exchange(trained)
    else:
        exchange = Exchange(parameters, ending) if world.world_size == 1 else AllReduceExchange(trained)
    return Engine(trained, exchange, ending, label=type(module).__name__), monitors
