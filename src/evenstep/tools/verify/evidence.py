"""What the ranks of a run record for `evenstep verify`, and how it travels: a line of JSON and two files a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from evenstep.tools.observing import launch
from evenstep.tools.observing.script import Place

Values = Mapping[str, Tensor]

MOST_ELEMENTS = 1 << 22  # of a tensor that are compared by value; of larger ones, as many evenly drawn
NUM_PROBES = 256  # elements of each gradient, evenly drawn, that every rank keeps of every backward pass


@dataclass(frozen=True)
class Plan(launch.Plan):
    """The instructions for a rank that records.

    Attributes:
        num_steps: After so many steps of an optimizer the script ends.
        world_size: Ranks of this run.
        in_double: Compute in float64.
        batch_sizes: For torch's loaders, in the order in which they are made: (what the script passes, what they get).
        is_sharded: An earlier run has seen FSDP2.
        skipped: Calls of a GradScaler's `step`, counted from 0, that make none; in float64, what overflowed without.
        script: Path of the script, whose lines are named.
    """

    num_steps: int
    world_size: int
    in_double: bool = False
    batch_sizes: Sequence[Sequence[int]] = ()
    is_sharded: bool = False
    skipped: Sequence[int] = ()
    script: str = ""


@dataclass
class Seen:
    """One step on one rank: everything up to and with one call of an optimizer's `step`.

    Attributes:
        rows: By training forward, a digest of each sample; empty where inputs have no rows or carry a gradient.
        loaded: A digest of each sample that the loaders have given since the step before.
        initial: The size of what the run began with, by some elements of it: of each parameter ("param/...") when its
            model was first called, and of the first input.
        losses: By backward pass, the value of its root, without the factor of a GradScaler, and the weight it was
            given (None: plain `backward`).
        windows: By backward pass, how many reductions the step had before it: weights count within one window.
        graphs: By backward pass, how often each kind of node is in its graph.
        modules: Names of the modules that ran, in order, of the first training forward.
        digests: By "grad/...", "param/..." and "buffer/..."; gradients as the optimizer got them, others as left by it.
        virtual_ranks: By backward pass, the digests of what it added to gradients on this rank.
        settings: By parameter group, the numbers that the optimizer steps with.
        dropouts: State of the random stream when dropout would have drawn from it, of the first calls.
        draws: Whether a training forward drew random numbers besides.
        unsynced: Batch normalisations that used the statistics of this rank's share alone.
        synced: Batch normalisations that used the statistics of all ranks' rows.
        means: Backward passes whose root was the mean of a loss function itself, divided by nothing.
        held_back: Whether gradients were held back for accumulation in one of the passes.
        has_hidden: Whether gradients were divided over the ranks and could not be read.
        batch_sizes: What the script passed to torch's loaders so far.
        virtual_ranks_of_run: Virtual ranks of reproducible mode; 0: it is off.
        shares_with: Ranks that have parts of the same layers (tensor parallelism, pipelines), and so the same samples;
            empty: none, or only itself.
        is_sharded: Whether FSDP2 has divided a model.
        skipped: Calls of a GradScaler's `step`, counted from 0, since the step before, that have made none.
        lines: File and line of the script that made the "loader" and the "wrapper", called the "model", began the
            backward pass of the "loss", and called the "optimizer"'s step; the newest of each.
    """

    rows: list[list[str]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    initial: dict[str, float] = field(default_factory=dict)
    losses: list[tuple[float, float | None]] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    graphs: list[dict[str, int]] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    virtual_ranks: list[dict[str, str]] = field(default_factory=list)
    settings: list[dict[str, float]] = field(default_factory=list)
    dropouts: list[str] = field(default_factory=list)
    draws: bool = False
    unsynced: list[str] = field(default_factory=list)
    synced: list[str] = field(default_factory=list)
    means: int = 0
    held_back: bool = False
    has_hidden: bool = False
    batch_sizes: list[int] = field(default_factory=list)
    virtual_ranks_of_run: int = 0
    shares_with: list[int] = field(default_factory=list)
    is_sharded: bool = False
    skipped: list[int] = field(default_factory=list)
    lines: dict[str, Place] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Samples that the model was given."""
        return sum(map(len, self.rows))


