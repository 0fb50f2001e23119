"""Private parts of torch's tensors and their kernels (torch 2.11 and later)."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, UntypedStorage
from torch._utils import _flatten_dense_tensors as flatten_dense
from torch._utils import _unflatten_dense_tensors as unflatten_dense
from torch.multiprocessing.reductions import StorageWeakRef

from evenstep.ground.compat.private_names import PrivateName

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

has_storage = torch._C._has_storage
disabled_dispatch = torch._C._disabled_torch_dispatch_impl
disabled_function = torch._C._disabled_torch_function_impl
make_wrapper_subclass = Tensor._make_wrapper_subclass
_free_weak_ref = UntypedStorage._free_weak_ref
unscale = torch._amp_foreach_non_finite_check_and_unscale_


def weak_storage(storage: UntypedStorage) -> StorageWeakRef:
    """A reference to a tensor's memory that doesn't keep it alive.

    torch's own reference is freed through `torch.storage`, which may be gone when python ends. Then every failed run
    would print a traceback that has nothing to do with the failure.
    """
    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    reference._free_weak_ref = _free_weak_ref
    return reference


# DTensors. Whoever has made one has imported `torch.distributed.tensor`; here it is used only if it is imported.


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def split_of(placement: Any) -> tuple[int | None, int] | None:
    """The dimension along which a placement divides a tensor.

    Returns:
        (dimension, split factor); (None, 1) if all ranks have the same values; None if each rank has a summand.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(placement, _StridedShard):  # no subclass of Shard since torch 2.11
        return placement.dim, int(placement.split_factor)
    if isinstance(placement, Shard):
        return placement.dim, 1
    return (None, 1) if isinstance(placement, Replicate) else None


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh from which a mesh was sliced; the mesh itself if it isn't a slice."""
    return mesh._get_root_mesh()


def forget_meshes() -> None:
    """Clear torch's cache of DTensor operations, which refers to the meshes of destroyed groups.

    torch compares meshes by ranks and names, not by their groups. So results on an equal mesh of a new group would get
    the old mesh, whose group names now belong to no group or to other groups.
    """
    if "torch.distributed.tensor" in sys.modules:
        debug: Any = importlib.import_module("torch.distributed.tensor.debug")
        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()


def ranks_of_mesh(mesh: DeviceMesh) -> Tensor:
    """The rank at each place of a mesh.

    Works for a slice even after the process group's end; torch's own method needs the group.
    """
    root, names = root_mesh(mesh), list(mesh.mesh_dim_names or ())
    known, place = root.mesh_dim_names or (), root.get_coordinate()
    if root is mesh or place is None or [name for name in known if name in names] != names:
        return mesh.mesh
    return root.mesh[tuple(slice(None) if name in names else at for name, at in zip(known, place, strict=True))]


def local_part(value: Tensor) -> Tensor:
    """This rank's part of a DTensor, outside of autograd and in the same memory; any other tensor unchanged.

    Waits for pending communication.
    """
    if not is_dtensor(value):
        return value
    part: Any = value._local_tensor  # `to_local` takes microseconds, for autograd
    local: Tensor = part.wait() if hasattr(part, "wait") else part
    return local


def wrapped_like(like: DTensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A DTensor from this rank's part, on the mesh of `like`; with the same placements if the shapes are equal.

    Args:
        like: A DTensor with the mesh, and with the device of the parts.
        local: This rank's part; or the whole, the same on all ranks, if `like` has another shape.
        shape: The shape of the whole tensor.
    """
    from torch.distributed.tensor import DTensor, Replicate

    is_like = tuple(like.shape) == shape
    placements = like.placements if is_like else [Replicate()] * like.device_mesh.ndim
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return DTensor.from_local(
        local.to(local_part(like).device),
        like.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(strides),
    )


def row_on_mesh(row: Tensor, mesh: DeviceMesh, num_rows: int) -> Tensor:
    """A DTensor [num_rows, ...]. Ranks along "replicate" have different rows, ranks along "shard" parts of one row.

    Args:
        row: This rank's row: a DTensor over the dimension "shard" of the mesh, or the same on all ranks along it.
        mesh: A mesh with one of these dimensions or both.
        num_rows: The number of rows.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    inner: Any = row.placements[0] if is_dtensor(row) else Replicate()
    if isinstance(inner, Shard):
        inner = Shard(inner.dim + 1)
    shape = torch.Size((num_rows, *row.shape))
    return DTensor.from_local(
        local_part(row)[None],
        mesh,
        [Shard(0) if name == "replicate" else inner for name in mesh.mesh_dim_names or ()],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


__all__ = [
    "StorageWeakRef",
    "disabled_dispatch",
    "disabled_function",
    "flatten_dense",
    "forget_meshes",
    "has_storage",
    "is_dtensor",
    "local_part",
    "make_wrapper_subclass",
    "ranks_of_mesh",
    "root_mesh",
    "row_on_mesh",
    "split_of",
    "unflatten_dense",
    "unscale",
    "weak_storage",
    "wrapped_like",
]

# Names that aren't looked up when evenstep is imported.
NAMES = (
    PrivateName(
        "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
        "the mesh that a mesh is a slice of",
        "an AttributeError with device_mesh",
    ),
    PrivateName(
        "torch.distributed.tensor:DTensor.to_local~_local_tensor",
        "what a rank has of a DTensor",
        "an AttributeError where a model has DTensors",
    ),
    PrivateName(
        "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
        "lets DTensors of the next process group have its meshes",
        "a DTensor's operation may find no group, or another one, in a second world of a process",
    ),
    PrivateName(
        "torch.distributed.tensor.placement_types:_StridedShard",
        "how FSDP2 divides what tensor parallelism has divided",
        "an ImportError when a DTensor is saved",
    ),
)
