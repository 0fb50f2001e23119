"""A bucket that is divided: every rank has the sum of one shard, and steps the parameters that lie in it.

[Note: what lies where]

    flat      gradients     [numel]        slot | slot | slot ...| padding       all of this rank's own, before the sum
    reduced   gradients     [numel / n]            ^^^^^^^^                      what this rank has of the sum
    shard     gradients     [numel / n]            ^^^^^^^^                      the mean; the same memory, or wider
    values    parameters    [numel]        slot | slot | slot ...| padding       the same places as in `flat`
    own       parameters    [numel / n]            ^^^^^^^^                      what this rank steps; then all gather

Parameters are views of `values`, so that gathering writes to where they are. With shared memory every rank copies the
others' shards from where their owners have written them.

What is added in a narrower dtype than the parameters' is unscaled, clipped and stepped in theirs: divided by a
GradScaler's scale, float16 would lose what the scale has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.replica.gradients.buckets.bucket import Bucket, late_gradient, view_like
from evenstep.replica.gradients.buckets.comm_hooks import HookWork
from evenstep.replica.gradients.buckets.layout import BucketLayout
from evenstep.replica.gradients.window import SavedGradients
from evenstep.replica.sharded.gradient_placeholder import GradientPlaceholder
from evenstep.transport.base import Collective, Row, Work
from evenstep.transport.core.transport import Transport
from evenstep.transport.local import LocalTransport


def in_memory_order(whole: Tensor, parameter: Tensor) -> Tensor:
    """[numel], a tensor of a parameter's shape in the order in which the parameter lies in memory."""
    if parameter.is_contiguous():
        return whole.reshape(-1)
    strides = parameter.stride()
    order = sorted(range(parameter.dim()), key=lambda dim: -strides[dim])
    return whole.permute(order).reshape(-1)


@dataclass(frozen=True)
class ShardSlice:
    """The part of one parameter that lies in one rank's shard.

    Attributes:
        parameter: Index of the parameter in registration order.
        index: Number of its slot in the bucket.
        begin: First element, counted in the shard.
        offset: The same element, counted in the parameter, in the order of its memory.
        numel: Number of elements; 0 if nothing of the parameter is here.
    """

    parameter: int
    index: int
    begin: int
    offset: int
    numel: int

    @property
    def end(self) -> int:
        """Behind the last element, counted in the shard."""
        return self.begin + self.numel


def plan_slices(layout: BucketLayout, rank: int, num_shards: int) -> tuple[ShardSlice, ...]:
    """What lies in a rank's shard, one shard_slice per slot. Pure."""
    length = layout.numel // num_shards
    first, last = rank * length, (rank + 1) * length
    slices = []
    for index, slot in enumerate(layout.slots):
        begin = min(max(slot.offset_numel, first), last)
        end = max(min(slot.offset_numel + slot.numel, last), begin)
        offset = begin - slot.offset_numel if end > begin else 0
        slices.append(ShardSlice(slot.parameter, index, begin - first, offset, end - begin))
    return tuple(slices)


# Their `reduce_scatter` may write its result over this rank's part of its input: the others never read that.
_REDUCE_IN_PLACE = ("local", "shared memory", "nccl")


