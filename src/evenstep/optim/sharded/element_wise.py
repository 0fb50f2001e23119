"""An optimizer divided between elements: every rank steps its shard of each bucket, wherever parameters begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, optim

from evenstep.optim.inner import copy_options, update_options
from evenstep.optim.kinds import step_without_hooks
from evenstep.optim.runs import Run, State, build_runs
from evenstep.optim.shards import STATE_DICT, Shard
from evenstep.replica.bucket import view_like
from evenstep.replica.host_copy import HostCopy
from evenstep.replica.layout import Sharding
from evenstep.replica.sharded_bucket import ShardedBucket
from evenstep.replica.sharded_exchange import Follower
from evenstep.replica.torch_interface import compilation_is_in_use
from evenstep.world import World

Groups = Sequence[dict[str, Any]]


class Buckets(Protocol):
    """Who has the buckets: `ShardedExchange`, or `LocalBuckets`.

    Attributes:
        sharded_buckets: The buckets with a sharding.
        shardings: By index of the parameter, how it is divided, and the number of its parameter group.
    """

    @property
    def sharded_buckets(self) -> list[ShardedBucket]:
        """See above."""

    @property
    def shardings(self) -> Mapping[int, tuple[Sharding, int]]:
        """See above."""

    def follow(self, follower: Follower) -> None:
        """From now on tell somebody when the layout changes."""


class ElementDivision:
    """Steps this rank's shards with an inner optimizer of the user's class.

    Args:
        exchange: Divides gradients and parameters.
        owner: Number of the optimizer in the exchange.
        kind: Class of the inner optimizer.
        defaults: Its arguments.
        groups: The user's parameter groups, as they are at any time.
        world: Who takes part; None where nothing is divided.
        master: Step values of 16 bits in float32.
    """

    elementwise = True

    def __init__(
        self,
        exchange: Buckets,
        owner: int,
        kind: type[optim.Optimizer],
        defaults: Mapping[str, Any],
        groups: Callable[[], Groups],
        world: World | None,
        *,
        master: bool,
    ) -> None:
        self._exchange = exchange
        self.owner = owner
        self._kind = kind
        self._defaults = defaults
        self._groups = groups
        self._world = world
        self._master = master
        self._buckets: list[ShardedBucket] = []
        self._host_copy: HostCopy | None = None
        self._runs: list[Run] = []
        self._are_set = False  # whether every run's gradient is its part of the shard
        self._versions: list[int] = []  # of parameters, if values are kept in another precision beside them
        self._inner: optim.Optimizer
        self.take_up({})
        exchange.follow(self)

    @property
    def buckets(self) -> Sequence[ShardedBucket]:
        """Those that this optimizer steps."""
        return self._buckets

    @property
    def num_runs(self) -> int:
        """How many tensors the inner optimizer sees."""
        return len(self._runs)

    # ------------------------------------------------------------------ the step

    def step(self, groups: Groups) -> None:
        """Collective: step this rank's shards, and give every rank the values of all."""
        self._arrive()
        host_copy = self._host_copy
        self._take_over_changes()
        if host_copy is None:
            for bucket in self._buckets:
                bucket.keep_hold()
        self._set_gradients()
        update_options(groups, self._inner)
        if host_copy is not None:
            host_copy.open(next((name for bucket in self._buckets if (name := bucket.replaced())), None))
        step_without_hooks(self._kind)(self._inner)
        if self._master:
            for run in self._runs:
                if run.has_master:
                    run.bucket.own[run.begin : run.end].copy_(run.values)
        may_wait = not compilation_is_in_use()
        # Asked before the gathers hold on to the buckets' memory.
        later = [may_wait and bucket.can_arrive_later(self._num_views(bucket)) for bucket in self._buckets]
        works = [bucket.start_gather() for bucket in self._buckets]
        for bucket, work, is_later in zip(self._buckets, works, later, strict=True):
            bucket.finish_gather(work, later=is_later)
        if host_copy is not None:
            host_copy.close()
        self._versions = self._count_changes()

    def _take_over_changes(self) -> None:
        """What a program has written into parameters since the last step counts, and not the values kept beside them.

        Where it wrote nothing those are kept. Written by way of `p.data` it isn't noticed.
        """
        if not self._master:
            return
        if self._host_copy is None:  # else another rank's writing isn't counted here
            is_replaced = any(bucket.replaced() is not None for bucket in self._buckets)
            for bucket in self._buckets:
                bucket.keep_hold()
            if not is_replaced and self._versions == self._count_changes():
                return
        for run in self._runs:
            if run.has_master:
                own = run.bucket.own[run.begin : run.end]
                run.values.copy_(torch.where(run.values.to(own.dtype) == own, run.values, own.to(run.values.dtype)))

    def _count_changes(self) -> list[int]:
        if not self._master:
            return []
        with torch._C.DisableTorchFunctionSubclass():  # parameters that are on their way aren't waited for
            return [parameter._version for bucket in self._buckets for parameter in bucket.parameters]

    def _num_views(self, bucket: ShardedBucket) -> int:
        """How many of the inner optimizer's tensors lie in a bucket's values."""
        return sum(run.bucket is bucket and not run.has_master for run in self._runs)

    def _arrive(self) -> None:
        """Wait for what the last step has sent."""
        for bucket in self._buckets:
            bucket.arrive()

    def _set_gradients(self) -> None:
        held = {bucket.layout.index: bucket.held() for bucket in self._buckets}
        are_all_held = all(all(each) for each in held.values())
        if are_all_held and self._are_set:
            return  # the usual step: every run's gradient is its part of the shard, as in the step before
        runs: list[Run] = []
        was_cut = False
        for run in self._runs:
            which = held[run.bucket.layout.index]
            first = which[run.pieces[0].index]
            if all(which[piece.index] is first for piece in run.pieces):
                runs.append(run)
                continue
            was_cut = True
            run.state = self._inner.state.pop(run.values, {})
            for part in run.cut(lambda piece, which=which: which[piece.index]):  # type: ignore[misc]
                self._inner.state[part.values] = part.state
                runs.append(part)
        if was_cut:
            self._runs = runs
            for index, group in enumerate(self._inner.param_groups):
                group["params"] = [run.values for run in runs if run.group == index]
        for run in runs:
            is_held = held[run.bucket.layout.index][run.pieces[0].index]
            run.values.grad = self._gradient(run) if is_held else None
        self._are_set = are_all_held and all(run.bucket.shard.dtype is run.values.dtype for run in runs)

    @staticmethod
    def _gradient(run: Run) -> Tensor:
        gradient = run.bucket.shard[run.begin : run.end]
        return gradient if gradient.dtype is run.values.dtype else gradient.to(run.values.dtype)

    # ------------------------------------------------------------------ state

    def let_go(self) -> dict[int, State]:
        """Collective: by index of the parameter its whole state, on every rank, on the parameter's device."""
        self._arrive()
        self._take_over_changes()
        told = self._tell_each_other()
        wholes: dict[int, State] = {index: dict(scalars) for index, (scalars, _) in told.items()}
        for bucket in self._buckets:
            names: dict[str, str] = {}
            for slot in bucket.layout.slots:
                names |= told.get(slot.parameter, ({}, {}))[1]
            for key, name in sorted(names.items()):
                self._gather(bucket, key, getattr(torch, name), wholes, told)
        return wholes

    def forget(self) -> None:
        """Hold nothing of the buckets until `take_up`."""
        self._buckets, self._runs, self._host_copy = [], [], None
        self._inner.param_groups.clear()
        self._inner.state.clear()

    def take_up(self, kept: Mapping[int, State], *, is_loaded: bool = False) -> None:
        """Keep a state, cut to this rank's shards.

        Args:
            kept: By index of the parameter, with tensors of the parameter's shape.
            is_loaded: It comes from a state dict, so it is converted to what is stepped, as torch does.
        """
        self._buckets = [b for b in self._exchange.sharded_buckets if _owner_of(b) == self.owner]
        self._arrive()
        self._host_copy = next((bucket.host_copy for bucket in self._buckets), None)
        self._are_set = False
        shardings = self._exchange.shardings
        self._runs = [
            run
            for bucket in self._buckets
            for run in build_runs(
                bucket, lambda index: shardings[index][1], kept, master=self._master, is_loaded=is_loaded
            )
        ]
        groups = self._groups()
        inner_groups = []
        for index, group in enumerate(groups):
            own = {"params": [run.values for run in self._runs if run.group == index]}
            copy_options(self._kind, group, own)
            inner_groups.append(own)
        self._inner = self._kind(inner_groups, **self._defaults)
        self._versions = []  # so that the next step compares: a state that was loaded may be of other parameters
        for run in self._runs:
            if run.state:
                self._inner.state[run.values] = {
                    key: self._placed(value, inner_groups[run.group], run) for key, value in run.state.items()
                }

    @staticmethod
    def _placed(value: Any, options: Mapping[str, Any], run: Run) -> Any:
        """Numbers that are tensors lie where the inner optimizer looks for them."""
        if not isinstance(value, Tensor) or value.shape == run.values.shape:
            return value
        on_device = options.get("fused") or options.get("capturable")
        return value.to(run.values.device if on_device else "cpu")

    def _refresh(self) -> list[Run]:
        """The runs, with what the inner optimizer keeps for them now."""
        for run in self._runs:
            run.state = self._inner.state.get(run.values, {})
        return self._runs

    def _tell_each_other(self) -> dict[int, tuple[State, dict[str, str]]]:
        """Collective: by parameter, the state that isn't divided, and names and dtypes of what is."""
        mine: dict[str, Any] = {}
        for run in self._refresh():
            elements = {key: str(value.dtype)[6:] for key, value in run.elements().items()}
            for piece in run.pieces:
                # Clones: those who load it would otherwise count the steps of all parameters in one tensor.
                scalars = {k: v.clone() if isinstance(v, Tensor) else v for k, v in run.scalars().items()}
                mine[str(piece.parameter)] = [scalars, elements]
        told: dict[int, tuple[State, dict[str, str]]] = {}
        is_whole = self._world is None or all(bucket.num_shards == 1 for bucket in self._buckets)
        for each in [mine] if is_whole or self._world is None else self._world.exchange(mine, what=STATE_DICT):
            told |= {int(index): (scalars, elements) for index, (scalars, elements) in each.items()}
        return {index: told[index] for index in sorted(told)}

    def _gather(
        self,
        bucket: ShardedBucket,
        key: str,
        dtype: torch.dtype,
        wholes: dict[int, State],
        told: Mapping[int, tuple[State, dict[str, str]]],
    ) -> None:
        """Collective: one entry of all parameters of a bucket."""
        shard = torch.zeros(bucket.own.numel(), dtype=dtype, device=bucket.own.device)
        for run in self._runs:
            value = run.elements().get(key) if run.bucket is bucket else None
            if value is not None:
                shard[run.begin : run.end] = value
        whole = bucket.gather(shard)
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            if key in told.get(slot.parameter, ({}, {}))[1]:
                wholes[slot.parameter][key] = view_like(whole, slot.offset_numel, parameter).clone()

    def shards(self, path_of: Callable[[int], tuple[str | int, ...]]) -> tuple[dict[int, State], list[Shard]]:
        """Collective: (by index of the parameter the state that isn't divided, this rank's pieces of the rest).

        Args:
            path_of: Where a parameter's state belongs.
        """
        self._arrive()
        self._take_over_changes()
        told = self._tell_each_other()
        permuted = self._gather_permuted(told)
        found = []
        for run in self._runs:
            for key, value in run.elements().items():
                for piece in run.pieces:
                    parameter = run.bucket.parameters[piece.index]
                    if not piece.numel and not run.bucket.is_first:
                        continue  # of a parameter without elements, which every rank has
                    values = run.part(value, piece)
                    whole = permuted.get(piece.parameter)
                    if whole is not None:  # what lies together in memory is scattered in the flattened whole
                        values = whole[key].reshape(-1)[piece.offset : piece.offset + piece.numel]
                    path = (*path_of(piece.parameter), key)
                    found.append(Shard(path, tuple(parameter.shape), piece.offset, values.detach().contiguous()))
        return {index: dict(scalars) for index, (scalars, _) in told.items()}, found

    def _gather_permuted(self, told: Mapping[int, tuple[State, dict[str, str]]]) -> dict[int, State]:
        """Collective: the state of parameters that aren't contiguous (channels_last), whole."""
        wholes: dict[int, State] = {}
        for bucket in self._buckets:
            scattered = {
                slot.parameter: told[slot.parameter]
                for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
                if slot.parameter in told and not parameter.is_contiguous()
            }
            wholes |= {index: {} for index in scattered}
            names = {key: dtype for _, elements in scattered.values() for key, dtype in elements.items()}
            for key, name in sorted(names.items()):
                self._gather(bucket, key, getattr(torch, name), wholes, scattered)
        return wholes

    @property
    def num_bytes(self) -> int:
        """What this rank's state takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        for run in self._refresh():
            yield from run.elements().values()
            yield from (value for value in run.scalars().values() if isinstance(value, Tensor))


def _owner_of(bucket: ShardedBucket) -> int:
    sharding = bucket.layout.sharding
    assert sharding is not None
    return sharding.owner
