"""The loop over the lanes of a batch: what each of them is given, and what it finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from evenstep import randomness
from evenstep.errors import ConfigurationError, UsageError
from evenstep.lanes import begin_of
from evenstep.replica.batches import rows_of, split
from evenstep.replica.engine import Engine
from evenstep.replica.module_buffers import buffer_at, places_of
from evenstep.replica.settings import Settings
from evenstep.replica.sync_batchnorm import SyncBatchNorm
from evenstep.replica.sync_layers import SyncLayers
from evenstep.world import World


def lanes_of(batch: Any, num_lanes: int, dim: int = 0) -> list[Any]:
    """A rank's share of a global batch, cut into its lanes; those without samples are left out, and come last. Pure.

    Copies: a kernel may take another way where memory begins at another multiple of 64 bytes, and where a lane begins
    in a share depends on the number of ranks.

    Args:
        batch: A nest of tensors with n samples along `dim`; tensors that lack it and other values go into every lane.
        num_lanes: Of this rank.
        dim: The batch dimension.

    Raises:
        ConfigurationError: No tensor, or tensors of different lengths.
    """
    leaves, structure, length = rows_of(batch, dim)
    cut = []
    for index in range(min(num_lanes, length)):  # one sample each at least, the longer lanes first
        start, stop = begin_of(length, index, num_lanes), begin_of(length, index + 1, num_lanes)
        part = [leaf.narrow(dim, start, stop - start).clone() if has_rows else leaf for leaf, has_rows in leaves]
        cut.append(pytree.tree_unflatten(part, structure))
    return cut


def loop(
    batch: Any, n: int, dim: int, engine: Engine, world: World, buffers: LaneBuffers, sync_layers: SyncLayers | None
) -> Iterator[Any]:
    """The lanes of this rank one after the other, each in `n` parts; between them, what belongs to a lane is changed.

    Collective, at its end. What `DistributedDataParallel.microbatches` does around it holds here too.

    Args:
        batch: This rank's share of the global batch.
        n: Parts of each lane; fewer where there are fewer samples.
        dim: The batch dimension.
        engine: Of the model.
        world: In reproducible mode.
        buffers: Of the model's module.
        sync_layers: That exchange statistics in training: a rank has one lane then, and all have equally many parts.

    Raises:
        ConfigurationError: As `lanes_of` and `split`.
        UsageError: Inside `no_sync` or `accumulate`, or inside another such loop.
    """
    lanes, sums = world.lanes, engine.lanes
    assert lanes is not None
    assert sums is not None
    parts_of = [split(part, n, dim) for part in lanes_of(batch, lanes.per_rank, dim)]
    if not torch.is_grad_enabled():
        yield from (part for parts in parts_of for part in parts)
        return
    if sums.is_open or lanes.current is not None or not engine.synchronise:
        raise UsageError(
            f"microbatches on rank {world.rank} inside another loop over micro-batches, no_sync or accumulate: in "
            f"reproducible mode gradients of several batches aren't added lane by lane. Take one larger batch from the "
            f"loader and cut its lanes into n parts each: model.microbatches(batch, n)."
        )
    if sync_layers is not None:
        padded = sync_layers.pad([part for parts in parts_of for part in parts], batch, dim)
        parts_of = [padded] if padded else []
    outside, num_reductions, completed = randomness.capture(), engine.num_reductions, False
    buffers.keep()
    if not engine.is_in_window:
        engine.carried.set_aside(engine.exchange)
    sums.begin()
    sums.at_end = buffers.settle
    lanes.num_loops += 1
    try:
        for index, parts in enumerate(parts_of):
            lanes.current = lanes.first + index
            is_last = index == len(parts_of) - 1
            randomness.seed_everything(lanes.key(lanes.current) >> 1)
            if index:
                buffers.restore()
            for number, part in enumerate(parts):
                engine.synchronise = is_last and number == len(parts) - 1
                yield part
            if lanes.current == 0:
                buffers.keep_first()
            if not is_last:
                engine.end_lane()
        if not parts_of:
            engine.reduce_without_backward()
        completed = True
    finally:
        if not completed:
            if not engine.is_in_window:
                engine.carried.add_back()
            engine.leave_early("a loop over micro-batches was left before its end")
        lanes.current = None
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


class LaneBuffers:
    """Module buffers in lanes: each lane begins with those of the step's beginning, and lane 0's are everybody's.

    Args:
        module: Whose buffers.
        ignored: Names of those that every rank keeps for itself.
    """

    def __init__(self, module: nn.Module, ignored: frozenset[str]) -> None:
        self._places = places_of(module, ignored)
        self._kept: list[Tensor | None] = []
        self._of_first: list[Tensor | None] | None = None

    def keep(self) -> None:
        """Remember what they are before the first lane."""
        self._kept, self._of_first = self._copies(), None

    def restore(self) -> None:
        """Make them what they were before the first lane."""
        self._write(self._kept)

    def keep_first(self) -> None:
        """Remember what lane 0 has left."""
        self._of_first = self._copies()

    def settle(self) -> None:
        """After the last lane of this rank: on rank 0, what lane 0 has left."""
        if self._of_first is not None:
            self._write(self._of_first)

    def forget(self) -> None:
        """The loop is over."""
        self._kept, self._of_first = [], None

    def _copies(self) -> list[Tensor | None]:
        buffers = [buffer_at(owner, name) for owner, name in self._places]
        return [None if buffer is None else buffer.detach().clone() for buffer in buffers]

    def _write(self, values: Sequence[Tensor | None]) -> None:
        into: list[Tensor] = []
        what: list[Tensor] = []
        for (owner, name), value in zip(self._places, values, strict=True):
            buffer = buffer_at(owner, name)
            if value is None or buffer is None or buffer.shape != value.shape or buffer.dtype is not value.dtype:
                owner._buffers[name] = None if value is None else value.clone()  # it was replaced, not written to
            else:
                into.append(buffer.data)  # through `.data`: see `module_buffers.finish_broadcast`
                what.append(value)
        if into:
            torch._foreach_copy_(into, what)


def validate_model(module: nn.Module, settings: Settings, *, is_of_group: bool, lanes_per_rank: int) -> None:
    """Refuse what can't be computed in lanes with the same bits on any number of ranks.

    Args:
        module: The model.
        settings: Of its wrapper.
        is_of_group: It is wrapped for some of the ranks only.
        lanes_per_rank: How many lanes a rank computes one after the other.

    Raises:
        ConfigurationError: What it is, and what to do instead.
    """
    where = "reproducible mode"
    if is_of_group:
        raise ConfigurationError(f"{where} divides lanes over all ranks: leave process_group and device_mesh out.")
    for name, layer in module.named_modules():
        if isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm) and lanes_per_rank > 1:
            raise ConfigurationError(
                f"{where}: {name!r} is a SyncBatchNorm, which needs the rows of all lanes at once, and a rank computes "
                f"its {lanes_per_rank} lanes one after the other. Start as many ranks as lanes, or use BatchNorm, "
                f"which then normalises each lane by itself, or GroupNorm or LayerNorm."
            )
    for name, parameter in settings.trained(module):
        if parameter.dtype.itemsize < 4:
            raise ConfigurationError(
                f"{where}: parameter {name!r} is {str(parameter.dtype)[6:]}, whose sums would be rounded differently "
                f"on another number of ranks. Keep parameters in float32 and compute in low precision with "
                f"torch.autocast."
            )
        if settings.policy.reduce_dtype not in (None, parameter.dtype):
            raise ConfigurationError(
                f"{where}: reduce_dtype={settings.policy.reduce_dtype} with parameter {name!r} in "
                f"{str(parameter.dtype)[6:]}. Sums inside a rank and between ranks have one dtype there: leave it out."
            )
        if name in settings.sparse:
            raise ConfigurationError(
                f"{where}: parameter {name!r} has sparse gradients, which aren't added lane by lane. Build the "
                f"embedding with sparse=False."
            )
    if not settings.sync_buffers and any(True for _ in settings.kept_buffers(module)):
        raise ConfigurationError(
            f"{where}: with broadcast_buffers=False every rank has module buffers of its own. Leave it out."
        )
