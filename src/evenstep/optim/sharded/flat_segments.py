"""What the inner optimizer sees: stretches of this rank's shards, each as if it were one parameter.

[Note: runs]

Neighbouring pieces of a shard are one *run* if they belong to the same parameter group and have the same history (the
number of steps, say): a step over few long tensors instead of many short ones. A parameter that gets no gradient in
some step has another history from then on, so its run is cut there. Between two pieces there may be padding, where
gradients and values are zero and stay so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from evenstep.optim.kinds import is_divided
from evenstep.replica.bucket import HALF_PRECISION
from evenstep.replica.pieces import Piece, in_memory_order
from evenstep.replica.sharded_bucket import ShardedBucket

State = dict[str, Any]
MASTER = "master_weights"  # in the state of a parameter: its value in full precision


@dataclass(eq=False)
class Run:
    """One stretch of a shard.

    Attributes:
        bucket: Whose shard.
        pieces: What lies in it, in order; none is empty, but of parameters that are.
        group: Number of the parameter group.
        values: [numel], what the inner optimizer steps: a view of the shard, or its copy in full precision.
        state: What the inner optimizer keeps.
    """

    bucket: ShardedBucket
    pieces: tuple[Piece, ...]
    group: int
    values: Tensor
    state: State = field(default_factory=dict)

    @property
    def begin(self) -> int:
        """First element, counted in the shard."""
        return self.pieces[0].begin

    @property
    def end(self) -> int:
        """Behind the last element, counted in the shard."""
        return self.pieces[-1].end

    @property
    def has_master(self) -> bool:
        """Whether `values` are a copy in another precision."""
        return self.values.dtype is not self.bucket.own.dtype

    def part(self, tensor: Tensor, piece: Piece) -> Tensor:
        """A piece of a tensor that is as long as the run. A view."""
        return tensor[piece.begin - self.begin : piece.end - self.begin]

    def elements(self) -> dict[str, Tensor]:
        """What has a number per element: [numel] each."""
        found = {key: value for key, value in self.state.items() if is_divided(key, value, self.values)}
        return {**found, MASTER: self.values} if self.has_master else found

    def scalars(self) -> State:
        """The rest of the state."""
        return {key: value for key, value in self.state.items() if not is_divided(key, value, self.values)}

    def cut(self, keep_together: Callable[[Piece], Hashable]) -> list[Run]:
        """Runs of pieces for which `keep_together` gives the same; they share this run's memory."""
        runs = []
        for _, group in groupby(self.pieces, keep_together):
            pieces = tuple(group)
            stretch = slice(pieces[0].begin - self.begin, pieces[-1].end - self.begin)
            state = {key: value[stretch] for key, value in self.state.items() if is_divided(key, value, self.values)}
            state |= {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.scalars().items()}
            runs.append(Run(self.bucket, pieces, self.group, self.values[stretch], state))
        return runs


def build_runs(
    bucket: ShardedBucket,
    group_of: Callable[[int], int],
    wholes: Mapping[int, State],
    *,
    master: bool,
    is_loaded: bool,
) -> Iterator[Run]:
    """The runs of one bucket's shard, with their part of the state.

    Args:
        bucket: Whose.
        group_of: Number of the parameter group of a parameter (by index).
        wholes: By index of the parameter its state, with tensors of the parameter's shape.
        master: Keep values of 16 bits in float32.
        is_loaded: The state takes on the values' dtype; else it keeps the one that its optimizer has chosen.
    """

    def kind(piece: Piece) -> Hashable:
        state, parameter = wholes.get(piece.parameter, {}), bucket.parameters[piece.index]
        scalars = {k: v for k, v in state.items() if not is_divided(k, v, parameter)}
        numbers = tuple(sorted((key, repr(_number(value))) for key, value in scalars.items()))
        return (
            group_of(piece.parameter),
            numbers,
            tuple(sorted((k, str(v.dtype)) for k, v in state.items() if k not in scalars)),
        )

    # Of a parameter without elements every rank has the whole, and its state: torch's optimizers keep one.
    here = [piece for piece in bucket.pieces if piece.numel or not bucket.parameters[piece.index].numel()]
    for _, same in groupby(here, kind):
        pieces = tuple(same)
        group = group_of(pieces[0].parameter)
        values = bucket.own[pieces[0].begin : pieces[-1].end].detach()
        run = Run(bucket, pieces, group, values.float() if master and values.dtype in HALF_PRECISION else values)
        _fill(run, [wholes.get(piece.parameter, {}) for piece in pieces], is_loaded=is_loaded)
        yield run


def _fill(run: Run, states: Sequence[State], *, is_loaded: bool) -> None:
    """Cut this run's part out of its parameters' states."""
    for key, value in states[0].items():
        parameter = run.bucket.parameters[run.pieces[0].index]
        if not is_divided(key, value, parameter):
            run.state[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        dtype = run.values.dtype if is_loaded else value.dtype
        into = run.values if key == MASTER else torch.zeros_like(run.values, dtype=dtype)
        for piece, state in zip(run.pieces, states, strict=True):
            home = run.bucket.parameters[piece.index]
            run.part(into, piece).copy_(in_memory_order(state[key], home)[piece.offset : piece.offset + piece.numel])
        if key != MASTER:
            run.state[key] = into


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
