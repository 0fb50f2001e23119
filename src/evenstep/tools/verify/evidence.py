"""The records of a run's ranks for `evenstep verify`, and their files: a line of JSON and two files a step."""

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

MOST_ELEMENTS = 1 << 22  # elements of a tensor that are compared by value; evenly spaced ones of larger tensors
NUM_PROBES = 256  # evenly spaced elements of each gradient that every rank keeps for every backward pass


@dataclass(frozen=True)
class Plan(launch.Plan):
    """The instructions for a recording rank.

    Attributes:
        num_steps: The number of optimizer steps after which the script ends.
        world_size: The number of ranks.
        in_double: Whether to compute in float64.
        batch_sizes: For torch's loaders, in the order in which they are made, (the script's batch size, that to use).
        is_sharded: Whether an earlier run used FSDP2.
        skipped: In float64, the calls of `GradScaler.step`, counted from 0, that make no step, as in the run before.
        script: The path of the script, whose lines are reported.
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
    """The record of one step on one rank, up to and with one call of an optimizer's `step`.

    Attributes:
        rows: By training forward pass, a digest of each sample; empty if inputs have no rows or have a gradient.
        loaded: A digest of each sample that the loaders yielded since the step before.
        initial: The absolute sum of some elements, for each parameter ("param/...") when its model was first called,
            and for the first input ("inputs").
        losses: By backward pass, the value of its root, without a GradScaler's scale, and its weight (None: plain
            `backward`).
        windows: By backward pass, the number of accumulation windows that ended before it: weights count within one.
        graphs: By backward pass, the number of nodes of each kind in its graph.
        modules: The names of the modules that ran in the first training forward pass, in order.
        digests: By "grad/...", "param/..." and "buffer/...", a digest of the tensor. Gradients as the optimizer got
            them, parameters and buffers after its step.
        virtual_ranks: By backward pass, digests of the gradients that it added on this rank.
        settings: By parameter group, the numbers that the optimizer steps with.
        dropouts: The states of the random stream when dropout would have drawn from it, for the first calls.
        draws: Whether a training forward pass drew other random numbers.
        unsynced: Names of batch norms that used the statistics of this rank's share only.
        synced: Names of batch norms that used the statistics of all ranks' rows.
        means: The number of backward passes whose root was directly the mean of a loss function, divided by nothing.
        held_back: Whether `no_sync` held gradients back for accumulation in one of the passes.
        has_hidden: Whether some gradients couldn't be read, because they were divided over the ranks.
        batch_sizes: The batch sizes that the script passed to torch's loaders so far.
        virtual_ranks_of_run: The number of virtual ranks in reproducible mode; 0: it is off.
        shares_with: The ranks that hold parts of the same layers (tensor parallelism, pipelines), and so get the same
            samples; empty if there are none.
        is_sharded: Whether FSDP2 has sharded a model.
        skipped: The calls of `GradScaler.step`, counted from 0, that made no step since the step before.
        lines: (file, line) of the script that made the "loader" and the "wrapper", called the "model", began the
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
        """The number of samples that the model was called with."""
        return sum(map(len, self.rows))


@dataclass(frozen=True)
class Run:
    """The records of one run of the script.

    Attributes:
        ranks: By rank, the records of its steps.
        values: Reads rank 0's tensors of a step (from 0), by the names of `Seen.digests`.
        probes: Reads elements of the gradient of a rank and step: "applied" for the one that the optimizer got, and
            "0", "1", ... for the ones that each backward pass added on that rank.
    """

    ranks: Sequence[Sequence[Seen]]
    values: Callable[[int], Values]
    probes: Callable[[int, int], Values]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the run."""
        return len(self.ranks)

    @property
    def num_data_ranks(self) -> int:
        """The number of ranks with their own samples. Ranks with the same samples count once."""
        return len(data_ranks(self.at(0))) if self.num_steps else self.num_ranks

    @property
    def num_steps(self) -> int:
        """The number of steps that all ranks made."""
        return min((len(steps) for steps in self.ranks), default=0)

    @property
    def num_virtual_ranks(self) -> int:
        """The number of virtual ranks in reproducible mode; 0: it is off."""
        return self.ranks[0][0].virtual_ranks_of_run if self.num_steps else 0

    @property
    def skipped(self) -> list[int]:
        """The calls of `GradScaler.step`, counted from 0, that made no step, in the whole run."""
        return [call for seen in self.ranks[0] for call in seen.skipped]

    def at(self, step: int) -> list[Seen]:
        """By rank, the record of a step, counted from 0."""
        return [steps[step] for steps in self.ranks]


def data_ranks(seen: Sequence[Seen]) -> list[Seen]:
    """The records of one rank of each group of ranks with the same samples."""
    return [each for rank, each in enumerate(seen) if min(each.shares_with, default=rank) == rank]


def write_step(plan: Plan, rank: int, step: int, seen: Seen, values: Values, probes: Values) -> None:
    """Write the record of a step. Only rank 0 writes values (`thinned`): digests show whether the others differ."""
    directory = Path(plan.directory)
    if rank == 0:
        save_file(dict(values), directory / _values_name(step))
    if probes:
        save_file(dict(probes), directory / _probes_name(rank, step))
    with (directory / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(seen)) + "\n")


def read_run(directory: Path, num_ranks: int) -> Run:
    """Read the records of a run. Tensors are read on access."""

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
    """A flat copy on the CPU, of at most `MOST_ELEMENTS` evenly spaced elements. A complex number is two elements."""
    return _drawn(tensor, MOST_ELEMENTS).clone()


def probe(tensor: Tensor) -> Tensor:
    """At most `NUM_PROBES` evenly spaced elements of a tensor, as a flat float64 copy on the CPU."""
    return _drawn(tensor, NUM_PROBES).to(torch.float64, copy=True)  # an optimizer may change gradients in place


def _drawn(tensor: Tensor, most: int) -> Tensor:
    tensor = tensor.detach()
    # Both parts of complex numbers: a conversion to a real dtype would drop the imaginary part.
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    if flat.numel() > most:
        flat = flat[torch.arange(most, device=flat.device) * flat.numel() // most]
    return flat.cpu()
