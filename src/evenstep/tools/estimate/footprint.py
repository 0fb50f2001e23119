"""Formulas for the memory that a rank needs, for each way to divide the work. Pure.

[Note: what lies where]

    P   trained parameters        F   frozen parameters, module buffers    S   the optimizer's state for all of P
    B   all buckets of gradients  V   all buckets of parameters            b   the largest bucket, once or twice
    A   activations               U   the largest unit of FSDP2            n   ranks

                      parameters     gradients    optimizer   while the backward pass runs
    one rank          P + F          P            S
    DDP               P + F          B            S           gradients not yet in a bucket: as much as the largest
    sharded           V + F          B            S / n       the same
    sharded, stage 2  V + F          B / n        S / n       temporary buckets: b, and gradients not yet in a bucket
    FSDP2             P / n + F      P / n        S / n       two gathered units and one of gradients: 3 U

    Gradients of evenstep's `DistributedDataParallel` are views of buckets, so they are counted once. torch's wrapper
    has both, unless `gradient_as_bucket_view` is set. Buckets of a sharded optimizer are padded so that ranks have
    equal shards (`replica/gradients/buckets/layout.py`). FSDP2 divides every parameter along its first dimension. HSDP
    needs as much as FSDP2 on the ranks of one of its groups. Tensor parallelism isn't computed: the user's plan decides
    what it divides.

    Activations are all tensors that the passes have made and hold at their peak: those that autograd has saved,
    gradients of activations, and temporary results. On one rank and with FSDP2, activations are freed while gradients
    are made, so only the larger of both counts. Buckets exist all the time. The memory of libraries (about half a
    gigabyte for a GPU's context) and the allocator's reserve aren't included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from evenstep.replica.gradients.buckets.layout import BucketPolicy, ParameterSpec, Sharding, plan_layout

WAYS = ("one rank", "DDP", "sharded", "sharded, stage 2", "FSDP2")

_NUM_LENT = 2
_MOST_RANKS = 8192


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, its optimizer and its batch.

    Attributes:
        parameters: The trained parameters, in registration order.
        fixed_bytes: The frozen parameters and module buffers.
        state_bytes: The optimizer's state for all parameters, on one rank.
        stepping_bytes: The temporary memory of the optimizer's step.
        activation_bytes: The peak memory of the passes without gradients of parameters, for `num_samples`.
        num_samples: The number of samples in a rank's batch; 0 if unknown.
        largest_unit_bytes: The parameters of the largest unit that FSDP2 gathers at once; 0: all parameters.
    """

    parameters: tuple[ParameterSpec, ...]
    fixed_bytes: int
    state_bytes: int
    activation_bytes: int = 0
    num_samples: int = 0
    largest_unit_bytes: int = 0
    stepping_bytes: int = 0

    @property
    def parameter_bytes(self) -> int:
        """The bytes of the trained parameters."""
        return sum(map(_bytes_of, self.parameters))


@dataclass(frozen=True)
class Footprint:
    """The memory of a rank in bytes, by kind.

    Attributes:
        way: How the work is divided.
        num_ranks: The number of ranks.
        parameters: Parameters, also frozen ones, and module buffers.
        gradients: Gradients between the backward pass and the optimizer's step, or the buckets that they are views of.
        optimizer: The optimizer's state.
        passing: Memory that only the backward pass needs.
        activations: The peak memory of the passes beside that.
        stepping: Memory that only the optimizer's step needs.
        lasting: Activations that still exist at the end of the backward pass: a gradient before FSDP2 scatters it.
        total: The peak of all kinds together.
    """

    way: str
    num_ranks: int
    parameters: int
    gradients: int
    optimizer: int
    passing: int
    activations: int
    stepping: int
    lasting: int = 0

    @property
    def lines(self) -> list[str]:
        """The lines that a script needs to divide the work this way."""
        if self.way == "one rank":
            return []
        if self.way == "FSDP2":
            return [
                'with evenstep.init(mesh={"shard": -1}) as world:',
                "    model = evenstep.parallelize(model, world)",
            ]
        stage = ", shard_gradients=True" if self.way == "sharded, stage 2" else ""
        return [
            "with evenstep.init() as world:",
            "    model = evenstep.DistributedDataParallel(model)",
            f"    optimizer = evenstep.ShardedOptimizer(model, torch.optim.AdamW, lr=...{stage})",
        ][: 2 if self.way == "DDP" else 3]

    @property
    def total(self) -> int:
        """The peak of all kinds together."""
        if self.num_ranks == 1 or self.way == "FSDP2":
            # Gradients are made while activations are freed. Buckets, below, exist all the time.
            passes = self.passing + max(self.activations, self.gradients + (self.lasting if self.num_ranks > 1 else 0))
            return self.parameters + self.optimizer + max(passes, self.gradients + self.stepping)
        return self.parameters + self.optimizer + self.gradients + max(self.passing + self.activations, self.stepping)

    def to_json(self) -> dict[str, object]:
        """The footprint as plain data for JSON."""
        return {**asdict(self), "total": self.total}


