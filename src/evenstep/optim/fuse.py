"""A plain optimizer's step over few long tensors instead of many short ones."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn, optim

from evenstep import checks
from evenstep.coordination.agreement import validate_on_all_ranks
from evenstep.errors import ConfigurationError, UsageError
from evenstep.optim import arguments
from evenstep.optim.consistency import OnTheWay, abort_peers
from evenstep.optim.kinds import is_elementwise, validate_kind, validate_optimizer
from evenstep.optim.sharded.base import PartitionedOptimizer, without_state
from evenstep.optim.sharded.element_wise import ElementWisePartition
from evenstep.replica.gradients.buckets.layout import BucketPolicy, ParameterSpec, Sharding, plan_layout
from evenstep.replica.gradients.engine import Engine
from evenstep.replica.sharded.bucket import ShardedBucket
from evenstep.replica.sharded.exchange import Follower, ShardedExchange, shard_gradients, validate_shardable
from evenstep.replica.wrapper.distributed import DistributedDataParallel
from evenstep.transport.local import LocalTransport


def fuse(optimizer: optim.Optimizer, model: nn.Module | None = None) -> FlatOptimizer:
    """An optimizer that does the same as another one, over parameters that lie side by side in memory.

        optimizer = evenstep.fuse(torch.optim.AdamW(model.parameters(), lr=3e-4), model)

    Where the class has a fused step, and `fused` and `foreach` aren't set, that is used. State, parameter groups and
    hyper-parameters are taken over; schedulers made for the other optimizer act on this one. Don't step the other one
    any more. State dicts load into either.

    With a model the ranks compare what they were given; options only where replicas are meant to be alike, as they are
    unless the model was wrapped with `compare_every=0`.

    Args:
        optimizer: An element-wise optimizer of torch's: SGD, AdamW, ...
        model: The `evenstep.DistributedDataParallel` whose parameters these are. Given one, gradients are stepped where
            they arrive (and this is collective: every rank calls it, between a step and the next backward pass);
            without, each step copies them together.

    Raises:
        ConfigurationError: The optimizer's step isn't known to be element-wise, or a parameter isn't the model's. Given
            a model, raised on all ranks if it is so on one.
        UsageError: Gradients have been added since they were last averaged. The same.
        MismatchError: The ranks were given different optimizers or options. Raised on all of them.
    """
    return FlatOptimizer(optimizer, model)


class FlatOptimizer(PartitionedOptimizer):
    """What `fuse` makes; its arguments are those of `fuse`."""

    def __init__(self, optimizer: optim.Optimizer, model: nn.Module | None = None) -> None:
        kind = type(optimizer)
        with abort_peers(optimizer if model is None else model):
            if model is not None and not isinstance(model, nn.Module):
                raise checks.refuse("fuse: model", model, "the module whose parameters these are, or None")
        self.model = model if isinstance(model, DistributedDataParallel) else None
        if self.model is None:
            _validate(optimizer)
        else:
            wrapped = self.model
            validate_on_all_ranks(OnTheWay(wrapped.engine), "fuse", lambda: _facts_of(optimizer, wrapped))
        self._kind = kind
        super().__init__(optimizer.param_groups, optimizer.defaults)
        saved = optimizer.state_dict()
        self.param_groups = optimizer.param_groups  # the list itself, which schedulers change
        replicated = self.model if self.model is not None and self.model.world.world_size > 1 else None
        parameters: Sequence[Any] = self._all_parameters() if replicated is None else replicated.engine.parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._names = list(map(str, range(len(parameters)))) if replicated is None else replicated.engine.names
        self._rank = 0 if replicated is None else replicated.world.rank
        buckets: ShardedExchange | LocalBuckets
        if replicated is None:
            buckets = LocalBuckets(parameters, self._groups_by_index())
        else:
            buckets = self._of_model(replicated)
        self.state = without_state()  # type: ignore[assignment]
        owner = next(iter(buckets.shardings.values()))[0].owner if replicated is None else self._owner
        # Of the defaults, those that are arguments: some are what a class has derived from them.
        given = {k: v for k, v in optimizer.defaults.items() if k in inspect.signature(kind).parameters}
        self._defaults_given = given
        self._partition = ElementWisePartition(
            buckets, owner, kind, given, lambda: self.param_groups, None, master=False
        )
        self.load_state_dict(saved)

    def _of_model(self, model: DistributedDataParallel) -> ShardedExchange:
        others = _shardings_of(model.engine)
        groups = self._groups_by_index()
        self._owner = 1 + max((sharding.owner for sharding, _ in others.values()), default=-1)
        sharding = Sharding(self._owner, is_replicated=True)
        return shard_gradients(
            model.engine, {**others, **{index: (sharding, group) for index, group in groups.items()}}
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As in torch. Schedulers made for the other optimizer go on acting on this one."""
        shared = self.param_groups
        super().load_state_dict(state_dict)
        shared[:] = self.param_groups
        self.param_groups = shared

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, until the optimizer is fused.

        Raises:
            ConfigurationError: It is fused.
        """
        if self._partition is not None:
            raise ConfigurationError("add_param_group: add groups to the plain optimizer, and fuse it then.")
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"<Flat{self._kind.__name__}, {len(self._all_parameters())} parameters>"


def _validate(optimizer: optim.Optimizer) -> None:
    validate_optimizer("fuse: optimizer", optimizer)
    kind = type(optimizer)
    validate_kind(kind)
    if isinstance(optimizer, PartitionedOptimizer) or not is_elementwise(kind):
        raise ConfigurationError(
            f"fuse: {kind.__name__} isn't known to change each element by its own gradient alone, so it can't step "
            f"parameters that lie together. Use it as it is."
        )


def _facts_of(optimizer: optim.Optimizer, model: DistributedDataParallel) -> dict[str, Any]:
    """What must be equal on all ranks that fuse an optimizer over a model's parameters.

    Raises:
        ConfigurationError: It can't be fused, or a parameter isn't the model's, or is another optimizer's.
        UsageError: Gradients have been added since the last reduction.
    """
    _validate(optimizer)
    if model.is_divided:
        raise UsageError(
            "fuse: the model is divided over ranks, and has no buckets to step over. Give the optimizer torch's own "
            "fused=True or foreach=True."
        )
    engine = model.engine
    index_of = {id(parameter): index for index, parameter in enumerate(engine.parameters)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = [parameter for parameter in parameters if id(parameter) not in index_of]
    if engine.world.world_size > 1:
        if strangers:
            raise ConfigurationError(
                f"fuse: a parameter of shape {list(strangers[0].shape)} is none of those that the model was wrapped "
                f"with and trains."
            )
        indices = [index_of[id(parameter)] for parameter in parameters]
        taken = [engine.names[index] for index in indices if index in _shardings_of(engine)]
        if taken:
            raise ConfigurationError(f"fuse: parameter {taken[0]!r} belongs to another flat or sharded optimizer.")
        validate_shardable(engine, indices)
    facts = arguments.facts_of(optimizer.param_groups, lambda parameter: index_of.get(id(parameter), -1))
    if model.monitors.drift is None:  # ranks may be meant to step differently
        facts = {name: value for name, value in facts.items() if "parameters of" in name or "parameter groups" in name}
    return {"the optimizer": type(optimizer).__name__} | facts


def _shardings_of(engine: Engine) -> Mapping[int, tuple[Sharding, int]]:
    return engine.exchange.shardings if isinstance(engine.exchange, ShardedExchange) else {}


class LocalBuckets:
    """Parameters side by side in memory that belongs to one process. Their gradients are copied together.

    Args:
        parameters: Which.
        groups: By index of the parameter, the number of its group.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], groups: Mapping[int, int]) -> None:
        sharding = Sharding(0, is_replicated=True)
        specs = [
            ParameterSpec(str(index), tuple(p.shape), p.dtype, p.device, sharding, groups[index])
            for index, p in enumerate(parameters)
        ]
        layout = plan_layout(specs, range(len(specs)), BucketPolicy())
        transport = LocalTransport()
        self.shardings = {index: (sharding, group) for index, group in groups.items()}
        self.sharded_buckets = [
            ShardedBucket(bucket, parameters, [spec.name for spec in specs], transport, allocator=transport)
            for bucket in layout.buckets
        ]

    def follow(self, follower: Follower) -> None:
        """Nothing: the layout never changes."""
