"""Checks of the ranks over which parameters are divided."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from evenstep.errors import ConfigurationError
from evenstep.ground.compat.torch_ddp import is_sharded_module
from evenstep.ground.compat.torch_tensors import is_dtensor
from evenstep.world import World


def ranks_of(world: World) -> list[int]:
    """The ranks of a world, as numbered in the default process group."""
    if world.world_size == 1:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return dist.get_process_group_ranks(world.process_group)


def is_divided_module(module: nn.Module) -> bool:
    """Whether `fully_shard` or tensor parallelism has divided a module."""
    return any(map(is_sharded_module, module.modules())) or any(map(is_dtensor, module.parameters()))


def validate_layout(module: nn.Module, sharded: Iterable[nn.Parameter], world: World, who: str) -> None:
    """Refuse parameters that are divided over other ranks than the mesh's.

    Args:
        module: The divided model.
        sharded: The parameters that `fully_shard` manages.
        world: All ranks.
        who: The caller, for messages.

    Raises:
        ConfigurationError: There is such a parameter; the message names it.
    """
    managed = set(map(id, sharded))
    data, everybody = set(ranks_of(world.data_parallel)), set(ranks_of(world.model_ranks))
    for name, parameter in module.named_parameters():
        if not is_dtensor(parameter):
            continue
        mesh: Any = parameter.device_mesh
        ranks = set(mesh.mesh.flatten().tolist())
        is_whole = ranks == everybody and mesh.ndim > 1  # with tensor parallelism
        if id(parameter) in managed and ranks != data and not is_whole:
            raise ConfigurationError(
                f"{who} on rank {world.rank}: fully_shard has divided {name!r} over ranks {sorted(ranks)}, but the "
                f"ranks with different samples are {sorted(data)}. Call evenstep.init(mesh=...) with the model's "
                f'sizes, and fully_shard with world.mesh["shard"] or world.mesh["replicate", "shard"].'
            )
        if id(parameter) not in managed and len(ranks & data) > 1:
            raise ConfigurationError(
                f"{who} on rank {world.rank}: {name!r} is a DTensor over ranks {sorted(ranks)}, which have "
                f"different samples, and fully_shard doesn't manage it. Divide it with parallelize_module over "
                f'world.mesh["tensor"], or call evenstep.init(mesh=...) with a mesh in which these ranks share samples.'
            )