def footprint(sizes: Sizes, way: str, num_ranks: int, policy: BucketPolicy | None = None) -> Footprint:
    """The memory that a rank needs; see [Note: what lies where].

    Args:
        sizes: The sizes of the model, optimizer and batch.
        way: How the work is divided, one of `WAYS`.
        num_ranks: The number of ranks.
        policy: The sizes of buckets; None: evenstep's defaults.
    """
    values = gradients = sizes.parameter_bytes
    passing, part = 0, 1.0
    if way == "one rank" or num_ranks == 1:
        num_ranks = 1  # no communication, no shards, and no buckets: gradients stay where autograd has put them
    elif way == "FSDP2":
        passing = 3 * (sizes.largest_unit_bytes or values)
        gradients = sum(_bytes_of(_rows_divided(spec, num_ranks)) for spec in sizes.parameters)
        part, values = gradients / max(1, values), gradients
    else:
        specs = sizes.parameters
        if way != "DDP":
            specs = tuple(replace(spec, sharding=Sharding(0)) for spec in specs)
        order = range(len(specs) - 1, -1, -1)
        layout = plan_layout(specs, order, policy or BucketPolicy(), 1 if way == "DDP" else num_ranks)
        buckets = [bucket.numel * bucket.dtype.itemsize for bucket in layout.buckets]
        gradients, passing = sum(buckets), max(buckets, default=0)
        if way != "DDP":
            used = [bucket for bucket in layout.buckets if bucket.slots]
            padded = sum(bucket.numel * specs[bucket.slots[0].parameter].dtype.itemsize for bucket in used)
            part, values = padded / max(1, values) / num_ranks, padded
        if way == "sharded, stage 2":
            passing *= 1 + min(_NUM_LENT, len(buckets))
            gradients //= num_ranks
    return Footprint(
        way,
        num_ranks,
        values + sizes.fixed_bytes,
        gradients,
        math.ceil(sizes.state_bytes * part),
        passing,
        sizes.activation_bytes,
        math.ceil(sizes.stepping_bytes * part),
        min(sizes.activation_bytes, max(map(_bytes_of, sizes.parameters), default=0)),
    )


def _bytes_of(spec: ParameterSpec) -> int:
    return spec.numel * spec.dtype.itemsize


def _rows_divided(spec: ParameterSpec, parts: int) -> ParameterSpec:
    """The first rank's shard of a parameter that is divided along its first dimension."""
    return replace(spec, shape=(math.ceil(spec.shape[0] / parts), *spec.shape[1:])) if spec.shape else spec


def footprints(sizes: Sizes, num_ranks: Sequence[int]) -> list[Footprint]:
    """The footprints of all ways on all numbers of ranks, with one rank first."""
    return [footprint(sizes, "one rank", 1), *(row for n in num_ranks if n > 1 for row in _ways(sizes, n))]


def _ways(sizes: Sizes, num_ranks: int) -> list[Footprint]:
    """The footprints of all ways on a number of ranks, the way that costs the least time first."""
    return [footprint(sizes, way, num_ranks) for way in (WAYS[1:] if num_ranks > 1 else WAYS[:1])]


# ---------------------------------------------------------------------- for users


def footprint_table(rows: Sequence[Footprint]) -> str:
    """The footprints as a Markdown table."""
    columns = ("parameters", "gradients", "optimizer", "passing", "activations", "stepping", "total")
    lines = [f"| MiB of a rank | ranks | {' | '.join(columns)} |", "| --- |" + " ---: |" * 8]
    for row in rows:
        cells = " | ".join(f"{getattr(row, column) / 2**20:,.1f}" for column in columns)
        lines.append(f"| {row.way} | {row.num_ranks:,} | {cells} |")
    return "\n".join(lines)


def verdict(sizes: Sizes, num_ranks: int, memory_bytes: int) -> list[str]:
    """The first way whose memory suffices, as lines of text, with the lines of a script for it.

    Args:
        sizes: The sizes of the model, optimizer and batch.
        num_ranks: The number of ranks.
        memory_bytes: The memory of each rank.
    """
    note = "" if sizes.num_samples else ", without activations, which were not counted"
    lines: list[str] = []
    for row in _ways(sizes, num_ranks):
        if row.total <= memory_bytes:
            lines.append(f"{row.way} is enough: it needs {_size(row.total)} of {_size(memory_bytes)} of memory{note}.")
            return [*lines, *(f"    {line}" for line in row.lines)]
        lines.append(f"{row.way} needs {_size(row.total)} of {_size(memory_bytes)} of memory: it is not enough.")
    least = footprint(sizes, "FSDP2", num_ranks)
    if least.activations > memory_bytes / 2:
        smaller = "take a smaller batch, or use" if sizes.num_samples > 1 else "use"
        lines.append(
            f"{least.activations / least.total:.0%} of {least.way} are activations, which none of these divides: "
            f"{smaller} torch.utils.checkpoint, which computes them twice."
        )
        return lines
    while (num_ranks := 2 * num_ranks) <= _MOST_RANKS:
        for row in _ways(sizes, num_ranks):
            if row.total <= memory_bytes:
                return [*lines, f"{row.way} is enough from {num_ranks:,} ranks on."]
    return [
        *lines,
        "None of these is enough on any number of ranks: a unit is gathered whole, and must fit. Divide the model into "
        "smaller blocks, or inside layers (tensor parallelism) or between them (torch.distributed.pipelining).",
    ]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
