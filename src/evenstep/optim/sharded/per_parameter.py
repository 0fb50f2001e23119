"""An optimizer that is divided at parameter boundaries: every rank steps whole parameters.

Used for steps that need whole parameters; and for all steps in a world of one, where packing would only cost copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, optim

from evenstep.optim.kinds import copy_options, options_of_users, step_without_hooks
from evenstep.optim.loading import load_exactly
from evenstep.optim.sharded.flat_segments import MASTER, STATE_DICT, Shard, State
from evenstep.replica.gradients.buckets.bucket import view_like
from evenstep.transport.core.transport import Transport
from evenstep.world import World

Groups = Sequence[dict[str, Any]]
_Answer = TypeVar("_Answer")
_ALIGNMENT_NUMEL = 32  # 64 bytes of the smallest dtype


def plan_owners(numels: Mapping[int, int], num_ranks: int) -> dict[int, int]:
    """Assign parameters to ranks: the largest first, each to the rank that has the fewest elements so far. Pure.

    Args:
        numels: Number of elements, by index of the parameter.
        num_ranks: Number of ranks.
    """
    loads = [0] * num_ranks
    owners = {}
    for index in sorted(numels, key=lambda index: (-numels[index], index)):
        owner = min(range(num_ranks), key=loads.__getitem__)
        owners[index] = owner
        loads[owner] += numels[index]
    return owners


class PerParameterPartition:
    """Steps this rank's parameters with an inner optimizer of the user's class, and receives all other parameters.

    Args:
        parameters: The model's parameters, in registration order.
        groups_by_index: Number of the group, by index of each parameter that is stepped.
        kind: Class of the inner optimizer.
        defaults: Arguments of the inner optimizer.
        groups: The user's parameter groups, read in every step.
        world: The ranks that take part.
        transport: The model's transport; carries the values of parameters.
        elementwise: Whether the step is element-wise, although parameters are stepped as a whole.

    Attributes:
        elementwise: The given argument.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups_by_index: Callable[[], Mapping[int, int]],
        kind: type[optim.Optimizer],
        defaults: Mapping[str, Any],
        groups: Callable[[], Groups],
        world: World,
        transport: Transport,
        *,
        elementwise: bool,
    ) -> None:
        self.elementwise = elementwise
        self._parameters = parameters
        self._groups_by_index = groups_by_index
        self._kind = kind
        self._defaults = defaults
        self._groups = groups
        self._world, self._transport = world, transport
        self._flats: list[tuple[int, Tensor]] = []  # (owner, [numel])
        self._homes: dict[int, Tensor] = {}
        self.load_state({})

    # ------------------------------------------------------------------ the step

    def step(self, groups: Groups) -> None:
        """Collective: step this rank's parameters, and receive the values of the other ranks' parameters."""
        self.run(groups, step_without_hooks(self._kind))

    def run(self, groups: Groups, call: Callable[[optim.Optimizer], _Answer]) -> _Answer:
        """Collective: run a method of the inner optimizer on this rank's parameters, and receive the others' values."""
        self._keep_hold()
        with options_of_users(groups, self._inner):
            answer = call(self._inner)
        if self._world.world_size > 1:
            for work in [self._transport.broadcast(flat, owner) for owner, flat in self._flats]:
                work.wait()
            torch.autograd.graph.increment_version([self._parameters[index] for index in self._homes])
        return answer

    def _keep_hold(self) -> None:
        """Move parameters whose memory was replaced back into the flat tensors."""
        for index, home in self._homes.items():
            parameter = self._parameters[index]
            if parameter.data_ptr() != home.data_ptr():
                home.copy_(parameter.detach())
                parameter.data = home

    # ------------------------------------------------------------------ state

    def load_state(self, kept: Mapping[int, State], *, is_loaded: bool = False) -> None:
        """Keep the part of a state that belongs to this rank's parameters.

        Args:
            kept: The state by index of the parameter.
            is_loaded: The state comes from a state dict, so it is converted to the parameters' dtypes, as torch does.
        """
        group_of = self._groups_by_index()
        self._owners = plan_owners({i: self._parameters[i].numel() for i in group_of}, self._world.world_size)
        if self._world.world_size > 1 and self._owners.keys() != self._homes.keys():
            self._flatten_parameters()
        own = [index for index in group_of if self._owners[index] == self._world.rank]
        inner_groups = []
        for number, group in enumerate(self._groups()):
            of_group = {"params": [self._parameters[index] for index in own if group_of[index] == number]}
            copy_options(self._kind, group, of_group)
            inner_groups.append(of_group)
        self._inner = self._kind(inner_groups, **self._defaults)
        packed = self._inner.state_dict()
        mine = [parameter for group in self._inner.param_groups for parameter in group["params"]]
        number_of = {id(parameter): number for number, parameter in enumerate(mine)}
        states = {number_of[id(self._parameters[i])]: self._state_of(i, kept[i]) for i in own if kept.get(i)}
        if states:
            load_exactly(self._inner, {**packed, "state": states}, keeps_dtypes=not is_loaded)

    def _state_of(self, index: int, state: State) -> State:
        """The state for the inner optimizer. A value that was saved in full precision is copied to the parameter."""
        parameter, master = self._parameters[index], state.get(MASTER)
        if master is not None:
            with torch.no_grad():
                parameter.copy_(master)
        return {key: value for key, value in state.items() if key != MASTER}

    def _flatten_parameters(self) -> None:
        """Move all parameters of one owner and dtype into one flat tensor, so that few broadcasts carry them."""
        together: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
        for index, owner in sorted(self._owners.items()):
            parameter = self._parameters[index]
            together.setdefault((owner, parameter.dtype, parameter.device), []).append(index)
        self._flats, self._homes = [], {}
        for (owner, dtype, device), indices in sorted(together.items(), key=lambda item: item[1]):
            offsets, numel = [], 0
            for index in indices:
                offsets.append(numel)
                numel += -(-self._parameters[index].numel() // _ALIGNMENT_NUMEL) * _ALIGNMENT_NUMEL
            flat = self._transport.allocate(numel, dtype=dtype, device=device)
            self._flats.append((owner, flat))
            for index, offset in zip(indices, offsets, strict=True):
                parameter = self._parameters[index]
                home = view_like(flat, offset, parameter)
                home.copy_(parameter.detach())
                parameter.data = home
                self._homes[index] = home

    def gather_state(self) -> dict[int, State]:
        """Collective: the state by index of the parameter, on every rank, on the parameter's device."""
        if self._world.world_size == 1:
            return {index: copy.deepcopy(state) for index, state in sorted(self._mine().items())}
        wholes: dict[int, State] = {}
        for rank in range(self._world.world_size):
            mine = {str(index): state for index, state in self._mine().items()} if rank == self._world.rank else None
            for index, state in self._world.broadcast_object(mine, rank).items():
                device = self._parameters[int(index)].device
                wholes[int(index)] = {
                    k: v.to(device) if isinstance(v, Tensor) and v.dim() > 0 else v for k, v in state.items()
                }
        return {index: wholes[index] for index in sorted(wholes)}

    def shards(self, path_of: Callable[[int], tuple[str | int, ...]]) -> tuple[dict[int, State], list[Shard]]:
        """Collective: (the state that isn't divided, by index of the parameter; this rank's part of the rest).

        Args:
            path_of: Returns the place of a parameter's state in the state dict.
        """
        scalars: dict[str, State] = {}
        found = []
        for index, state in self._mine().items():
            scalars[str(index)] = {}
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    path = (*path_of(index), key)
                    found.append(Shard(path, tuple(value.shape), 0, value.detach().contiguous().reshape(-1)))
                else:
                    scalars[str(index)][key] = value
        received: dict[int, State] = {}
        for each in self._world.exchange(scalars, what=STATE_DICT) if self._world.world_size > 1 else [scalars]:
            received |= {int(index): state for index, state in each.items()}
        return {index: received[index] for index in sorted(received)}, found

    def _mine(self) -> dict[int, State]:
        own = {index: self._inner.state.get(self._parameters[index], {}) for index in self._owners}
        return {index: state for index, state in own.items() if state}

    @property
    def num_bytes(self) -> int:
        """The memory that this rank's state takes."""
        values = [value for state in self._mine().values() for value in state.values()]
        return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))
