"""Bytes of all tensors that are alive, at every operation: the memory of a rank, which torch doesn't count on CPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SHARED = "/memfd:evenstep"


def shared_bytes() -> dict[int, int]:
    """The memory of each segment that this process shares with other ranks, by the number of its file."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith(_SHARED):
                status = os.fstat(int(fd))
                found[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue  # the descriptor of the list itself
    return found


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations inside the context have seen, for as long as they live.

    What the ranks share isn't counted: a view of it has the storage of all of it (`shared_bytes` has its size).

    Attributes:
        peak: The most at once; may be set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._shared = [
            range(*(int(end, 16) for end in line.split()[0].split("-")))
            for line in Path("/proc/self/maps").read_text().splitlines()
            if _SHARED in line
        ]
        self._seen: dict[int, StorageWeakRef] = {}

    def add(self, tensors: Any) -> None:
        """Count the storages of these, which may be in any container."""
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                if any(storage.data_ptr() in each for each in self._shared):
                    continue
                self._seen[storage._cdata] = StorageWeakRef(storage)

    def now(self) -> int:
        """At this moment. A storage may have been made smaller: FSDP2 frees gathered parameters so.

        [Note] Another thread may free one at any time, so each is asked for once, and `None` says that it is gone.
        """
        total = 0
        for key, seen in list(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(seen.cdata)
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here
        result = func(*args, **(kwargs or {}))
        self.add((args, kwargs, result))
        self.peak = max(self.peak, self.now())
        return result
