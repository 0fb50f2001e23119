"""The exchange of a model with sharded optimizers: gradients are reduce-scattered, all or some of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.c_library.heap import give_back_freed_memory
from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.buckets.comm_hooks import CommHook, HookQueue
from evenstep.replica.gradients.buckets.layout import BucketLayout, Layout, ParameterSpec, Sharding, plan_layout
from evenstep.replica.gradients.engine import Engine
from evenstep.replica.gradients.exchange.all_reduce import AllReduceExchange
from evenstep.replica.gradients.exchange.base import Trained
from evenstep.replica.gradients.window import SavedGradients, Window
from evenstep.replica.join import Uneven
from evenstep.replica.sharded.bucket import ShardedBucket
from evenstep.transport.core.transport import Transport

_NUM_LENT = 2  # buckets that may be under way at once where their memory is lent


class Follower(Protocol):
    """Keeps values beside each shard, such as an optimizer's state.

    Attributes:
        owner: As in `Sharding`.
    """

    owner: int

    def gather_state(self) -> Any:
        """Collective: return the state, because the layout is about to change; `load_state` gets it back."""

    def release(self) -> None:
        """Release the old buckets, whose memory is needed, between `gather_state` and `load_state`."""

    def load_state(self, kept: Any) -> None:
        """Collective: take the state back, in the new layout."""


class ShardedExchange(AllReduceExchange):
    """`AllReduceExchange` whose buckets with a sharding are reduce-scattered; placeholders stand in `p.grad`.

    Args:
        trained: As in `AllReduceExchange`.
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
        self._reduced: list[Tensor | None] = [
            parameter.grad for parameter in trained.parameters
        ]  # what new buckets take
        self._pass_begins: Callable[[], bool] | None = None
        super().__init__(trained)
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
        """Have a follower's state follow the layout, for as long as the follower lives."""
        self._followers.append(weakref.ref(follower))

    def owners_alive(self) -> set[int]:
        """Return the owners whose followers are alive."""
        return {follower.owner for follower in (each() for each in self._followers) if follower is not None}

    def reshard(self, shardings: Mapping[int, tuple[Sharding, int]]) -> None:
        """Collective, between two windows: divide other parameters, or divide them otherwise."""
        self._shardings = dict(shardings)
        self._specs = [self._describe(index) for index in range(self._num_dense)]
        self._lay_out_again(self._plan(self._order))

    # ------------------------------------------------------------------ hooks of AllReduceExchange

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
        super()._build(layout)
        self.watch_early_gradients(self._pass_begins)
        give_back_freed_memory()  # the parameters', which have moved to their buckets

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
        return ShardedBucket(
            layout,
            self._parameters,
            self._names,
            self._transport,
            allocator=allocator,
            lent=lent,
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
        followers = [follower for follower in (each() for each in self._followers) if follower is not None]
        kept = [(follower, follower.gather_state()) for follower in followers]
        for follower in followers:
            follower.release()
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
            follower.load_state(state)

    # ------------------------------------------------------------------ the seam

    def watch_early_gradients(self, pass_begins: Callable[[], bool] | None) -> None:
        """Call back for a gradient that comes to a placeholder before a pass has begun.

        Args:
            pass_begins: Returns whether it has begun one.
        """
        self._pass_begins = pass_begins
        for bucket in self.sharded_buckets:
            bucket.pass_begins = pass_begins

    def open_window(self, saved: SavedGradients, *, is_running: bool) -> None:
        """See `Exchange.open_window`."""
        for bucket in self.sharded_buckets:
            bucket.open_window(saved, is_running=is_running)

    def finish(self, window: Window) -> None:
        """See `Exchange.finish`; of a divided gradient every rank has its shard of the mean."""
        super().finish(window)
        for bucket in self.sharded_buckets:
            bucket.close_window()

    def reset(self) -> None:
        """See `Exchange.reset`."""
        super().reset()
        for bucket in self.sharded_buckets:
            bucket.close_window()

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
        if uneven is not None and self.sharded_buckets:
            raise UsageError(
                "join with a ShardedOptimizer: a rank that has left its loop would be missing in the others' steps. "
                "Use evenstep.DataLoader, whose ranks have equally many batches (some of them empty)."
            )
        super().set_uneven(uneven)


def validate_shardable(engine: Engine, indices: Iterable[int]) -> None:
    """Raise if the gradients of some parameters can't be divided now. Local.

    Raises:
        UsageError: Gradients have been added since the last reduction.
        ConfigurationError: A parameter has sparse gradients.
    """
    rank = engine.world.rank
    if engine.is_in_pass or engine.is_in_window:
        raise UsageError(
            f"rank {rank}: a sharded optimizer was made, or given parameters, between a backward pass and the "
            f"reduction of its gradients. Do that before the training loop."
        )
    sparse = [engine.names[index] for index in indices if index >= engine.num_dense]
    if sparse:
        raise ConfigurationError(
            f"parameter {sparse[0]!r} has sparse gradients, which aren't divided over ranks. Build the embedding "
            f"with sparse=False, or give the parameter to an optimizer of its own, such as torch.optim.SparseAdam."
        )


def shard_gradients(engine: Engine, shardings: Mapping[int, tuple[Sharding, int]]) -> ShardedExchange:
    """Divide the gradients of some parameters over the ranks from now on.

    Collective, between two windows: every rank calls this, with the same arguments.

    Args:
        engine: Of the wrapped model.
        shardings: By index of the parameter, how, and the number of its parameter group.

    Raises:
        UsageError: Gradients have been added since the last reduction.
        ConfigurationError: A parameter has sparse gradients.
    """
    validate_shardable(engine, shardings)
    before = engine.exchange
    if isinstance(before, ShardedExchange):
        before.reshard(shardings)
        made = before
    else:
        hook = before.hook
        made = ShardedExchange(engine.trained, shardings, hook=hook)
    engine.replace_exchange(made)
    this = weakref.ref(engine)

    def pass_begins() -> bool:
        engine = this()
        if engine is None:
            return False
        engine.gradient_came()
        return engine.is_in_pass

    made.watch_early_gradients(pass_begins)
    return made
