"""Private parts of torch's tensors and their kernels (torch 2.11 and later)."""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage
from torch._utils import _flatten_dense_tensors as flatten_dense
from torch._utils import _unflatten_dense_tensors as unflatten_dense
from torch.multiprocessing.reductions import StorageWeakRef

has_storage = torch._C._has_storage
disabled_dispatch = torch._C._disabled_torch_dispatch_impl
disabled_function = torch._C._disabled_torch_function_impl
make_wrapper_subclass = Tensor._make_wrapper_subclass
unscale = torch._amp_foreach_non_finite_check_and_unscale_


def weak_storage(storage: UntypedStorage) -> StorageWeakRef:
    """A reference to a tensor's memory that doesn't keep it alive.

    torch's own frees itself through `torch.storage`, which may be gone when python ends: every failed run then printed
    a traceback that had nothing to do with the failure.
    """
    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    reference._free_weak_ref = UntypedStorage._free_weak_ref
    return reference


__all__ = [
    "StorageWeakRef",
    "disabled_dispatch",
    "disabled_function",
    "flatten_dense",
    "has_storage",
    "make_wrapper_subclass",
    "unflatten_dense",
    "unscale",
    "weak_storage",
]
