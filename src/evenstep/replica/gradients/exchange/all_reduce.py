"""The all-reduce over ranks: buckets are sent while the backward pass runs, then a header, then module buffers.

[Note: one order]

A loss may go through several wrapped models. A rank with samples launches the buckets of both as they fill. A rank
whose share is empty launches all buckets of one model, and then all of the other. Each model has its own transport, so
on the CPU both orders work. On a GPU two transports are two communicators that share the GPU's queues. If ranks begin
the communicators' calls in different orders, they may wait for each other for ever. So on a GPU all ranks launch the
first model's buckets during the pass, and those of all other models when the pass has ended. The first model is the one
that `evenstep.backward` names first, or else the one whose outputs the pass reaches first.

With `ShardedOptimizer(shard_gradients=True)` buckets share memory, and a bucket waits for the one before it. So there
the same holds on the CPU. With a SyncBatchNorm all buckets are launched when the pass has ended, because a rank with an
empty share launches them then, and first takes part in the others' statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from evenstep.ground.health.telemetry import REDUCED, WAITING
from evenstep.replica.gradients.buckets.bucket import Bucket, whole_memory
from evenstep.replica.gradients.buckets.comm_hooks import CommHook, hook_order
from evenstep.replica.gradients.buckets.launch import LaunchOrder
from evenstep.replica.gradients.buckets.layout import BucketLayout, Layout, ParameterSpec, plan_layout
from evenstep.replica.gradients.division import divide, row_of, zero_where
from evenstep.replica.gradients.exchange.across_ranks import AcrossRanks
from evenstep.replica.gradients.exchange.base import Trained
from evenstep.replica.gradients.exchange.sparse import sum_over_ranks
from evenstep.replica.gradients.window import Kind, Turn, Window
from evenstep.replica.join import Uneven
from evenstep.transport.core.transport import Transport
from evenstep.transport.local import LocalTransport


class AllReduceExchange(AcrossRanks):
    """Adds gradients over ranks in buckets, in order, while the backward pass runs.

    Args:
        trained: The parameters whose gradients are averaged.
    """

    def __init__(self, trained: Trained) -> None:
        super().__init__(trained, trained.parameters[0].device)
        self._names = trained.names
        self._num_dense, self._policy = trained.num_dense, trained.policy
        self._observers = trained.observers
        self._shares_queue = self._header.tensor.device.type != "cpu"
        # A backward pass reaches the last layers first. The second layout uses the measured order.
        self._build(self._plan(range(trained.num_dense - 1, -1, -1)))
        # Autograd multiplies weights into gradients in the parameters' dtype, even if they are added in another dtype.
        self._scale_weights({*(p.dtype for p in trained.parameters), *(bucket.layout.dtype for bucket in self.buckets)})

    def _describe(self, index: int) -> ParameterSpec:
        parameter = self._parameters[index]
        added_in = self._policy.reduce_dtype if parameter.is_floating_point() else None
        shape = tuple(parameter.shape)
        return ParameterSpec(self._names[index], shape, parameter.dtype, parameter.device, added_in=added_in)

    def _plan(self, order: Sequence[int]) -> Layout:
        self.order = order
        specs = [self._describe(index) for index in range(self._num_dense)]
        return plan_layout(specs, order, self._policy, self._world.world_size)

    def _build(self, layout: Layout) -> None:
        self.layout = layout
        # The header is sent in the same call as the last bucket: ranks that share memory synchronise once less.
        self._is_beside = self.hook is None and len(layout.buckets) > 0
        self._launches = LaunchOrder(len(layout.buckets), keeps_last=self._is_beside)
        # A hook may resize the memory that it gets, and memory of a transport's allocator may not allow that.
        allocator: Transport = self._transport if self.hook is None else LocalTransport()
        self.buckets: Sequence[Bucket] = [self._build_bucket(bucket, allocator) for bucket in layout.buckets]
        self._recorder.has_buckets(sum(bucket.flat.nbytes for bucket in self.buckets))
        for observer in self._observers:
            observer.watch_buckets(self.buckets)
        self._inspectors = [each for each in self._observers if each.inspects_buckets]

    def _build_bucket(self, layout: BucketLayout, allocator: Transport) -> Bucket:
        memory = whole_memory(layout, self._parameters[layout.slots[0].parameter].dtype, allocator)
        return Bucket(layout, self._parameters, self._names, self._transport, memory)

    def last_pass_begins(self, window: Window) -> None:
        """See `Exchange`. Collective if there is a hook: hooks get means, which need the sum of weights."""
        if self.hook is not None:
            self._open()
            self.scale.start_total(window)

    def complete(self, bucket: int, window: Window) -> None:
        """See `Exchange`."""
        if not self._launches_at_end:
            self._open()
            self._launch(self._launches.complete(bucket), window)

    def _open(self) -> None:
        """Begin the first collectives of a window. On all ranks, once per window."""
        if self.uneven is not None:
            self.uneven.announce_bucket()
        self.scale.start_agreement()

    @property
    def _launches_at_end(self) -> bool:
        """Whether buckets are launched only when the pass has ended: earlier, peers may wait for this rank elsewhere.

        See [Note: one order]. Three more facts matter with a hook. The weights of all ranks are awaited before a bucket
        is handed to a hook. If a loss goes through several models, a rank without samples sends the weights of one
        model after everything of another. And ranks that have left a join of several models take part only when a
        window ends, perhaps over the same group that the hook's calls use.
        """
        if self.hook is not None and (self.turn is not Turn.ALONE or self.uneven is not None):
            return True
        return self.turn is Turn.BEHIND and self._shares_queue

    def finish(self, window: Window) -> None:
        """See `Exchange`."""
        self.announce()  # before the first wait
        self.scale.start_agreement()
        if self.hook is not None:
            self.scale.start_total(window)
        launches = list(self._launches.finish())
        # A rank that has left a join can't send the header together with a bucket.
        last = self.buckets[launches.pop()] if self._is_beside and self.uneven is None else None
        self._launch(launches, window)
        if last is not None:
            self._pack(last, window)
        scale = self.scale.end_window(window.kind)
        if isinstance(window.weight, Tensor):  # as in `_pack`, but for gradients that are in no bucket
            zero_where(window.weight == 0, [p.grad for p in self._parameters[self._num_dense :] if p.grad is not None])
        self._recorder.mark(WAITING)
        self._used = self._used_here()
        self._header.fill(window, self._used, scale=scale)
        header_work = None
        if last is None:
            header_work = self._transport.all_reduce(self._header.tensor)
        else:
            self._send(last, window, scale, beside=self._header.tensor)
        src = 0 if self.uneven is None else self.uneven.lowest_active(self._control)
        sent_buffers = self._module_buffers.start(src)
        for bucket in self.buckets:
            bucket.wait()
        if header_work is not None:
            header_work.wait()
        self._recorder.mark(REDUCED)
        self._launches.reset()
        self._read_header(window)
        if not all(self._used) or self._num_dense < len(self._parameters):
            self._used = self._header.used_anywhere()
            for bucket in self.buckets:
                bucket.publish(self._used.__getitem__)
            for parameter, is_used in list(zip(self._parameters, self._used, strict=True))[self._num_dense :]:
                if is_used:
                    parameter.grad = sum_over_ranks(parameter.grad, parameter, self._transport, self._control)
        self._divide()
        own_factor = self._own_factor(window, scale)
        for bucket in self.buckets:
            bucket.unpack(own_factor)
        self._module_buffers.finish(sent_buffers)
        if self.uneven is not None:
            self.uneven.end_window()

    def _own_factor(self, window: Window, scale: float) -> float | Tensor | None:
        """See `Bucket.unpack`. Virtual ranks, except the last, have left sums without graphs."""
        if self._ending.sums_first:
            return None
        if window.kind is not Kind.WEIGHTED:
            return 1.0
        if isinstance(window.weight, Tensor):
            return torch.where(window.weight > 0, scale / window.weight, 0.0)
        return scale / window.weight if window.weight else None

    def _used_here(self) -> list[bool]:
        """For each parameter, whether it has a gradient on this rank; all buckets have been packed."""
        if self._num_dense == len(self._parameters) and all(bucket.is_full for bucket in self.buckets):
            return self._all_used
        return [parameter.grad is not None for parameter in self._parameters]

    def learn_order(self, ready_order: Sequence[int]) -> None:
        """See `Exchange`."""
        seen = [index for index in ready_order if index < self._num_dense]
        order = [*seen, *sorted(set(range(self._num_dense)) - set(seen), reverse=True)]
        agreed = torch.tensor(order, device="cpu")
        self._control.broadcast(agreed, 0).wait()
        layout = self._plan(agreed.tolist())
        if layout != self.layout:
            self._lay_out_again(layout)

    def _lay_out_again(self, layout: Layout) -> None:
        reduced = [parameter.grad for parameter in self._parameters]
        self._build(layout)
        for bucket in self.buckets:
            bucket.take(reduced)

    def set_hook(self, hook: CommHook) -> None:
        """See `Exchange`."""
        self.hook = hook
        self._policy = hook.suit(self._policy, self._header.tensor.device)
        self._lay_out_again(self.layout)

    def set_uneven(self, uneven: Uneven | None) -> None:
        """See `Exchange`."""
        self.uneven = uneven
        self.scale.announce = uneven.announce if uneven else lambda: None
        for observer in self._observers:
            observer.set_apart(uneven is not None)

    def reset(self) -> None:
        """See `Exchange`."""
        self._launches.reset()

    def announce(self) -> None:
        """See `Exchange`. Called before the first collective of a window."""
        if self.uneven is not None:
            self.uneven.announce()

    def _launch(self, indices: Iterable[int], window: Window) -> None:
        for index in indices:
            bucket = self.buckets[index]
            self._pack(bucket, window)
            if self.hook is not None:
                is_last = index == len(self.buckets) - 1
                bucket.launch_hook(partial(hook_order(self._world).submit, self.hook, is_last=is_last))
            else:
                self._send(bucket, window, self.scale.of_window)

    def _send(self, bucket: Bucket, window: Window, scale: float, beside: Tensor | None = None) -> None:
        row = row_of(window.kind, self._ending.weight_of(window), scale) if self._sends_rows else None
        plain = self._ending.num_shares / (self._world.world_size if bucket.overflows else 1)
        bucket.launch(row, plain, beside)

    @property
    def _sends_rows(self) -> bool:
        """Whether the transport divides sums: see [Note: one division]. In a `join` ranks that have left send none."""
        return self._transport.divides and self.hook is None and self.uneven is None

    def _pack(self, bucket: Bucket, window: Window) -> None:
        self._recorder.mark(bucket.layout.index)
        totals: list[float] | None = None
        if self._inspectors and not self._ending.sums_first:
            wanted = [each.totals_for(bucket) for each in self._inspectors]
            totals = next((each for each in wanted if each is not None), None)
        is_small = bucket.overflows and self.hook is None and window.kind is not Kind.WEIGHTED
        bucket.pack(self._world.world_size if is_small else 1.0, totals)
        if isinstance(window.weight_held, Tensor):
            # On a GPU a weight isn't read, so a window of weight 0 wasn't recognised: contribute zeros.
            zero_where(window.weight_held == 0, [bucket.flat])
        if self.hook is not None and window.kind is Kind.WEIGHTED:
            self.scale.divide_by_total(bucket.flat)
        self._ending.add_to(bucket)
        for observer in self._inspectors:
            observer.inspect(bucket, totals)

    def _divide(self) -> None:
        """Divide the gradients that neither the transport nor a hook has divided: see [Note: one division]."""
        plain: float | Tensor = float(self._ending.num_shares)
        if self.uneven is not None and not self.uneven.divide_by_initial_world_size:
            plain = self._header.num_plain()
        sums = [p.grad for p in self._parameters[self._num_dense :] if p.grad is not None]
        small = []
        if self.hook is not None:
            if self.uneven is not None and not self._header.kinds()[0]:
                divide([bucket.reduced for bucket in self.buckets], plain / self._world.world_size)
        elif not self._sends_rows:
            sums += [bucket.reduced for bucket in self.buckets if not bucket.overflows]
            small = [bucket.reduced for bucket in self.buckets if bucket.overflows]
        for gradients, divided_by in ((sums, 1), (small, self._world.world_size)):
            if gradients:
                divide(gradients, self._header.divisor(plain / divided_by))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._parameters)} parameters, {self._launches!r}>"
