"""The exchange of a model whose gradients are, all or in part, divided over the ranks by sharded optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.health.telemetry import Recorder
from evenstep.heap import give_back_freed_memory
from evenstep.replica.bucket import Bucket
from evenstep.replica.comm_hook import CommHook, HookQueue
from evenstep.replica.exchange import BucketExchange
from evenstep.replica.host_copy import HostCopy
from evenstep.replica.layout import BucketLayout, BucketPolicy, Layout, ParameterSpec, Sharding, plan_layout
from evenstep.replica.module_buffers import BufferBroadcast
from evenstep.replica.sharded_bucket import ShardedBucket
from evenstep.replica.uneven import Uneven
from evenstep.replica.weighting import Window
from evenstep.transport.base import Transport
from evenstep.world import World

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
        names: As in `BucketExchange`, and so up to `recorder`.
        parameters: As in `BucketExchange`.
        num_dense: As in `BucketExchange`.
        world: As in `BucketExchange`.
        policy: As in `BucketExchange`.
        module_buffers: As in `BucketExchange`.
        recorder: As in `BucketExchange`.
        shardings: By index of the parameter, how it is divided, and the number of its parameter group.
        hook: Averages buckets instead of the transport, or None.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        num_dense: int,
        world: World,
        policy: BucketPolicy,
        module_buffers: BufferBroadcast | None,
        recorder: Recorder,
        transport: Transport,
        shardings: Mapping[int, tuple[Sharding, int]],
        *,
        hook: CommHook | None,
    ) -> None:
        self._shardings = dict(shardings)
        self._followers: list[weakref.ref[Follower]] = []
        self._lent: dict[tuple[object, ...], Tensor] = {}
        self._borrowers: dict[tuple[object, ...], ShardedBucket] = {}
        self._order: Sequence[int] = ()
        self._host_copy = HostCopy(world, transport)
        self._in_common: dict[int, Tensor] = {}
        self._reduced: list[Tensor | None] = [parameter.grad for parameter in parameters]  # what new buckets take
        super().__init__(names, parameters, num_dense, world, policy, module_buffers, recorder, transport)
        if hook is not None:
            self.set_hook(hook)

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
        self._in_common = self._allocate_in_common(layout)
        super()._build(layout)
        if self._in_common:
            self._host_copy.close()
            self._in_common = {}
        give_back_freed_memory()  # the parameters', which have moved to their buckets

    def _allocate_in_common(self, layout: Layout) -> dict[int, Tensor]:
        """Collective: by number of the bucket, memory for parameters of which a host has one copy."""
        sizes = {
            bucket.index: (bucket.numel, self._parameters[bucket.slots[0].parameter].dtype)
            for bucket in layout.buckets
            if bucket.sharding is not None and bucket.sharding.shares_parameters and self._world.world_size > 1
        }
        return dict(zip(sizes, self._host_copy.allocate(list(sizes.values())), strict=True)) if sizes else {}

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
        values = self._in_common.get(layout.index)
        return ShardedBucket(
            layout,
            self._parameters,
            self._names,
            self._transport,
            allocator=allocator,
            lent=lent,
            values=values,
            host_copy=None if values is None else self._host_copy,
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
        shared = [bucket for bucket in self.sharded_buckets if bucket.host_copy is not None]
        if shared:  # one rank moves them for all, and would miss what another has put elsewhere
            self._host_copy.open(next((name for each in shared if (name := each.replaced())), None))
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

    # ------------------------------------------------------------------ the seam

    def open_window(self) -> None:
        """See `Exchange.open_window`."""
        for bucket in self.sharded_buckets:
            bucket.set_aside()

    def cancel_window(self) -> None:
        """See `Exchange.cancel_window`."""
        for bucket in self.sharded_buckets:
            bucket.put_back(add=False)

    def finish(self, window: Window) -> None:
        """See `Exchange.finish`; of a divided gradient every rank has its shard of the mean."""
        super().finish(window)
        for bucket in self.sharded_buckets:
            bucket.put_back(add=True)

    def set_hook(self, hook: CommHook) -> None:
        """See `Exchange.set_hook`; in a world of one nothing is handed over."""
        if self._world.world_size == 1:
            return
        self.hook = hook
        self._hooks = HookQueue(hook)
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
