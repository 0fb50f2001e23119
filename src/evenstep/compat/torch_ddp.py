"""Private parts of torch's DistributedDataParallel (torch 2.11 and later)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig as JoinConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecision

Future = torch._C.Future

__all__ = ["Future", "JoinConfig", "MixedPrecision", "active_in_dynamo", "is_slice", "localise_parameters"]


@contextlib.contextmanager
def active_in_dynamo(model: DistributedDataParallel) -> Iterator[None]:
    """Name the module that runs to torch.compile, which then splits its graph at buckets."""
    running = DistributedDataParallel._active_ddp_module
    DistributedDataParallel._active_ddp_module = model
    try:
        yield
    finally:
        DistributedDataParallel._active_ddp_module = running


def is_slice(mesh: DeviceMesh) -> bool:
    """Return whether a mesh is a dimension of a larger one."""
    return bool(mesh._get_root_mesh() != mesh)


def localise_parameters(module: nn.Module) -> None:
    """Replace parameters that tensor parallelism has divided (`DTensor`) by their local parts."""
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    _pre_dp_module_transform(module)
