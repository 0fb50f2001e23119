"""An optimizer divided at any element: every rank steps its shard of each bucket, across parameter boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, optim

from evenstep.optim.kinds import copy_options, options_of_users, step_without_hooks
from evenstep.optim.sharded.flat_segments import STATE_DICT, FlatSegment, Shard, State, build_segments
from evenstep.replica.gradients.buckets.bucket import view_like
from evenstep.replica.sharded.bucket import ShardedBucket
from evenstep.replica.sharded.exchange import ShardedExchange
from evenstep.world import World

Groups = Sequence[dict[str, Any]]
_Answer = TypeVar("_Answer")


class ElementWisePartition:
    """Steps this rank's shards with an inner optimizer of the user's class.

    Args:
        exchange: Shards gradients and parameters.
        owner: Number of the optimizer in the exchange.
        kind: Class of the inner optimizer.
        defaults: Arguments of the inner optimizer.
        groups: The user's parameter groups, read in every step.
        world: The ranks that take part.
        master: Whether 16-bit values are stepped in float32.
    """

    elementwise = True

    def __init__(
        self,
        exchange: ShardedExchange,
        owner: int,
        kind: type[optim.Optimizer],
        defaults: Mapping[str, Any],
        groups: Callable[[], Groups],
        world: World,
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
        self._segments: list[FlatSegment] = []
        self._are_set = False  # whether every segment's gradient is its part of the shard
        self._versions: list[int] = []  # versions of the parameters that have master weights
        self._inner: optim.Optimizer
        self.load_state({})
        exchange.followers[owner] = self

    @property
    def buckets(self) -> Sequence[ShardedBucket]:
        """The buckets that this optimizer steps."""
        return self._buckets

    @property
    def num_segments(self) -> int:
        """Number of tensors that the inner optimizer steps."""
        return len(self._segments)

    # ------------------------------------------------------------------ the step

    def step(self, groups: Groups) -> None:
        """Collective: step this rank's shards, and gather the values of all shards on every rank."""
        self._set_gradients()
        self.run(groups, step_without_hooks(self._kind))

    def run(self, groups: Groups, call: Callable[[optim.Optimizer], _Answer]) -> _Answer:
        """Collective: run a method of the inner optimizer on this rank's shards, and gather all values."""
        self._take_over_changes()
        with options_of_users(groups, self._inner):
            answer = call(self._inner)
        if self._master:
            for segment in self._segments:
                if segment.has_master:
                    segment.own.copy_(segment.values)
        for finish_gather in [bucket.values.start_gather() for bucket in self._buckets]:
            finish_gather()
        self._versions = self._count_changes()
        return answer

    def _take_over_changes(self) -> None:
        """Take back parameters that the program has moved, and copy values that it has written to the master weights.

        Master weights of unwritten parameters stay. Writing through `p.data` isn't noticed.
        """
        are_replaced = [bucket.values.keep_hold() for bucket in self._buckets]
        if not self._master or (not any(are_replaced) and self._versions == self._count_changes()):
            return
        for segment in self._segments:
            if segment.has_master:
                own = segment.own
                segment.values.copy_(
                    torch.where(segment.values.to(own.dtype) == own, segment.values, own.to(segment.values.dtype))
                )

    def _count_changes(self) -> list[int]:
        if not self._master:
            return []
        return [parameter._version for bucket in self._buckets for parameter in bucket.parameters]

    def _set_gradients(self) -> None:
        held = {bucket.layout.index: bucket.held() for bucket in self._buckets}
        are_all_held = all(all(each) for each in held.values())
        if are_all_held and self._are_set:
            return  # the usual step: every segment's gradient is already its part of the shard
        segments: list[FlatSegment] = []
        was_cut = False
        for segment in self._segments:
            which = held[segment.bucket.layout.index]
            first = which[segment.slices[0].index]
            if all(which[part.index] is first for part in segment.slices):
                segments.append(segment)
                continue
            was_cut = True
            segment.state = self._inner.state.pop(segment.values, {})
            for part in segment.cut(lambda part, which=which: which[part.index]):  # type: ignore[misc]
                self._inner.state[part.values] = part.state
                segments.append(part)
        if was_cut:
            self._segments = segments
            for index, group in enumerate(self._inner.param_groups):
                group["params"] = [segment.values for segment in segments if segment.group == index]
        for segment in segments:
            is_held = held[segment.bucket.layout.index][segment.slices[0].index]
            segment.values.grad = self._gradient(segment) if is_held else None
        self._are_set = are_all_held and all(segment.bucket.shard.dtype is segment.values.dtype for segment in segments)

    @staticmethod
    def _gradient(segment: FlatSegment) -> Tensor:
        gradient = segment.bucket.shard[segment.begin : segment.end]
        return gradient if gradient.dtype is segment.values.dtype else gradient.to(segment.values.dtype)

    # ------------------------------------------------------------------ state

    def gather_state(self) -> dict[int, State]:
        """Collective: the whole state by index of the parameter, on every rank, on the parameter's device."""
        self._take_over_changes()
        received = self._tell_each_other()
        wholes: dict[int, State] = {index: dict(scalars) for index, (scalars, _) in received.items()}
        for bucket in self._buckets:
            names: dict[str, str] = {}
            for slot in bucket.layout.slots:
                names |= received.get(slot.parameter, ({}, {}))[1]
            for key, name in sorted(names.items()):
                self._gather(bucket, key, getattr(torch, name), wholes, received)
        return wholes

    def release(self) -> None:
        """Drop references to the buckets until `load_state`."""
        self._buckets, self._segments = [], []
        self._inner.param_groups.clear()
        self._inner.state.clear()

    def load_state(self, kept: Mapping[int, State], *, is_loaded: bool = False) -> None:
        """Load a state, cut to this rank's shards.

        Args:
            kept: The state by index of the parameter, with tensors of the parameter's shape.
            is_loaded: The state comes from a state dict, so it is converted to the dtype that is stepped, as torch
                does.
        """
        self._buckets = [b for b in self._exchange.sharded_buckets if _owner_of(b) == self.owner]
        self._are_set = False
        shardings = self._exchange.shardings
        self._segments = [
            segment
            for bucket in self._buckets
            for segment in build_segments(
                bucket, lambda index: shardings[index][1], kept, master=self._master, is_loaded=is_loaded
            )
        ]
        groups = self._groups()
        inner_groups = []
        for index, group in enumerate(groups):
            own = {"params": [segment.values for segment in self._segments if segment.group == index]}
            copy_options(self._kind, group, own)
            inner_groups.append(own)
        self._inner = self._kind(inner_groups, **self._defaults)
        self._versions = []  # so that the next step compares values: parameters may not match the loaded master weights
        for segment in self._segments:
            if segment.state:
                self._inner.state[segment.values] = {
                    key: self._placed(value, inner_groups[segment.group], segment)
                    for key, value in segment.state.items()
                }

    @staticmethod
    def _placed(value: Any, options: Mapping[str, Any], segment: FlatSegment) -> Any:
        """Return a 0-dim state tensor on the device where the inner optimizer expects it."""
        if not isinstance(value, Tensor) or value.shape == segment.values.shape:
            return value
        on_device = options.get("fused") or options.get("capturable")
        return value.to(segment.values.device if on_device else "cpu")

    def _refresh(self) -> list[FlatSegment]:
        """The segments, with the inner optimizer's present state."""
        for segment in self._segments:
            segment.state = self._inner.state.get(segment.values, {})
        return self._segments

    def _tell_each_other(self) -> dict[int, tuple[State, dict[str, str]]]:
        """Collective: exchange, by parameter, the state that isn't divided, and names and dtypes of divided state."""
        mine: dict[str, Any] = {}
        for segment in self._refresh():
            elements = {key: str(value.dtype)[6:] for key, value in segment.elements().items()}
            for part in segment.slices:
                # Clone: an optimizer that loads the state would otherwise count the steps of all parameters in one
                # tensor.
                scalars = {k: v.clone() if isinstance(v, Tensor) else v for k, v in segment.scalars().items()}
                mine[str(part.parameter)] = [scalars, elements]
        received: dict[int, tuple[State, dict[str, str]]] = {}
        for each in self._world.exchange(mine, what=STATE_DICT):
            received |= {int(index): (scalars, elements) for index, (scalars, elements) in each.items()}
        return {index: received[index] for index in sorted(received)}

    def _gather(
        self,
        bucket: ShardedBucket,
        key: str,
        dtype: torch.dtype,
        wholes: dict[int, State],
        received: Mapping[int, tuple[State, dict[str, str]]],
    ) -> None:
        """Collective: gather one entry of the state of all parameters in a bucket."""
        shard = torch.zeros_like(bucket.values.own, dtype=dtype)
        for segment in self._segments:
            value = segment.elements().get(key) if segment.bucket is bucket else None
            if value is not None:
                shard[segment.begin : segment.end] = value
        whole = self._whole(bucket, shard)
        for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True):
            if key in received.get(slot.parameter, ({}, {}))[1]:
                wholes[slot.parameter][key] = view_like(whole, slot.offset_numel, parameter).clone()

    def _whole(self, bucket: ShardedBucket, shard: Tensor) -> Tensor:
        """Collective: gather all ranks' shards into one tensor, laid out like the bucket."""
        if not self._world.is_closed:
            return bucket.gather(shard)
        return torch.cat(self._world.exchange(shard.cpu())).to(shard.device)

    def shards(self, path_of: Callable[[int], tuple[str | int, ...]]) -> tuple[dict[int, State], list[Shard]]:
        """Collective: (the state that isn't divided, by index of the parameter; this rank's slices of the rest).

        Args:
            path_of: Returns the place of a parameter's state in the state dict.
        """
        self._take_over_changes()
        received = self._tell_each_other()
        permuted = self._gather_permuted(received)
        found = []
        for segment in self._segments:
            for key, value in segment.elements().items():
                for part in segment.slices:
                    parameter = segment.bucket.parameters[part.index]
                    if not part.numel and segment.bucket.transport.rank > 0:
                        continue  # a parameter without elements: every rank has its state
                    values = segment.part(value, part)
                    whole = permuted.get(part.parameter)
                    if whole is not None:  # a contiguous range of memory is scattered in the flattened whole tensor
                        values = whole[key].reshape(-1)[part.offset : part.offset + part.numel]
                    path = (*path_of(part.parameter), key)
                    found.append(Shard(path, tuple(parameter.shape), part.offset, values.detach().contiguous()))
        return {index: dict(scalars) for index, (scalars, _) in received.items()}, found

    def _gather_permuted(self, received: Mapping[int, tuple[State, dict[str, str]]]) -> dict[int, State]:
        """Collective: gather the whole state of parameters that aren't contiguous (channels_last)."""
        wholes: dict[int, State] = {}
        for bucket in self._buckets:
            scattered = {
                slot.parameter: received[slot.parameter]
                for slot, parameter in zip(bucket.layout.slots, bucket.parameters, strict=True)
                if slot.parameter in received and not parameter.is_contiguous()
            }
            wholes |= {index: {} for index in scattered}
            names = {key: dtype for _, elements in scattered.values() for key, dtype in elements.items()}
            for key, name in sorted(names.items()):
                self._gather(bucket, key, getattr(torch, name), wholes, scattered)
        return wholes

    @property
    def num_bytes(self) -> int:
        """The memory that this rank's state takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        for segment in self._refresh():
            yield from segment.elements().values()
            yield from (value for value in segment.scalars().values() if isinstance(value, Tensor))


def _owner_of(bucket: ShardedBucket) -> int:
    sharding = bucket.layout.sharding
    assert sharding is not None
    return sharding.owner
