"""The models of a script, found among all objects of its process."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from evenstep.compat import torch_pytree as pytree
from evenstep.replica.wrapper.distributed import DistributedDataParallel


def find_models(optimizer: torch.optim.Optimizer) -> tuple[list[nn.Module], str]:
    """Return the wrapped models of this process; without one, the module that the optimizer trains.

    Returns:
        (models, who averages their gradients: "evenstep", "torch" or "").
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
    """Return the outermost module with the most of the optimizer's parameters."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    inner = {id(child) for module in modules for child in module.children()}
    counts = [(sum(id(p) in trained for p in m.parameters()), m) for m in modules if id(m) not in inner]
    most, model = max(counts, key=lambda each: each[0], default=(0, None))
    return [model] if most and model is not None else []


def num_rows(batch: object, dim: int = 0) -> int:
    """Samples of a batch: the length of its first tensor, wherever in a pytree that is; 0 without one."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Tensor) or first.dim() <= dim:
        tensors = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim() > dim)
        first = next(tensors, None)
    return first.shape[dim] if isinstance(first, Tensor) and first.dim() > dim else 0