class ShardedBucket(Bucket):
    """See [Note: what lies where].

    Args:
        layout: Which parameter lies where; it has a sharding.
        parameters: All parameters of the model, in registration order. Those in this bucket move to `values`.
        names: Their names, for messages.
        transport: Carries the memory.
        allocator: Allocates it.
        lent: [numel] or more: memory for `flat`, which this bucket has from `pack` to `wait` only.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        transport: Transport,
        *,
        allocator: Transport,
        lent: Tensor | None = None,
    ) -> None:
        self._lent = lent
        super().__init__(layout, parameters, names, transport, allocator=allocator)
        self.transport = transport
        self.num_shards, rank = transport.world_size, transport.rank
        self.slices = plan_slices(layout, rank, self.num_shards)
        self.is_first = rank == 0  # of those who divide it
        length = layout.numel // self.num_shards
        own = slice(rank * length, (rank + 1) * length)
        self._is_in_place = lent is None and (self.num_shards == 1 or transport.name in _REDUCE_IN_PLACE)
        self._own_of_flat = self.flat[own]
        self._sum = self._own_of_flat if self._is_in_place else torch.zeros_like(self._own_of_flat)
        stepped_in = torch.promote_types(layout.dtype, self.parameters[0].dtype)
        self._is_widened = stepped_in is not layout.dtype
        self.shard = torch.zeros_like(self._sum, dtype=stepped_in) if self._is_widened else self._sum
        self.values = allocator.allocate(layout.numel, dtype=self.parameters[0].dtype, device=layout.device)
        self.own = self.values[own]
        self._homes = self._views_of(self.values)
        for parameter, home in zip(self.parameters, self._homes, strict=True):
            home.copy_(parameter.detach())
            parameter.data = home
        self._addresses = [home.data_ptr() for home in self._homes]
        # Where nothing is divided, gradients are there for everybody.
        self.hides = self.num_shards > 1 or self.values.dtype is not layout.dtype
        self._hidden = [GradientPlaceholder(self, i, p) if self.hides else None for i, p in enumerate(self.parameters)]
        self._gaps = list(self._find_gaps())
        self._zeroed: list[int | None] = []  # versions of the views since which they show zeros
        self._is_packed = False  # since the window began
        self._early: set[int] = set()  # slots to which a gradient came before its pass, see `receive`
        # Tells the engine of a gradient that came first; whether a pass begins with it.
        self.pass_begins: Callable[[], bool] | None = None

    def _allocate(self, allocator: Transport) -> Tensor:
        return super()._allocate(allocator) if self._lent is None else self._lent[: self.layout.numel]

    def _find_gaps(self) -> Iterator[Tensor]:
        ends = [slot.offset_numel + slot.numel for slot in self.layout.slots]
        begins = [slot.offset_numel for slot in self.layout.slots[1:]] + [self.layout.numel]
        return (self.flat[end:begin] for end, begin in zip(ends, begins, strict=True) if end < begin)

    # ------------------------------------------------------------------ gradients

    @property
    def is_lent(self) -> bool:
        """Whether `flat` is this bucket's for a short time only."""
        return self._lent is not None

    @property
    def reduced(self) -> Tensor:
        """What this rank has of the sum after `wait`."""
        return self._sum

    def pack(self, divide_by: float = 1.0, totals: list[float] | None = None) -> None:
        """As `Bucket.pack`; what is in `flat` is hidden in `p.grad`, so that the original's memory is free."""
        # Shards are clipped and stepped with the gaps between gradients, so nothing may be left there: neither somebody
        # else's gradients in lent memory, nor a NaN that a clip by a norm of NaN has made of a zero.
        self._zeroed, self._is_packed = [], True
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        self._pack(self._hidden if self.hides else self.views, divide_by, totals)

    def _call(self, row: Row | None, plain: float, beside: Tensor | None) -> Collective:
        """What this rank gets of the sum is its shard."""
        return Collective("reduce_scatter", self.flat, self._sum, "sum", beside=beside, row=row, plain=plain)

    def wait(self) -> None:
        """Return when `reduced` holds this rank's part of the sum over ranks."""
        was_hooked = isinstance(self.work, HookWork)
        super().wait()
        if was_hooked and not self._is_in_place:
            self._sum.copy_(self._own_of_flat)

    def unpack(self, own_factor: float | Tensor | None = 1.0) -> None:
        """`reduced` holds the mean: the shard does, too. What is hidden can't be differentiated."""
        if self._is_widened:
            self.shard.copy_(self._sum)
        super().unpack(None if self.hides else own_factor)

    def publish(self, used_anywhere: Callable[[int], bool]) -> None:
        """As `Bucket.publish`."""
        for index, (slot, parameter) in enumerate(zip(self.layout.slots, self.parameters, strict=True)):
            if parameter.grad is None and used_anywhere(slot.parameter):
                parameter.grad = self._placeholder_of(index)

    def take(self, reduced: Sequence[Tensor | None]) -> None:
        """As `Bucket.take`; the gradients that are given are whole."""
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            grad = reduced[self.layout.slots[index].parameter]
            if grad is None:
                view.zero_()
                continue
            view.copy_(grad.detach())
            parameter.grad = self._placeholder_of(index)
            if self._is_widened:  # by way of the view it would be rounded
                self._fill_part(self.shard, index, grad)
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        if not (self._is_in_place or self._is_widened):
            self.shard.copy_(self._own_of_flat)

    def _fill_part(self, shard: Tensor, index: int, grad: Tensor) -> None:
        """Put this rank's part of a whole gradient where it belongs in something that lies like the shard."""
        shard_slice = self.slices[index]
        part = in_memory_order(grad, self._homes[index])[shard_slice.offset : shard_slice.offset + shard_slice.numel]
        shard[shard_slice.begin : shard_slice.end].copy_(part)

    def _placeholder_of(self, index: int) -> Tensor:
        hidden = self._hidden[index]
        return self.views[index] if hidden is None else hidden

    def whole_gradients(self) -> list[Tensor | None]:
        """Collective: the reduced gradients, of full length on every rank. None where `p.grad` is None."""
        # What isn't hidden may lie elsewhere than in the shard, such as what a window without a gradient has kept.
        held = [parameter.grad is not None for parameter in self.parameters] if self.hides else self.held()
        if not any(held):
            return [None] * len(held)
        whole = self.gather(self.shard.clone())
        return [
            view_like(whole, slot.offset_numel, parameter) if is_held else None
            for slot, parameter, is_held in zip(self.layout.slots, self.parameters, held, strict=True)
        ]

    def gather(self, shard: Tensor) -> Tensor:
        """Collective: all ranks' shards of something that lies like the bucket.

        Args:
            shard: [numel / n], this rank's.

        Returns:
            [numel].
        """
        if self.num_shards == 1:
            return shard
        whole = shard.new_empty(self.layout.numel)
        self.transport.all_gather(whole, shard).wait()
        return whole

    def show_zeros(self, index: int) -> None:
        """`p.grad` becomes zeros that autograd may add to."""
        view, parameter, shard_slice = self.views[index], self.parameters[index], self.slices[index]
        self.shard[shard_slice.begin : shard_slice.end].zero_()
        if self._lent is None and view.dtype is parameter.dtype:
            parameter.grad = view.zero_()
            self._zeroed = self._zeroed or [None] * len(self.views)
            self._zeroed[index] = view._version
        else:
            parameter.grad = torch.zeros_like(parameter)

    def zero(self) -> None:
        """What `show_zeros` does, of all gradients that there are, in one go."""
        held = [index for index, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if self._lent is None and self.layout.dtype is self.values.dtype:
            self.flat.zero_()
            torch.autograd.graph.increment_version(self.views)  # which don't share the flat tensor's
            if not self._is_in_place:
                self.shard.zero_()
            self._zeroed = [view._version for view in self.views]
            for index in held:
                self.parameters[index].grad = self.views[index]
        else:
            for index in held:
                self.show_zeros(index)

    @property
    def is_zero(self) -> bool:
        """As `Bucket.is_zero`, also of zeros that have been put there on a GPU."""
        return self._zeroed == [view._version for view in self.views] or super().is_zero

    def is_held(self, index: int) -> bool:
        """Whether there is a reduced gradient of a parameter, by number of its slot, where gradients are hidden.

        Raises:
            UsageError: There is a gradient that wasn't reduced.
        """
        grad = self.parameters[index].grad
        if grad is None or grad is self._hidden[index]:
            return grad is not None
        if not grad.any():
            return True  # zero_grad(set_to_none=False), and no pass since
        raise UsageError(
            f"rank {self.transport.rank}: step with a gradient of {self.names[index]!r} that was not averaged over "
            f"ranks: it comes from a backward pass inside accumulate or no_sync, or was put there. End the window with "
            f"a backward pass outside, or the loop over microbatches."
        )

    def held(self) -> list[bool]:
        """For each slot, whether there is a reduced gradient (see `is_held`). In the usual case a look at each."""
        grads = [parameter.grad for parameter in self.parameters]
        if self.hides:
            if all(grad is hidden for grad, hidden in zip(grads, self._hidden, strict=True)):
                return [True] * len(grads)
            return [self.is_held(index) for index in range(len(grads))]
        into, what = [], []
        for grad, view in zip(grads, self.views, strict=True):
            if grad is not None and grad is not view:
                into.append(view)
                what.append(grad)
        if into:
            torch._foreach_copy_(into, what)
        return [grad is not None for grad in grads]

    def receive(self, index: int, gradient: Tensor) -> None:
        """Autograd adds to a hidden gradient: the pass begins with it, of a loss that uses the parameter directly.

        Raises:
            UsageError: The pass has begun, and the gradient comes after its bucket has been sent. Or it isn't the
                wrapper's pass, so this rank's own gradient would be added to what all ranks share.
        """
        if self._is_packed or self.pass_begins is None:
            raise late_gradient([self.names[index]])
        parameter = self.parameters[index]
        self._early.add(index)
        parameter.grad = gradient.detach().clone()
        is_begun = self.pass_begins()  # which saves what was hidden
        self._early.clear()
        if not is_begun:
            parameter.grad = self._hidden[index]
            raise UsageError(
                f"the gradient of {self.names[index]!r} is divided over {self.num_shards} ranks by a ShardedOptimizer, "
                f"and a backward pass around the wrapped model would add this rank's own to it. Call zero_grad before, "
                f"or use torch.autograd.grad, which leaves p.grad alone."
            )
        if parameter.grad is None:  # it isn't to count; but autograd, which is adding, expects a gradient to be there
            parameter.grad = torch.zeros_like(parameter)

    def local_parts(self, indices: Sequence[int]) -> list[Tensor]:
        """This rank's parts of some gradients, by number of their slots; neighbours become one flat tensor."""
        parts: list[tuple[int, int]] = []
        previous = -2
        for index in sorted(indices):
            shard_slice = self.slices[index]
            if shard_slice.numel == 0:
                continue
            if previous == index - 1 and parts:
                parts[-1] = (parts[-1][0], shard_slice.end)
            else:
                parts.append((shard_slice.begin, shard_slice.end))
            previous = index
        return [self.shard[begin:end] for begin, end in parts]

    # ------------------------------------------------------------------ a second window without zero_grad

    def open_window(self, saved: SavedGradients, *, is_running: bool) -> None:
        """Save the gradients that there are; `p.grad` is None, so that autograd can add to it.

        Where all are zeros that `zero` has put there, they stay: autograd adds to those.

        Args:
            saved: Keeps them until the window ends.
            is_running: The backward pass has begun, so gradients may have come: those of parameters that the loss uses
                beside the model's outputs. What isn't hidden stays, and is averaged. (What was there before has the
                same mean.)
        """
        grads = [parameter.grad for parameter in self.parameters]
        if is_running:
            grads = [grad if isinstance(grad, GradientPlaceholder) else None for grad in grads]
            for index in self._early:
                grads[index] = self._hidden[index]
        held = [grad is not None for grad in grads]
        all_views = all(grad is view for grad, view in zip(grads, self.views, strict=True))
        if not self.hides or not any(held) or (all_views and self.is_zero):
            return
        kept = self.shard.clone()
        for shard_slice, grad in zip(self.slices, grads, strict=True):
            if grad is None:
                kept[shard_slice.begin : shard_slice.end].zero_()
                continue
            if shard_slice.index not in self._early:
                self.parameters[shard_slice.index].grad = None
            if not isinstance(
                grad, GradientPlaceholder
            ):  # zeros, or what the user has put there, the same on all ranks
                self._fill_part(kept, shard_slice.index, grad)
        saved.shards.append(SavedShard(self, kept, held))

    def close_window(self) -> None:
        """The window has ended: gradients may come again."""
        self._is_packed = False

    def give_back(self, kept: Tensor, held: Sequence[bool], *, add: bool) -> None:
        """Give back what `open_window` saved; see `SavedShard`."""
        if add:
            self.shard.add_(kept)
        for index, is_held in enumerate(held):
            if is_held:
                self.parameters[index].grad = self._placeholder_of(index)

    # ------------------------------------------------------------------ parameters

    def replaced(self) -> str | None:
        """Name of a parameter that is not where it was put; None: all are."""
        addresses = [parameter.data_ptr() for parameter in self.parameters]
        if addresses == self._addresses:
            return None
        moved = zip(self.names, addresses, self._addresses, strict=True)
        return next(name for name, address, before in moved if address != before)

    def keep_hold(self) -> None:
        """Take back parameters whose memory was replaced (`load_state_dict(assign=True)`, `p.data = ...`).

        Raises:
            UsageError: They have another dtype, device or shape now.
        """
        if self.replaced() is None:
            return
        for parameter, home, name in zip(self.parameters, self._homes, self.names, strict=True):
            if parameter.data_ptr() == home.data_ptr():
                continue
            found = (parameter.dtype, parameter.device, parameter.shape)
            if found != (home.dtype, home.device, home.shape):
                raise UsageError(
                    f"rank {self.transport.rank}: parameter {name!r} is {str(found[0])[6:]} {list(found[2])} on "
                    f"{found[1]} now, and was {str(home.dtype)[6:]} {list(home.shape)} on {home.device} when its "
                    f"ShardedOptimizer was made. Convert or move the model before wrapping it."
                )
            home.copy_(parameter.detach())
            parameter.data = home

    def start_gather(self) -> Work:
        """Collective: begin to give every rank the values of all shards."""
        if self.num_shards == 1:
            return LocalTransport().barrier()  # they are there
        self._begin_range("parameters of bucket", self.values)
        return self.transport.all_gather(self.values, self.own)

    def finish_gather(self, work: Work) -> None:
        """Return when the values are there, and have autograd know of the change.

        Args:
            work: What `start_gather` has returned.
        """
        torch.autograd.graph.increment_version(self.parameters)
        work.wait()
        self._end_range()


@dataclass(frozen=True)
class SavedShard:
    """This rank's shard of reduced gradients, kept out of a window.

    Attributes:
        bucket: Whose.
        shard: [numel / n], a copy.
        held: For each slot, whether there was a gradient.
    """

    bucket: ShardedBucket
    shard: Tensor
    held: Sequence[bool]

    def give_back(self, *, add: bool) -> None:
        """Put placeholders back into `p.grad`; `add` the shard to what has been reduced since, or nothing has been."""
        self.bucket.give_back(self.shard, self.held, add=add)
