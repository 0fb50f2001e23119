"""The exchange of a model whose gradients are, all or in part, divided over the ranks by sharded optimizers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenstep.errors import EvenstepError, UsageError
from evenstep.heap import give_back_freed_memory
from evenstep.replica.arriving import Arrival
from evenstep.replica.bucket import Bucket
from evenstep.replica.bucket_exchange import BucketExchange
from evenstep.replica.comm_hook import CommHook, HookQueue
from evenstep.replica.host_copy import HostCopy
from evenstep.replica.layout import BucketLayout, Layout, ParameterSpec, Sharding, plan_layout
from evenstep.replica.sharded_bucket import ShardedBucket
from evenstep.replica.torch_interface import compilation_is_in_use
from evenstep.replica.trained import Trained
from evenstep.replica.uneven import Uneven
from evenstep.replica.weighting import Window
from evenstep.transport.base import Transport
from evenstep.transport.common import is_in_common

_NUM_LENT = 2  # buckets that may be under way at once where their memory is lent


class Follower(Protocol):
    """Who keeps something beside each shard, such as an optimizer's state.

    Attributes:
        owner: As in `Sharding`.
    """

    owner: int

    def let_go(self) -> Any:
        """Collective: the layout is about to change. What is returned comes back in `take_up`."""

    def forget(self) -> None:
        """Between these two: hold nothing of the buckets any more, whose memory is needed."""

    def take_up(self, kept: Any) -> None:
        """Collective: the layout has changed."""


class ShardedExchange(BucketExchange):
    """`BucketExchange`, but buckets with a sharding are reduce-scattered, and their gradients hidden.

    Args:
        trained: As in `BucketExchange`.
        shardings: By index of the parameter, how it is divided, and the number of its parameter group.
        hook: Averages buckets instead of the transport, or None.
    """

    def __init__(
        self, trained: Trained, shardings: Mapping[int, tuple[Sharding, int]], *, hook: CommHook | None
    ) -> None:
        self._shardings = dict(shardings)
        self._followers: list[weakref.ref[Follower]] = []
        self._lent: dict[tuple[object, ...], Tensor] = {}
        self._borrowers: dict[tuple[object, ...], ShardedBucket] = {}
        self._order: Sequence[int] = ()
        self._host_copy = HostCopy(trained.world, trained.transport)
        self._reduced: list[Tensor | None] = [
            parameter.grad for parameter in trained.parameters
        ]  # what new buckets take
        self._seen: set[int] = set()  # parameters of which reading is noticed
        self._is_forward_seen = False  # whether the model has run since the last step
        self._unread: list[nn.Parameter] = []  # whose values still were on their way when the backward pass began
        self._pass_begins: Callable[[], object] | None = None
        super().__init__(trained)
        if hook is not None:
            self.set_hook(hook)
        trained.world.before_close.append(_weak_call(self))

    @property
    def shardings(self) -> Mapping[int, tuple[Sharding, int]]:
        """By index of the parameter, how it is divided, and the number of its parameter group."""
        return self._shardings

    @property
    def sharded_buckets(self) -> list[ShardedBucket]:
        """The buckets that are divided."""
        return [bucket for bucket in self.buckets if isinstance(bucket, ShardedBucket)]

    def follow(self, follower: Follower) -> None:
        """From now on tell somebody when the layout changes, for as long as it lives."""
        self._followers.append(weakref.ref(follower))

    def owners_alive(self) -> set[int]:
        """Owners whose followers have not gone."""
        return {follower.owner for follower in (each() for each in self._followers) if follower is not None}

    def reshard(self, shardings: Mapping[int, tuple[Sharding, int]]) -> None:
        """Collective, between two windows: divide other parameters, or divide them otherwise."""
        self._shardings = dict(shardings)
        self._specs = [self._describe(index) for index in range(self._num_dense)]
        self._lay_out_again(self._plan(self._order))

    # ------------------------------------------------------------------ what BucketExchange asks

    def _describe(self, index: int) -> ParameterSpec:
        spec = super()._describe(index)
        if index not in self._shardings:
            return spec
        sharding, group = self._shardings[index]
        return replace(spec, sharding=sharding, group=group)

    def _plan(self, order: Sequence[int]) -> Layout:
        self._order = order
        return plan_layout(self._specs, order, self._policy, self._world.world_size)

    def _build(self, layout: Layout) -> None:
        self._lent, self._borrowers = {}, {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for bucket in layout.buckets:
            if bucket.sharding is not None and bucket.sharding.frees_gradients:
                key = (bucket.dtype, bucket.device)
                sizes[key] = max(sizes.get(key, 0), bucket.numel)
        self._sizes_lent = sizes
        shares = any(self._is_shared(bucket) for bucket in layout.buckets)
        try:
            super()._build(layout)
        except BaseException:
            if shares:
                self._leave_common_memory()
            raise
        self.tell_of_early(self._pass_begins)
        if shares:
            self._host_copy.close()
        give_back_freed_memory()  # the parameters', which have moved to their buckets

    def _is_shared(self, layout: BucketLayout) -> bool:
        """Whether a host has one copy of a bucket's parameters."""
        return layout.sharding is not None and layout.sharding.shares_parameters and self._world.world_size > 1

    def _leave_common_memory(self) -> None:
        """There was none for some bucket: nobody steps these parameters for all, so each rank has its own again."""
        for parameter in self._parameters:
            parameter.grad = None  # it may lie in a bucket that has gone
            if is_in_common(parameter):
                parameter.data = parameter.detach().clone()

    def _build_bucket(self, layout: BucketLayout, allocator: Transport) -> Bucket:
        bucket = self._build_empty(layout, allocator)
        bucket.take(self._reduced)
        for slot in layout.slots:
            self._reduced[slot.parameter] = None
        return bucket

    def _build_empty(self, layout: BucketLayout, allocator: Transport) -> Bucket:
        if layout.sharding is None:
            return super()._build_bucket(layout, allocator)
        lent = None
        if layout.sharding.frees_gradients and self._world.world_size > 1:
            key = (layout.dtype, layout.device, layout.index % _NUM_LENT)
            if key not in self._lent:
                numel = self._sizes_lent[layout.dtype, layout.device]
                self._lent[key] = allocator.allocate(numel, dtype=layout.dtype, device=layout.device)
            lent = self._lent[key]
        values = None
        if self._is_shared(layout):  # one by one: what parameters leave is free before the next has its memory
            values = self._host_copy.allocate(layout.numel, self._parameters[layout.slots[0].parameter].dtype)
        # Shared memory is written by the owners themselves: a gather there is done when all have come to it.
        is_overlapped = layout.sharding.overlaps_gather and values is None and self._transport.name != "shared memory"
        return ShardedBucket(
            layout,
            self._parameters,
            self._names,
            self._transport,
            allocator=allocator,
            lent=lent,
            values=values,
            host_copy=None if values is None else self._host_copy,
            seen=self._seen if is_overlapped and self._world.world_size > 1 else None,
        )

    def _make_room(self, bucket: Bucket) -> None:
        if not isinstance(bucket, ShardedBucket) or not bucket.is_lent:
            return
        key = (bucket.layout.dtype, bucket.layout.device, bucket.layout.index % _NUM_LENT)
        before = self._borrowers.get(key)
        if before is not None and before is not bucket:
            before.wait()
        self._borrowers[key] = bucket

    def _lay_out_again(self, layout: Layout) -> None:
        self.arrive()
        shared = [bucket for bucket in self.sharded_buckets if bucket.host_copy is not None]
        if shared:  # one rank moves them for all, and would miss what another has put elsewhere
            self._host_copy.open(next((name for each in shared if (name := each.replaced())), None))
            shared.clear()  # or they would all live until this ends
        followers = [follower for follower in (each() for each in self._followers) if follower is not None]
        kept = [(follower, follower.let_go()) for follower in followers]
        for follower in followers:
            follower.forget()
        # Bucket by bucket: memory would else hold all gradients three times for a moment, and all parameters twice.
        reduced: list[Tensor | None] = [parameter.grad for parameter in self._parameters]
        before, self.buckets, self._borrowers = [*self.buckets], [], {}
        while before:
            bucket = before.pop()
            if isinstance(bucket, ShardedBucket):
                for slot, whole in zip(bucket.layout.slots, bucket.whole_gradients(), strict=True):
                    reduced[slot.parameter] = whole
            for parameter in bucket.parameters:
                parameter.grad = None
            del bucket
        self._reduced = reduced
        self._build(layout)
        for follower, state in kept:
            follower.take_up(state)

    # ------------------------------------------------------------------ parameters on their way: see `arriving`

    @property
    def num_arriving(self) -> int:
        """Buckets whose parameters' new values nobody has waited for."""
        return sum(each.is_under_way for each in self._arrivals())

    def _arrivals(self) -> list[Arrival]:
        return [bucket.arrival for bucket in self.sharded_buckets if bucket.arrival is not None]

    def arrive(self) -> None:
        """Wait for all values that are still on their way."""
        for arrival in self._arrivals():
            arrival.stop_listening()
            arrival.arrive()

    def before_forward(self) -> None:
        """The model is about to run."""
        if not torch.is_grad_enabled() or compilation_is_in_use():
            self.arrive()  # what isn't trained may take quicker ways where nobody asks for parameters
            return
        self._is_forward_seen, self._unread = True, []
        for arrival in self._arrivals():
            arrival.listen()

    def _end_of_reading(self) -> None:
        """A backward pass begins: what its forward pass hasn't read isn't read any more."""
        self._unread = []
        for bucket in self.sharded_buckets:
            if bucket.arrival is not None:
                bucket.arrival.stop_listening()
                if bucket.arrive() and self._is_forward_seen:
                    self._unread += [parameter for parameter in bucket.parameters if parameter.grad is None]
        self._is_forward_seen = False

    def _validate_unread(self) -> None:
        unread, self._unread = self._unread, []
        found = next((parameter for parameter in unread if parameter.grad is not None), None)
        if found is not None:
            name = self._names[next(i for i, parameter in enumerate(self._parameters) if parameter is found)]
            raise UsageError(
                f"rank {self._world.rank}: parameter {name!r} has a gradient, and nobody was seen to read it since the "
                f"last step, whose result was still on its way: old values have been used. A CUDA graph reads so. Pass "
                f"overlap_gather=False to ShardedOptimizer."
            )

    # ------------------------------------------------------------------ the seam

    def tell_of_early(self, pass_begins: Callable[[], object] | None) -> None:
        """Have somebody told of a gradient that comes where one is hidden, and no pass has begun."""
        self._pass_begins = pass_begins
        for bucket in self.sharded_buckets:
            bucket.pass_begins = pass_begins

    def open_window(self, *, is_running: bool) -> None:
        """See `Exchange.open_window`."""
        self._end_of_reading()
        for bucket in self.sharded_buckets:
            bucket.set_aside(is_running=is_running)

    def cancel_window(self) -> None:
        """See `Exchange.cancel_window`."""
        for bucket in self.sharded_buckets:
            bucket.put_back(add=False)

    def finish(self, window: Window) -> None:
        """See `Exchange.finish`; of a divided gradient every rank has its shard of the mean."""
        if self._unread:
            self._validate_unread()
        super().finish(window)
        for bucket in self.sharded_buckets:
            bucket.put_back(add=True)

    def set_hook(self, hook: CommHook) -> None:
        """See `Exchange.set_hook`; in a world of one nothing is handed over."""
        if self._world.world_size == 1:
            return
        self.hook = hook
        self._hooks = HookQueue(hook, self._world)
        self._policy = hook.suit(self._policy, self._header.tensor.device)
        self._lay_out_again(self.layout)

    def set_uneven(self, uneven: Uneven | None) -> None:
        """See `Exchange.set_uneven`.

        Raises:
            UsageError: A rank that has left could not take part in the others' optimizer steps.
        """
        if uneven is not None and not all(bucket.is_replicated for bucket in self.sharded_buckets):
            raise UsageError(
                "join with a ShardedOptimizer: a rank that has left its loop would be missing in the others' steps. "
                "Use evenstep.DataLoader, whose ranks have equally many batches (some of them empty)."
            )
        super().set_uneven(uneven)


def _weak_call(exchange: ShardedExchange) -> Callable[[], None]:
    """Waits for what an exchange has under way, if that is still there: peers need this rank's part of it."""
    reference = weakref.ref(exchange)

    def arrive() -> None:
        there = reference()
        if there is not None:
            # A peer that has gone is told of by who needs it; this rank only ends.
            with contextlib.suppress(EvenstepError, RuntimeError):
                there.arrive()

    return arrive
