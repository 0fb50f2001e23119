"""The exchange of a model with sharded optimizers: all or some of its gradients are reduce-scattered."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.compat.c_library.heap import give_back_freed_memory
from evenstep.replica.gradients.buckets.bucket import Bucket
from evenstep.replica.gradients.buckets.layout import BucketLayout, Layout, ParameterSpec, Sharding
from evenstep.replica.gradients.engine import Engine
from evenstep.replica.gradients.exchange.all_reduce import AllReduceExchange
from evenstep.replica.gradients.window import SavedGradients, Turn, drop_grads
from evenstep.replica.join import Uneven
from evenstep.replica.sharded.bucket import Loan, ShardedBucket
from evenstep.transport.core.transport import Transport

_NUM_LENT = 2  # lent buckets that may be in flight at once


class Follower(Protocol):
    """An object with values for each shard, such as an optimizer with its state.

    Attributes:
        owner: Number of the optimizer, as in `Sharding`.
    """

    owner: int

    def gather_state(self) -> Any:
        """Collective: return the state, because the layout is about to change. `load_state` receives it."""

    def release(self) -> None:
        """Drop references to the old buckets, whose memory is needed.

        Called between `gather_state` and `load_state`.
        """

    def load_state(self, kept: Any) -> None:
        """Collective: load the state in the new layout."""


class ShardedExchange(AllReduceExchange):
    """An `AllReduceExchange` that reduce-scatters buckets with a sharding, and sets their `p.grad` to placeholders.

    Args:
        engine: The model's engine. This exchange replaces the engine's, and keeps its communication hook.
        shardings: The sharding and the number of the parameter group, by index of the parameter.

    Attributes:
        shardings: The present shardings, as given here or to `reshard`.
        followers: Followers by owner. Their state is moved to each new layout, as long as they live.
    """

    def __init__(self, engine: Engine, shardings: Mapping[int, tuple[Sharding, int]]) -> None:
        self.shardings = shardings
        self._engine = weakref.ref(engine)
        self.followers: weakref.WeakValueDictionary[int, Follower] = weakref.WeakValueDictionary()
        self._loans: dict[tuple[object, ...] | None, Loan] = {}  # by place, for the next bucket at the same place
        self._reduced: list[Tensor | None] = [p.grad for p in engine.parameters]  # gradients that new buckets take over
        super().__init__(engine.trained)
        give_back_freed_memory()  # the old memory of parameters, which have moved to their buckets
        if engine.exchange.hook is not None:
            self.set_hook(engine.exchange.hook)

    @property
    def sharded_buckets(self) -> list[ShardedBucket]:
        """The buckets that are sharded."""
        return [bucket for bucket in self.buckets if isinstance(bucket, ShardedBucket)]

    def reshard(self, shardings: Mapping[int, tuple[Sharding, int]]) -> None:
        """Collective, between two windows: shard other parameters, or shard them in another way."""
        self.shardings = shardings
        self._lay_out_again(self._plan(self.order))

    # ------------------------------------------------------------------ called by `AllReduceExchange`

    def _describe(self, index: int) -> ParameterSpec:
        sharding, group = self.shardings.get(index, (None, 0))
        return replace(super()._describe(index), sharding=sharding, group=group)

    def _build_bucket(self, layout: BucketLayout, allocator: Transport) -> Bucket:
        if layout.sharding is None:
            bucket = super()._build_bucket(layout, allocator)
        else:
            loan = self._lend(layout, allocator)
            bucket = ShardedBucket(
                layout,
                self._parameters,
                self._names,
                self._transport,
                allocator=allocator,
                engine=self._engine,
                loan=loan,
            )
            if loan is not None:
                self._loans[_place(layout)] = Loan(loan.memory, bucket)
        bucket.take(self._reduced)
        for slot in layout.slots:
            self._reduced[slot.parameter] = None
        return bucket

    def _lend(self, layout: BucketLayout, allocator: Transport) -> Loan | None:
        """Memory for a bucket that has its gradients only during the exchange; None: the bucket has its own memory."""
        if (place := _place(layout)) is None:
            return None
        if place not in self._loans:
            longest = max(each.numel for each in self.layout.buckets if _place(each) == place)
            memory = allocator.allocate(longest, dtype=layout.dtype, device=layout.device)
            self._loans[place] = Loan(memory, None)
        return self._loans[place]

    def _lay_out_again(self, layout: Layout) -> None:
        followers = [*self.followers.values()]
        kept = [follower.gather_state() for follower in followers]
        for follower in followers:
            follower.release()
        # Work bucket by bucket: else memory would briefly hold all gradients three times, and all parameters twice.
        self._reduced = [parameter.grad for parameter in self._parameters]
        before, self.buckets, self._loans = [*self.buckets], [], {}
        while before:
            self._take_apart(before.pop())
        self._build(layout)
        give_back_freed_memory()
        for follower, state in zip(followers, kept, strict=True):
            follower.load_state(state)

    def _take_apart(self, bucket: Bucket) -> None:
        if isinstance(bucket, ShardedBucket):
            for index, whole in bucket.whole_gradients().items():
                self._reduced[index] = whole
        drop_grads(bucket.parameters)

    # ------------------------------------------------------------------ the seam

    @property
    def _launches_at_end(self) -> bool:
        """See [Note: one order]."""
        engine = self._engine()
        peers_may_be_elsewhere = self.turn is Turn.BEHIND or (engine is not None and engine.shares_statistics)
        return super()._launches_at_end or (bool(self._loans) and peers_may_be_elsewhere)

    def open_window(self, saved: SavedGradients, *, is_running: bool) -> None:
        """See `Exchange.open_window`."""
        for bucket in self.sharded_buckets:
            bucket.open_window(saved, is_running=is_running)

    def set_uneven(self, uneven: Uneven | None) -> None:
        """See `Exchange.set_uneven`.

        Raises:
            UsageError: `uneven` isn't None: a rank that has left couldn't take part in the others' optimizer steps.
        """
        if uneven is not None and self.sharded_buckets:
            raise UsageError(
                "join with a ShardedOptimizer: a rank that has left its loop would be missing in the others' steps. "
                "Use evenstep.DataLoader, whose ranks have equally many batches (some of them empty)."
            )
        super().set_uneven(uneven)


def _place(layout: BucketLayout) -> tuple[object, ...] | None:
    """The key of a bucket's place: buckets of one place use the same memory in turn.

    None: the bucket has its own memory.
    """
    is_lent = layout.sharding is not None and layout.sharding.frees_gradients
    return (layout.dtype, layout.device, layout.index % _NUM_LENT) if is_lent else None


def validate_shardable(engine: Engine, indices: Iterable[int]) -> None:
    """Raise if the gradients of some parameters can't be sharded now. Local.

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
    """Shard the gradients of some parameters over the ranks from now on.

    Collective, between two windows: every rank calls this, with the same arguments.

    Args:
        engine: The wrapped model's engine.
        shardings: The sharding and the number of the parameter group, by index of the parameter.

    Raises:
        UsageError: Gradients have been added since the last reduction.
        ConfigurationError: A parameter has sparse gradients.
    """
    validate_shardable(engine, shardings)
    exchange = engine.exchange
    if isinstance(exchange, ShardedExchange):
        exchange.reshard(shardings)
    else:
        exchange = ShardedExchange(engine, shardings)
    engine.replace_exchange(exchange)
    return exchange
