"""The sharded optimizer: its state and work are sharded over the ranks.

The method is that of ZeRO, stages 1 and 2 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020).
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn, optim

from evenstep import checks
from evenstep.errors import ConfigurationError, UsageError
from evenstep.ground.coordination.agreement import validate_on_all_ranks
from evenstep.ground.health import excepthook
from evenstep.optim import arguments
from evenstep.optim.consistency import abort_peers
from evenstep.optim.kinds import defaults_of, is_divided, is_elementwise, try_out, validate_kind
from evenstep.optim.sharded.element_wise import ElementWisePartition
from evenstep.optim.sharded.flat_segments import Shard, State
from evenstep.optim.sharded.per_parameter import PerParameterPartition
from evenstep.replica.gradients.buckets.bucket import HALF_PRECISION
from evenstep.replica.gradients.buckets.layout import Sharding
from evenstep.replica.sharded.exchange import ShardedExchange, shard_gradients, validate_shardable
from evenstep.replica.wrapper.distributed import DistributedDataParallel

Partition = ElementWisePartition | PerParameterPartition

_ORDER = "order of gradients"  # key of `Exchange.order` in a checkpoint


class ShardedOptimizer(optim.Optimizer):
    """A torch optimizer whose state and work are sharded over the ranks of a replicated model.

        model = evenstep.DistributedDataParallel(build_model())
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4)

    Collective: every rank makes it, with the same arguments, before the training loop; every rank calls `step`. It is a
    `torch.optim.Optimizer`: parameter groups, schedulers, hooks, `zero_grad` and hyper-parameters are used as usual.

    During the backward pass gradients are summed so that each rank gets only its shard. `step` updates the shard, and
    every rank gets the new values of all shards. Until then `p.grad` is a placeholder that raises when it is read: clip
    with `evenstep.clip_grad_norm_`. In a world of one nothing is divided and `p.grad` is the usual gradient.

    Optimizers whose step isn't known to be element-wise (Adafactor, Muon, your own classes) are divided at parameter
    boundaries: gradients are whole, state and work are divided. Values that a step writes into its groups (`k` of
    schedule-free optimizers) are copied to `param_groups`, and compared between ranks. Methods of the class that
    torch's optimizers lack, such as `train()` and `eval()`, work too: call them on all ranks.

    Args:
        model: An `evenstep.DistributedDataParallel`.
        kind: Class of the optimizer, such as `torch.optim.AdamW`.
        params: Parameters of the model, or groups of them, as for `kind`; None: all trained parameters.
        shard_gradients: Keep only this rank's shard of the gradients (ZeRO stage 2). Buckets then share memory: there
            is enough for two at a time. In a model with a `SyncBatchNorm`, and in all models of a loss but the first,
            they are sent when the backward pass has ended; until then this rank has whole gradients.
        elementwise: Whether the step changes an element only by that element's gradient and state; None: known for
            torch's classes, False for others.
        master_weights: Step 16-bit parameters in float32, and keep the float32 values in the state.
        reduce_dtype: The dtype in which gradients are added over ranks; None: the parameters' own.
        defaults: Arguments of `kind`. If the class has a fused step, and neither `fused` nor `foreach` is given, the
            fused step is used.

    Raises:
        ConfigurationError: The model or optimizer class is wrong, or a parameter isn't the model's, or belongs to
            another ShardedOptimizer. Raised on all ranks if it happens on one.
        UsageError: The optimizer was made between a backward pass and the reduction of its gradients, or while the
            model has a LocalSGD. Raised on all ranks if it happens on one.
        MismatchError: The ranks were given different arguments. Raised on all ranks. Later, backward passes raise it if
            options of the groups have become different between ranks.
    """

    model: DistributedDataParallel
    _partition: Partition | None = None
    _sharding: Sharding | None = None
    _index_of: dict[int, int]  # index of each parameter, by id

    @excepthook.for_users
    def __init__(
        self,
        model: DistributedDataParallel,
        kind: type[optim.Optimizer],
        params: Any = None,
        *,
        shard_gradients: bool = False,
        elementwise: bool | None = None,
        master_weights: bool = False,
        reduce_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        with abort_peers(model):
            if not isinstance(model, DistributedDataParallel):
                torchs = "torch's " if isinstance(model, nn.parallel.DistributedDataParallel) else "a "
                raise ConfigurationError(
                    f"ShardedOptimizer takes an evenstep.DistributedDataParallel, not {torchs}{type(model).__name__}. "
                    f"Wrap the model first: model = evenstep.DistributedDataParallel(model)."
                )
        self.model = model
        self._kind = kind
        self._index_of = {id(parameter): index for index, parameter in enumerate(model.engine.parameters)}
        by_elements = False
        groups: list[Any] = []
        switches: dict[str, Any] = {
            "shard_gradients": shard_gradients,
            "master_weights": master_weights,
        }

        def validate() -> dict[str, Any]:
            nonlocal by_elements
            if model.is_divided:
                raise UsageError(
                    "it isn't needed here: the model is divided over ranks, so its optimizer state is divided, too. "
                    "Use torch's own optimizer, such as torch.optim.AdamW(model.parameters())."
                )
            validate_kind(kind)
            arguments.validate_switches(elementwise=elementwise, **switches)
            by_elements = is_elementwise(kind) if elementwise is None else bool(elementwise)
            _validate_options(kind, by_elements, switches, reduce_dtype)
            groups[:] = arguments.listed(model.engine.parameters if params is None else params)
            tried = arguments.try_out(kind, groups, defaults)
            chosen = [parameter for group in tried for parameter in group["params"]]
            self._validate(chosen)
            if not by_elements:
                arguments.try_whole(kind, tried, defaults)
            is_converted = reduce_dtype is not None and any(each.dtype is not reduce_dtype for each in chosen)
            if model.world.virtual_ranks is not None and is_converted:
                raise ConfigurationError(
                    f"reduce_dtype={reduce_dtype} in reproducible mode, where sums of virtual ranks would be rounded "
                    f"differently on another number of ranks. Leave it out."
                )
            validate_shardable(model.engine, [self._index_of[id(parameter)] for parameter in chosen] * by_elements)
            options = {
                "the optimizer": kind.__name__,
                "elementwise": by_elements,
                "reduce_dtype": str(reduce_dtype),
                **{name: bool(value) for name, value in switches.items()},
            }
            return options | arguments.facts_of(tried, lambda parameter: self._index_of[id(parameter)])

        validate_on_all_ranks(model.world, "ShardedOptimizer", validate)
        self._defaults_given = defaults
        super().__init__(groups, defaults_of(kind, defaults))
        self.state = _PartitionedState()  # type: ignore[assignment]
        # In a world of one nothing is packed, except for virtual ranks: they must be stepped as on several ranks.
        keeps_master = master_weights and any(each.dtype in HALF_PRECISION for each in model.engine.parameters)
        stays_whole = model.world.world_size == 1 and model.world.virtual_ranks is None and not keeps_master
        this = weakref.proxy(self)  # avoids a reference cycle: a deleted optimizer is freed at once
        if by_elements and not stays_whole:
            has_peers = model.world.world_size > 1
            self._sharding = Sharding(
                _free_owner(model),
                frees_gradients=bool(shard_gradients) and has_peers,
                reduce_dtype=reduce_dtype if has_peers else None,
            )
            self._partition = ElementWisePartition(
                self._shard(self._sharding),
                self._sharding.owner,
                kind,
                defaults,
                lambda: this.param_groups,
                model.world,
                master=bool(master_weights),
            )
        else:
            self._partition = PerParameterPartition(
                model.engine.parameters,
                lambda: this._groups_by_index(),
                kind,
                defaults,
                lambda: this.param_groups,
                model.world,
                model.engine.transport,
                elementwise=by_elements,
            )
        model.monitors.options.add(self)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters, equally on every rank. Collective.

        Args:
            closure: Computes the loss and its gradients again, as in torch.

        Raises:
            UsageError: A gradient was not averaged over ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._divided.step(self.param_groups)
        return loss

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the optimizer's class that torch's optimizers lack, such as `eval()` of schedule-free optimizers.

        Collective: each rank runs the method on its own part, and changed parameters are gathered as after a step.

        Raises:
            AttributeError: The class has no such method.
        """
        method = None if name.startswith("_") else getattr(self._kind, name, None)
        if not callable(method):
            raise AttributeError(
                f"ShardedOptimizer of {self._kind.__name__} has no attribute {name!r}", name=name, obj=self
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                return self._divided.run(self.param_groups, lambda inner: method(inner, *args, **kwargs))

        return functools.wraps(method)(call)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. With False, gradients in one flat tensor are zeroed at once."""
        if set_to_none:
            for parameter in self._all_parameters():
                parameter.grad = None
        elif isinstance(self._partition, ElementWisePartition):
            for bucket in self._partition.buckets:
                bucket.zero()
        else:
            super().zero_grad(set_to_none=False)

    def state_dict(self) -> dict[str, Any]:
        """The whole state dict, as of a plain optimizer. Collective.

        It loads into a plain optimizer of the same class, and into a ShardedOptimizer on any number of ranks.
        """
        by_index = self._divided.gather_state()
        states = {parameter: by_index.get(self._index_of[id(parameter)]) for parameter in self._all_parameters()}
        self.state = {parameter: state for parameter, state in states.items() if state}  # type: ignore[assignment]
        try:
            return super().state_dict()  # runs the program's hooks, too
        finally:
            self.state = _PartitionedState()  # type: ignore[assignment]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of a plain optimizer, or of a ShardedOptimizer on any number of ranks.

        Every rank passes the same state dict.

        Raises:
            ConfigurationError: `state_dict` isn't a state dict, is another optimizer class's, or has a tensor without
                its parameter's shape. Nothing was loaded.
            ValueError: Raised by torch if parameter groups don't match.
        """
        with abort_peers(self):
            _validate_state_dict(state_dict)
        heard: list[Mapping[str, Any]] = []

        def take_state(_: optim.Optimizer, given: Any) -> dict[str, Any]:
            with abort_peers(self):
                self._validate_options(given)
                self._validate_loaded(given)
            heard.append(given)
            return {**given, "state": {}}

        # Runs after the program's own hooks, which may return another state dict.
        handle = self.register_load_state_dict_pre_hook(take_state)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()
        self.state = _PartitionedState()  # type: ignore[assignment]
        by_index: dict[int, State] = {}
        for number, parameter in self._numbered(heard[0]):
            state = heard[0]["state"].get(number)
            if state:
                by_index[self._index_of[id(parameter)]] = dict(state)
        if self._sharding is not None:
            self.model.engine.adopt_order(heard[0].get(_ORDER, ()))
        self._divided.load_state(by_index, is_loaded=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective: add a group of parameters of the wrapped model, as in torch.

        Raises:
            ConfigurationError: See the class.
            UsageError: See the class.
        """
        add = super().add_param_group
        if self._partition is None:  # called by the constructor, which has checked the group
            add(param_group)
            return
        before = len(self.param_groups)

        def validate() -> dict[str, Any]:
            with arguments.torchs_refusals(self._kind):
                add(param_group)
            chosen = self.param_groups[before]["params"]
            self._validate(chosen)
            if self._divided.elementwise:
                validate_shardable(self.model.engine, [self._index_of[id(parameter)] for parameter in chosen])
            else:
                arguments.try_whole(self._kind, self.param_groups, self._defaults_given)
            return arguments.facts_of(self.param_groups[before:], lambda each: self._index_of[id(each)])

        try:
            validate_on_all_ranks(self.model.world, "ShardedOptimizer.add_param_group", validate)
            if isinstance(self._partition, PerParameterPartition):
                self._partition.load_state(self._partition.gather_state())
            elif self._sharding is not None:
                self._shard(self._sharding)
        except BaseException:
            del self.param_groups[before:]
            raise

    def state_shards(self) -> tuple[dict[str, Any], list[Shard]]:
        """Collective: the state dict without its divided tensors, and this rank's shards of these tensors.

        Returns:
            (the state that is equal on all ranks, this rank's shards). `evenstep.Checkpointer` writes each rank's
            shards; `load_state_dict` takes the two put together.
        """
        number_of = {self._index_of[id(p)]: number for number, p in enumerate(self._all_parameters())}
        scalars, shards = self._divided.shards(lambda index: ("state", number_of[index]))
        engine = self.model.engine
        order = {_ORDER: list(engine.exchange.order)} if self._sharding is not None and engine.has_learned_order else {}
        return self._packed(scalars) | order, shards

    @property
    def state_bytes(self) -> int:
        """Memory that this rank's state takes."""
        return self._divided.num_bytes

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles: parameters are in the model's memory, and state is on other ranks.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"{type(self).__name__} on rank {self.model.world.rank} can't be copied or pickled, because its parameters "
            f"are in its model's memory. Save state_dict(), make another optimizer over the copy of the model, and "
            f"call its load_state_dict()."
        )

    def __repr__(self) -> str:
        world = self.model.world
        return f"<Sharded{self._kind.__name__} rank {world.rank}/{world.world_size}, {len(self.param_groups)} groups>"

    # ------------------------------------------------------------------ inside

    @property
    def _divided(self) -> Partition:
        assert self._partition is not None, "made by the constructor"
        return self._partition

    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _groups_by_index(self) -> dict[int, int]:
        """The number of each parameter's group, by index of the parameter."""
        return {
            self._index_of[id(parameter)]: number
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }

    def _packed(self, by_index: Mapping[int, State]) -> dict[str, Any]:
        """Make a state dict from a part of the state."""
        packed: dict[str, Any] = super().state_dict()
        states = {number: by_index.get(self._index_of[id(p)]) for number, p in enumerate(self._all_parameters())}
        packed["state"] = {number: state for number, state in states.items() if state}
        return packed

    def _numbered(self, state_dict: Mapping[str, Any]) -> list[tuple[int, Tensor]]:
        """(number in the state dict, parameter), in order of the groups."""
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        return list(zip(saved, self._all_parameters(), strict=False))

    def _validate_options(self, state_dict: Mapping[str, Any]) -> None:
        """Raise for another class's state, which lacks entries that the first step needs."""
        for number, group in enumerate(state_dict["param_groups"]):
            strange = group.keys() - {"initial_lr"}.union(*self.param_groups)
            lacking = _lacks(self._kind, self._defaults_given, group) if strange else set()
            if lacking:  # unknown entries alone may come from a scheduler or another version
                raise ConfigurationError(
                    f"load_state_dict on rank {self.model.world.rank}: parameter group {number} has "
                    f"{', '.join(sorted(strange))}, and lacks {', '.join(sorted(lacking))}: it was saved from another "
                    f"class of optimizer than {self._kind.__name__}. Make an optimizer of the saved class, or don't "
                    f"load the state."
                )

    def _validate_loaded(self, state_dict: Mapping[str, Any]) -> None:
        if not self._divided.elementwise:
            return  # the state of such an optimizer may have other shapes
        for number, parameter in self._numbered(state_dict):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and not is_divided(key, value, parameter):
                    name = self.model.engine.names[self._index_of[id(parameter)]]
                    raise ConfigurationError(
                        f"load_state_dict on rank {self.model.world.rank}: {key!r} of parameter {name!r} has the shape "
                        f"{list(value.shape)}, but the parameter has {list(parameter.shape)}."
                    )

    def _shard(self, sharding: Sharding) -> ShardedExchange:
        """Collective: shard the gradients of the parameters that are in the groups now."""
        engine = self.model.engine
        others = _shardings_of_others(self.model, sharding.owner)
        return shard_gradients(engine, others | {i: (sharding, group) for i, group in self._groups_by_index().items()})

    def _stepped_by_others(self) -> set[int]:
        """Ids of parameters that other existing ShardedOptimizers have."""
        taken = _shardings_of_others(self.model, -1 if self._sharding is None else self._sharding.owner)
        others = [each for each in self.model.monitors.options.alive if each is not self]
        stepped = {id(parameter) for each in others for group in each.param_groups for parameter in group["params"]}
        return stepped | {id(self.model.engine.parameters[index]) for index in taken}

    def _validate(self, parameters: list[Tensor]) -> None:
        if self.model.engine.stays_local:
            raise UsageError(
                "the model has a LocalSGD, so its gradients aren't averaged over ranks and can't be sharded. Close the "
                "LocalSGD first."
            )
        stepped = self._stepped_by_others()
        if not stepped.isdisjoint(map(id, parameters)):
            gc.collect()  # optimizers are in reference cycles: an unused optimizer may not be collected yet
            stepped = self._stepped_by_others()
        for parameter in parameters:
            index = self._index_of.get(id(parameter))
            if index is None:
                raise ConfigurationError(
                    f"a parameter of shape {list(parameter.shape)} isn't a trained parameter of the wrapped model. "
                    f"Wrap the model after unfreezing or adding parameters, and pass parameters from "
                    f"model.parameters()."
                )
            if id(parameter) in stepped:
                raise ConfigurationError(
                    f"parameter {self.model.engine.names[index]!r} belongs to another ShardedOptimizer of this model."
                )


def _validate_state_dict(given: Any) -> None:
    is_one = isinstance(given, Mapping) and isinstance(given.get("state"), Mapping)
    if not is_one or not isinstance(given.get("param_groups"), Sequence):
        raise checks.refuse("load_state_dict: state_dict", given, "the result of an optimizer's state_dict()")
    wrong = [state for state in given["state"].values() if not isinstance(state, Mapping)]
    if wrong:
        raise checks.refuse("load_state_dict: the state of a parameter", wrong[0], "values by name")


def _lacks(kind: type[optim.Optimizer], arguments: Mapping[str, Any], group: Mapping[str, Any]) -> set[str]:
    """Options of a class that a saved group lacks, except those that the class adds to older versions' states."""
    tried = try_out(kind, arguments)
    wanted = set(tried.param_groups[0])
    tried.load_state_dict({"state": {}, "param_groups": [{**group, "params": [0]}]})
    return wanted - tried.param_groups[0].keys()


class _PartitionedState(dict[Any, Any]):
    """`optimizer.state`: empty. Looking up a parameter in it raises an error."""

    def __bool__(self) -> bool:
        """Return True: torch's `get_optimizer_state_dict` would step an optimizer whose state is empty."""
        return True

    def __missing__(self, key: object) -> Any:
        raise UsageError(
            "the state of this optimizer is divided over the ranks, and not stored by parameter. Call "
            "optimizer.state_dict() (with a ShardedOptimizer: on all ranks), or state_shards() of a ShardedOptimizer "
            "for this rank's pieces."
        )


def _validate_options(
    kind: type[optim.Optimizer],
    by_elements: bool,
    switches: Mapping[str, Any],
    reduce_dtype: torch.dtype | None,
) -> None:
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise checks.refuse("reduce_dtype", reduce_dtype, "a floating-point dtype, or None")
    if not by_elements and (any(switches.values()) or reduce_dtype is not None):
        raise ConfigurationError(
            f"{kind.__name__} is divided at parameter boundaries, with whole gradients and parameters of one dtype. "
            f"{', '.join(switches)} and reduce_dtype are for element-wise optimizers. If it is one, pass "
            f"elementwise=True."
        )


def _shardings_of_others(model: DistributedDataParallel, owner: int) -> dict[int, tuple[Sharding, int]]:
    """The shardings of parameters that belong to other existing ShardedOptimizers."""
    exchange = model.engine.exchange
    if not isinstance(exchange, ShardedExchange):
        return {}
    return {
        index: (sharding, group)
        for index, (sharding, group) in exchange.shardings.items()
        if sharding.owner != owner and sharding.owner in exchange.followers
    }


def _free_owner(model: DistributedDataParallel) -> int:
    exchange = model.engine.exchange
    if not isinstance(exchange, ShardedExchange):
        return 0
    return max((sharding.owner for sharding, _ in exchange.shardings.values()), default=-1) + 1
