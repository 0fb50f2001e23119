"""The mesh: the dimensions along which the ranks of a run divide the work, and the ranks that share samples.

    pipeline    layers are divided into stages, one after the other
    replicate   every rank has all parameters, and its own samples
    shard       parameters are divided (FSDP2), and every rank has its own samples
    tensor      single layers are divided, and all ranks have the same samples

Ranks along `replicate` and `shard` are the *data ranks*. Those that differ only along `pipeline` or `tensor` work on
the same samples. The planning is pure; `build_mesh` and `group_along` create torch's process groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from evenstep import checks
from evenstep.errors import ConfigurationError

NAMES = ("pipeline", "replicate", "shard", "tensor")
"""From the outermost to the innermost. Neighbouring ranks, usually of one node, are along `tensor`."""
DATA = ("replicate", "shard")
_KNOWN = '"pipeline", "replicate", "shard" and "tensor"'
_REST = -1


def validate_mesh(what: str, given: Any) -> dict[str, int] | None:
    """Return a mesh as sizes by name, from the outermost dimension to the innermost. Pure.

    Args:
        what: The argument, for messages.
        given: Sizes by name, in any order (one size may be -1: it is computed from the others); or torch's
            `DeviceMesh`; or None.

    Raises:
        ConfigurationError: A name is unknown, a size isn't a size, or a `DeviceMesh` has no names.
    """
    if given is None:
        return None
    if isinstance(given, DeviceMesh):
        names = given.mesh_dim_names or ()
        if len(names) < given.ndim:
            raise ConfigurationError(f"{what}: a DeviceMesh without names. Pass mesh_dim_names, some of {_KNOWN}.")
        _validate_names(what, names)
        if list(names) != sorted(names, key=NAMES.index):
            raise ConfigurationError(
                f"{what}: a DeviceMesh whose dimensions are {', '.join(names)}. Order them as {', '.join(NAMES)}."
            )
        return dict(zip(names, given.mesh.shape, strict=True))
    if not isinstance(given, Mapping) or not given:
        wanted = 'sizes by name such as {"replicate": 2, "shard": 4}, or a DeviceMesh'
        raise checks.refuse(what, given, wanted)
    _validate_names(what, list(given))
    sizes = {name: checks.whole(f"{what}[{name!r}]", given[name], least=_REST) for name in NAMES if name in given}
    if 0 in sizes.values() or list(sizes.values()).count(_REST) > 1:
        raise ConfigurationError(
            f"{what}={sizes}: sizes are at least 1; one of them may be -1, to be computed from the others."
        )
    return sizes


def _validate_names(what: str, names: Sequence[Any]) -> None:
    for name in names:
        if name not in NAMES:
            raise checks.refuse(f"{what}: the dimension", name, f"one of {_KNOWN}")


def complete_mesh(what: str, sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Compute the size that is -1, and compare the product of the sizes with the number of ranks. Pure.

    Raises:
        ConfigurationError: The product of the sizes isn't the number of ranks.
    """
    known = math.prod(size for size in sizes.values() if size != _REST)
    filled = {name: world_size // known if size == _REST else size for name, size in sizes.items()}
    if math.prod(filled.values()) != world_size:
        shown = " x ".join(f"{name} {'?' if size == _REST else size}" for name, size in sizes.items())
        raise ConfigurationError(
            f"{what}: {shown} is a mesh of {known} ranks{' or a multiple' if _REST in sizes.values() else ''}, but "
            f"there are {checks.counted(world_size, 'rank')}. Change the sizes, or the number of ranks."
        )
    return filled


def build_mesh(given: Any, sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """Return torch's mesh over all ranks: the given mesh, or a new one. Collective.

    Args:
        given: A `DeviceMesh`, or anything else.
        sizes: The result of `complete_mesh`.
        device_type: The type of this rank's device.

    Raises:
        ConfigurationError: The given mesh has other devices, or not all ranks.
    """
    if not isinstance(given, DeviceMesh):
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if given.device_type != device_type:
        raise ConfigurationError(f"mesh: a DeviceMesh of {given.device_type} devices, but ranks are on {device_type}.")
    if sorted(given.mesh.flatten().tolist()) != list(range(dist.get_world_size())):
        raise ConfigurationError(f"mesh: {given} doesn't have every rank once. Pass the mesh of all ranks.")
    return given


def ranks_along(ranks: Tensor, names: Sequence[str], along: Sequence[str]) -> list[list[int]]:
    """Divide all ranks into groups that differ only along some dimensions. Pure.

    Args:
        ranks: [size, ...], the rank at each place of the mesh.
        names: The names of the dimensions.
        along: The dimensions of a group; a dimension that the mesh lacks has size 1.
    """
    inner = [index for index, name in enumerate(names) if name in along]
    outer = [index for index in range(len(names)) if index not in inner]
    numel = math.prod(ranks.shape[index] for index in inner)
    groups: list[list[int]] = ranks.permute(*outer, *inner).reshape(-1, numel).tolist()
    return [sorted(group) for group in groups]


def group_along(mesh: DeviceMesh, along: Sequence[str]) -> tuple[list[int], dist.ProcessGroup | None]:
    """Return the ranks that differ from this one only along some dimensions, and their process group.

    Collective: every rank of the mesh calls this.

    Returns:
        The ranks, in order; and the group, or None if it would have only this rank, or all ranks.
    """
    names = mesh.mesh_dim_names or ()
    present = [name for name in names if name in along]
    groups = ranks_along(mesh.mesh, names, along)
    own = next(group for group in groups if dist.get_rank() in group)
    if len(own) == 1 or len(groups) == 1:
        return own, None
    if len(present) == 1:
        return own, mesh.get_group(present[0])
    made = [dist.new_group(group) for group in groups]
    group = made[groups.index(own)]
    assert isinstance(group, dist.ProcessGroup)
    return own, group
