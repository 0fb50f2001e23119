"""Between ranks buckets travel while the backward pass runs, a header behind them, and module buffers behind that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.health.telemetry import REDUCED, WAITING
from evenstep.replica import multiplied
from evenstep.replica.bucket import HALF_PRECISION, Bucket, CastBucket
from evenstep.replica.comm_hook import CommHook, HookQueue
from evenstep.replica.drift import NOTHING, DriftWatch
from evenstep.replica.lane_sums import LaneSums
from evenstep.replica.layout import BucketLayout, Layout, ParameterSpec, plan_layout
from evenstep.replica.nonfinite import NonFiniteGuard, OwnWatch, SumWatch
from evenstep.replica.options import NOTHING as NO_OPTIONS
from evenstep.replica.options import OptionsWatch
from evenstep.replica.reducer import BucketState, LaunchReduce, Reducer
from evenstep.replica.sparse import sum_over_ranks
from evenstep.replica.total_weight import TotalWeight
from evenstep.replica.trained import Trained
from evenstep.replica.uneven import Uneven
from evenstep.replica.units import Units
from evenstep.replica.weighting import Header, Kind, Window, zero_where
from evenstep.transport.base import Transport, Work
from evenstep.transport.local import LocalTransport
from evenstep.transport.segment import MAX_BESIDE_BYTES
from evenstep.transport.shared_memory import SharedMemoryTransport


class BucketExchange:
    """Adds gradients over ranks in buckets, in order, while the backward pass runs.

    Args:
        trained: Whose gradients.
    """

    def __init__(self, trained: Trained) -> None:
        self._names, self._parameters = trained.names, trained.parameters
        self._num_dense, self._policy = trained.num_dense, trained.policy
        self._world, self._transport = trained.world, trained.transport
        self._recorder, self._module_buffers = trained.recorder, trained.module_buffers
        self.sums: SumWatch | None = None
        self._specs = [self._describe(index) for index in range(trained.num_dense)]
        self._header = Header(len(trained.parameters), trained.parameters[0].device)
        self._was_weighted: bool | None = None  # the last window; None: not known, as always on a GPU
        self.hook: CommHook | None = None
        self.looker: NonFiniteGuard | OwnWatch | None = None
        self.drift: DriftWatch | None = None
        self.options: OptionsWatch | None = None
        self.lanes: LaneSums | None = None
        self._hooks: HookQueue | None = None
        self._total_weight = TotalWeight(trained.transport, trained.parameters[0].device)  # for hooks
        self._uneven: Uneven | None = None
        self._used: list[bool] = []
        self._all_used = [True] * len(trained.parameters)
        # A backward pass reaches the last layers first; the second layout knows better.
        self._build(self._plan(range(trained.num_dense - 1, -1, -1)))
        # Autograd multiplies weights into gradients of the parameters' dtype, whatever these are added in.
        has_half_precision = any(each.dtype in HALF_PRECISION for each in trained.parameters) or any(
            bucket.has_half_precision for bucket in self.buckets
        )
        self._units = Units(trained.parameters, trained.transport, is_needed=has_half_precision)

    def _describe(self, index: int) -> ParameterSpec:
        parameter = self._parameters[index]
        added_in = self._policy.reduce_dtype if parameter.is_floating_point() else None
        shape = tuple(parameter.shape)
        return ParameterSpec(self._names[index], shape, parameter.dtype, parameter.device, added_in=added_in)

    def _plan(self, order: Sequence[int]) -> Layout:
        return plan_layout(self._specs, order, self._policy)

    def _build(self, layout: Layout) -> None:
        self.layout = layout
        # Over shared memory the header travels beside the last bucket: ranks meet once less.
        fits = self._header.tensor.nbytes <= MAX_BESIDE_BYTES and self._hooks is None and len(layout.buckets) > 0
        carrier = self._transport if isinstance(self._transport, SharedMemoryTransport) and fits else None
        self._carrier = carrier if self._header.tensor.device.type == "cpu" else None
        self.reducer = self._new_reducer()
        # A hook may resize the memory that it is given, which a transport's own may not allow.
        allocator: Transport = self._transport if self._hooks is None else LocalTransport()
        self.buckets: Sequence[Bucket] = [self._build_bucket(bucket, allocator) for bucket in layout.buckets]
        self._recorder.has_buckets(sum(bucket.flat.nbytes for bucket in self.buckets))
        if self.sums is not None:
            self.watch_sums(self.sums)

    def _new_reducer(self) -> Reducer:
        return Reducer(len(self.layout.buckets), keeps_last=self._carrier is not None)

    def watch_sums(self, sums: SumWatch) -> None:
        """Have somebody look at the sums of buckets while they are made."""
        self.sums = sums
        for bucket in self.buckets:
            sums.watch(bucket.flat, bucket.layout, bucket.names)

    def _build_bucket(self, layout: BucketLayout, allocator: Transport) -> Bucket:
        is_cast = layout.dtype is not self._parameters[layout.slots[0].parameter].dtype
        kind = CastBucket if is_cast else Bucket
        return kind(layout, self._parameters, self._names, self._transport, allocator=allocator)

    def weight_from(self, weight: float | Tensor, scale: float, *, opens_window: bool) -> float | Tensor:
        """See `exchange.Exchange.weight_from`. What there is of the window gets the other model's scale."""
        self._units.count_in(scale, opens_window=opens_window)
        return weight

    def weight_scale(self, weight: float | Tensor | None, *, opens_window: bool) -> float:
        """See `exchange.Exchange.weight_scale`. Collective in the first windows of 16-bit models: see `Units`."""
        if weight is not None and self._units.is_due:
            self.announce()
            self._units.ask(weight)
            self._units.hear(reads=True)
        # Also of a weight of 0: what ranks add up has one unit on all of them.
        self._units.count_in(self._units.unit, opens_window=opens_window)
        return self._units.unit

    def open_window(self, *, is_running: bool) -> None:
        """See `exchange.Exchange.open_window`; autograd can add to every gradient."""

    def cancel_window(self) -> None:
        """See `exchange.Exchange.cancel_window`."""

    def is_clear(self, bucket: Bucket) -> bool:
        """See `exchange.Exchange.is_clear`."""
        all_views = all(p.grad is view for p, view in zip(bucket.parameters, bucket.views, strict=True))
        return all_views and bucket.is_zero

    def weigh(self, window: Window) -> None:
        """See `exchange.Exchange.weigh`; collective where there is a hook, which is handed means."""
        if self._hooks is not None:
            if self._units.is_due:
                self._units.ask()
            if self._uneven is not None:
                self._uneven.announce_bucket()
            self._total_weight.ask(window, self._units.of_window)

    def complete(self, bucket: int, window: Window) -> None:
        """See `exchange.Exchange.complete`."""
        if self._units.is_due:
            self._units.ask()
        if not self._waits_for_others(window):
            self._execute(self.reducer.complete(bucket), window)

    def _waits_for_others(self, window: Window) -> bool:
        """Whether buckets go when the pass has ended: before that, others may wait for this rank elsewhere.

        Before a bucket is handed to a hook weights of all ranks are waited for. Where a loss may go through several
        models, a rank without samples tells that of one behind all of another. And ranks that have left a join of
        several models are told when a window ends; a hook's calls may be of the group in which that is.
        """
        is_early = self._hooks is not None and (window.kind is Kind.WEIGHTED or self._uneven is not None)
        return is_early and multiplied.are_several()

    def finish(self, window: Window) -> None:
        """See `exchange.Exchange.finish`."""
        self.announce()  # before anything is waited for
        if self._units.is_due:
            self._units.ask()
        if self._hooks is not None:
            self._total_weight.ask(window, self._units.of_window)
        launches = list(self.reducer.finish())
        carrier = self._carrier if self._uneven is None else None  # who has left a join sends nothing beside
        last = None if carrier is None else self.buckets[launches.pop().bucket]
        self._execute(launches, window)
        if last is not None:
            self._pack(last, window)
        self._units.hear(reads=window.kind is not Kind.PLAIN)
        self._total_weight.end_window()
        if isinstance(window.weight, Tensor):  # see `_pack`; what is in no bucket
            zero_where(window.weight == 0, [p.grad for p in self._parameters[self._num_dense :] if p.grad is not None])
        self._recorder.mark(WAITING)
        self._used = self._used_here()
        # Within a join some have left, and are made equal when it ends.
        told = NOTHING if self.drift is None or self._uneven is not None else self.drift.tell()
        options = NO_OPTIONS if self.options is None or self._uneven is not None else self.options.tell()
        found = self.sums is not None and self.sums.has_found
        self._header.fill(window, self._used, told, found, options=options, unit=self._units.take())
        header_work = self._send_header(last, carrier)
        src = 0 if self._uneven is None else self._uneven.lowest_active(self._world)
        sent_buffers = self._module_buffers.start(src)
        for index, bucket in enumerate(self.buckets):
            bucket.wait()
            self.reducer.arrived(index)
        if header_work is not None:
            header_work.wait()
        self._recorder.mark(REDUCED)
        self.reducer.reset()
        if self._header.tensor.device.type == "cpu":
            self._note_kind(window)
        if self.drift is not None:
            self.drift.hear(self._header.told())
        if self.options is not None:
            self.options.hear(self._header.options())
        if self.sums is not None:
            self.sums.end_window(self._header.any_found())
        if not all(self._used) or self._num_dense < len(self._parameters):
            self._used = self._header.used_anywhere()
            for bucket in self.buckets:
                bucket.publish(self._used.__getitem__)
            for parameter, is_used in list(zip(self._parameters, self._used, strict=True))[self._num_dense :]:
                if is_used:
                    parameter.grad = sum_over_ranks(parameter.grad, parameter, self._transport, self._world.control)
        self._divide(window)
        for bucket in self.buckets:
            bucket.unpack()
        self._module_buffers.finish(sent_buffers)
        if self._uneven is not None:
            self._uneven.end_window()

    def _send_header(self, last: Bucket | None, carrier: SharedMemoryTransport | None) -> Work | None:
        """Beside the last bucket, if there is one; else in a call of its own, which is returned."""
        if last is None or carrier is None:
            return self._transport.all_reduce(self._header.tensor)
        carrier.take_along(self._header.tensor)
        last.launch()
        return None

    def _used_here(self) -> list[bool]:
        """For each parameter, whether it has a gradient on this rank; all buckets have been packed."""
        if self._num_dense == len(self._parameters) and all(bucket.is_full for bucket in self.buckets):
            return self._all_used
        return [parameter.grad is not None for parameter in self._parameters]

    def was_weighted(self) -> bool:
        """See `exchange.Exchange.was_weighted`."""
        return bool(self._header.kinds()[0]) if self._was_weighted is None else self._was_weighted

    def _note_kind(self, window: Window) -> None:
        """After the header has come. Collective where the kind has changed and a rank had no pass, which all know.

        Such a rank has done with what was left in `p.grad` as it would have been right for the kind before.
        """
        num_weighted, num_plain = self._header.kinds()
        if not num_weighted and not num_plain:
            return
        before, self._was_weighted = self._was_weighted, num_weighted > 0
        if before in (None, self._was_weighted) or num_weighted + num_plain == self._world.world_size:
            return
        wrong = torch.tensor([float(window.has_leftovers)], dtype=torch.float64, device=self._header.tensor.device)
        self._transport.all_reduce(wrong).wait()
        if wrong.item():
            raise UsageError(
                "ranks changed between loss.backward() and model.backward(loss, ...) where an earlier step's gradients "
                "are left in p.grad and a rank's share is empty: what is left counts otherwise for the two. Call "
                "zero_grad between them."
            )

    def conclude(self) -> None:
        """See `exchange.Exchange.conclude`. Options first: where they differ parameters may, too."""
        if self.options is not None:
            self.options.conclude(are_replicas_alike=self.drift is not None and self.drift.is_on)
        if self.drift is not None:
            self.drift.conclude()

    def learn_order(self, ready_order: Sequence[int]) -> None:
        """See `exchange.Exchange.learn_order`."""
        seen = [index for index in ready_order if index < self._num_dense]
        order = [*seen, *sorted(set(range(self._num_dense)) - set(seen), reverse=True)]
        agreed = torch.tensor(order, device="cpu")
        self._world.control.broadcast(agreed, 0).wait()
        layout = self._plan(agreed.tolist())
        if layout != self.layout:
            self._lay_out_again(layout)

    def _lay_out_again(self, layout: Layout) -> None:
        reduced = [parameter.grad for parameter in self._parameters]
        self._build(layout)
        for bucket in self.buckets:
            bucket.take(reduced)

    def set_hook(self, hook: CommHook) -> None:
        """See `exchange.Exchange.set_hook`."""
        self.hook = hook
        self._hooks = HookQueue(hook, self._world)
        self._policy = hook.suit(self._policy, self._header.tensor.device)
        self._build(self.layout)

    def set_uneven(self, uneven: Uneven | None) -> None:
        """See `exchange.Exchange.set_uneven`."""
        self._uneven = uneven
        if self.options is not None:
            self.options.notes.forget_calls()

    def unused(self) -> list[int]:
        """See `exchange.Exchange.unused`."""
        return [index for index, used in enumerate(self._used) if not used]

    def in_flight(self) -> list[int]:
        """See `exchange.Exchange.in_flight`."""
        return [i for i in range(len(self.buckets)) if self.reducer.state(i) is BucketState.REDUCING]

    def reset(self) -> None:
        """See `exchange.Exchange.reset`."""
        self.reducer = self._new_reducer()

    def announce(self) -> None:
        """See `exchange.Exchange.announce`: before the first collective of a window."""
        if self._uneven is not None:
            self._uneven.announce()

    def _execute(self, actions: Iterable[LaunchReduce], window: Window) -> None:
        for action in actions:
            if self._uneven is not None:
                self._uneven.announce_bucket()
            bucket = self.buckets[action.bucket]
            self._pack(bucket, window)
            bucket.launch(self._hooks, is_last=action.bucket == len(self.buckets) - 1)

    def _pack(self, bucket: Bucket, window: Window) -> None:
        self._recorder.mark(bucket.layout.index)
        self._make_room(bucket)
        divides_first = self._divides_first(bucket, is_weighted=window.kind is Kind.WEIGHTED)
        totals = None if self.looker is None or self.lanes is not None else self.looker.room_for_totals(bucket)
        bucket.pack(self._world.world_size if divides_first else 1.0, totals)
        if isinstance(window.weight_held, Tensor):
            # On a GPU a weight isn't read, so a window of weight 0 hasn't been recognised: contribute zeros.
            zero_where(window.weight_held == 0, [bucket.flat])
        if self._hooks is not None and window.kind is Kind.WEIGHTED:
            self._total_weight.divide(bucket.flat)
        if self.lanes is not None:
            self.lanes.add_to(bucket)
        if self.looker is not None:
            self.looker.look(bucket, totals)

    def _divides_first(self, bucket: Bucket, *, is_weighted: bool) -> bool:
        """Whether every rank divides by the number of ranks before the sum.

        Lanes are added first and divided after, so that it doesn't matter how many a rank has.
        """
        return bucket.divides_first and not is_weighted and self._hooks is None and self.lanes is None

    def _make_room(self, bucket: Bucket) -> None:
        """Before a bucket is packed; where memory is lent, take it from whoever had it."""

    def _divide(self, window: Window) -> None:
        # A rank whose share was empty knows only from the header which kind the others had.
        weighted = window.kind is Kind.WEIGHTED
        if window.kind is None:
            weighted = bool(self._header.tensor[1] > 0)
        num_ranks = float(self._world.world_size)
        divisor: float | Tensor = num_ranks if self.lanes is None else float(self.lanes.num_lanes)
        if weighted:
            divisor = self._header.divisor()
        elif self._uneven is not None and not self._uneven.divide_by_initial_world_size:
            divisor = self._header.num_plain()
        for bucket in self.buckets:
            if self._hooks is not None and weighted:
                continue  # see `_pack`
            is_averaged = self._hooks is not None or self._divides_first(bucket, is_weighted=weighted)
            by = divisor / num_ranks if is_averaged else divisor
            if isinstance(by, Tensor):
                bucket.reduced.div_(by.to(bucket.reduced.device))
            elif by != 1.0:
                bucket.reduced.div_(by)
        for parameter in self._parameters[self._num_dense :]:
            if parameter.grad is not None:
                parameter.grad.div_(divisor)

    def __repr__(self) -> str:
        return f"<BucketExchange of {len(self._parameters)} parameters, {self.reducer!r}>"
