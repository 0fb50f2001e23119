"""The models of a script, found among all objects of its process."""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from evenstep import world as worlds
from evenstep.checkpoint.format.payload import bytes_of
from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.compat.torch_tensors import is_dtensor, split_of
from evenstep.replica.wrapper.distributed import DistributedDataParallel


def find_models(optimizer: torch.optim.Optimizer) -> tuple[list[nn.Module], str]:
    """The wrapped models of this process; without any, the module that the optimizer trains.

    Returns:
        (models, the library that averages their gradients: "evenstep", "torch" or "").
    """
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    wrapped = [module for module in modules if isinstance(module, TorchDistributedDataParallel)]
    ours: list[nn.Module] = [module for module in wrapped if isinstance(module, DistributedDataParallel)]
    if ours:
        return ours, "evenstep"
    if wrapped:
        return list(wrapped), "torch"
    return trained_by(optimizer, modules), ""


def trained_by(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The outermost module with most of the optimizer's parameters, as a list; [] if none has any."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    inner = {id(child) for module in modules for child in module.children()}
    counts = [(sum(id(p) in trained for p in m.parameters()), m) for m in modules if id(m) not in inner]
    most, model = max(counts, key=lambda each: each[0], default=(0, None))
    return [model] if most and model is not None else []


def ranks_with_the_same_samples(model: nn.Module, rank: int) -> list[int]:
    """The ranks that hold parts of the same layers as this one, and so get the same samples; [] if there are none.

    With a mesh of the world, the ranks along its dimensions "tensor" and "pipeline". Without one, the ranks along which
    the model's DTensors are divided, without the dimensions of FSDP2, which come first in the mesh of a parameter.

    Args:
        model: The model, after it was divided.
        rank: This rank.
    """
    world = worlds.initialised()
    if world is not None and world.mesh is not None:
        inner = [name for name in world.mesh.mesh_dim_names or () if name in ("tensor", "pipeline")]
        mesh, dims = world.mesh, [(world.mesh.mesh_dim_names or ()).index(name) for name in inner]
    else:
        divided = [parameter for parameter in model.parameters() if is_dtensor(parameter)]
        if not divided:
            return []
        most = max(divided, key=lambda parameter: parameter.device_mesh.ndim)
        mesh, outer = most.device_mesh, 0
        if uses_fsdp(model):
            shards = [dim for dim, each in enumerate(most.placements) if (split_of(each) or (None, 1))[0] is not None]
            outer = shards[0] + 1 if shards else mesh.ndim
        dims = list(range(outer, mesh.ndim))
    place = mesh.get_coordinate()
    if place is None or not dims:
        return []
    found = mesh.mesh[tuple(slice(None) if dim in dims else place[dim] for dim in range(mesh.ndim))].flatten().tolist()
    return sorted(found) if len(found) > 1 else []


def uses_fsdp(model: nn.Module) -> bool:
    """Whether `fully_shard` has sharded a model or a part of it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def is_trained(module: nn.Module) -> bool:
    """Whether any parameter of a module is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


def digest(tensor: Tensor) -> str:
    """A 64-bit hash of a tensor's bits, as hexadecimal text."""
    return hashlib.blake2b(bytes_of(tensor.detach().cpu().contiguous()), digest_size=8).hexdigest()


def first_samples(inputs: object) -> Tensor:
    """The first tensor with rows, [samples, ...]; an empty one if there is none, or if it has a gradient (no data)."""
    tensors = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0)
    first = next(tensors, None)
    return torch.empty(0, device="cpu") if first is None or first.requires_grad else first.detach()


def num_rows(batch: object, dim: int = 0) -> int:
    """The number of samples of a batch: the size of dimension `dim` of its first tensor; 0 without tensors."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Tensor) or first.dim() <= dim:
        tensors = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > dim)
        first = next(tensors, None)
    return first.shape[dim] if isinstance(first, Tensor) and first.dim() > dim else 0
