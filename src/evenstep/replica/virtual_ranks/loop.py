"""The loop over the virtual ranks of a batch: their samples, random streams and module buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.ground.compat import torch_pytree as pytree
from evenstep.ground.computing import randomness
from evenstep.ground.computing.virtual_ranks import begin_of
from evenstep.replica.batches import rows_of, split
from evenstep.replica.gradients.engine import Engine
from evenstep.replica.module_buffers import buffer_at, places_of
from evenstep.replica.normalization.sync_batchnorm import SyncLayers
from evenstep.replica.virtual_ranks.sums import VirtualRankSums
from evenstep.world import World


def virtual_ranks_of(batch: Any, num_virtual_ranks: int, dim: int = 0) -> list[Any]:
    """Cut a rank's share of a global batch into its virtual ranks. Pure.

    Virtual ranks without samples come last, and are left out. The parts are copies: a kernel may compute differently if
    memory begins at another alignment, and the position of a virtual rank in the share depends on the number of ranks.

    Args:
        batch: A pytree of tensors with n samples along `dim`. Tensors without that dimension and other values go into
            every virtual rank.
        num_virtual_ranks: Number of this rank's virtual ranks.
        dim: The batch dimension.

    Raises:
        ConfigurationError: The batch has no tensor, or tensors of different lengths.
    """
    leaves, structure, length = rows_of(batch, dim)
    cut = []
    for index in range(min(num_virtual_ranks, length)):  # at least one sample each, the longer virtual ranks first
        start, stop = begin_of(length, index, num_virtual_ranks), begin_of(length, index + 1, num_virtual_ranks)
        part = [leaf.narrow(dim, start, stop - start).clone() if has_rows else leaf for leaf, has_rows in leaves]
        cut.append(pytree.tree_unflatten(part, structure))
    return cut


def loop(
    batch: Any,
    n: int,
    dim: int,
    engine: Engine,
    world: World,
    buffers: VirtualRankBuffers,
    sync_layers: SyncLayers | None,
) -> Iterator[Any]:
    """Yield this rank's virtual ranks in turn, each in `n` parts, with its own random streams and module buffers.

    Collective, at its end. The contract of `DistributedDataParallel.microbatches` holds here, too.

    Args:
        batch: This rank's share of the global batch.
        n: Number of parts of each virtual rank; fewer if there are fewer samples.
        dim: The batch dimension.
        engine: The model's engine.
        world: The world, in reproducible mode.
        buffers: The buffers of the model's module.
        sync_layers: The layers that exchange statistics in training. If there are any, a rank has one virtual rank, and
            all ranks have equally many parts.

    Raises:
        ConfigurationError: As in `virtual_ranks_of` and `split`.
        UsageError: The loop is inside `no_sync` or `accumulate`, or inside another such loop.
    """
    virtual_ranks, sums = world.virtual_ranks, engine.ending
    assert virtual_ranks is not None
    assert isinstance(sums, VirtualRankSums)
    parts_of = [split(part, n, dim) for part in virtual_ranks_of(batch, virtual_ranks.per_rank, dim)]
    if not torch.is_grad_enabled():
        yield from (part for parts in parts_of for part in parts)
        return
    if sums.is_open or virtual_ranks.current is not None or not engine.synchronise:
        raise UsageError(
            f"microbatches on rank {world.rank} inside another loop over micro-batches, no_sync or accumulate. "
            f"Reproducible mode can't accumulate over several batches. Take one larger batch from the loader and cut "
            f"its virtual ranks into n parts each: model.microbatches(batch, n)."
        )
    if sync_layers is not None:
        padded = sync_layers.pad([part for parts in parts_of for part in parts], batch, dim)
        parts_of = [padded] if padded else []
    outside, num_reductions, completed = randomness.capture(), engine.num_reductions, False
    buffers.keep()
    engine.open_window()
    sums.begin()
    sums.at_end = buffers.finish
    virtual_ranks.num_loops += 1
    try:
        for index, parts in enumerate(parts_of):
            virtual_ranks.current = virtual_ranks.first + index
            is_last = index == len(parts_of) - 1
            randomness.seed_everything(virtual_ranks.key(virtual_ranks.current) >> 1)
            if index:
                buffers.restore()
            for number, part in enumerate(parts):
                engine.synchronise = is_last and number == len(parts) - 1
                yield part
            if virtual_ranks.current == 0:
                buffers.keep_first()
            if not is_last:
                sums.add_virtual_rank(engine.window, engine.buckets)
        if not parts_of:
            engine.reduce_without_backward()
        completed = True
    finally:
        if not completed:
            engine.cancel_window()
            engine.leave_early("a loop over micro-batches was left before its end")
        virtual_ranks.current = None
        engine.synchronise = True
        sums.end()
        buffers.forget()
        randomness.restore(outside)
    if engine.num_reductions == num_reductions:
        engine.leave_early("a loop over micro-batches ended without a backward pass for its last part")
        raise UsageError(
            f"microbatches on rank {world.rank}: the last part was not followed by a backward pass, so the gradients "
            f"have not been averaged. Call backward inside the loop, once per part."
        )


class VirtualRankBuffers:
    """Module buffers in virtual ranks. Each virtual rank begins with the buffers from the beginning of the step.

    After the step all ranks get virtual rank 0's buffers.

    Args:
        module: The module that has the buffers.
        ignored: Names of buffers that every rank keeps for itself.
    """

    def __init__(self, module: nn.Module, ignored: frozenset[str]) -> None:
        self._places = places_of(module, ignored)
        self._kept: list[Tensor | None] = []
        self._of_first: list[Tensor | None] | None = None

    def keep(self) -> None:
        """Copy the buffers before the first virtual rank."""
        self._kept, self._of_first = self._copies(), None

    def restore(self) -> None:
        """Restore the buffers from before the first virtual rank."""
        self._write(self._kept)

    def keep_first(self) -> None:
        """Copy the buffers after virtual rank 0."""
        self._of_first = self._copies()

    def finish(self) -> None:
        """Called after this rank's last virtual rank: on rank 0, restore the buffers from after virtual rank 0."""
        if self._of_first is not None:
            self._write(self._of_first)

    def forget(self) -> None:
        """Drop the copies after the loop."""
        self._kept, self._of_first = [], None

    def _copies(self) -> list[Tensor | None]:
        buffers = [buffer_at(owner, name) for owner, name, _ in self._places]
        return [None if buffer is None else buffer.detach().clone() for buffer in buffers]

    def _write(self, values: Sequence[Tensor | None]) -> None:
        into: list[Tensor] = []
        what: list[Tensor] = []
        for (owner, name, _), value in zip(self._places, values, strict=True):
            buffer = buffer_at(owner, name)
            if value is None or buffer is None or buffer.shape != value.shape or buffer.dtype is not value.dtype:
                owner._buffers[name] = None if value is None else value.clone()  # replaced, not written to
            else:
                into.append(buffer.data)  # through `.data`: see `module_buffers.broadcast`
                what.append(value)
        if into:
            torch._foreach_copy_(into, what)
