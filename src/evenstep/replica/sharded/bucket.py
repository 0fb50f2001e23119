"""A sharded bucket: every rank has the sum over ranks of one shard, and steps the parameters in this shard.

[Note: what lies where]

    flat      gradients     [numel]        slot | slot | slot ...| padding       all of this rank's own, before the sum
    reduced   gradients     [numel / n]            ^^^^^^^^                      this rank's shard of the sum
    shard     gradients     [numel / n]            ^^^^^^^^                      the mean; the same memory, or wider
    values    parameters    [numel]        slot | slot | slot ...| padding       the same places as in `flat`
      .own    parameters    [numel / n]            ^^^^^^^^                      stepped by this rank, then gathered

Parameters are views of `values`, so gathering writes directly into them. With shared memory every rank copies the other
ranks' shards straight from their owners' memory.

If gradients are added in a narrower dtype than the parameters', they are unscaled, clipped and stepped in the
parameters' dtype: divided by a GradScaler's scale, float16 numbers would lose the digits that the scale protects.

[Note: what stands in p.grad]

    None           there is no gradient
    shown          the gradient has been reduced, and is in the shard: a placeholder. In a world of one it is a view of
                   `flat`, which programs may read
    a view         of `flat`, which holds zeros: autograd adds gradients directly in the memory that is sent
    anything else  zeros, if `flat` is lent or has another dtype; gradients of the open window from autograd;
                   or a tensor from the program, the same on all ranks

In an open window `p.grad` holds no placeholder until its bucket is packed: `open_window` has saved the shards.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.replica.gradients.buckets.bucket import Bucket, BucketMemory, late_gradient, view_like
from evenstep.replica.gradients.buckets.comm_hooks import HookWork
from evenstep.replica.gradients.buckets.layout import BucketLayout
from evenstep.replica.gradients.engine import Engine
from evenstep.replica.gradients.window import SavedGradients, drop_grads
from evenstep.replica.sharded.gradient_placeholder import GradientPlaceholder
from evenstep.replica.sharded.slices import plan_slices
from evenstep.replica.sharded.values import ShardedValues
from evenstep.transport.core.transport import Transport

# Transports whose `reduce_scatter` may write the result to this rank's part of the input, which no other rank reads.
_REDUCE_IN_PLACE = ("local", "shared memory", "nccl")


@dataclass(frozen=True)
class Loan:
    """Memory that several buckets use in turn.

    Attributes:
        memory: [n], at least as long as the longest bucket.
        before: The bucket that uses the memory before this one, in the order of sending; None: this bucket is the
            first.
    """

    memory: Tensor
    before: Bucket | None


class ShardedBucket(Bucket):
    """A bucket of which each rank has one shard: see [Note: what lies where].

    Args:
        layout: The place of each parameter; it has a sharding.
        parameters: All parameters of the model, in registration order. This bucket's parameters move into `values`.
        names: The parameters' names, for messages.
        transport: Carries the memory.
        allocator: Allocates the memory.
        engine: The model's engine.
        loan: Memory for `flat`, which this bucket has only from `pack` to `wait`; None: it has its own memory.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        transport: Transport,
        *,
        allocator: Transport,
        engine: weakref.ref[Engine],
        loan: Loan | None = None,
    ) -> None:
        dtype = parameters[layout.slots[0].parameter].dtype
        if loan is None:
            flat = allocator.allocate(layout.numel, dtype=layout.dtype, device=layout.device)
        else:
            flat = loan.memory[: layout.numel]
        self._own_of_flat = reduced = flat.chunk(transport.world_size)[transport.rank]
        if loan is not None or (transport.world_size > 1 and transport.name not in _REDUCE_IN_PLACE):
            reduced = torch.zeros_like(reduced)
        self.shard = reduced.to(torch.promote_types(layout.dtype, dtype))
        super().__init__(layout, parameters, names, transport, BucketMemory(flat, reduced, self.shard))
        self.slices = plan_slices(layout, transport.rank, transport.world_size)
        self.values = ShardedValues(layout, self.parameters, self.names, transport, allocator)
        self._engine, self._loan = engine, loan
        # In a world of one, in one dtype, programs may read the reduced gradients.
        if transport.world_size > 1 or dtype is not layout.dtype:
            self.shown = [GradientPlaceholder(self, index, each) for index, each in enumerate(self.parameters)]
        self._keeps_zeros = loan is None and dtype is layout.dtype  # views of `flat` can be gradients
        self._zeroed_at: int | None = None  # `_versions()` of the views when `zero` zeroed them
        ends = [slot.offset_numel + slot.numel for slot in layout.slots]
        begins = [slot.offset_numel for slot in layout.slots[1:]] + [layout.numel]
        self._gaps = [flat[end:begin] for end, begin in zip(ends, begins, strict=True) if end < begin]

    # ------------------------------------------------------------------ on the way

    def pack(self, divide_by: float = 1.0, totals: list[float] | None = None) -> None:
        """Like `Bucket.pack`. `p.grad` becomes a placeholder, so that the original gradient's memory is freed."""
        if self._loan is not None and self._loan.before is not None:
            self._loan.before.wait()
        self._zeroed_at = None
        # Clipping and stepping include the gaps between gradients, so the gaps must be zero. They may hold another
        # bucket's gradients (in lent memory), or NaNs (0 times a norm of NaN in clipping).
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        super().pack(divide_by, totals)

    def wait(self) -> None:
        """Wait until `reduced` holds this rank's part of the sum over ranks."""
        was_hooked = isinstance(self.work, HookWork)
        super().wait()
        if was_hooked:
            self.reduced.copy_(self._own_of_flat)

    def receive(self, index: int, gradient: Tensor) -> None:
        """Begin a pass, because autograd adds a gradient to a placeholder: the loss uses the parameter directly.

        Raises:
            UsageError: The pass has already begun, so the gradient comes after its bucket was sent. Or the pass isn't
                the wrapper's own, so this rank's own gradient would be added to the reduced gradient.
        """
        engine = self._engine()
        if engine is None or engine.is_in_pass:
            raise late_gradient([self.names[index]])
        engine.gradient_came()  # saves the sharded gradients
        if not engine.is_in_pass:
            raise UsageError(
                f"the gradient of {self.names[index]!r} is divided over {self.transport.world_size} ranks by a "
                f"ShardedOptimizer, and a backward pass that bypasses the wrapped model would add this rank's own "
                f"gradient to it. Call zero_grad before, or use torch.autograd.grad, which leaves p.grad alone."
            )
        self.parameters[index].grad = gradient.detach().clone()

    # ------------------------------------------------------------------ reduced gradients

    def take(self, reduced: Sequence[Tensor | None]) -> None:
        """Like `Bucket.take`; takes whole gradients."""
        self.shard.zero_()
        self._absorb([reduced[slot.parameter] for slot in self.layout.slots])
        drop_grads(self.parameters)
        self.publish(lambda index: reduced[index] is not None)

    def _absorb(self, grads: Sequence[Tensor | None]) -> None:
        """Copy this rank's slices of whole gradients, by slot, to the shard. Sharded gradients are there already."""
        for part, grad, shown, home in zip(self.slices, grads, self.shown, self.values.homes, strict=True):
            if grad is not None and grad is not shown:
                part.of_shard(self.shard).copy_(part.of_whole(grad.detach(), home))

    def held(self) -> list[bool]:
        """For each slot, whether there is a reduced gradient. The shard then holds this rank's part of it.

        Raises:
            UsageError: There is a gradient that wasn't reduced.
        """
        grads = [parameter.grad for parameter in self.parameters]
        if all(map(operator.is_, grads, self.shown)):  # the usual case
            return [True] * len(grads)
        for name, grad, shown in zip(self.names, grads, self.shown, strict=True):
            # Zeros are allowed: zero_grad(set_to_none=False), and no pass since.
            if self.hides and grad is not None and grad is not shown and grad.any():
                raise UsageError(
                    f"rank {self.transport.rank}: step with a gradient of {name!r} that was not averaged over ranks: "
                    f"it comes from a backward pass inside accumulate or no_sync, or the program has set it. End the "
                    f"window with a backward pass outside, or finish the loop over microbatches."
                )
        self._absorb(grads)
        return [grad is not None for grad in grads]

    def whole_gradients(self) -> dict[int, Tensor]:
        """Collective: the reduced gradients, in full length on every rank, by index of the parameter."""
        grads = [parameter.grad for parameter in self.parameters]
        if all(grad is None for grad in grads):
            return {}
        self._absorb(grads)  # includes a gradient left from a window in which the parameter had none
        whole = self.gather(self.shard)
        return {
            slot.parameter: view_like(whole, slot.offset_numel, parameter)
            for slot, parameter, grad in zip(self.layout.slots, self.parameters, grads, strict=True)
            if grad is not None
        }

    def gather(self, shard: Tensor) -> Tensor:
        """Collective: all ranks' shards of a tensor that is laid out like the bucket.

        Args:
            shard: [numel / n], this rank's shard.

        Returns:
            [numel], a new tensor.
        """
        whole = shard.new_empty(self.layout.numel)
        self.transport.all_gather(whole, shard).wait()
        return whole

    def local_parts(self, indices: Sequence[int]) -> list[Tensor]:
        """This rank's parts of some gradients, by slot number, with neighbours joined into one flat tensor."""
        here = [index for index in sorted(indices) if self.slices[index].numel]
        parts = []
        for _, neighbours in groupby(enumerate(here), lambda each: each[1] - each[0]):
            run = [self.slices[index] for _, index in neighbours]
            parts.append(self.shard[run[0].begin : run[-1].end])
        return parts

    # ------------------------------------------------------------------ zeros

    def show_zeros(self, index: int) -> None:
        """Set `p.grad` to zeros to which autograd may add."""
        view, parameter = self.views[index], self.parameters[index]
        self.slices[index].of_shard(self.shard).zero_()
        parameter.grad = view.zero_() if self._keeps_zeros else torch.zeros_like(parameter)

    def zero(self) -> None:
        """Set all existing gradients to zeros, as `show_zeros` does for one."""
        if self._keeps_zeros:
            self.flat.zero_()
            torch.autograd.graph.increment_version(self.views)  # separate from the flat tensor's version
            self._zeroed_at = self._versions()
        if not self._keeps_zeros or self.shard is not self._own_of_flat:
            self.shard.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None:
                parameter.grad = view if self._keeps_zeros else torch.zeros_like(parameter)

    @property
    def is_zero(self) -> bool:
        """Like `Bucket.is_zero`, but also knows of zeros that `zero` has written on a GPU."""
        is_known = self._zeroed_at == self._versions()
        return is_known or (self.flat.device.type == "cpu" and not self.flat.any())

    # ------------------------------------------------------------------ a second window without zero_grad

    def open_window(self, saved: SavedGradients, *, is_running: bool) -> None:
        """Save the existing gradients and set `p.grad` to None, so that autograd can add to it.

        If all gradients are zeros from `zero`, they stay: autograd adds to them.

        Args:
            saved: Holds the gradients until the window ends.
            is_running: Whether the backward pass has begun, so that parameters that the loss uses directly may have new
                gradients. Gradients that aren't placeholders stay, and are averaged. (Averaging doesn't change the
                reduced gradients among them.)
        """
        grads = [parameter.grad for parameter in self.parameters]
        if is_running:
            grads = [grad if isinstance(grad, GradientPlaceholder) else None for grad in grads]
        held = {part.parameter for part, grad in zip(self.slices, grads, strict=True) if grad is not None}
        if not self.hides or not held or self.is_clear:
            return
        self._absorb(grads)
        kept = self.shard.clone()
        for part, parameter in zip(self.slices, self.parameters, strict=True):
            if part.parameter in held:
                parameter.grad = None
            else:
                part.of_shard(kept).zero_()
        saved.shards.append(SavedShard(self, kept, held))


@dataclass(frozen=True)
class SavedShard:
    """This rank's shard of reduced gradients, kept separate from a window's gradients.

    Attributes:
        bucket: The bucket.
        shard: [numel / n], a copy.
        held: The parameters (by index) that had a gradient.
    """

    bucket: ShardedBucket
    shard: Tensor
    held: Set[int]

    def give_back(self, *, add: bool) -> None:
        """Restore the placeholders in `p.grad`. With `add`, add the shard to the gradients that were reduced since."""
        if add:
            self.bucket.shard.add_(self.shard)
        self.bucket.publish(self.held.__contains__)
