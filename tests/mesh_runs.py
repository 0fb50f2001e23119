"""Small models that torch divides over ranks, by layout: FSDP2, HSDP, tensor parallelism, and both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# Sizes of the mesh by name; "shard" and "replicate" share no samples, ranks along "tensor" do.
LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "shard 2": {"shard": 2},
    "shard 3": {"shard": 3},
    "shard 4": {"shard": 4},
    "replicate 2 x shard 2": {"replicate": 2, "shard": 2},
    "tensor 2": {"tensor": 2},
    "replicate 2 x tensor 2": {"replicate": 2, "tensor": 2},
    "shard 2 x tensor 2": {"shard": 2, "tensor": 2},
}


class Block(nn.Module):
    """A residual pair of layers, as tensor parallelism divides them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks between an embedding and a head that share their weight; sizes that no number of ranks divides."""

    def __init__(self, width: int = 6, hidden: int = 10, vocabulary: int = 13) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, hidden), Block(width, hidden)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Buffer(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale[0]


def num_ranks(layout: str) -> int:
    """How many ranks a layout has."""
    count = 1
    for size in LAYOUTS[layout].values():
        count *= size
    return count


def mesh_of(layout: str, device_type: str = "cpu") -> DeviceMesh | None:
    """torch's mesh of a layout; None for one process. Collective."""
    sizes = LAYOUTS[layout]
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None


def divided(model: Model, mesh: DeviceMesh | None) -> Model:
    """Divide a model along a mesh, as a script does that calls torch's functions itself."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is not None and "tensor" in names:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
    if mesh is not None and "shard" in names:
        data = mesh[tuple(name for name in names if name != "tensor")]
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    return model


def whole_of(value: Any) -> Any:
    """The whole of a DTensor, on every rank; other values as they are, tensors copied. Collective."""
    if isinstance(value, Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    if isinstance(value, dict):
        return {key: whole_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole_of(item) for item in value]
    return value
