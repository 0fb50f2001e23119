"""What optimizers have in common that step something else than their parameters one by one: torch's interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, optim

from evenstep import checks
from evenstep.errors import ConfigurationError, UsageError
from evenstep.optim.consistency import abort_peers
from evenstep.optim.kinds import is_divided, try_out
from evenstep.optim.sharded.element_wise import ElementWisePartition
from evenstep.optim.sharded.flat_segments import State
from evenstep.optim.sharded.per_parameter import PerParameterPartition
from evenstep.replica.wrapper.distributed import DistributedDataParallel

Partition = ElementWisePartition | PerParameterPartition


class PartitionedOptimizer(optim.Optimizer):
    """A `torch.optim.Optimizer` in front of a division: parameter groups here, the step and the state there.

    Attributes:
        model: Whose parameters these are, if evenstep replicates it.
    """

    model: DistributedDataParallel | None
    _partition: Partition | None = None
    _kind: type[optim.Optimizer]
    _defaults_given: Mapping[str, Any]  # the arguments of `_kind`
    _index_of: dict[int, int]  # by id of the parameter
    _names: Sequence[str]  # by index
    _rank: int = 0

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters, equally on every rank. Collective where the optimizer is divided over ranks.

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
        """As in torch; with False, gradients that lie side by side are zeroed in one go."""
        if set_to_none:
            for parameter in self._all_parameters():
                parameter.grad = None
        elif isinstance(self._partition, ElementWisePartition):
            for bucket in self._partition.buckets:
                bucket.zero()
        else:
            super().zero_grad(set_to_none=False)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of a plain optimizer, whole. Collective where the optimizer is divided over ranks.

        It loads into a plain optimizer of the same class, and into a divided one on any number of ranks.
        """
        by_index = self._divided.gather_state()
        states = {parameter: by_index.get(self._index_of[id(parameter)]) for parameter in self._all_parameters()}
        self.state = {parameter: state for parameter, state in states.items() if state}  # type: ignore[assignment]
        try:
            return super().state_dict()  # with what hooks of the program make of it
        finally:
            self.state = _PartitionedState()  # type: ignore[assignment]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up a state dict, of a plain optimizer or of a divided one on any number of ranks.

        Every rank gives the same.

        Raises:
            ConfigurationError: It is no state dict, or that of another class of optimizer, or a tensor of it doesn't
                have its parameter's shape. Nothing was taken up.
            ValueError: torch's own, where parameter groups don't match.
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

        # Behind the program's own hooks, which may give another state dict.
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
        self._divided.load_state(by_index, is_loaded=True)

    @property
    def state_bytes(self) -> int:
        """Memory that this rank's state takes."""
        return self._divided.num_bytes

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: what it steps lies in its model's memory, and on other ranks.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"{type(self).__name__} on rank {self._rank} can't be copied or pickled: what it steps lies in memory of "
            f"its model's. Keep state_dict(), make another one over the copy of the model, and load_state_dict() there."
        )

    # ------------------------------------------------------------------ inside

    @property
    def _divided(self) -> Partition:
        assert self._partition is not None, "made by the constructor"
        return self._partition

    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _groups_by_index(self) -> dict[int, int]:
        """Of each parameter (by index) the number of its group."""
        return {
            self._index_of[id(parameter)]: number
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }

    def _packed(self, by_index: Mapping[int, State]) -> dict[str, Any]:
        """A state dict of which a part is missing."""
        packed: dict[str, Any] = super().state_dict()
        states = {number: by_index.get(self._index_of[id(p)]) for number, p in enumerate(self._all_parameters())}
        packed["state"] = {number: state for number, state in states.items() if state}
        return packed

    def _numbered(self, state_dict: Mapping[str, Any]) -> list[tuple[int, Tensor]]:
        """(number in the state dict, parameter), in order of the groups."""
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        return list(zip(saved, self._all_parameters(), strict=False))

    def _validate_options(self, state_dict: Mapping[str, Any]) -> None:
        """Raise for the state of another class, which lacks entries that the first step needs."""
        for number, group in enumerate(state_dict["param_groups"]):
            strange = group.keys() - {"initial_lr"}.union(*self.param_groups)
            lacking = _lacks(self._kind, self._defaults_given, group) if strange else set()
            if lacking:  # what is strange alone may be a scheduler's, or another version's
                raise ConfigurationError(
                    f"load_state_dict on rank {self._rank}: parameter group {number} has {', '.join(sorted(strange))}, "
                    f"and lacks {', '.join(sorted(lacking))}: it was saved from another class of optimizer than "
                    f"{self._kind.__name__}. Make one of the class that was saved, or load no state."
                )

    def _validate_loaded(self, state_dict: Mapping[str, Any]) -> None:
        if not self._divided.elementwise:
            return  # its optimizer's state has shapes of its own
        for number, parameter in self._numbered(state_dict):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and not is_divided(key, value, parameter):
                    name = self._names[self._index_of[id(parameter)]]
                    raise ConfigurationError(
                        f"load_state_dict on rank {self._rank}: {key!r} of parameter {name!r} has the shape "
                        f"{list(value.shape)}, and the parameter {list(parameter.shape)}."
                    )


def _validate_state_dict(given: Any) -> None:
    is_one = isinstance(given, Mapping) and isinstance(given.get("state"), Mapping)
    if not is_one or not isinstance(given.get("param_groups"), Sequence):
        raise checks.refuse("load_state_dict: state_dict", given, "what an optimizer's state_dict() gives")
    wrong = [state for state in given["state"].values() if not isinstance(state, Mapping)]
    if wrong:
        raise checks.refuse("load_state_dict: the state of a parameter", wrong[0], "values by name")


def _lacks(kind: type[optim.Optimizer], arguments: Mapping[str, Any], group: Mapping[str, Any]) -> set[str]:
    """Options of a class that a saved group lacks, but for those that the class adds to what older versions saved."""
    tried = try_out(kind, arguments)
    wanted = set(tried.param_groups[0])
    tried.load_state_dict({"state": {}, "param_groups": [{**group, "params": [0]}]})
    return wanted - tried.param_groups[0].keys()


class _PartitionedState(dict[Any, Any]):
    """`optimizer.state`: empty, and an error when a parameter is looked up in it."""

    def __missing__(self, key: object) -> Any:
        raise UsageError(
            "the state of this optimizer is divided over the ranks or lies in flat memory, and isn't kept by "
            "parameter. optimizer.state_dict() gives it (with a ShardedOptimizer: called on all ranks), and "
            "state_shards() of a ShardedOptimizer this rank's pieces."
        )


def without_state() -> dict[Any, Any]:
    """What stands for `optimizer.state`."""
    return _PartitionedState()
