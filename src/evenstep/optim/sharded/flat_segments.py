"""Flat segments of this rank's shards. The inner optimizer steps each segment as if it were one parameter.

[Note: flat segments]

Neighbouring slices of a shard are one *segment* if they belong to the same parameter group and have the same history,
such as the number of steps. So a step handles few long tensors instead of many short ones. A parameter that gets no
gradient in some step has a different history from then on, so its segment is cut at that parameter. Between two slices
there may be padding, whose gradients and values are zero and stay zero.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from evenstep.optim.kinds import is_divided
from evenstep.replica.gradients.buckets.bucket import HALF_PRECISION
from evenstep.replica.sharded.bucket import ShardedBucket
from evenstep.replica.sharded.slices import ShardSlice

STATE_DICT = "a state_dict of an optimizer"  # the call's name, for the error if ranks make different calls


@dataclass(frozen=True)
class Shard:
    """This rank's shard of one tensor of a state dict. The shards of all ranks cover the tensor exactly once.

    Attributes:
        path: The tensor's place in the state dict, such as ("state", 3, "exp_avg").
        shape: The whole tensor's shape.
        offset_numel: First element of the shard in the flattened tensor.
        values: [numel], contiguous.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    offset_numel: int
    values: Tensor


State = dict[str, Any]
MASTER = "master_weights"  # key, in a parameter's state, of its value in full precision


@dataclass(eq=False)
class FlatSegment:
    """A contiguous part of a shard, which the inner optimizer steps as one parameter.

    Attributes:
        bucket: The bucket of the shard.
        slices: The slices of parameters in the segment, in order; only slices of empty parameters are empty.
        group: Number of the parameter group.
        values: [numel], the values that are stepped: a view of the shard, or its copy in full precision.
        state: The inner optimizer's state.
    """

    bucket: ShardedBucket
    slices: tuple[ShardSlice, ...]
    group: int
    values: Tensor
    state: State = field(default_factory=dict)

    @property
    def begin(self) -> int:
        """Index of the first element in the shard."""
        return self.slices[0].begin

    @property
    def end(self) -> int:
        """Index after the last element in the shard."""
        return self.slices[-1].end

    @property
    def own(self) -> Tensor:
        """The parameters' values: a view of the shard, [numel]."""
        return self.bucket.values.own[self.begin : self.end]

    @property
    def has_master(self) -> bool:
        """Whether `values` are a copy in another precision."""
        return self.values.dtype is not self.bucket.values.own.dtype

    def part(self, tensor: Tensor, part: ShardSlice) -> Tensor:
        """View a slice of a tensor that is as long as the segment."""
        return tensor[part.begin - self.begin : part.end - self.begin]

    def elements(self) -> dict[str, Tensor]:
        """Return the state that has a number for each element: [numel] each."""
        found = {key: value for key, value in self.state.items() if is_divided(key, value, self.values)}
        return {**found, MASTER: self.values} if self.has_master else found

    def scalars(self) -> State:
        """The state that isn't in `elements`."""
        return {key: value for key, value in self.state.items() if not is_divided(key, value, self.values)}

    def cut(self, keep_together: Callable[[ShardSlice], Hashable]) -> list[FlatSegment]:
        """Cut this segment into runs of slices with the same result of `keep_together`.

        The new segments share this segment's memory.
        """
        segments = []
        for _, group in groupby(self.slices, keep_together):
            slices = tuple(group)
            stretch = slice(slices[0].begin - self.begin, slices[-1].end - self.begin)
            state = {key: value[stretch] for key, value in self.state.items() if is_divided(key, value, self.values)}
            state |= {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.scalars().items()}
            segments.append(FlatSegment(self.bucket, slices, self.group, self.values[stretch], state))
        return segments


def build_segments(
    bucket: ShardedBucket,
    group_of: Callable[[int], int],
    wholes: Mapping[int, State],
    *,
    master: bool,
    is_loaded: bool,
) -> Iterator[FlatSegment]:
    """Make the segments of one bucket's shard, with their part of the state.

    Args:
        bucket: The bucket.
        group_of: Returns the number of a parameter's group, by index of the parameter.
        wholes: The state by index of the parameter, with tensors of the parameter's shape.
        master: Whether values of 16 bits are kept in float32.
        is_loaded: Whether to convert the state to the values' dtype; else it keeps the dtype that its optimizer has
            chosen.
    """

    def kind(part: ShardSlice) -> Hashable:
        state, parameter = wholes.get(part.parameter, {}), bucket.parameters[part.index]
        scalars = {k: v for k, v in state.items() if not is_divided(k, v, parameter)}
        numbers = tuple(sorted((key, repr(_number(value))) for key, value in scalars.items()))
        return (
            group_of(part.parameter),
            numbers,
            tuple(sorted((k, str(v.dtype)) for k, v in state.items() if k not in scalars)),
        )

    # Every rank has the parameters without elements, and their state: torch's optimizers have state for them.
    here = [part for part in bucket.slices if part.numel or not bucket.parameters[part.index].numel()]
    for _, same in groupby(here, kind):
        slices = tuple(same)
        group = group_of(slices[0].parameter)
        values = bucket.values.own[slices[0].begin : slices[-1].end].detach()
        segment = FlatSegment(
            bucket, slices, group, values.float() if master and values.dtype in HALF_PRECISION else values
        )
        _fill(segment, [wholes.get(part.parameter, {}) for part in slices], is_loaded=is_loaded)
        yield segment


def _fill(segment: FlatSegment, states: Sequence[State], *, is_loaded: bool) -> None:
    """Copy this segment's part from its parameters' states."""
    for key, value in states[0].items():
        parameter = segment.bucket.parameters[segment.slices[0].index]
        if not is_divided(key, value, parameter):
            segment.state[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        dtype = segment.values.dtype if is_loaded else value.dtype
        into = segment.values if key == MASTER else torch.zeros_like(segment.values, dtype=dtype)
        for part, state in zip(segment.slices, states, strict=True):
            home = segment.bucket.parameters[part.index]
            segment.part(into, part).copy_(part.of_whole(state[key], home))
        if key != MASTER:
            segment.state[key] = into


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
