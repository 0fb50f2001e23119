"""From a replicated exchange to a sharded one: what `ShardedOptimizer` and `fuse` ask of an engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from evenstep.errors import ConfigurationError, UsageError
from evenstep.replica.bucket_exchange import BucketExchange
from evenstep.replica.engine import Engine
from evenstep.replica.layout import Sharding
from evenstep.replica.sharded_exchange import ShardedExchange


def validate_dividable(engine: Engine, indices: Iterable[int]) -> None:
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


def divide_gradients(engine: Engine, shardings: Mapping[int, tuple[Sharding, int]]) -> ShardedExchange:
    """Divide the gradients of some parameters over the ranks from now on.

    Collective, between two windows: every rank calls this, with the same arguments.

    Args:
        engine: Of the wrapped model.
        shardings: By index of the parameter, how, and the number of its parameter group.

    Raises:
        UsageError: Gradients have been added since the last reduction.
        ConfigurationError: A parameter has sparse gradients.
    """
    validate_dividable(engine, shardings)
    before = engine.exchange
    if isinstance(before, ShardedExchange):
        before.reshard(shardings)
        made = before
    else:
        hook = before.hook if isinstance(before, BucketExchange) else None
        made = ShardedExchange(engine.trained, shardings, hook=hook)
    engine.replace_exchange(made)
    this = weakref.WeakMethod(engine.gradient_came)
    made.tell_of_early(lambda: None if (tell := this()) is None else tell())
    return made
