"""The optimizer whose state and work are divided over the ranks.

The method is that of ZeRO, stages 1 and 2 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn, optim

from evenstep.errors import ConfigurationError, UsageError
from evenstep.optim.elements import ElementDivision
from evenstep.optim.kinds import is_divided, is_elementwise, validate_kind
from evenstep.optim.runs import State
from evenstep.optim.shards import Shard
from evenstep.optim.whole import WholeDivision
from evenstep.replica.distributed import DistributedDataParallel
from evenstep.replica.layout import Sharding
from evenstep.replica.sharded_exchange import ShardedExchange

Division = ElementDivision | WholeDivision


class ShardedOptimizer(optim.Optimizer):
    """A torch optimizer whose state and work are divided over the ranks of a replicated model.

        model = evenstep.DistributedDataParallel(build_model())
        optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=3e-4)

    Collective: every rank makes it, with the same arguments, before the training loop; every rank calls `step`. It is a
    `torch.optim.Optimizer`: parameter groups, schedulers, hooks, `zero_grad` and hyper-parameters are torch's.

    During the backward pass gradients are summed so that each rank gets its shard only; `step` updates the shard, and
    every rank gets the new values of all. What stands in `p.grad` meanwhile raises when it is read: clip with
    `evenstep.clip_grad_norm_`. In a world of one nothing is divided and `p.grad` is what it always is.

    Optimizers whose step isn't known to be element-wise (Adafactor, Muon, classes of your own) are divided at
    parameter boundaries: gradients are those of an unsharded optimizer, state and work are divided.

    Args:
        model: An `evenstep.DistributedDataParallel`.
        kind: Class of the optimizer, such as `torch.optim.AdamW`.
        params: As for `kind`: parameters of the model, or groups of them; None: all that are trained.
        shard_gradients: Keep only this rank's shard of the gradients (ZeRO stage 2). Buckets are lent memory then, two
            at a time.
        elementwise: Whether the step changes an element by that element's gradient and state alone; None: known of
            torch's classes, False for others.
        master_weights: Step in float32 parameters that have 16 bits, and keep those values in the state.
        reduce_dtype: The dtype in which gradients are added over ranks; None: the parameters' own.
        defaults: Arguments of `kind`. Where it has a fused step, and `fused` and `foreach` aren't given, that is used.

    Raises:
        ConfigurationError: No such model or optimizer, a parameter that isn't the model's, or one that belongs to
            another ShardedOptimizer.
        UsageError: Made between a backward pass and the reduction of its gradients.
    """

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
        if not isinstance(model, DistributedDataParallel):
            raise ConfigurationError(
                f"ShardedOptimizer takes an evenstep.DistributedDataParallel, not a {type(model).__name__}. Wrap the "
                f"model first: model = evenstep.DistributedDataParallel(model)."
            )
        validate_kind(kind)
        by_elements = is_elementwise(kind) if elementwise is None else elementwise
        _validate_options(kind, by_elements, shard_gradients, master_weights, reduce_dtype)
        self._model = model
        self._kind = kind
        self._index_of = {id(parameter): index for index, parameter in enumerate(model.engine.parameters)}
        self._division: Division | None = None
        # The class says itself what its arguments mean: on a parameter that is nobody's.
        probe = kind([nn.Parameter(torch.zeros(2, 2))], **defaults)
        self._arguments = defaults
        super().__init__(model.engine.parameters if params is None else params, probe.defaults)
        self.state = _DividedState()  # type: ignore[assignment]
        if by_elements:
            self._sharding = Sharding(_free_owner(model), shard_gradients, reduce_dtype)
            exchange = self._shard()
            self._division = ElementDivision(
                exchange,
                self._sharding.owner,
                kind,
                defaults,
                lambda: self.param_groups,
                model.world,
                master=master_weights,
            )
        else:
            self._division = WholeDivision(
                model.engine.parameters, self._groups_by_index, kind, defaults, lambda: self.param_groups, model.world
            )

    # ------------------------------------------------------------------ torch's interface

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Collective: update the parameters, equally on every rank.

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; neither setting makes memory for gradients where these are freed (`shard_gradients`)."""
        if not set_to_none and isinstance(self._division, ElementDivision):
            for bucket in self._division.buckets:
                bucket.zero()
        elif set_to_none:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            super().zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Collective: as in torch; parameters of the wrapped model.

        Raises:
            ConfigurationError: As for the class.
            UsageError: As for the class.
        """
        super().add_param_group(param_group)
        try:
            self._validate(self.param_groups[-1]["params"])
            if isinstance(self._division, ElementDivision):
                self._shard()
            elif self._division is not None:
                self._division.take_up(self._division.let_go())
        except BaseException:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Collective: the state dict of the unsharded optimizer, whole, on every rank.

        It loads into a plain optimizer of the same class, and into a ShardedOptimizer on any number of ranks.
        """
        return self._packed(self._divided.let_go())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a state dict, of a plain optimizer or of a ShardedOptimizer on any number of ranks.

        Every rank gives the same.

        Raises:
            ConfigurationError: A tensor of it doesn't have its parameter's shape.
            ValueError: torch's own, where parameter groups don't match.
        """
        self._validate_loaded(state_dict)
        super().load_state_dict({**state_dict, "state": {}})
        self.state = _DividedState()  # type: ignore[assignment]
        by_index: dict[int, State] = {}
        for number, parameter in self._numbered(state_dict):
            state = state_dict["state"].get(number)
            if state:
                by_index[self._index_of[id(parameter)]] = dict(state)
        self._divided.take_up(by_index)

    def state_shards(self) -> tuple[dict[str, Any], list[Shard]]:
        """Collective: the state dict without the tensors that are divided, and this rank's pieces of those.

        Returns:
            (equal on all ranks, this rank's pieces). `evenstep.Checkpointer` writes each rank's pieces; put together
            they are what `load_state_dict` takes.
        """
        number_of = {self._index_of[id(p)]: number for number, p in enumerate(self._all_parameters())}
        scalars, shards = self._divided.shards(lambda index: ("state", number_of[index]))
        return self._packed(scalars), shards

    @property
    def state_bytes(self) -> int:
        """Memory that this rank's state takes."""
        return self._divided.num_bytes

    def __repr__(self) -> str:
        world = self._model.world
        return f"<Sharded{self._kind.__name__} rank {world.rank}/{world.world_size}, {len(self.param_groups)} groups>"

    # ------------------------------------------------------------------ inside

    @property
    def _divided(self) -> Division:
        assert self._division is not None, "made by the constructor"
        return self._division

    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _groups_by_index(self) -> dict[int, int]:
        """Of each parameter (by index in the model) the number of its group."""
        return {
            self._index_of[id(parameter)]: number
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }

    def _shard(self) -> ShardedExchange:
        """Collective: divide the gradients of what is in the groups now."""
        engine = self._model.engine
        others = _shardings_of_others(self._model, self._sharding.owner)
        return engine.shard(others | {i: (self._sharding, group) for i, group in self._groups_by_index().items()})

    def _validate(self, parameters: list[Tensor]) -> None:
        rank = self._model.world.rank
        for parameter in parameters:
            index = self._index_of.get(id(parameter))
            if index is None:
                raise ConfigurationError(
                    f"ShardedOptimizer on rank {rank}: a parameter of shape {list(parameter.shape)} is none of those "
                    f"that the model was wrapped with and trains. Wrap the model after unfreezing or adding "
                    f"parameters, and take them from model.parameters()."
                )
            mine = -1 if self._division is None or not hasattr(self, "_sharding") else self._sharding.owner
            if index in _shardings_of_others(self._model, mine):
                raise ConfigurationError(
                    f"ShardedOptimizer on rank {rank}: parameter {self._model.engine.names[index]!r} belongs to "
                    f"another ShardedOptimizer of this model."
                )

    def _packed(self, by_index: Mapping[int, State]) -> dict[str, Any]:
        packed: dict[str, Any] = super().state_dict()
        states = {number: by_index.get(self._index_of[id(p)]) for number, p in enumerate(self._all_parameters())}
        packed["state"] = {number: state for number, state in states.items() if state}
        return packed

    def _numbered(self, state_dict: Mapping[str, Any]) -> list[tuple[int, Tensor]]:
        """(number in the state dict, parameter), in order of the groups."""
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        return list(zip(saved, self._all_parameters(), strict=False))

    def _validate_loaded(self, state_dict: Mapping[str, Any]) -> None:
        for number, parameter in self._numbered(state_dict):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and not self._fits(key, value, parameter):
                    name = self._model.engine.names[self._index_of[id(parameter)]]
                    raise ConfigurationError(
                        f"load_state_dict on rank {self._model.world.rank}: {key!r} of parameter {name!r} has the "
                        f"shape {list(value.shape)}, and the parameter {list(parameter.shape)}."
                    )

    def _fits(self, key: str, value: Tensor, parameter: Tensor) -> bool:
        return isinstance(self._division, WholeDivision) or is_divided(key, value, parameter)


class _DividedState(dict[Any, Any]):
    """`optimizer.state`: empty, and an error for whoever looks up a parameter in it."""

    def __missing__(self, key: object) -> Any:
        raise UsageError(
            "the state of a ShardedOptimizer is divided over the ranks: no rank has a parameter's. On all ranks, "
            "optimizer.state_dict() gives it whole, optimizer.state_shards() this rank's pieces."
        )


def _validate_options(
    kind: type[optim.Optimizer],
    by_elements: bool,
    shard_gradients: bool,
    master_weights: bool,
    reduce_dtype: torch.dtype | None,
) -> None:
    if reduce_dtype is not None and not (isinstance(reduce_dtype, torch.dtype) and reduce_dtype.is_floating_point):
        raise ConfigurationError(f"ShardedOptimizer: reduce_dtype={reduce_dtype!r}; a floating-point dtype, or None.")
    if not by_elements and (shard_gradients or master_weights or reduce_dtype is not None):
        raise ConfigurationError(
            f"ShardedOptimizer: {kind.__name__} is divided at parameter boundaries, where gradients are whole and in "
            f"the parameters' dtype: shard_gradients, master_weights and reduce_dtype are for element-wise optimizers. "
            f"If it is one, say elementwise=True."
        )


def _shardings_of_others(model: DistributedDataParallel, owner: int) -> dict[int, tuple[Sharding, int]]:
    """Of parameters that belong to other sharded optimizers that are alive."""
    exchange = model.engine.exchange
    if not isinstance(exchange, ShardedExchange):
        return {}
    alive = exchange.owners_alive()
    return {
        index: (sharding, group)
        for index, (sharding, group) in exchange.shardings.items()
        if sharding.owner != owner and sharding.owner in alive
    }


def _free_owner(model: DistributedDataParallel) -> int:
    exchange = model.engine.exchange
    if not isinstance(exchange, ShardedExchange):
        return 0
    return max((sharding.owner for sharding, _ in exchange.shardings.values()), default=-1) + 1