@dataclass(frozen=True)
class Run:
    """One run of the script: what each rank saw, step by step.

    Attributes:
        ranks: By rank, its steps.
        values: For a step (from 0), rank 0's tensors, by the names of `Seen.digests`.
        probes: For a rank and a step, elements of the gradient: "applied" for the optimizer, "0", "1", ... what each
            backward pass added on that rank.
    """

    ranks: Sequence[Sequence[Seen]]
    values: Callable[[int], Values]
    probes: Callable[[int, int], Values]

    @property
    def num_ranks(self) -> int:
        """How many ranks this run had."""
        return len(self.ranks)

    @property
    def num_data_ranks(self) -> int:
        """Ranks that have samples of their own."""
        return len(data_ranks(self.at(0))) if self.num_steps else self.num_ranks

    @property
    def num_steps(self) -> int:
        """That all ranks have made."""
        return min((len(steps) for steps in self.ranks), default=0)

    @property
    def num_virtual_ranks(self) -> int:
        """How many virtual ranks reproducible mode had; 0: it is off."""
        return self.ranks[0][0].virtual_ranks_of_run if self.num_steps else 0

    @property
    def skipped(self) -> list[int]:
        """See `Seen.skipped`: of all steps."""
        return [call for seen in self.ranks[0] for call in seen.skipped]

    def at(self, step: int) -> list[Seen]:
        """The record of each rank of a step, counted from 0."""
        return [steps[step] for steps in self.ranks]


def data_ranks(seen: Sequence[Seen]) -> list[Seen]:
    """One rank of each group that has the same samples."""
    return [each for rank, each in enumerate(seen) if min(each.shares_with, default=rank) == rank]


def write_step(plan: Plan, rank: int, step: int, seen: Seen, values: Values, probes: Values) -> None:
    """Add a step of a rank. Values (`thinned`) are rank 0's alone: the others' are equal, or their digests say so."""
    directory = Path(plan.directory)
    if rank == 0:
        save_file(dict(values), directory / _values_name(step))
    if probes:
        save_file(dict(probes), directory / _probes_name(rank, step))
    with (directory / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(seen)) + "\n")


def read_run(directory: Path, num_ranks: int) -> Run:
    """Read what the ranks of a run have written; tensors are read on access."""

    def steps_of(rank: int) -> list[Seen]:
        path = directory / f"rank-{rank}.jsonl"
        return [_seen(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def probes(rank: int, step: int) -> Values:
        path = directory / _probes_name(rank, step)
        return load_file(path) if path.exists() else {}

    return Run(
        ranks=[steps_of(rank) for rank in range(num_ranks)],
        values=lambda step: load_file(directory / _values_name(step)),
        probes=probes,
    )


def _seen(received: dict[str, Any]) -> Seen:
    losses = [(value, weight) for value, weight in received.pop("losses")]
    lines = {what: (file, line) for what, (file, line) in received.pop("lines").items()}
    return Seen(**received, losses=losses, lines=lines)


def _values_name(step: int) -> str:
    return f"step-{step}.safetensors"


def _probes_name(rank: int, step: int) -> str:
    return f"probes-{rank}-{step}.safetensors"


def thinned(tensor: Tensor) -> Tensor:
    """A copy [numel] on the CPU (complex numbers are two), of large tensors `MOST_ELEMENTS` elements evenly drawn."""
    return _drawn(tensor, MOST_ELEMENTS).clone()


def probe(tensor: Tensor) -> Tensor:
    """[at most NUM_PROBES] float64: some elements, the same ones of every tensor of that size."""
    return _drawn(tensor, NUM_PROBES).to(torch.float64, copy=True)  # an optimizer may write to what it was given


def _drawn(tensor: Tensor, most: int) -> Tensor:
    tensor = tensor.detach()
    # Complex numbers give both parts: as a real number one would lose the imaginary one.
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    if flat.numel() > most:
        flat = flat[torch.arange(most, device=flat.device) * flat.numel() // most]
    return flat.cpu()
