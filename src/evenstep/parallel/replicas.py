"""Finds the ranks that have the same parts of a divided model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from evenstep.ground.compat.torch_tensors import is_dtensor, local_part
from evenstep.parallel.layout import ranks_of
from evenstep.replica.channels import channel_of
from evenstep.replica.monitors.checks import Replicas
from evenstep.transport.core.staged import for_messages
from evenstep.world import World


def find_replicas(parameters: Sequence[nn.Parameter], world: World, owner: object) -> Replicas | None:
    """The ranks that differ from this one only along "replicate"; None if there are none, or their parts differ.

    Collective: every rank of the model calls this.

    Args:
        parameters: The trained parameters.
        world: All ranks, with a mesh.
        owner: The model.
    """
    mesh = world.mesh
    if mesh is None or "replicate" not in (mesh.mesh_dim_names or ()) or mesh["replicate"].size() == 1:
        return None
    # Parts that were offloaded to the host aren't on the device of the ranks' transport.
    if any(local_part(p).device.type != world.device.type for p in parameters):
        return None
    replicas = world.along("replicate")
    numbers = ranks_of(replicas)
    if not all(_is_alike(parameter, numbers) for parameter in parameters):
        return None  # fully_shard over all ranks, under any dimension name: there are no replicas
    channel = channel_of(owner, replicas, "parts", world.device)
    return Replicas(replicas.rank, numbers, channel, for_messages(channel, world.device))


def _is_alike(parameter: nn.Parameter, ranks: Sequence[int]) -> bool:
    """Whether ranks have the same part of a parameter: no mesh dimension along which they differ divides it."""
    if not is_dtensor(parameter):
        return True
    mesh, placements = parameter.device_mesh.mesh, parameter.placements
    places = [(mesh == rank).nonzero() for rank in ranks]
    inside = [place[0].tolist() for place in places if len(place)]
    dividing = [index for index, placement in enumerate(placements) if not placement.is_replicate()]
    return len({tuple(place[index] for index in dividing) for place in inside}) <= 1
