"""What FSDP2 waits for: collectives of `fully_shard`, by the block whose parameters travel.

[Note: blocks of FSDP2]

FSDP2 calls `torch.distributed` by name, so its collectives are seen where they are called. On CPUs a call returns when
all ranks have come and the parameters are there: nothing is computed meanwhile, and all of it is waiting. (On GPUs the
host goes on, and the device waits: that isn't seen here.) A block is told by the number of elements that it gathers;
where several have as many, by which of them runs.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.compat.torch_tensors import is_dtensor, local_part, split_of
from evenstep.tools.bench.measure.records import COLLECTIVE, COLLECTIVE_END
from evenstep.tools.observing.patching import Patches

# By name, in torch 2.11 and since 2.13: the kind of wait. HSDP averages what is scattered over replicas.
_KINDS = {
    "all_gather_into_tensor": 0,
    "all_gather_single": 0,
    "reduce_scatter_tensor": 1,
    "reduce_scatter_single": 1,
    "all_reduce": 1,
}


class ShardWatch:
    """Times the collectives of models that `fully_shard` has divided.

    Args:
        marks: Where the waits go.
    """

    def __init__(self, marks: list[int]) -> None:
        self._marks = marks
        self._sizes: dict[int, list[str]] = {}  # by the elements that travel
        self._running = ""
        self._is_waiting = False
        self._waited_ns: dict[str, list[int]] = {}  # by block: in all-gathers, in reduce-scatters

    def install(self, patches: Patches) -> None:
        """See every call, until the patches are undone."""
        for name, kind in _KINDS.items():
            if hasattr(dist, name):
                patches.replace(dist, name, functools.partial(self._timed, kind))

    def attach(self, model: nn.Module) -> None:
        """Learn the blocks of a model; one that isn't sharded has none."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if fsdp is None:
            return
        blocks = {name: module for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)}
        inner: set[int] = set()
        for name, module in reversed(list(blocks.items())):  # blocks before what they are in
            module.reshard()  # an evaluation may have left the root's parameters gathered
            own = [p for p in module.parameters() if is_dtensor(p) and id(p) not in inner]
            inner |= {id(p) for p in own}
            shown = "(root)" if name in ("", "module") else name.removeprefix("module.")
            shards = {_shards(p) for p in own}
            for numel in {sum(map(_gathered_numel, own)), *(sum(map(_gathered_numel, own)) // each for each in shards)}:
                self._sizes.setdefault(numel, []).append(shown)
            self._waited_ns[shown] = [0, 0]
            module.register_forward_pre_hook(functools.partial(self._runs, shown), prepend=True)
            module.register_forward_hook(functools.partial(self._ran, shown), prepend=True)

    def restart(self) -> None:
        """Forget what was waited: steps begin to count."""
        self._waited_ns = {name: [0, 0] for name in self._waited_ns}

    def blocks(self, num_steps: int) -> list[tuple[str, float, float]]:
        """(block, seconds in all-gathers, in reduce-scatters) of a step, on average; in order of the names."""
        return [
            (name, waited[0] / 1e9 / max(1, num_steps), waited[1] / 1e9 / max(1, num_steps))
            for name, waited in sorted(self._waited_ns.items())
        ]

    def _timed(self, kind: int, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            block = self._block_of(args, kwargs) if self._sizes and not self._is_waiting else None
            if block is None:
                return original(*args, **kwargs)
            self._is_waiting = True  # one of these may call another one
            began = perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                ended = perf_counter_ns()
                self._is_waiting = False
                self._marks += (COLLECTIVE, began, COLLECTIVE_END, ended)
                self._waited_ns[block][kind] += ended - began

        return call

    def _block_of(self, args: Any, kwargs: Any) -> str | None:
        """The block whose elements these are; None: the call isn't FSDP2's."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        numel = max((tensor.numel() for tensor in tensors), default=0)
        names = self._sizes.get(numel, [])
        if self._running in names:
            return self._running
        return names[0] if names else None

    def _runs(self, name: str, *_: Any) -> None:
        self._running = name

    def _ran(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(functools.partial(self._runs, name))  # type: ignore[no-untyped-call]


def _shards(parameter: Any) -> int:
    """Over how many ranks FSDP2 divides a parameter: those along the first dimension of its mesh that divides it."""
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return next((int(size) for size, each in sizes if (split_of(each) or (None, 1))[0] is not None), 1)


def _gathered_numel(parameter: Any) -> int:
    """Elements of a parameter that an all-gather brings, with what fills up the last parts."""
    shards = _shards(parameter)
    local = local_part(parameter)
    rest = int(math.prod(local.shape[1:])) if local.dim() else 1
    placed = [split_of(each) for each in parameter.placements]
    inner = math.prod(
        size
        for size, each in zip(parameter.device_mesh.shape, placed, strict=True)
        if each is not None and each[0] == 0
    )
    rows = int(parameter.shape[0]) if parameter.dim() else 1
    numel: int = math.ceil(math.ceil(rows / max(1, inner // shards)) / shards) * shards * rest
    return numel
